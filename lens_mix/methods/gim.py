"""Gradient interaction modifications."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from einops import einsum
from jaxtyping import Float
from torch import Tensor

from lens_mix.arguments import number
from lens_mix.hooks import DEFAULT_ATTENTION, HookPair, scale_gradient, scale_pattern_gradient
from lens_mix.hooks.base import attention_module
from lens_mix.hooks.gradient import with_gradient_of
from lens_mix.methods.changed_gradients import ChangedGradients


@dataclasses.dataclass(frozen=True)
class Gim(ChangedGradients):
    """GIM, gradient interaction modifications (Edin et al., 2025, arXiv 2505.17630): g · x per token.

    x is the residual stream that enters the first block, g the gradient of the target F, read at the row's
    position, of a backward pass with three changed rules; the forward pass is the model's own.

    - The softmax of attention goes back at `temperature` T: with P_T = softmax(scores / T), the gradient by
      the scores is P_T ⊙ (g_P − Σ_k P_T g_P) (as in the authors' code, without a derivative's factor 1/T).
    - Gradients of queries and keys are times `queries_keys`, of values times `values`.
    - Norms go back at their scale, held: those of the blocks, on queries and keys, the last one.

    One map [1, query, key], signed, in the target's unit, a backward pass per row: ask for the rows that you
    need. Rows sum to nothing in particular. The authors' package subtracts the embedding of a space from x;
    here the baseline is 0. Where patterns hold an attention sink (gpt-oss), it counts as a key.

    Args:
        target: as `InputGradients`.
        readout: "signed_sum" Σ_d g_d x_d (the paper), or "absolute" Σ_d |g_d x_d|, 0 or more.
        after_blocks: read relevance off the embeddings and the residual stream after each of the first n
            blocks: each row is scaled to Σ|scores| = 1, then their mean is taken. A list names the streams
            (0: the embeddings). 0, or a list of one: that stream alone, not scaled.
        activations: "gradient" (the paper), or "ratio": act(z)/z, held, in place of act'(z), and half of the
            gradient to each factor of a gated feed-forward (needs feed-forwards that are written down).
        temperature: T, above 0.
        queries_keys, values: the factors; 0 or more.
        internal_batch_size: most rows in one pass; None: what `max_memory` allows.

    Raises:
        TypeError, ValueError: an unknown option; a target that does not fit. RuntimeError: inside
            torch.inference_mode. UnsupportedModelError: a rule that can't be put on this model.
    """

    name: ClassVar[str] = "gim"
    citation: ClassVar[str] = "edin-etal-2025-gim"

    temperature: float = 2.0
    queries_keys: float = 0.25
    values: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        number("temperature", self.temperature, 0, above=True)
        number("queries_keys", self.queries_keys, 0)
        number("values", self.values, 0)

    def interventions(self, layer: int, *, attention: str = DEFAULT_ATTENTION) -> list[HookPair]:
        """The hooks that change the gradient at one layer's attention. On your run, for one position's row:

            store, layers = {}, range(model.cfg.n_layers)
            hooks = [record(store, "blocks.0.hook_resid_pre", detach=False)]
            hooks += [pair for layer in layers for pair in method.interventions(layer)]
            hooks += [freeze_scale(f"blocks.{layer}.{norm}") for layer in layers for norm in ("ln1", "ln2")]
            logits = model.run_with_hooks(tokens, fwd_hooks=[*hooks, freeze_scale("ln_final")])
            x = store["blocks.0.hook_resid_pre"]
            (gradient,) = torch.autograd.grad(logits[0, position].max(), x)
            row = (gradient * x).sum(dim=-1)

        Norms are no part of it, as which there are is the model's matter: with `lens_mix.hooks.freeze_scale`
        hold each one, on queries and keys and after branches too. The norms of a T5's TransformerBridge show
        no scale, nor do some that transformers keeps to itself: the method goes by torch's own hooks there.
        Attention by a fused kernel shows no pattern: ask for eager attention, as `lm.run` does, and put
        `must_fire` around both passes. `activations="ratio"` takes `lens_mix.hooks.hold_activation_ratio` in
        every layer besides.

        Args:
            layer: which block.
            attention: name of the attention module, with `{layer}`, as in `lens_mix.hooks.zero_values`.
        """
        pattern = scale_pattern_gradient(
            layer, self.queries_keys, temperature=self.temperature, attention=attention
        )
        return [pattern, scale_gradient(f"{attention_module(layer, attention)}.hook_v", self.values)]


def modified_attention(
    scores: Float[Tensor, "head query key"],
    values: Float[Tensor, "head key d_head"],
    temperature: float = 2.0,
    queries_keys: float = 0.25,
    values_factor: float = 0.5,
) -> Float[Tensor, "head query d_head"]:
    """softmax(scores) · V, differentiated as GIM does; slow, the oracle of the method.

    T · softmax(scores / T) has the derivative P_T ⊙ (g − Σ_k P_T g) that takes the softmax's place.
    """
    tempered = temperature * (scores / temperature).softmax(dim=-1)
    pattern = with_gradient_of(queries_keys * tempered, scores.softmax(dim=-1))
    axes = "head query key, head key d_head -> head query d_head"
    return einsum(pattern, with_gradient_of(values_factor * values, values), axes)
