"""What a change of a norm's input does to its output."""

from __future__ import annotations

import dataclasses

import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix.lens.anatomy import Norm
from lens_mix.methods.zeroing.room import Workspace


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

    def centre(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """Without its mean, for LayerNorm."""
        return x - x.mean(-1, keepdim=True) if self.norm.kind == "layer" else x

    def change(self, rows: slice, change: Float[Tensor, "key row d_model"], room: Workspace) -> ChangedNorm:
        """What a change of the input does: 1/s' and 1/s' - 1/s without cancellation."""
        centred = change
        if self.norm.kind == "layer":
            centred = room.like("centred", change, change.shape, change.dtype)
            torch.sub(change, change.mean(-1, keepdim=True), out=centred)
        growth = room.like("product", change, change.shape, change.dtype)
        growth = torch.add(centred, self.centred[rows], alpha=2, out=growth).mul_(centred).mean(-1)
        smallest = max(self.norm.eps, torch.finfo(growth.dtype).tiny)
        changed, size = (self.square[rows] + growth).clamp_min_(smallest).sqrt_(), self.size[rows]
        # 1/s' - 1/s = -(s'² - s²) / (s s' (s + s'))
        drift = growth.neg_().div_((size + changed).mul_(changed).mul_(size))
        return ChangedNorm(self, rows, centred, changed.reciprocal_(), drift)


@dataclasses.dataclass(frozen=True)
class ChangedNorm:
    """A norm's output change, γ ⊙ (centred · inverse + C x · drift)."""

    source: NormChange
    rows: slice
    centred: Float[Tensor, "key row d_model"]
    inverse: Float[Tensor, "key row"]
    drift: Float[Tensor, "key row"]

    def vector(self, out: Float[Tensor, "key row d_model"]) -> Float[Tensor, "key row d_model"]:
        """The change itself, into `out` (which may be the change that came in)."""
        torch.mul(self.centred, self.inverse[..., None], out=out)
        out.addcmul_(self.source.centred[self.rows], self.drift[..., None])
        return out if self.source.weight is None else out.mul_(self.source.weight)
