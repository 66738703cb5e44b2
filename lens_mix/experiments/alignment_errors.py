"""Measure the errors of word alignments against gold: the alignment error rate (Och & Ney, 2003)."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from lens_mix.arguments import check_whole_number
from lens_mix.evaluation.agreement import Interval, bootstrap
from lens_mix.experiments.alignment import Link

_LINK = re.compile(r"([0-9]+)([-p])([0-9]+)")


class GoldAlignment(NamedTuple):
    """The links that annotators gave to one sentence pair.

        >>> sure = frozenset({(0, 0)})
        >>> gold = lm.experiments.GoldAlignment(sure=sure, possible=sure | {(1, 2)})
        >>> lm.experiments.alignment_errors([lm.experiments.diagonal(2, 3)], [gold])

    Attributes:
        sure: The links that are certain.
        possible: The links that are acceptable, including the sure ones.
    """

    sure: frozenset[Link]
    possible: frozenset[Link]


def read_gold(path: str | os.PathLike[str], first: int = 1) -> list[GoldAlignment]:
    """Return gold alignments from a file in the Talp format.

        >>> pathlib.Path("gold.talp").write_text("1-1 2p3")
        >>> lm.experiments.read_gold("gold.talp")

    Each line is one sentence pair, in which `3-4` is a sure link and `3p4` a possible one.

    Args:
        path: The file.
        first: The number that the file gives to the first word.

    Raises:
        ValueError: Something is not a link, or a word has a number below `first`. The error names the line.
    """
    first = check_whole_number("first", first, 0)
    with open(path, encoding="utf-8") as file:
        return [_parse_gold_line(line, number, first) for number, line in enumerate(file, 1)]


def _parse_gold_line(line: str, number: int, first: int) -> GoldAlignment:
    links: dict[str, set[Link]] = {"-": set(), "p": set()}
    for text in line.split():
        match = _LINK.fullmatch(text)
        if match is None:
            raise ValueError(f"path: expected links like 3-4 or 3p4, got {text!r} in line {number}")
        source, target = int(match[1]) - first, int(match[3]) - first
        if min(source, target) < 0:
            raise ValueError(f"path: expected words counted from {first}, got {text!r} in line {number}")
        links[match[2]].add((source, target))
    return GoldAlignment(frozenset(links["-"]), frozenset(links["-"] | links["p"]))


@dataclasses.dataclass(frozen=True)
class AlignmentErrors:
    """The differences of a corpus's alignments from gold. Each list has one number per sentence pair.

    Attributes:
        links: |A|, the number of links of the alignment.
        sure: |S|, the number of sure links of gold.
        sure_found: |A ∩ S|.
        possible_found: |A ∩ P|, where P includes S.
    """

    links: list[int]
    sure: list[int]
    sure_found: list[int]
    possible_found: list[int]

    @property
    def error_rate(self) -> float:
        """Return AER = 1 − (|A ∩ S| + |A ∩ P|) / (|A| + |S|), 0 to 1, with sums over the corpus.

        It is NaN for 0 / 0.
        """
        total = sum(self.links) + sum(self.sure)
        return 1 - (sum(self.sure_found) + sum(self.possible_found)) / total if total else float("nan")

    @property
    def precision(self) -> float:
        """Return |A ∩ P| / |A|, or NaN without links."""
        return sum(self.possible_found) / sum(self.links) if sum(self.links) else float("nan")

    @property
    def recall(self) -> float:
        """Return |A ∩ S| / |S|, or NaN if gold has no sure links."""
        return sum(self.sure_found) / sum(self.sure) if sum(self.sure) else float("nan")

    def per_pair(self) -> list[float]:
        """Return one number per pair whose mean is the error rate, for `bootstrap`.

        The error rate of a corpus is a ratio of two sums, and not a mean over pairs. With numerator n_i and
        denominator d_i in pair i, the numbers are the terms AER + ((1 − AER) d_i − n_i) / mean(d) of its
        linear expansion. Their bootstrap is that of the ratio, up to terms of order 1 / pairs.
        """
        rate, count = self.error_rate, len(self.links)
        mean = (sum(self.links) + sum(self.sure)) / count if count else float("nan")
        counts = zip(self.links, self.sure, self.sure_found, self.possible_found, strict=True)
        return [rate + ((1 - rate) * (a + s) - (in_s + in_p)) / mean for a, s, in_s, in_p in counts]

    def interval(self, against: AlignmentErrors | None = None, **options: Any) -> Interval:
        """Return the error rate with its bootstrap interval, or its excess over that of other alignments.

        Args:
            against: Other alignments of the same sentence pairs. None: the error rate itself.
            **options: The options of `bootstrap`.
        """
        return bootstrap(self.per_pair(), None if against is None else against.per_pair(), **options)


def alignment_errors(alignments: Iterable[Iterable[Link]], gold: Sequence[GoldAlignment]) -> AlignmentErrors:
    """Return the errors of a corpus's alignments, compared with gold alignments.

        >>> gold = lm.experiments.GoldAlignment(frozenset({(0, 0)}), frozenset({(0, 0), (1, 1)}))
        >>> lm.experiments.alignment_errors([{(0, 0), (1, 1)}], [gold])

    Args:
        alignments: For each sentence pair, its links.
        gold: For each sentence pair, its gold alignment.

    Raises:
        ValueError: The number of alignments differs from that of gold.
    """
    link_sets = [frozenset(links) for links in alignments]
    if len(link_sets) != len(gold):
        raise ValueError(f"alignments: expected {len(gold)}, one per pair of gold, got {len(link_sets)}")
    pairs = list(zip(link_sets, gold, strict=True))
    return AlignmentErrors(
        [len(links) for links, _ in pairs],
        [len(true.sure) for _, true in pairs],
        [len(links & true.sure) for links, true in pairs],
        # A `GoldAlignment` that was made by hand may lack the sure links in its possible ones.
        [len(links & (true.possible | true.sure)) for links, true in pairs],
    )
