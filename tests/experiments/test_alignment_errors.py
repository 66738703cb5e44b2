"""Test error rates of alignments against cases that were computed by hand."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from lens_mix.experiments.alignment_errors import AlignmentErrors, GoldAlignment, alignment_errors, read_gold

DATA = Path(__file__).parents[2] / "demos" / "data" / "alignment"


def gold(sure: set, possible: set = frozenset()) -> GoldAlignment:
    return GoldAlignment(frozenset(sure), frozenset(sure) | frozenset(possible))


# ------------------------------------------------------------------ error rate

# This is Och & Ney's rate. Links 0-0 and 1-1 are sure, and 2-1 and 2-2 are possible too.
PAIR = gold({(0, 0), (1, 1)}, {(2, 1), (2, 2)})


@pytest.mark.parametrize(
    ("links", "rate", "precision", "recall"),
    [
        # The alignment has exactly the sure links.
        ({(0, 0), (1, 1)}, 0.0, 1.0, 1.0),
        # It also has possible ones: (2 + 4) / (4 + 2).
        ({(0, 0), (1, 1), (2, 1), (2, 2)}, 0.0, 1.0, 1.0),
        # It has a sure, a possible and a wrong link: 1 − (1 + 2) / (3 + 2).
        ({(0, 0), (2, 2), (0, 2)}, 0.4, 2 / 3, 1 / 2),
        # It has only possible links and misses the sure ones: 1 − (0 + 2) / (2 + 2).
        ({(2, 1), (2, 2)}, 0.5, 1.0, 0.0),
        # The same links in the other direction do not count.
        ({(1, 2)}, 1.0, 0.0, 0.0),
    ],
)
def test_error_rate_by_hand(links: set, rate: float, precision: float, recall: float) -> None:
    found = alignment_errors([links], [PAIR])
    assert found.error_rate == pytest.approx(rate)
    assert found.precision == pytest.approx(precision)
    assert found.recall == pytest.approx(recall)


def test_no_link_is_wrong_where_gold_has_some_and_undefined_where_it_has_none() -> None:
    nothing = alignment_errors([set()], [PAIR])
    assert nothing.error_rate == 1.0
    assert math.isnan(nothing.precision)
    empty = alignment_errors([set()], [gold(set())])
    assert math.isnan(empty.error_rate)
    assert math.isnan(empty.recall)
    assert math.isnan(alignment_errors([], []).interval().mean)


def test_sums_are_over_the_corpus() -> None:
    """The rate is 1 − (1 + 1 + 0 + 1) / (1 + 1 + 1 + 4) = 4/7. The mean of 0 and 4/5 would be 2/5."""
    pairs = [gold({(0, 0)}), gold({(0, 0), (1, 1), (2, 2), (3, 3)}, {(0, 1)})]
    found = alignment_errors([{(0, 0)}, {(0, 1)}], pairs)
    assert found.error_rate == pytest.approx(4 / 7)
    # The terms are AER + ((1 − AER) d − n) / mean(d) with d = 2 and 5, n = 2 and 1.
    assert found.per_pair() == pytest.approx([4 / 7 + (3 / 7 * 2 - 2) / 3.5, 4 / 7 + (3 / 7 * 5 - 1) / 3.5])
    assert sum(found.per_pair()) / 2 == pytest.approx(4 / 7)


def random_errors(generator: np.random.Generator, pairs: int) -> AlignmentErrors:
    sure, links = generator.integers(1, 12, pairs), generator.integers(1, 15, pairs)
    possible_found = generator.binomial(links, 0.7)
    sure_found = np.minimum(sure, generator.binomial(possible_found, 0.6))
    return AlignmentErrors(*(values.tolist() for values in (links, sure, sure_found, possible_found)))


def test_the_interval_is_that_of_the_ratio() -> None:
    """The interval equals that of drawing pairs again and computing the ratio of the sums."""
    generator = np.random.default_rng(0)
    found, other = random_errors(generator, 300), random_errors(generator, 300)

    def ratio(errors: AlignmentErrors, chosen: np.ndarray) -> np.ndarray:
        links, sure, in_s, in_p = (np.array(v)[chosen].sum(1) for v in vars(errors).values())
        return 1 - (in_s + in_p) / (links + sure)

    chosen = generator.integers(0, 300, (10_000, 300))
    for against in (None, other):
        rates = ratio(found, chosen) - (0 if against is None else ratio(other, chosen))
        interval = found.interval(against)
        assert interval.mean == pytest.approx(
            found.error_rate - (0 if against is None else other.error_rate), abs=1e-12
        )
        assert [interval.low, interval.high] == pytest.approx(np.quantile(rates, [0.025, 0.975]), abs=2e-3)


# ------------------------------------------------------------------ gold


def test_gold_is_read_from_the_talp_format(tmp_path: Path) -> None:
    (tmp_path / "gold").write_text("1-1 2p3  10-4\n\n")
    first, second = read_gold(tmp_path / "gold")
    assert first.sure == {(0, 0), (9, 3)}
    assert first.possible == {(0, 0), (9, 3), (1, 2)}
    assert second == (frozenset(), frozenset())
    assert read_gold(tmp_path / "gold", first=0)[0].sure == {(1, 1), (10, 4)}


@pytest.mark.parametrize(
    ("line", "says"), [("1-1 2x3", "'2x3' in line 2"), ("0-1", "'0-1' in line 2"), ("1-", "'1-' in line 2")]
)
def test_what_is_no_link_is_refused(tmp_path: Path, line: str, says: str) -> None:
    (tmp_path / "gold").write_text(f"1-1\n{line}\n")
    with pytest.raises(ValueError, match=says):
        read_gold(tmp_path / "gold")


def test_the_data_of_the_demos_are_whole() -> None:
    alignments = read_gold(DATA / "enfr.gold")
    lines = (DATA / "enfr.src-tgt").read_text(encoding="utf-8").splitlines()
    assert len(alignments) == len(lines) == 447
    assert sum(len(one.sure) for one in alignments) == 4038
    assert sum(len(one.possible - one.sure) for one in alignments) == 13400
    for line, one in zip(lines, alignments, strict=True):
        source, target = (side.split() for side in line.split("|||"))
        assert all(i < len(source) and j < len(target) for i, j in one.possible)


def test_another_number_of_alignments_is_refused() -> None:
    with pytest.raises(ValueError, match="alignments: expected 1, one per pair of gold, got 2"):
        alignment_errors([set(), set()], [PAIR])
