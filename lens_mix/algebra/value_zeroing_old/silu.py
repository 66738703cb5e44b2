"""How much a gated SiLU layer changes, not as a difference of two layers.

With σ' = σ(g + δ), t = tanh(g / 2) = 2 σ(g) - 1 and d = tanh(δ / 2),

    (g + δ) σ' - g σ = δ σ' + g (σ' - σ) = δ σ' + d (g σ - g t σ'),

for tanh x - tanh y = tanh(x - y) (1 - tanh x tanh y). A small δ keeps its digits; a difference would have
those of g σ.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix.algebra.workspace import Rows, Workspace, of_rows


@dataclasses.dataclass(frozen=True)
class CleanSilu:
    """The clean layer SiLU(g) u of some neurons.

    Attributes:
        gate: g.
        linear: u.
        activated: g σ.
        turned: g t.
    """

    gate: Float[Tensor, "row column"]
    linear: Float[Tensor, "row column"]
    activated: Float[Tensor, "row column"]
    turned: Float[Tensor, "row column"]

    @staticmethod
    def of(pre: Sequence[Float[Tensor, "row column"]], dtype: torch.dtype) -> CleanSilu:
        """Of the pre-activations g and u."""
        gate, linear = (some.to(dtype) for some in pre)
        return CleanSilu(gate, linear, gate * gate.sigmoid(), gate * (gate / 2).tanh_())

    def change(
        self,
        rows: Rows,
        gate: Float[Tensor, "*pair column"],
        linear: Float[Tensor, "*pair column"],
        out: Float[Tensor, "*pair column"],
        room: Workspace,
    ) -> None:
        """What changes of g and u do to the layer.

        Args:
            rows: which queries.
            gate: the change of g; overwritten.
            linear: the change of u; overwritten.
            out: where it goes; may be `gate`.
            room: for what lies between.
        """
        clean_gate, clean_linear, activated, turned = (
            of_rows(some, rows) for some in (self.gate, self.linear, self.activated, self.turned)
        )
        sigma = room.like("gate", out, out.shape, out.dtype)
        other = room.like("second gate", out, out.shape, out.dtype)
        torch.add(clean_gate, gate, out=sigma).sigmoid_()
        torch.mul(gate, 0.5, out=other).tanh_()
        gate.mul_(sigma)
        change = gate.addcmul_(other, torch.addcmul(activated, turned, sigma, value=-1, out=sigma))
        linear_now = torch.add(clean_linear, linear, out=other)
        linear.mul_(activated)
        torch.addcmul(linear, change, linear_now, out=out)
