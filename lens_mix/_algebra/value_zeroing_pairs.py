"""The pairs of a zeroed group of keys and a query, and the chunks in which they are computed.

Zeroing a value changes only the queries that attend to its key, so a causal map needs half of the pairs.
The same key of neighboring prompts, and neighboring keys, share a rectangle of pairs if few of them
(`Sizes.spare`) have no weight. Several rectangles are one chunk, the pairs of one product with W_out.
`max_memory` bounds the sizes of both.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Bool
from torch import Tensor

from lens_mix._algebra.budget import budget_beside
from lens_mix._blocks.states import value_path

if TYPE_CHECKING:
    from lens_mix._blocks.block import Block


IndexGroups = Sequence[Sequence[int]]  # Heads or positions that are zeroed together.
Spans = Sequence[IndexGroups] | None  # Groups of positions, for each prompt.


class Sizes(NamedTuple):
    """The sizes of the tensors of one block's map.

    Attributes:
        rectangle: The number of pairs of a rectangle, whose vectors fit a CPU's cache.
        chunk: The number of pairs of one product with W_out.
        neurons: The number of neurons that are computed at once.
        keys: The number of zeroed groups whose vectors are in memory at once.
        positions: The number of positions of all prompts that are in memory at once.
        spare: The pairs without weight that are computed in the time that one more rectangle takes to start.
    """

    rectangle: int
    chunk: int
    neurons: int
    keys: int
    positions: int
    spare: int = 0


_CPU = Sizes(rectangle=512, chunk=2304, neurons=768, keys=128, positions=2048)
_GPU = Sizes(rectangle=16384, chunk=16384, neurons=4096, keys=1024, positions=16384)
# So many multiplications take as long as starting the operations of one rectangle.
_CPU_START, _GPU_START = 2**22, 2**32


class ZeroedGroup(NamedTuple):
    """A key or a span of keys that are zeroed together.

    Attributes:
        prompt: The prompt's index.
        key: The group's index on the key axis of the map.
        positions: The positions of its keys.
        first: The first row that attends to it.
        last: One more than the last row that attends to it.
    """

    prompt: int
    key: int
    positions: list[int]
    first: int
    last: int


class Rectangle(NamedTuple):
    """Pairs of some rows and neighboring zeroed groups, which neighboring prompts have in common.

    Attributes:
        prompts: The prompts.
        key: The first group's index on the key axis of the map.
        zeroed: The groups in the list of all; by key if there are several prompts.
        rows: The rows, of each prompt.
    """

    prompts: slice
    key: int
    zeroed: slice
    rows: slice

    @property
    def shape(self) -> tuple[int, int, int]:
        """The numbers of zeroed groups of a prompt, of prompts and of rows."""
        prompts = self.prompts.stop - self.prompts.start
        return (self.zeroed.stop - self.zeroed.start) // prompts, prompts, self.rows.stop - self.rows.start

    @property
    def place(self) -> tuple[slice, slice]:
        """The index of its rows in the states of the clean pass, [prompt, row, ...]."""
        return self.prompts, self.rows

    @property
    def pairs(self) -> int:
        """The number of its pairs."""
        return math.prod(self.shape)


def find_zeroed_groups(
    attended: Bool[Tensor, "batch query key"], real: Bool[Tensor, "batch key"], spans: Spans
) -> list[ZeroedGroup]:
    """Return every group of keys that gets weight, by prompt; this is the only copy from GPU to CPU."""
    queries, any_query = attended.shape[1], attended.any(1)
    # argmax takes no booleans, and returns the first of equal numbers.
    first = torch.where(any_query, attended.byte().argmax(1), queries).tolist()
    last = torch.where(any_query, queries - attended.flip(1).byte().argmax(1), 0).tolist()
    zeroed = []
    for prompt, is_real in enumerate(real.tolist()):
        positions = [position for position, inside in enumerate(is_real) if inside]
        groups = enumerate([positions[place] for place in span] for span in (spans[prompt] if spans else ()))
        for index, keys in groups if spans else ((position, [position]) for position in positions):
            begin, end = min(first[prompt][key] for key in keys), max(last[prompt][key] for key in keys)
            if begin < end:
                zeroed.append(ZeroedGroup(prompt, index, keys, begin, end))
    return zeroed


def in_best_order(zeroed: Sequence[ZeroedGroup], sizes: Sizes) -> Sequence[ZeroedGroup]:
    """Return groups by key, or by prompt if they are: whichever takes fewer rectangles.

    By key, prompts share a rectangle. By prompt, keys do, which prompts of different lengths may prevent.
    """
    by_key = sorted(zeroed, key=lambda group: (group.key, group.prompt))
    return min(by_key, zeroed, key=lambda groups: sum(1 for _ in _rectangles(groups, sizes)))


def chunks(zeroed: Sequence[ZeroedGroup], sizes: Sizes) -> Iterator[list[Rectangle]]:
    """Yield the pairs of some zeroed groups in chunks of rectangles."""
    chunk: list[Rectangle] = []
    for rectangle in _rectangles(zeroed, sizes):
        if chunk and sum(other.pairs for other in (*chunk, rectangle)) > sizes.chunk:
            yield chunk
            chunk = []
        chunk.append(rectangle)
    if chunk:
        yield chunk


def _rectangles(zeroed: Sequence[ZeroedGroup], sizes: Sizes) -> Iterator[Rectangle]:
    begin = 0
    while begin < len(zeroed):
        prompt, key, _, first, last = zeroed[begin]
        whole = Rectangle(slice(prompt, prompt + 1), key, slice(begin, begin + 1), slice(first, last))
        for find_neighbors in (_in_next_prompt, _of_next_key):
            while new := find_neighbors(zeroed, whole):
                larger, weighted = _joined(whole, new), sum(each.last - each.first for each in new)
                if larger.pairs > min(sizes.rectangle, whole.pairs + weighted + sizes.spare):
                    break
                whole = larger
        begin = whole.zeroed.stop
        # The rows of a single key may be more than a rectangle's pairs.
        rows = max(1, sizes.rectangle // (whole.pairs // (whole.rows.stop - whole.rows.start)))
        for start in range(whole.rows.start, whole.rows.stop, rows):
            yield whole._replace(rows=slice(start, min(start + rows, whole.rows.stop)))


def _in_next_prompt(zeroed: Sequence[ZeroedGroup], beside: Rectangle) -> Sequence[ZeroedGroup]:
    """Return the group of the same key in the next prompt, if there is one."""
    new = zeroed[beside.zeroed.stop : beside.zeroed.stop + 1]
    return [each for each in new if (each.prompt, each.key) == (beside.prompts.stop, beside.key)]


def _of_next_key(zeroed: Sequence[ZeroedGroup], beside: Rectangle) -> Sequence[ZeroedGroup]:
    """Return the groups of the next key in the same prompts, if all have one."""
    keys, prompts, _ = beside.shape
    new = zeroed[beside.zeroed.stop : beside.zeroed.stop + prompts]
    expected = [(prompt, beside.key + keys) for prompt in range(beside.prompts.start, beside.prompts.stop)]
    return new if [(each.prompt, each.key) for each in new] == expected else []


def _joined(rectangle: Rectangle, new: Sequence[ZeroedGroup]) -> Rectangle:
    """Return a rectangle with some more groups."""
    prompts = slice(rectangle.prompts.start, new[-1].prompt + 1)
    zeroed = slice(rectangle.zeroed.start, rectangle.zeroed.stop + len(new))
    first = min(rectangle.rows.start, *(each.first for each in new))
    last = max(rectangle.rows.stop, *(each.last for each in new))
    return Rectangle(prompts, rectangle.key, zeroed, slice(first, last))


def fitting(block: Block, dtypes: Sequence[torch.dtype]) -> Sizes:
    """Return the device's sizes, reduced to fit into `max_memory`.

    Raises:
        ValueError: Even the smallest sizes do not fit.
    """
    on_cpu, spans = block.resid_pre.device.type == "cpu", block.key_positions or ()
    span = max((len(span) for of_prompt in spans for span in of_prompt), default=1)
    feed_forward = None if block.anatomy.parallel else block.anatomy.feed_forward
    of_pair = block.n_heads * block.resid_pre.shape[-1]
    of_pair += 0 if feed_forward is None else feed_forward.W_out.numel()
    spare = (_CPU_START if on_cpu else _GPU_START) // of_pair
    sizes = (_CPU if on_cpu else _GPU)._replace(spare=spare)
    length, bytes_with = block.attended.shape[2], functools.partial(_bytes, block, span, dtypes)
    # A prompt is never divided, so all its positions are in memory at once.
    smallest = Sizes(rectangle=8, chunk=8, neurons=64, keys=1, positions=length, spare=spare)
    budget = budget_beside(
        block, 0, bytes_with(smallest), "value zeroing by algebra; engine='hooks' may need less"
    )
    while budget is not None and bytes_with(sizes) > budget:
        halves = (max(least, size // 2) for least, size in zip(smallest[:-1], sizes[:-1], strict=True))
        sizes = Sizes(*halves, spare=spare)  # type: ignore[misc]
    return sizes


def _bytes(block: Block, span: int, dtypes: Sequence[torch.dtype], sizes: Sizes) -> int:
    """Return an upper bound of the bytes of one block's temporaries, without the map itself."""
    narrow, wide = (dtype.itemsize for dtype in dtypes)
    anatomy, (batch, queries, length) = block.anatomy, block.attended.shape
    (heads, d_head, d_model), stored = value_path(block).W_O.shape, block.resid_pre.dtype.itemsize
    matrices, d_mlp, W_out = 0, 0, 0
    if anatomy.feed_forward is not None:
        d_mlp = anatomy.feed_forward.W_in.shape[1]
        matrices = 0 if anatomy.parallel else 1 if anatomy.feed_forward.W_gate is None else 2
        W_out = (stored != narrow) * d_model * d_mlp * narrow
    prompts = min(batch, max(1, sizes.positions // length))
    rows, inner, hidden, rank = prompts * queries, heads * d_head, matrices * d_mlp, span * heads
    neurons = min(sizes.neurons, d_mlp)

    # These are the states of the clean rows; up to three norms have bases.
    clean = rows * d_model * (12 * narrow + 4 * wide) + prompts * (length + queries) * inner * 4 * wide
    clean += rows * d_mlp * (matrices * 5 * wide + (2 * matrices + 3) * narrow)
    clean += prompts * queries * length * (heads * (wide + 1) + 8)
    weights = 2 * inner * d_model * wide + W_out + (stored != wide) * (2 * inner + hidden) * d_model * wide
    weights += inner * hidden * wide * max(1, matrices)  # This is the product of W_O and W_in.
    # Spans need another copy.
    values = sizes.keys * rank * min(span, 2) * (d_model + hidden + 3 * d_head) * wide
    chunk = (3 * d_model + neurons) * narrow + (rank * (1 + d_head) + d_model + 5) * wide
    # These are the vectors that W_in is applied to if its product with W_O is not used.
    chunk += (3 * d_model + 2 * matrices * neurons) * wide
    rectangle = 4 * (d_model + rank + neurons) * wide
    return clean + weights + values + max(sizes.chunk, sizes.rectangle) * chunk + sizes.rectangle * rectangle
