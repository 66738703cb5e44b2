"""What the pieces cost in memory, and pieces that fit a bound."""

from __future__ import annotations

import dataclasses

import torch

from lens_mix.algebra.large_product import copy_bytes
from lens_mix.algebra.value_zeroing_old.pieces import Sizes
from lens_mix.lens.anatomy import BlockAnatomy

_SMALLEST = {"slab": 8, "columns": 64, "chunk": 8, "keys": 1}


@dataclasses.dataclass(frozen=True)
class Cost:
    """What the temporaries of one block's map depend on.

    Attributes:
        anatomy: the block.
        heads, d_head, d_model: its sizes.
        length: positions of one (padded) prompt.
        span: positions that are zeroed as one, at most.
        stored, narrow, wide: bytes of a number in the model, in the computation, and up to the first matrix.
    """

    anatomy: BlockAnatomy
    heads: int
    d_head: int
    d_model: int
    length: int
    span: int
    stored: int
    narrow: int
    wide: int

    @staticmethod
    def of(
        anatomy: BlockAnatomy,
        length: int,
        span: int,
        stored: torch.dtype,
        narrow: torch.dtype,
        wide: torch.dtype,
    ) -> Cost:
        """Of a block whose value path is known."""
        if anatomy.value_path is None:
            raise ValueError("anatomy: expected a block with a value path, got none")
        heads, d_head, d_model = anatomy.value_path.W_O.shape
        sizes = (stored.itemsize, narrow.itemsize, wide.itemsize)
        return Cost(anatomy, heads, d_head, d_model, length, span, *sizes)

    @property
    def matrices(self) -> int:
        """First matrices of a feed-forward that changes; 0 where nothing goes through one."""
        feed_forward = self.anatomy.feed_forward
        if feed_forward is None or self.anatomy.parallel:
            return 0
        return 1 if feed_forward.W_gate is None else 2

    @property
    def d_mlp(self) -> int:
        """Width of the feed-forward; 0 where there is none."""
        return 0 if self.anatomy.feed_forward is None else self.anatomy.feed_forward.W_in.shape[1]

    def bytes(self, sizes: Sizes) -> int:
        """An upper bound of the temporaries of one block's map, the map itself not counted."""
        return self._clean(sizes.positions) + self._weights() + self._lot(sizes.keys) + self._chunk(sizes)

    def _clean(self, positions: int) -> int:
        positions = max(positions, self.length)
        prompts = -(-positions // self.length)
        vectors = positions * self.d_model * (14 * self.narrow + 4 * self.wide)
        values = positions * self.heads * self.d_head * 5 * self.wide
        norms = sum(
            norm is not None
            for norm in (
                self.anatomy.attention_branch,
                self.anatomy.attention_residual,
                self.anatomy.feed_forward_input,
            )
        )
        # Once whole, once in parts; a gated SiLU's own numbers.
        hidden = positions * self.d_mlp * (self.matrices * (2 * norms + 3) * self.wide + 4 * self.narrow)
        hidden += positions * self.d_mlp * 5 * self.narrow if self.matrices == 2 else 0
        pattern = prompts * self.length**2 * (self.heads * self.wide + 8)
        return vectors + values + hidden + pattern

    def _weights(self) -> int:
        """Copies of weights in other dtypes, and the folded matrices."""
        inner, outer = self.heads * self.d_head, self.d_model
        first = self.matrices * self.d_mlp
        folded = inner * first * self.wide * (2 if self.matrices == 2 else 1) + 2 * inner * outer * self.wide
        copied = 2 * inner * outer * self.wide if self.stored != self.wide else 0
        copied += outer * first * self.wide if self.stored != self.wide else 0
        copied += outer * self.d_mlp * self.narrow if self.stored != self.narrow else 0
        if self.anatomy.feed_forward is not None:
            copied += copy_bytes(self.anatomy.feed_forward.W_out, self.narrow)
        return folded + copied

    def _lot(self, keys: int) -> int:
        rank = self.span * self.heads
        pattern = keys * rank * self.length * (5 * self.wide + self.narrow)
        # Scalar products of a source's vectors, in float64, and of vectors and clean rows.
        factors = keys * rank * (2 * self.length * 8 + self.d_model * (2 * 8 + self.narrow) + rank * 8)
        factors += keys * rank * self.length * 2 * self.wide + keys * self.length * 10 * self.narrow
        # Spans are gathered once more; without folded matrices each product is one more copy.
        copies = 3 if self.span == 1 else 4
        return (
            pattern + factors + keys * rank * copies * (self.d_model + self.matrices * self.d_mlp) * self.wide
        )

    def _chunk(self, sizes: Sizes) -> int:
        slab = sizes.slab
        rows = max(sizes.chunk, slab)
        columns = min(sizes.columns, self.d_mlp) if self.matrices else 0
        # The changes, what oneDNN makes for them, a norm's input after the feed-forward, the directions that
        # stairs gather; neurons.
        products = rows * (4 * self.d_model + columns) * self.narrow
        vectors = slab * self.d_model * (4 * self.wide + 4 * self.narrow)
        # Per pair and neuron: pre-activations, what runs gather of clean rows and of products, the gate.
        hidden = slab * columns * (self.matrices * 5 * self.wide + 3 * self.narrow)
        factors = slab * self.span * self.heads * 6 * self.wide
        return products + vectors + hidden + factors


def fitting(sizes: Sizes, cost: Cost, max_memory: int | None) -> Sizes:
    """The sizes, made smaller where a bound asks for it.

    Args:
        sizes: what suits the device.
        cost: of the block.
        max_memory: bytes for the temporaries; None: no bound.

    Raises:
        ValueError: the smallest pieces don't fit.
    """
    if max_memory is None:
        return sizes
    sizes = dataclasses.replace(sizes, positions=min(sizes.positions, max(cost.length, 1)))
    while cost.bytes(sizes) > max_memory:
        smaller = {name: max(least, getattr(sizes, name) // 2) for name, least in _SMALLEST.items()}
        if all(getattr(sizes, name) == value for name, value in smaller.items()):
            raise ValueError(
                f"max_memory: expected at least {cost.bytes(sizes)} bytes (the smallest step of value "
                f"zeroing by algebra at {cost.length} positions), got {max_memory}; "
                "engine='hooks' may need less"
            )
        sizes = dataclasses.replace(sizes, **smaller)
    return sizes
