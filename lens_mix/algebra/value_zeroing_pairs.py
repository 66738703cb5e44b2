"""Which pairs of a zeroed key and a query there are, and in which chunks they are computed.

A zeroed value reaches only the queries that give its key weight, so a causal map costs its triangle. The
pairs of neighbouring keys make a rectangle as long as few pairs without weight come into it; rectangles are
gathered into chunks for the one large product.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool
from torch import Tensor


class Sizes(NamedTuple):
    """How much is done at once.

    Attributes:
        rectangle: pairs whose vectors fit a processor's cache.
        together: keys that share the clean rows of a long rectangle.
        chunk: pairs of one product with W_out.
        columns: neurons between the two matrices.
        keys: zeroed keys whose vectors are held at once.
        positions: positions of all prompts that are held at once.
        spare: pairs without weight that a rectangle may have, as a share of the others.
    """

    rectangle: int
    together: int
    chunk: int
    columns: int
    keys: int
    positions: int
    spare: float


CPU = Sizes(rectangle=512, together=4, chunk=1024, columns=512, keys=128, positions=2048, spare=0.03)
GPU = Sizes(rectangle=16384, together=16, chunk=16384, columns=4096, keys=1024, positions=16384, spare=0.25)


class Source(NamedTuple):
    """What is zeroed as one, a key or a span of keys; the rows that give it weight lie in first..last - 1."""

    prompt: int
    column: int
    keys: list[int]
    first: int
    last: int


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
        return self.shape[0] * self.shape[1]


def find_sources(
    seen: Bool[Tensor, "batch query key"],
    real: Bool[Tensor, "batch key"],
    spans: Sequence[Sequence[int]] | None,
) -> list[Source]:
    """Every source of every prompt that reaches a row; the one look at a GPU's numbers.

    Args:
        seen: which keys get weight from any of the heads that are zeroed; no padding.
        real: which positions are the prompts' own.
        spans: positions of a prompt, padding not counted, that are zeroed as one; None: each alone.
    """
    queries, any_query = seen.shape[1], seen.any(1)
    first = torch.where(any_query, seen.byte().argmax(1), queries).tolist()
    last = torch.where(any_query, queries - seen.flip(1).byte().argmax(1), 0).tolist()
    sources = []
    for prompt, is_real in enumerate(real.tolist()):
        positions = [position for position, inside in enumerate(is_real) if inside]
        groups = enumerate([positions[place] for place in span] for span in spans or ())
        for column, keys in groups if spans else ((position, [position]) for position in positions):
            begin, end = min(first[prompt][key] for key in keys), max(last[prompt][key] for key in keys)
            if begin < end:
                sources.append(Source(prompt, column, keys, begin, end))
    return sources


def chunks(sources: Sequence[Source], sizes: Sizes) -> Iterator[list[Rectangle]]:
    """The pairs of some sources, gathered for the large product."""
    chunk: list[Rectangle] = []
    for rectangle in _rectangles(sources, sizes):
        if chunk and sum(other.pairs for other in chunk) + rectangle.pairs > sizes.chunk:
            yield chunk
            chunk = []
        chunk.append(rectangle)
    if chunk:
        yield chunk


def _rectangles(sources: Sequence[Source], sizes: Sizes) -> Iterator[Rectangle]:
    begin = 0
    while begin < len(sources):
        prompt, _, _, first, last = sources[begin]
        end, weighted = begin + 1, last - first
        for new in sources[end:]:
            window, weighted = (min(first, new.first), max(last, new.last)), weighted + new.last - new.first
            pairs = (end + 1 - begin) * (window[1] - window[0])
            neighbours = (new.prompt, new.column) == (prompt, sources[end - 1].column + 1)
            large = pairs > sizes.rectangle and end - begin >= sizes.together
            if not neighbours or large or pairs > (1 + sizes.spare) * weighted:
                break
            end, (first, last) = end + 1, window
        rows = max(1, sizes.rectangle // (end - begin))
        for start in range(first, last, rows):
            yield Rectangle(prompt, slice(begin, end), slice(start, min(start + rows, last)))
        begin = end
