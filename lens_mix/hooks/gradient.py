"""Change the gradient on its way back; what the forward pass computes stays as it is.

`calls` counts the gradients that were seen: where it stays 0 after a backward pass, none was changed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix.arguments import flags, instance, number
from lens_mix.hooks.base import DEFAULT_ATTENTION, HookFunction, HookPair, HookPointLike, attention_module
from lens_mix.hooks.mixing import sink, tolerance


def scale_gradient(name: str, factor: float) -> HookPair:
    """Multiply the gradient by one activation by a factor, on its way back.

    Args:
        name: the hook point, as `"blocks.0.attn.hook_v"`. Gradients are changed where the model goes on from
            what it shows there, or shows what it went on from.
        factor: any finite number; 0 stops the gradient.

    Raises:
        TypeError, ValueError: `name` is no string, `factor` no finite number.

    Example:
        ```python
        import torch

        from lens_mix.hooks import record, scale_gradient

        store = {}
        hooks = [record(store, "blocks.0.hook_resid_pre", detach=False)]
        hooks.append(scale_gradient("blocks.0.attn.hook_v", 0.5))
        logits = model.run_with_hooks(tokens, fwd_hooks=hooks)
        (gradient,) = torch.autograd.grad(logits[:, -1].max(dim=-1).values.sum(), list(store.values()))
        ```
    """
    instance("name", name, str, "the name of one hook point")
    factor = number("factor", factor)
    return name, _ScaleGradient(name, lambda shown, gradient: gradient * factor)


def scale_pattern_gradient(
    layer: int, factor: float, *, temperature: float = 1.0, attention: str = DEFAULT_ATTENTION
) -> HookPair:
    """Multiply the gradient by one layer's attention scores; its softmax goes back at another temperature.

    With P_T = softmax(scores / T), the gradient by the scores is factor · P_T ⊙ (g − Σ_k P_T g) for the
    gradient g by the pattern, whose every row sums over its keys k (GIM, Edin et al., 2025, has T = 2). With
    the factor 0 the pattern is a constant (AH-rule, Ali et al., ICML 2022). An attention sink (gpt-oss)
    counts as a key. A fused kernel shows no pattern, and nothing is changed then: put `must_fire` around the
    backward pass too, and ask such a model for eager attention.

    Args:
        layer, attention: as in `zero_values`.
        factor: any finite number; of queries and keys together.
        temperature: T, above 0.

    Raises:
        TypeError, ValueError: an argument of another kind, or out of bounds.

    Example:
        ```python
        import torch

        from lens_mix.hooks import record, scale_pattern_gradient

        store = {}
        hooks = [record(store, "blocks.0.hook_resid_pre", detach=False)]
        hooks += [scale_pattern_gradient(layer, 0) for layer in range(model.cfg.n_layers)]
        logits = model.run_with_hooks(tokens, fwd_hooks=hooks)
        (gradient,) = torch.autograd.grad(logits[:, -1].max(dim=-1).values.sum(), list(store.values()))
        ```
    """
    name = f"{attention_module(layer, attention)}.hook_pattern"
    temperature = number("temperature", temperature, 0, above=True)
    change = functools.partial(_pattern_gradient, temperature, number("factor", factor))
    return name, _ScalePatternGradient(name, change)


def freeze_scale(norm: str) -> HookPair:
    """Hold what a LayerNorm or RMSNorm divides by: going back it is a constant, and the norm linear.

    This is the LN-rule of Ali et al. (ICML 2022). A TransformerBridge then computes the norm itself, where it
    left it to transformers, and warns of the rounding; where it shows no scale (T5), `calls` stays 0;
    where the norm has no weight (OLMo) TransformerLens raises.

    Args:
        norm: name of the norm, as `"blocks.0.ln1"` or `"ln_final"`.

    Raises:
        TypeError: `norm` is no string.

    Example:
        ```python
        from lens_mix.hooks import freeze_scale

        logits = model.run_with_hooks(tokens, fwd_hooks=[freeze_scale("blocks.0.ln1")])
        logits[:, -1].max(dim=-1).values.sum().backward()
        ```
    """
    name = f"{instance('norm', norm, str, 'the name of one norm')}.hook_scale"
    return name, _FreezeScale(name)


def hold_activation_ratio(
    mlp: str,
    act: Callable[[Tensor], Tensor],
    *,
    gated: bool = False,
    bias: Float[Tensor, " d_mlp"] | None = None,
) -> list[HookPair]:
    """Go back through one feed-forward's activation as through act(z)/z · z, with the ratio held.

    Each factor of a gated feed-forward's act(gate) · up gets half of the gradient. As in DecompX (Modarressi
    et al., ACL 2023) the feed-forward is then linear. One pair per hook point, in their order.

    Args:
        mlp: name of the feed-forward, as `"blocks.0.mlp"`.
        act: its activation; the pass checks that it gives what `hook_post` shows.
        gated: whether it has a gate: `hook_pre` then shows that, and `hook_pre_linear` what it multiplies.
        bias: what is added before the last matrix is applied, if anything.

    Raises:
        TypeError: an argument of another kind. ValueError: in the pass: act gives something else.

    Example:
        ```python
        from torch.nn import functional

        from lens_mix.hooks import hold_activation_ratio

        hooks = hold_activation_ratio("blocks.0.mlp", lambda z: functional.gelu(z, approximate="tanh"))
        logits = model.run_with_hooks(tokens, fwd_hooks=hooks)
        logits[:, -1].max(dim=-1).values.sum().backward()
        ```
    """
    instance("mlp", mlp, str, "the name of one feed-forward")
    instance("act", act, Callable, "an activation function")
    flags(gated=gated)
    if bias is not None:
        instance("bias", bias, Tensor, "a tensor [d_mlp]")
    post = _HoldActivationRatio(f"{mlp}.hook_post", act, bias)
    names = [f"{mlp}.hook_pre", *[f"{mlp}.hook_pre_linear"] * gated]
    return [*((name, _Factor(name, post)) for name in names), (post.name, post)]


# ------------------------------------------------------------------ what they compute


def _pattern_gradient(
    temperature: float,
    factor: float,
    pattern: Float[Tensor, "batch head query key"],
    gradient: Float[Tensor, "batch head query key"],
) -> Float[Tensor, "batch head query key"]:
    """The gradient by P that the model's own softmax turns into factor · P_T ⊙ (g − Σ P_T g) by the scores.

    P_T = softmax(log P / T) = softmax(scores / T). The softmax makes P ⊙ (g' − Σ P g') of what is given here.
    Weight that a row leaves to no key (an attention sink's) counts as one key more.
    """
    if factor == 0:
        return torch.zeros_like(gradient)
    if temperature == 1:
        return factor * gradient
    wide = torch.promote_types(pattern.dtype, torch.float32)
    weights, given = pattern.to(wide), gradient.to(wide)
    to_no_key = sink(pattern)
    all_weights = torch.cat([weights, to_no_key], dim=-1)
    tempered = (all_weights.log() / temperature).softmax(-1).nan_to_num(0)[..., :-1]
    by_scores = tempered * (given - (tempered * given).sum(-1, keepdim=True))
    changed = torch.where(weights > 0, by_scores / weights, 0)
    # With a sink these numbers don't sum to 0, and the softmax's own Σ P g' has to be made up for.
    changed = changed + torch.where(to_no_key > 0, by_scores.sum(-1, keepdim=True) / to_no_key, 0)
    return (factor * changed).to(gradient.dtype)


def _activation_ratio(
    act: Callable[[Tensor], Tensor], z: Float[Tensor, "*batch d_mlp"]
) -> Float[Tensor, "*batch d_mlp"]:
    """act(z) / z; next to 0 the mean slope there."""
    near, small = z.abs() < 1e-9, torch.full_like(z[..., :1], 1e-3)
    slope = (act(small) - act(-small)) / (2 * small)
    return torch.where(near, slope, act(z) / torch.where(near, 1, z))


def with_gradient_of(linear: Tensor, output: Tensor) -> Tensor:
    """The output as it is, with the gradient of something else."""
    return output.detach() + (linear - linear.detach()).to(output.dtype)


def beside(constants: Float[Tensor, " row"], like: Tensor) -> Tensor:
    """Numbers of rows, to be multiplied with a tensor whose first axis is the rows, or their positions."""
    each = constants.repeat_interleave(len(like) // len(constants)).to(like.dtype)
    return each.reshape(-1, *[1] * (like.ndim - 1))


def is_differentiated(tensor: Tensor) -> bool:
    """Whether a gradient may come back to the tensor."""
    return torch.is_grad_enabled() and tensor.requires_grad


# ------------------------------------------------------------------ the hooks


class GradientCounter:
    """Counts in `calls` the gradients that came back to what it follows."""

    calls: int = 0

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"{type(self).__name__.lstrip('_')}({self.name})"

    def follow(self, tensor: Tensor, change: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """The tensor, whose gradient is counted, and changed if a change is given."""
        tensor.register_hook(functools.partial(self._came_back, change))
        return tensor

    def _came_back(self, change: Callable[[Tensor], Tensor] | None, gradient: Tensor) -> Tensor | None:
        self.calls += 1
        return None if change is None else change(gradient)


class _ScaleGradient(GradientCounter, HookFunction):
    """Changes the gradient: a function of what is shown and the gradient by it."""

    def __init__(self, name: str, change: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__(name)
        self._change = change

    def __call__(self, tensor: Tensor, hook: HookPointLike) -> Tensor | None:
        if not is_differentiated(tensor):
            return None
        # Followed as it is: where a TransformerBridge leaves attention to transformers, it would discard an
        # edited pattern.
        self.follow(tensor, functools.partial(self._change, tensor.detach()))
        # A hook point with a conversion shows a rearranged copy, which only gets a gradient if the pass goes
        # on from it: it does where the hook returns it.
        return tensor if getattr(hook, "hook_conversion", None) is not None else None


class _ScalePatternGradient(_ScaleGradient):
    """As errors name it."""


class _FreezeScale(GradientCounter, HookFunction):
    def __call__(self, tensor: Tensor, hook: HookPointLike) -> Tensor | None:
        # Another tensor, of the same numbers: a TransformerBridge goes on from its own norm otherwise.
        return self.follow(tensor.view_as(tensor), torch.zeros_like) if is_differentiated(tensor) else None


class _HoldActivationRatio(GradientCounter, HookFunction):
    def __init__(self, name: str, act: Callable[[Tensor], Tensor], bias: Tensor | None) -> None:
        super().__init__(name)
        self._act, self._bias = act, bias
        # What `_Factor` saw on the way here in this pass: by the name of its hook point.
        self.factors: dict[str, Tensor] = {}

    def __call__(self, tensor: Tensor, hook: HookPointLike) -> Tensor | None:
        z, up = (self.factors.pop(point, None) for point in ("hook_pre", "hook_pre_linear"))
        if not is_differentiated(tensor):
            return None
        if z is None:
            raise ValueError(f"mlp: expected hook_pre to fire before {self.name} in each pass, it did not")
        product = self._act(z.detach()) if up is None else self._act(z.detach()) * up.detach()
        self._require_alike(product, tensor.detach())
        linear = _activation_ratio(self._act, z.detach()) * z
        if up is not None:
            linear = (linear * up.detach() + linear.detach() * up) / 2
        return self.follow(with_gradient_of(linear, tensor))

    def _require_alike(self, product: Tensor, shown: Tensor) -> None:
        wide, accepted = torch.promote_types(shown.dtype, torch.float32), tolerance(shown.dtype)
        rebuilt = product if self._bias is None else product + self._bias.to(product.dtype)
        error, size = (x.norm(dim=-1) for x in (rebuilt.to(wide) - shown.to(wide), shown.to(wide)))
        if not bool((error <= accepted * size).all()):
            relative = torch.where(error == 0, 0, error / size)
            raise ValueError(
                f"act: expected what {self.name} shows within {accepted:.0e}, got a relative error of "
                f"{float(relative.max()):.1e}: it is another activation, or gated, or a hook edits it"
            )


class _Factor(GradientCounter, HookFunction):
    """Hands what goes into the activation, or is multiplied with it, to the hook at its output."""

    def __init__(self, name: str, post: _HoldActivationRatio) -> None:
        super().__init__(name)
        self._post = post

    def __call__(self, tensor: Tensor, hook: HookPointLike) -> None:
        if is_differentiated(tensor):
            self._post.factors[self.name.rpartition(".")[2]] = self.follow(tensor)


class Constant(GradientCounter, HookFunction):
    """A bias (None: all that is shown) times the leaf, per row, that stands for what comes from no token."""

    def __init__(self, bias: Tensor | None, constants: Float[Tensor, " row"], name: str) -> None:
        super().__init__(name)
        self._bias, self._constants = bias, constants

    def __call__(self, tensor: Tensor, hook: HookPointLike | None) -> Tensor | None:
        if not torch.is_grad_enabled():
            return None
        bias = tensor.detach() if self._bias is None else self._bias.to(tensor.dtype)
        if self._bias is not None and bias.ndim == 2 and tensor.ndim == 3:
            bias = bias.flatten()
        added = beside(self._constants, tensor) * bias
        return self.follow(tensor + (added - added.detach()))
