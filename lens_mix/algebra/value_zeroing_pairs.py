"""Which pairs of a zeroed key and a query there are, and in which chunks they are computed.

A zeroed value reaches only the queries that give its key weight, so a causal map costs its triangle. The
pairs of neighbouring keys make a rectangle as long as few pairs without weight come into it; rectangles are
gathered into chunks for the one large product.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How much is done at once.

    Attributes:
        rectangle: pairs whose vectors fit a processor's cache.
        chunk: pairs of one product with W_out.
        columns: neurons between the two matrices.
        keys: zeroed keys whose vectors are held at once.
        positions: positions of all prompts that are held at once.
        spare: pairs without weight that a rectangle may have, as a share of the others.
    """

    rectangle: int
    chunk: int
    columns: int
    keys: int
    positions: int
    spare: float


CPU = Sizes(rectangle=512, chunk=1024, columns=512, keys=128, positions=2048, spare=0.03)
GPU = Sizes(rectangle=16384, chunk=16384, columns=4096, keys=1024, positions=16384, spare=0.25)


class Source(NamedTuple):
    """What is zeroed as one: a key, or a span of keys, of one prompt.

    Attributes:
        prompt: of which prompt.
        column: its place in the map's key axis.
        keys: positions.
        first, last: the rows that give any of them weight lie in first..last - 1.
    """

    prompt: int
    column: int
    keys: list[int]
    first: int
    last: int

    @property
    def rows(self) -> int:
        """How many rows it may change."""
        return self.last - self.first


class Rectangle(NamedTuple):
    """Neighbouring sources of one prompt by some of its rows."""

    prompt: int
    sources: slice
    rows: slice

    @property
    def shape(self) -> tuple[int, int]:
        """Sources and rows."""
        return self.sources.stop - self.sources.start, self.rows.stop - self.rows.start

    @property
    def pairs(self) -> int:
        """How many pairs."""
        keys, rows = self.shape
        return keys * rows


def find_sources(
    seen: Bool[Tensor, "batch query key"],
    real: Bool[Tensor, "batch key"],
    real_queries: Bool[Tensor, "batch query"],
    spans: Sequence[Sequence[int]] | None,
) -> list[Source]:
    """Every source of every prompt that reaches a row; the one look at a GPU's numbers.

    Args:
        seen: which keys get weight from any of the heads that are zeroed.
        real, real_queries: which positions are the prompts' own.
        spans: positions of a prompt, padding not counted, that are zeroed as one; None: each alone.
    """
    seen = seen & real_queries[:, :, None] & real[:, None, :]
    queries, any_query = seen.shape[1], seen.any(1)
    first = torch.where(any_query, seen.byte().argmax(1), queries)
    last = torch.where(any_query, queries - seen.flip(1).byte().argmax(1), 0)
    sources = []
    for prompt, (begins, ends, is_real) in enumerate(zip(*(x.tolist() for x in (first, last, real)), strict=True)):
        positions = [position for position, inside in enumerate(is_real) if inside]
        if spans is None:
            members = [(position, [position]) for position in positions]
        else:
            members = [(number, [positions[p] for p in span]) for number, span in enumerate(spans)]
        for column, keys in members:
            begin, end = min(begins[key] for key in keys), max(ends[key] for key in keys)
            if begin < end:
                sources.append(Source(prompt, column, keys, begin, end))
    return sources


def chunks(sources: Sequence[Source], numbers: range, sizes: Sizes) -> Iterator[list[Rectangle]]:
    """The pairs of some sources, gathered for the large product."""
    chunk: list[Rectangle] = []
    for rectangle in _rectangles(sources, numbers, sizes):
        if chunk and _pairs(chunk) + rectangle.pairs > sizes.chunk:
            yield chunk
            chunk = []
        chunk.append(rectangle)
    if chunk:
        yield chunk


def _pairs(rectangles: Iterable[Rectangle]) -> int:
    return sum(rectangle.pairs for rectangle in rectangles)


def _rectangles(sources: Sequence[Source], numbers: range, sizes: Sizes) -> Iterator[Rectangle]:
    begin = numbers.start
    while begin < numbers.stop:
        end, first, last, needed = begin + 1, sources[begin].first, sources[begin].last, sources[begin].rows
        while end < numbers.stop:
            before, new = sources[end - 1], sources[end]
            window = min(first, new.first), max(last, new.last)
            pairs = (end + 1 - begin) * (window[1] - window[0])
            neighbours = (new.prompt, new.column) == (before.prompt, before.column + 1)
            if not neighbours or pairs > min(sizes.rectangle, (1 + sizes.spare) * (needed + new.rows)):
                break
            end, (first, last), needed = end + 1, window, needed + new.rows
        rows = -(-(last - first) // -(-(last - first) * (end - begin) // sizes.rectangle))
        for start in range(first, last, rows):
            yield Rectangle(sources[begin].prompt, slice(begin, end), slice(start, min(start + rows, last)))
        begin = end
