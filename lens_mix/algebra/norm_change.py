"""How a norm takes a change of its input to the change of its output.

With C the centring (of LayerNorm; RMSNorm has none), s the size of C x and s' that of C (x + c),

    N(x + c) - N(x) = γ ⊙ (C c / s' + C x (1/s' - 1/s)).

A small change keeps its digits: 1/s' - 1/s comes from s'² - s² = (2 C x · C c + ‖C c‖²) / d_model.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix.lens.anatomy import Norm

# C c, 1/s' and 1/s' - 1/s.
Changed = tuple[Float[Tensor, "key row d_model"], Float[Tensor, "key row 1"], Float[Tensor, "key row 1"]]


class NormChange:
    """A norm at the clean vectors x that it reads; `clean` is C x and `size` is s."""

    def __init__(self, norm: Norm, clean: Float[Tensor, "row d_model"]) -> None:
        self.norm = norm
        self._weight = None if norm.weight is None else norm.weight.to(clean.dtype)
        self.clean: Float[Tensor, "row d_model"] = self._centre(clean)
        self._square = self.clean.square().mean(-1, keepdim=True) + norm.eps
        self.size: Float[Tensor, "row 1"] = self._square.sqrt()

    def sizes(self, rows: slice, change: Float[Tensor, "key row d_model"]) -> Changed:
        """What changes of some rows' inputs do to the sizes."""
        centred, size = self._centre(change), self.size[rows]
        growth = products(centred, self.clean[rows]).mul_(2)
        growth += torch.linalg.vector_norm(centred, dim=-1) ** 2
        growth = (growth / centred.shape[-1])[..., None]
        # Where all that was read is taken away, eps is left; without eps, rounding could leave less than 0.
        smallest = max(self.norm.eps, torch.finfo(growth.dtype).tiny)
        changed = (self._square[rows] + growth).clamp_min_(smallest).sqrt_()
        # 1/s' - 1/s = -(s'² - s²) / (s s' (s + s'))
        inverse_change = growth.neg_().div_((size + changed).mul_(changed).mul_(size))
        return centred, changed.reciprocal_(), inverse_change

    def output(self, rows: slice, changed: Changed) -> Float[Tensor, "key row d_model"]:
        """The change of some rows' outputs."""
        centred, inverse, inverse_change = changed
        out = torch.addcmul(centred * inverse, self.clean[rows], inverse_change)
        return out if self._weight is None else out.mul_(self._weight)

    def _centre(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        return x - x.mean(-1, keepdim=True) if self.norm.kind == "layer" else x


def norm_change(norm: Norm | None, clean: Float[Tensor, "row d_model"]) -> NormChange | None:
    """A norm at its clean vectors; None where there is no norm."""
    return None if norm is None else NormChange(norm, clean)


def products(
    change: Float[Tensor, "key row d_model"], clean: Float[Tensor, "row d_model"]
) -> Float[Tensor, "key row"]:
    """Scalar products with the clean rows, by one batched product: it reads what is changed once."""
    return torch.bmm(clean[:, None], change.permute(1, 2, 0))[:, 0].T
