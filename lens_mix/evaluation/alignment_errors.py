"""How far word alignments are from gold: the alignment error rate (Och & Ney, 2003)."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from lens_mix.arguments import whole_number
from lens_mix.evaluation.agreement import Interval, bootstrap
from lens_mix.evaluation.alignment import Link

_LINK = re.compile(r"([0-9]+)([-p])([0-9]+)")


class GoldAlignment(NamedTuple):
    """What annotators say of one sentence pair; `possible` holds the sure links too."""

    sure: frozenset[Link]
    possible: frozenset[Link]


def read_gold(path: str | os.PathLike[str], first: int = 1) -> list[GoldAlignment]:
    """Gold alignments in the Talp format: one pair per line, `3-4` a sure link, `3p4` a possible one.

    Args:
        first: the number that the file gives to the first word.

    Raises:
        ValueError: something that is no link, or a word before the first; the line is named.
    """
    first = whole_number("first", first, 0)
    with open(path, encoding="utf-8") as file:
        return [_gold_line(line, number, first) for number, line in enumerate(file, 1)]


def _gold_line(line: str, number: int, first: int) -> GoldAlignment:
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
    """How alignments of a corpus differ from gold; each list has one number per sentence pair.

    Attributes:
        links: how many the alignment has, |A|.
        sure: how many sure ones gold has, |S|.
        sure_found: |A ∩ S|.
        possible_found: |A ∩ P|; P holds S.
    """

    links: list[int]
    sure: list[int]
    sure_found: list[int]
    possible_found: list[int]

    @property
    def error_rate(self) -> float:
        """AER = 1 − (|A ∩ S| + |A ∩ P|) / (|A| + |S|), 0 to 1, sums over the corpus; NaN for 0 / 0."""
        total = sum(self.links) + sum(self.sure)
        return 1 - (sum(self.sure_found) + sum(self.possible_found)) / total if total else float("nan")

    @property
    def precision(self) -> float:
        """|A ∩ P| / |A|; NaN without links."""
        return sum(self.possible_found) / sum(self.links) if sum(self.links) else float("nan")

    @property
    def recall(self) -> float:
        """|A ∩ S| / |S|; NaN without sure links in gold."""
        return sum(self.sure_found) / sum(self.sure) if sum(self.sure) else float("nan")

    def per_pair(self) -> list[float]:
        """One number per pair whose mean is the error rate, for `bootstrap` and its paired differences.

        A rate over a corpus is a ratio of two sums, no mean over pairs. With n_i its numerator and d_i its
        denominator in pair i, these are the terms AER + ((1 − AER) d_i − n_i) / mean(d) of its linear
        expansion, whose bootstrap is that of the ratio up to terms of order 1 / pairs.
        """
        rate, count = self.error_rate, len(self.links)
        mean = (sum(self.links) + sum(self.sure)) / count if count else float("nan")
        counts = zip(self.links, self.sure, self.sure_found, self.possible_found, strict=True)
        return [rate + ((1 - rate) * (a + s) - (in_s + in_p)) / mean for a, s, in_s, in_p in counts]

    def interval(self, against: AlignmentErrors | None = None, **options: Any) -> Interval:
        """The error rate, or how much it is above another's on the same pairs, with its bootstrap interval.

        `options`: of `bootstrap`.
        """
        return bootstrap(self.per_pair(), None if against is None else against.per_pair(), **options)


def alignment_errors(alignments: Iterable[Iterable[Link]], gold: Sequence[GoldAlignment]) -> AlignmentErrors:
    """Alignments of a corpus against gold, pair by pair.

    Raises:
        ValueError: another number of alignments than of gold ones.
    """
    link_sets = [frozenset(links) for links in alignments]
    if len(link_sets) != len(gold):
        raise ValueError(f"alignments: expected {len(gold)}, one per pair of gold, got {len(link_sets)}")
    pairs = list(zip(link_sets, gold, strict=True))
    return AlignmentErrors(
        [len(links) for links, _ in pairs],
        [len(true.sure) for _, true in pairs],
        [len(links & true.sure) for links, true in pairs],
        # Of a `GoldAlignment` made by hand too: P holds S.
        [len(links & (true.possible | true.sure)) for links, true in pairs],
    )
