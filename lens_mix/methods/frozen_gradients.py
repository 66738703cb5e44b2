"""Compute gradient times input with attention patterns and norm scales frozen."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from einops import einsum, reduce
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from lens_mix._passes.backward_rules import AttentionRule
from lens_mix.hooks import DEFAULT_ATTENTION, HookPair, scale_pattern_gradient
from lens_mix.methods.changed_gradients import ChangedGradients


@dataclasses.dataclass(frozen=True)
class FrozenGradients(ChangedGradients):
    """Compute gradient × input with attention patterns and norm scales frozen (Ali et al., ICML 2022).

        score[query, key] = g_key · x_key

    x is the residual stream that enters the first block, at the position of the key. g is the gradient of the
    target F with respect to x, where F is read at the row's position. The paper's two rules make constants in
    the backward pass: attention patterns (AH-rule), and the scales that norms divide by (LN-rule).

    With `activations="ratio"` an activation is z times the constant act(z)/z, as in DecompX, and each factor
    of a gated feed-forward gets half of the gradient. The rest of the model is linear, so a row conserves the
    target. With `readout="signed_sum"` at the embeddings, a row sums to F minus what comes from no token:
    biases, and what an encoder contributes. `provenance["details"]` has that share for each row as
    `constant_share`, and what is then missing as `conservation_gap`. Except for rounding, the gap is 0 if the
    target is linear in the logits, and the logits are linear in the output of the last norm. If it is not 0,
    a note says so.

    The result is one map [1, query, key], signed, in the target's unit. Each row takes a backward pass.

        >>> method = lm.methods.FrozenGradients(activations="ratio")
        >>> lm.run(model, "The Eiffel Tower is in the city of", method, queries=[-1]).top(3)

    Args:
        target: As in `Gim`.
        against: A token with which that of the target is contrasted (`lens_mix.targets`). None: no contrast.
        readout: As in `Gim`.
        after_blocks: As in `Gim`.
        activations: As in `Gim`.
        internal_batch_size: As in `Gim`.

    Raises:
        TypeError: As in `Gim`.
        ValueError: As in `Gim`.
        RuntimeError: As in `Gim`.
        UnsupportedModelError: As in `Gim`.
    """

    name: ClassVar[str] = "frozen_gradients"
    description: ClassVar[str] = "gradient times input, with attention weights and norms constant"
    place_in_list: ClassVar[int] = 3
    citation: ClassVar[str] = "ali-etal-2022-xai"
    reads_graph_alone: ClassVar[bool] = True

    @property
    @override
    def conserves(self) -> bool:
        # Ratios distribute all of what an activation returns, and its gradients do not.
        return self.activations == "ratio"

    @property
    @override
    def attention_rule(self) -> AttentionRule:
        return AttentionRule(scores=0.0)

    def interventions(self, layer: int, *, attention: str = DEFAULT_ATTENTION) -> list[HookPair]:
        """Return the hook that makes the pattern of one layer a constant in the backward pass (AH-rule).

        The LN-rule needs a hook on every norm. `Gim.interventions` shows a complete run of your own.

        Args:
            layer: The number of the block.
            attention: The name of the attention module, with `{layer}`.
        """
        return [scale_pattern_gradient(layer, 0, attention=attention)]


def frozen_attention(
    scores: Float[Tensor, "head query key"], values: Float[Tensor, "head key d_head"]
) -> Float[Tensor, "head query d_head"]:
    """Return y_i = Σ_j [p_ij] v_j, where the bracket is constant (AH-rule, section 4).

    This is slow. Tests compare the method with it.

    Args:
        scores: The attention scores before the softmax.
        values: The values v.
    """
    axes = "head query key, head key d_head -> head query d_head"
    return einsum(scores.softmax(dim=-1).detach(), values, axes)


def frozen_norm(
    x: Float[Tensor, "pos d_model"], eps: float, centered: bool = True
) -> Float[Tensor, "pos d_model"]:
    """Return y = (x − E[x]) / [√(ε + Var[x])], where the bracket is constant (LN-rule, section 4).

    This is slow, and has no weight and bias. Tests compare the method with it.

    Args:
        x: The input.
        eps: ε.
        centered: Whether the mean is subtracted: True for LayerNorm, False for RMSNorm.
    """
    x = x - reduce(x, "pos d_model -> pos 1", "mean") if centered else x
    return x / (eps + reduce(x.square(), "pos d_model -> pos 1", "mean")).sqrt().detach()
