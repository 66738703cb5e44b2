"""Compute GIM: gradient times input under gradient interaction modifications."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from einops import einsum
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from lens_mix._passes.backward_rules import AttentionRule
from lens_mix.arguments import check_number
from lens_mix.hooks import DEFAULT_ATTENTION, HookPair, scale_gradient, scale_pattern_gradient
from lens_mix.hooks.base import attention_module
from lens_mix.hooks.gradient import replace_gradient
from lens_mix.methods.changed_gradients import ChangedGradients


@dataclasses.dataclass(frozen=True)
class Gim(ChangedGradients):
    """Compute GIM, gradient interaction modifications (Edin et al., 2025, arXiv 2505.17630).

        score[query, key] = g_key · x_key

    x is the residual stream that enters the first block, at the position of the key. g is the gradient of the
    target F with respect to x, where F is read at the row's position. The forward pass is the model's own,
    and the backward pass has four changed rules:

    - The softmax of attention is differentiated at `temperature` T. With P_T = softmax(scores / T), the
      gradient with respect to the scores is P_T ⊙ (g_P − Σ_k P_T g_P). As in the authors' code, it lacks the
      factor 1/T of a derivative.
    - Gradients of queries and keys are multiplied by `queries_keys`, and those of values by `values`.
    - In a gated feed-forward, act(gate) ⊙ up, the gradients of gate and up are multiplied by `gate_up`. In a
      mixture, this is the rule of each gated expert. Releases of the authors' package up to 0.1.4 lack it.
    - Norms are linear maps at the scale of the forward pass: those of the blocks, those on queries and keys,
      and the final norm.

    The result is one map [1, query, key], signed, in the target's unit. Each row takes a backward pass, so
    ask only for the rows that you need. The sum of a row has no meaning. The authors' package subtracts the
    embedding of a space from x; here the baseline is 0. If patterns contain an attention sink (gpt-oss), it
    counts as a key.

        >>> method = lm.methods.Gim(readout="absolute")
        >>> lm.run(model, "The Eiffel Tower is in the city of", method, queries=[-1]).top(3)

    Args:
        target: As in `InputGradients`.
        against: A token with which that of the target is contrasted (`lens_mix.targets`). None: no contrast.
        readout: "signed_sum" for Σ_d g_d x_d (as in the paper), or "absolute" for Σ_d |g_d x_d|, at least 0.
        after_blocks: The residual streams at which relevance is read. A number n: the embeddings and the
            streams after each of the first n blocks. A list names the streams, where 0 is the embeddings. If
            there are several, each row is scaled to Σ|scores| = 1 and their mean is returned.
        activations: "gradient" (as in the paper), or "ratio": act'(z) is replaced by the constant act(z)/z.
            Gradients of gate and up are multiplied by `gate_up` once, with both. "ratio" needs feed-forwards
            whose formula is known.
        temperature: T, above 0.
        queries_keys: The factor of the gradients of queries and keys, at least 0.
        values: The factor of the gradients of values, at least 0.
        gate_up: The factor of the gradients of gate and up, at least 0. 1 leaves out the rule for gated
            feed-forwards, as in releases of the authors' package up to 0.1.4.
        internal_batch_size: The largest number of rows in one pass. None: as many as `max_memory` allows.

    Raises:
        TypeError: An option has the wrong type.
        ValueError: An option is unknown, or the target does not fit the prompt.
        RuntimeError: Inference mode (`torch.inference_mode`) is on.
        UnsupportedModelError: A rule cannot be applied to this model.
    """

    name: ClassVar[str] = "gim"
    description: ClassVar[str] = "gradient times input, by a gradient that lets fewer effects cancel"
    place_in_list: ClassVar[int] = 2
    citation: ClassVar[str] = "edin-etal-2025-gim"
    reads_graph_alone: ClassVar[bool] = True

    temperature: float = 2.0
    queries_keys: float = 0.25
    values: float = 0.5
    gate_up: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("temperature", self.temperature, 0, above=True)
        check_number("queries_keys", self.queries_keys, 0)
        check_number("values", self.values, 0)
        check_number("gate_up", self.gate_up, 0)

    @property
    @override
    def attention_rule(self) -> AttentionRule:
        return AttentionRule(self.temperature, self.queries_keys, self.values)

    def interventions(self, layer: int, *, attention: str = DEFAULT_ATTENTION) -> list[HookPair]:
        """Return the hooks that change the gradient at one layer's attention.

        In your own run, for one position's row:

            store, layers = {}, range(model.cfg.n_layers)
            hooks = [record(store, "blocks.0.hook_resid_pre", detach=False)]
            hooks += [pair for layer in layers for pair in method.interventions(layer)]
            hooks += [freeze_scale(f"blocks.{layer}.{norm}") for layer in layers for norm in ("ln1", "ln2")]
            for point in ("hook_pre", "hook_pre_linear") if model.cfg.gated_mlp else ():
                hooks += [scale_gradient(f"blocks.{layer}.mlp.{point}", method.gate_up) for layer in layers]
            logits = model.run_with_hooks(tokens, fwd_hooks=[*hooks, freeze_scale("ln_final")])
            x = store["blocks.0.hook_resid_pre"]
            (gradient,) = torch.autograd.grad(logits[0, position].max(), x)
            row = (gradient * x).sum(dim=-1)

        The hooks do not include norms, because models have different ones. Freeze each norm with
        `lens_mix.hooks.freeze_scale`, including those on queries and keys and those after branches. Some
        norms have no hook point for their scale: those of a T5's TransformerBridge, and those that are inside
        transformers. For these the method uses torch's own hooks.

        Nor do they include gated feed-forwards, because others have no gate. As above, their rule is one
        factor for the gradients at `hook_pre`, the gate, and at `hook_pre_linear`, which it multiplies.
        Experts of a mixture have no such hook points. There the method changes the gradient with respect to
        an expert's input, which is the same rule.

        Attention by a fused kernel has no pattern to hook. Ask for eager attention, as `lm.run` does, and run
        the forward and the backward pass inside `must_fire`. `activations="ratio"` needs
        `lens_mix.hooks.hold_activation_ratio` in every layer, which has the factor `gate_up` itself.

        Args:
            layer: The number of the block.
            attention: The name of the attention module, with `{layer}`, as in `lens_mix.hooks.zero_values`.
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
    """Return softmax(scores) · V with the gradients that GIM defines.

    This is slow. Tests compare the method with it. T · softmax(scores / T) has the derivative
    P_T ⊙ (g − Σ_k P_T g), which replaces that of the softmax.

    Args:
        scores: The attention scores before the softmax.
        values: V.
        temperature: T.
        queries_keys: The factor of the gradients of queries and keys.
        values_factor: The factor of the gradients of values.
    """
    tempered = temperature * (scores / temperature).softmax(dim=-1)
    pattern = replace_gradient(queries_keys * tempered, scores.softmax(dim=-1))
    axes = "head query key, head key d_head -> head query d_head"
    return einsum(pattern, replace_gradient(values_factor * values, values), axes)
