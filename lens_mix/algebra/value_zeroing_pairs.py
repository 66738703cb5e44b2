"""Which pairs of a zeroed key and a query there are, and in which chunks they are computed.

A zeroed value reaches only the queries that give its key weight, so a causal map costs its triangle.
Neighbouring keys share a rectangle while few of its pairs (`Sizes.spare`) have no weight. Several rectangles
form one chunk, the pairs of one product with W_out. `max_memory` can shrink both.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Bool
from torch import Tensor

from lens_mix.algebra.budget import budget_beside, copy_bytes
from lens_mix.algebra.vectors import value_path

if TYPE_CHECKING:
    from lens_mix.lens.block import Block


Groups = Sequence[Sequence[int]]  # heads or positions that are zeroed as one
Spans = Groups | None


class Sizes(NamedTuple):
    """How much is done at once."""

    rectangle: int  # pairs whose vectors fit a processor's cache
    chunk: int  # pairs of one product with W_out
    neurons: int  # neurons between the two matrices
    keys: int  # zeroed keys whose vectors are held at once
    positions: int  # positions of all prompts that are held at once
    spare: float  # pairs without weight that a rectangle may have, as a share of the others


_CPU = Sizes(rectangle=512, chunk=2304, neurons=768, keys=128, positions=2048, spare=0.05)
_GPU = Sizes(rectangle=16384, chunk=16384, neurons=4096, keys=1024, positions=16384, spare=0.25)


class Source(NamedTuple):
    """What is zeroed as one, a key or a span of keys; the rows that give it weight lie in first..last - 1."""

    prompt: int
    column: int
    keys: list[int]
    first: int
    last: int


class Rectangle(NamedTuple):
    """Pairs of neighbouring sources of one prompt, the first at `column` of its map, and some of its rows."""

    prompt: int
    column: int
    sources: slice
    rows: slice

    @property
    def shape(self) -> tuple[int, int]:
        """Sources and rows."""
        return self.sources.stop - self.sources.start, self.rows.stop - self.rows.start

    def lines(self, queries: int) -> slice:
        """Its rows in the line of all prompts' rows, so many of each."""
        return slice(self.prompt * queries + self.rows.start, self.prompt * queries + self.rows.stop)


def find_sources(
    attended: Bool[Tensor, "batch query key"], real: Bool[Tensor, "batch key"], spans: Spans
) -> list[Source]:
    """Every source that gets weight, from any head that is zeroed; the only copy from GPU to CPU."""
    queries, any_query = attended.shape[1], attended.any(1)
    # As bytes: argmax takes no booleans, and of equals it gives the first.
    first = torch.where(any_query, attended.byte().argmax(1), queries).tolist()
    last = torch.where(any_query, queries - attended.flip(1).byte().argmax(1), 0).tolist()
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
        if chunk and sum(math.prod(other.shape) for other in (*chunk, rectangle)) > sizes.chunk:
            yield chunk
            chunk = []
        chunk.append(rectangle)
    if chunk:
        yield chunk


def _rectangles(sources: Sequence[Source], sizes: Sizes) -> Iterator[Rectangle]:
    begin = 0
    while begin < len(sources):
        prompt, column, _, first, last = sources[begin]
        end, weighted = begin + 1, last - first
        for new in sources[end:]:
            window, weighted = (min(first, new.first), max(last, new.last)), weighted + new.last - new.first
            pairs = (end + 1 - begin) * (window[1] - window[0])
            neighbours = (new.prompt, new.column) == (prompt, sources[end - 1].column + 1)
            if not neighbours or pairs > min(sizes.rectangle, (1 + sizes.spare) * weighted):
                break
            end, (first, last) = end + 1, window
        rows = max(1, sizes.rectangle // (end - begin))  # a single key's rows may be too many
        for start in range(first, last, rows):
            yield Rectangle(prompt, column, slice(begin, end), slice(start, min(start + rows, last)))
        begin = end


def fitting(block: Block, span: int, dtypes: Sequence[torch.dtype]) -> Sizes:
    """The device's sizes, made smaller where `max_memory` asks for it; ValueError where none fits."""
    sizes = _CPU if block.resid_pre.device.type == "cpu" else _GPU
    length, bytes_with = block.attended.shape[2], functools.partial(_bytes, block, span, dtypes)
    # A prompt is never cut: all its positions are held at once.
    smallest = Sizes(rectangle=8, chunk=8, neurons=64, keys=1, positions=length, spare=sizes.spare)
    budget = budget_beside(
        block, 0, bytes_with(smallest), "value zeroing by algebra; engine='hooks' may need less"
    )
    while budget is not None and bytes_with(sizes) > budget:
        halves = (max(least, size // 2) for least, size in zip(smallest[:-1], sizes[:-1], strict=True))
        sizes = Sizes(*halves, spare=sizes.spare)  # type: ignore[misc]
    return sizes


def _bytes(block: Block, span: int, dtypes: Sequence[torch.dtype], sizes: Sizes) -> int:
    """An upper bound of the temporaries of one block's map, the map itself not counted."""
    narrow, wide = (dtype.itemsize for dtype in dtypes)
    anatomy, (batch, queries, length) = block.anatomy, block.attended.shape
    (heads, d_head, d_model), stored = value_path(block).W_O.shape, block.resid_pre.dtype.itemsize
    matrices, d_mlp, W_out = 0, 0, 0
    if anatomy.feed_forward is not None:
        d_mlp = anatomy.feed_forward.W_in.shape[1]
        matrices = 0 if anatomy.parallel else 1 if anatomy.feed_forward.W_gate is None else 2
        W_out = copy_bytes(anatomy.feed_forward.W_out, narrow) + (stored != narrow) * d_model * d_mlp * narrow
    prompts = min(batch, max(1, sizes.positions // length))
    rows, inner, hidden, rank = prompts * queries, heads * d_head, matrices * d_mlp, span * heads
    neurons = min(sizes.neurons, d_mlp)

    # Of the clean rows; up to three norms have bases.
    clean = rows * d_model * (12 * narrow + 4 * wide) + prompts * (length + queries) * inner * 4 * wide
    clean += rows * d_mlp * (matrices * 5 * wide + (2 * matrices + 3) * narrow)
    clean += prompts * queries * length * (heads * (wide + 1) + 8)
    weights = 2 * inner * d_model * wide + W_out + (stored != wide) * (2 * inner + hidden) * d_model * wide
    weights += inner * hidden * wide * max(1, matrices)  # folded
    # Spans are gathered once more.
    values = sizes.keys * rank * min(span, 2) * (d_model + hidden + 3 * d_head) * wide
    chunk = (3 * d_model + neurons) * narrow + (rank * (1 + d_head) + d_model + 5) * wide
    rectangle = 4 * (d_model + rank + neurons) * wide
    return clean + weights + values + max(sizes.chunk, sizes.rectangle) * chunk + sizes.rectangle * rectangle
