"""What a change of a norm's input does to its output."""

from __future__ import annotations

import dataclasses
import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lens_mix.algebra.budget import chunk_size
from lens_mix.algebra.head_vectors import linear_part
from lens_mix.algebra.workspace import Rows, Workspace, even, of_rows
from lens_mix.lens.anatomy import Norm


class NormChange:
    """One norm of a block, at the clean vectors that it reads.

    Args:
        norm: the norm.
        clean: what it reads in the clean pass.
    """

    def __init__(self, norm: Norm, clean: Float[Tensor, "row d_model"]) -> None:
        self.norm = norm
        self.centred = self.centre(clean)
        self.square = self.centred.square().mean(-1) + norm.eps
        self.size = self.square.sqrt()
        self.weight = None if norm.weight is None else norm.weight.to(clean.dtype)
        # γ ⊙ C x: what a change of the size is a factor of.
        self.base = self.centred if self.weight is None else self.centred * self.weight

    def centre(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """Without its mean, for LayerNorm."""
        return x - x.mean(-1, keepdim=True) if self.norm.kind == "layer" else x

    def change(self, rows: Rows, change: Float[Tensor, "*pair d_model"], room: Workspace) -> ChangedNorm:
        """What a change of the input does."""
        centred = change
        if self.norm.kind == "layer":
            centred = room.like("centred", change, change.shape, change.dtype)
            torch.sub(change, change.mean(-1, keepdim=True), out=centred)
        growth = room.like("product", change, change.shape, change.dtype)
        growth = torch.add(centred, of_rows(self.centred, rows), alpha=2, out=growth).mul_(centred).mean(-1)
        inverse, drift = self.sizes(growth, of_rows(self.square, rows), of_rows(self.size, rows))
        return ChangedNorm(self, rows, centred, inverse, drift)

    def sizes(
        self, growth: Float[Tensor, "*pair"], square: Float[Tensor, "*row"], size: Float[Tensor, "*row"]
    ) -> tuple[Float[Tensor, "*pair"], Float[Tensor, "*pair"]]:
        """1/s' and 1/s' - 1/s without cancellation, from s'² - s²; overwrites `growth`."""
        smallest = max(self.norm.eps, torch.finfo(growth.dtype).tiny)
        changed = (square + growth).clamp_min_(smallest).sqrt_()
        # 1/s' - 1/s = -(s'² - s²) / (s s' (s + s'))
        drift = growth.neg_().div_((size + changed).mul_(changed).mul_(size))
        return changed.reciprocal_(), drift

    def from_factors(
        self,
        weights: Float[Tensor, "source rank query"],
        vectors: Float[Tensor, "source rank axis"],
        products: Float[Tensor, "source rank query"],
        ones: Float[Tensor, " axis"],
        prompts: Int[Tensor, " source"],
        room: Workspace,
    ) -> tuple[Float[Tensor, "source query"], Float[Tensor, "source query"]]:
        """1/s' and 1/s' - 1/s for changes c = Σ_r weights_r vectors_r, without these sums.

        s'² - s² = (2 C x · c + ‖C c‖²) / d_model: the first from scalar products of clean rows and vectors,
        the second from those of the vectors, in float64 (a float32 Gram matrix is wrong by half where heads
        cancel).

        Args:
            weights: factors of the vectors.
            vectors: of each source, in any orthogonal axes.
            products: C x · vectors_r of each query, float64; overwritten.
            ones: the vector of ones in these axes.
            prompts: of each source.
            room: for what lies between.
        """
        growth = weights.new_empty((len(weights), weights.shape[2]))
        # The vectors' float64 copies stay in a processor's caches.
        step = chunk_size(8 * math.prod(vectors.shape[1:]), vectors.device, None)
        for some in even(0, len(vectors), step):
            own = vectors[some]
            # With the ones, so that one reading gives the sums too.
            shape = (len(own), own.shape[1] + 1, own.shape[2])
            wide = room.like("wide", own, shape, torch.float64)
            wide[:, :-1], wide[:, -1] = own, ones
            products_and_sums = wide @ wide.transpose(-1, -2)
            gram, sums = products_and_sums[:, :-1, :-1], products_and_sums[:, :-1, -1:]
            if self.norm.kind == "layer":
                # C is a projection: ‖C c‖² = ‖c‖² - (c · 1)² / d_model.
                gram = torch.baddbmm(gram, sums, sums.transpose(-1, -2), alpha=-1 / len(ones))
            factors = weights[some].double()
            growth[some] = products[some].baddbmm_(gram, factors, beta=2).mul_(factors).sum(1)
        growth /= len(ones)
        square, size = (x.view(-1, growth.shape[1])[prompts] for x in (self.square, self.size))
        return self.sizes(growth, square, size)

    def linear(self, vectors: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """The norm's linear part, γ ⊙ C v."""
        return linear_part(self.norm, vectors)


@dataclasses.dataclass(frozen=True)
class ChangedNorm:
    """A norm's output change, γ ⊙ (centred · inverse + C x · drift)."""

    source: NormChange
    rows: Rows
    centred: Float[Tensor, "*pair d_model"]
    inverse: Float[Tensor, "*pair"]
    drift: Float[Tensor, "*pair"]

    def vector(self, out: Float[Tensor, "*pair d_model"]) -> Float[Tensor, "*pair d_model"]:
        """The change itself, into `out` (which may be the change that came in)."""
        torch.mul(self.centred, self.inverse[..., None], out=out)
        out.addcmul_(of_rows(self.source.centred, self.rows), self.drift[..., None])
        return out if self.source.weight is None else out.mul_(self.source.weight)
