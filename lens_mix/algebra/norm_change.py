"""How a norm takes a change of its input to the change of its output.

With C the centring (of LayerNorm; RMSNorm has none), s the size of C x and s' that of C (x + c),

    N(x + c) - N(x) = γ ⊙ (C c / s' + C x (1/s' - 1/s)).

The difference of two outputs would leave float32 with few digits where the change is small. Here 1/s' - 1/s
comes from s'² - s² = mean(C c ⊙ (2 C x + C c)), in which nothing cancels.
"""

from __future__ import annotations

import dataclasses

import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix.lens.anatomy import Norm


class NormChange:
    """A norm at the clean vectors that it reads.

    Args:
        norm: the norm.
        clean: what it reads in the clean pass.
    """

    def __init__(self, norm: Norm, clean: Float[Tensor, "row d_model"]) -> None:
        self.norm = norm
        self.weight = None if norm.weight is None else norm.weight.to(clean.dtype)
        self.centred = self._centre(clean)
        self._square = self.centred.square().mean(-1, keepdim=True) + norm.eps
        self.size: Float[Tensor, "row 1"] = self._square.sqrt()

    @property
    def numerator(self) -> Float[Tensor, "row d_model"]:
        """γ ⊙ C x, the clean output before it is divided by the size and the bias is added."""
        return self.centred if self.weight is None else self.centred * self.weight

    def linear(self, vectors: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """The norm's linear part, γ ⊙ C v."""
        centred = self._centre(vectors)
        return centred if self.weight is None else centred * self.weight.to(vectors.dtype)

    def change(self, rows: slice, change: Float[Tensor, "key row d_model"]) -> ChangedNorm:
        """What changes of some rows' inputs do."""
        clean, centred = self.centred[rows], self._centre(change)
        growth = torch.add(centred, clean, alpha=2).mul_(centred).mean(-1, keepdim=True)
        # Where all that was read is taken away, only eps is left; without eps, rounding could leave less than 0.
        smallest = max(self.norm.eps, torch.finfo(growth.dtype).tiny)
        size, changed = self.size[rows], (self._square[rows] + growth).clamp_min_(smallest).sqrt_()
        # 1/s' - 1/s = -(s'² - s²) / (s s' (s + s'))
        inverse_change = growth.neg_().div_((size + changed).mul_(changed).mul_(size))
        return ChangedNorm(clean, self.weight, centred, changed.reciprocal_(), inverse_change)

    def _centre(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        return x - x.mean(-1, keepdim=True) if self.norm.kind == "layer" else x


@dataclasses.dataclass(frozen=True)
class ChangedNorm:
    """A norm whose input has changed.

    Attributes:
        clean: C x.
        weight: γ, where the norm has one.
        centred: C c.
        inverse: 1/s'.
        inverse_change: 1/s' - 1/s.
    """

    clean: Float[Tensor, "row d_model"]
    weight: Float[Tensor, " d_model"] | None
    centred: Float[Tensor, "key row d_model"]
    inverse: Float[Tensor, "key row 1"]
    inverse_change: Float[Tensor, "key row 1"]

    def output(self) -> Float[Tensor, "key row d_model"]:
        """The change of the norm's output."""
        out = self.centred * self.inverse
        out.addcmul_(self.clean, self.inverse_change)
        return out if self.weight is None else out.mul_(self.weight)


def norm_change(norm: Norm | None, clean: Float[Tensor, "row d_model"]) -> NormChange | None:
    """A norm at its clean vectors; None where there is no norm."""
    return None if norm is None else NormChange(norm, clean)
