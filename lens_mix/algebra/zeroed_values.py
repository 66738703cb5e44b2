"""Zeroed values on their way through the linear parts of a block: W_O, and from it to the pre-activations.

`FoldedValues` applies W_O, the norms' linear parts and W_in, folded into one matrix per head, once per key; a
pair costs a sum over heads. `PlainValues` sums a pair's weighted values and applies W_O and W_in to each pair:
that is less work where each key reaches few rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lens_mix.algebra.feed_forward_change import AddChange
from lens_mix.algebra.large_product import add_product
from lens_mix.algebra.value_zeroing_pairs import Rectangle


@dataclasses.dataclass(frozen=True)
class ZeroedValues:
    """The values of some sources and heads.

    Attributes:
        start: number of the first source.
        positions: the zeroed positions of each source; a shorter span is filled up.
        factors: -1 times what the branch is multiplied by; 0 where a shorter span is filled up.
        pattern: of these heads.
        vectors: v, spans before heads.
    """

    start: int
    positions: Int[Tensor, "source span"]
    factors: Float[Tensor, "source span"]
    pattern: Float[Tensor, "batch head query key"]
    vectors: Float[Tensor, "source span head d_head"]

    def among(self, rectangle: Rectangle) -> slice:
        """The rectangle's sources among these."""
        return slice(rectangle.sources.start - self.start, rectangle.sources.stop - self.start)

    def weights(self, rectangle: Rectangle) -> Float[Tensor, "key row span head"]:
        """Factors of the vectors in each pair's change."""
        sources = self.among(rectangle)
        pattern = self.pattern[rectangle.prompt, :, rectangle.rows][..., self.positions[sources]]
        # In memory of their own order: a product of strided factors would be made one by one.
        return pattern.permute(2, 1, 3, 0).contiguous() * self.factors[sources][:, None, :, None]

    def change(
        self, rectangle: Rectangle, weights: Float[Tensor, "key row span head"]
    ) -> Float[Tensor, "key row d_model"]:
        """The change of the attention's output."""
        raise NotImplementedError

    def add_first(
        self,
        rectangle: Rectangle,
        weights: Float[Tensor, "key row span head"],
        read: Float[Tensor, "key row d_model"],
    ) -> AddChange:
        """What adds the values' share of the pre-activations.

        Args:
            rectangle: the pairs.
            weights: factors of the vectors, divided by the sizes of all norms on the way.
            read: the change of what the first matrices read; `FoldedValues` don't look at it.
        """
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class FoldedValues(ZeroedValues):
    """Values that have gone through the matrices.

    Attributes:
        outer: v W_O.
        inner: v through the folded matrices, W_gate's before W_in's.
    """

    outer: Float[Tensor, "source rank d_model"]
    inner: Sequence[Float[Tensor, "source rank d_mlp"]]

    def change(
        self, rectangle: Rectangle, weights: Float[Tensor, "key row span head"]
    ) -> Float[Tensor, "key row d_model"]:
        return torch.bmm(weights.flatten(2), self.outer[self.among(rectangle)])

    def add_first(
        self,
        rectangle: Rectangle,
        weights: Float[Tensor, "key row span head"],
        read: Float[Tensor, "key row d_model"],
    ) -> AddChange:
        sources, by_rank = self.among(rectangle), weights.flatten(2)

        def add(matrix: int, columns: slice, into: Tensor) -> None:
            torch.baddbmm(into, by_rank, self.inner[matrix][sources, :, columns], out=into)

        return add


@dataclasses.dataclass(frozen=True)
class PlainValues(ZeroedValues):
    """Values of which each pair's weighted sum goes through the matrices.

    Attributes:
        W_O: of these heads, in one line.
        first: the first matrices, W_gate before W_in.
    """

    W_O: Float[Tensor, "inner d_model"]
    first: Sequence[Float[Tensor, "d_model d_mlp"]]

    def change(
        self, rectangle: Rectangle, weights: Float[Tensor, "key row span head"]
    ) -> Float[Tensor, "key row d_model"]:
        vectors = self.vectors[self.among(rectangle)]
        total = weights[:, :, 0, :, None] * vectors[:, None, 0]
        for place in range(1, vectors.shape[1]):
            total.addcmul_(weights[:, :, place, :, None], vectors[:, None, place])
        return total.flatten(2) @ self.W_O

    def add_first(
        self,
        rectangle: Rectangle,
        weights: Float[Tensor, "key row span head"],
        read: Float[Tensor, "key row d_model"],
    ) -> AddChange:
        def add(matrix: int, columns: slice, into: Tensor) -> None:
            add_product(into.flatten(0, 1), read.flatten(0, 1), self.first[matrix][:, columns])

        return add
