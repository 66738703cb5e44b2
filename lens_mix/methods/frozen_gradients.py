"""Gradient times input with patterns and norms frozen."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from einops import einsum, reduce
from jaxtyping import Float
from torch import Tensor

from lens_mix.hooks import DEFAULT_ATTENTION, HookPair, scale_pattern_gradient
from lens_mix.methods.changed_gradients import ChangedGradients


@dataclasses.dataclass(frozen=True)
class FrozenGradients(ChangedGradients):
    """Gradient × input with attention patterns and norm scales frozen (Ali et al., ICML 2022).

    g · x per token, where x is the residual stream that enters the first block and g the gradient of the
    target F, read at the row's position, with the paper's two rules: attention patterns (AH-rule) and the
    scales that LayerNorm or RMSNorm divide by (LN-rule) are constants in the backward pass.

    With `activations="ratio"` an activation is z times act(z)/z with the factor held, as in DecompX, and each
    factor of a gated feed-forward gets half of the gradient. What is left of the model is linear, and a row
    conserves: with `readout="signed_sum"` at the embeddings it sums to F less what comes from no token
    (biases; what an encoder sends). `provenance["details"]` holds that per row as `constant_share`, and what
    is missing then, 0 but for rounding, as `conservation_gap`. A note says where it is not: the target has to
    be linear in the logits, and these in what the last norm gives.

    One map [1, query, key], signed, in the target's unit, a backward pass per row.

    Args:
        target, readout, after_blocks, activations, internal_batch_size: as `Gim`.

    Raises: as `Gim`.
    """

    name: ClassVar[str] = "frozen_gradients"
    citation: ClassVar[str] = "ali-etal-2022-xai"

    @property
    def conserves(self) -> bool:
        return self.activations == "ratio"

    def interventions(self, layer: int, *, attention: str = DEFAULT_ATTENTION) -> list[HookPair]:
        """The hook that makes one layer's pattern a constant going back: the AH-rule.

        For the LN-rule, hold the norms; a run of your own, and arguments, as in `Gim.interventions`.
        """
        return [scale_pattern_gradient(layer, 0, attention=attention)]


def frozen_attention(
    scores: Float[Tensor, "head query key"], values: Float[Tensor, "head key d_head"]
) -> Float[Tensor, "head query d_head"]:
    """The AH-rule (section 4): y_i = Σ_j [p_ij] v_j, what is in brackets held; slow, the oracle."""
    axes = "head query key, head key d_head -> head query d_head"
    return einsum(scores.softmax(dim=-1).detach(), values, axes)


def frozen_norm(
    x: Float[Tensor, "pos d_model"], eps: float, centred: bool = True
) -> Float[Tensor, "pos d_model"]:
    """The LN-rule (section 4): y = (x − E[x]) / [√(ε + Var[x])], what is in brackets held; slow, the oracle.

    Without weight and bias; an RMSNorm is not centred.
    """
    x = x - reduce(x, "pos d_model -> pos 1", "mean") if centred else x
    return x / (eps + reduce(x.square(), "pos d_model -> pos 1", "mean")).sqrt().detach()
