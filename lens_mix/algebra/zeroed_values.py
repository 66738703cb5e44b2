"""Zeroed values on their way to the attention's output and to the pre-activations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lens_mix.algebra.large_product import add_product
from lens_mix.algebra.value_zeroing_pairs import Rectangle


class ZeroedValues(NamedTuple):
    """The values of some sources and heads; `Rectangle.sources` count from the first of them.

    Folded ones have gone through the matrices, once per key and head, and a pair costs a sum over heads. Of
    plain ones each pair's sum goes through the matrices: less work where keys reach few rows.

    Attributes:
        positions: of each source; a short span is filled up.
        factors: -1 times what the branch is multiplied by; 0 where a span is filled up or nothing is sent.
        pattern: of these heads.
        vectors: v; folded, v W_O (spans before heads).
        W_O: of these heads; None where folded.
        first: of folded values, what the first matrices make of them; else the first matrices. W_gate first.
    """

    positions: Int[Tensor, "source span"]
    factors: Float[Tensor, "source span head"]
    pattern: Float[Tensor, "batch head query key"]
    vectors: Float[Tensor, "source span head d_head"] | Float[Tensor, "source rank d_model"]
    W_O: Float[Tensor, "head d_head d_model"] | None
    first: Sequence[Float[Tensor, "source rank d_mlp"]] | Sequence[Float[Tensor, "d_model d_mlp"]]

    def weights(self, rectangle: Rectangle) -> Float[Tensor, "key row span head"]:
        """Factors of the values in each pair's change."""
        sources = rectangle.sources
        pattern = self.pattern[rectangle.prompt, :, rectangle.rows][..., self.positions[sources]]
        # In memory of their own order: a product of strided factors would be made one by one.
        return pattern.permute(2, 1, 3, 0).contiguous() * self.factors[sources][:, None]

    def change(
        self,
        sources: slice,
        weights: Float[Tensor, "key row span head"],
        out: Float[Tensor, "key row d_model"],
    ) -> Float[Tensor, "key row d_model"]:
        """The change of the attention's output; in `out` where that has its dtype."""
        vectors = self.vectors[sources]
        out = out if out.dtype == vectors.dtype else torch.empty_like(out, dtype=vectors.dtype)
        if self.W_O is None:
            return torch.bmm(weights.flatten(2), vectors, out=out)
        total = weights[:, :, 0, :, None] * vectors[:, None, 0]
        for place in range(1, vectors.shape[1]):
            total.addcmul_(weights[:, :, place, :, None], vectors[:, None, place])
        torch.mm(total.flatten(0, 1).flatten(1), self.W_O.flatten(0, 1), out=out.flatten(0, 1))
        return out

    def add_first(
        self,
        sources: slice,
        weights: Float[Tensor, "key row span head"],
        read: Float[Tensor, "key row d_model"],
        matrix: int,
        columns: slice,
        into: Float[Tensor, "key row column"],
    ) -> None:
        """Add to some neurons' pre-activations what folded values change, or what of plain ones is `read`."""
        if self.W_O is None:
            torch.baddbmm(into, weights.flatten(2), self.first[matrix][sources, :, columns], out=into)
        else:
            add_product(into.flatten(0, 1), read.flatten(0, 1).to(into.dtype), self.first[matrix][:, columns])
