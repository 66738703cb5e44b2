"""Change gradients in the backward pass, and no number of the forward pass.

`calls` counts the gradients that reached the hook. If it is 0 after a backward pass, none was changed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix.arguments import check_flags, check_instance, check_number
from lens_mix.hooks.base import DEFAULT_ATTENTION, HookFunction, HookPair, HookPointLike, attention_module
from lens_mix.hooks.mixing import heads_at_once, sink, tolerance


def scale_gradient(name: str, factor: float) -> HookPair:
    """Multiply the gradient with respect to one activation by a factor.

    Args:
        name: The hook point, as `"blocks.0.attn.hook_v"`. The gradient is changed if later activations of the
            model are computed from the tensor that the hook point shows.
        factor: Any finite number; 0 stops the gradient.

    Returns:
        A pair for `fwd_hooks=`.

    Raises:
        TypeError: `name` is not a string, or `factor` is not a number.
        ValueError: `factor` is not finite.

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
    check_instance("name", name, str, "the name of one hook point")
    factor = check_number("factor", factor)
    return name, _ScaleGradient(name, lambda shown, gradient: gradient * factor)


def scale_pattern_gradient(
    layer: int, factor: float, *, temperature: float = 1.0, attention: str = DEFAULT_ATTENTION
) -> HookPair:
    """Multiply the gradient with respect to one layer's attention scores by a factor.

    The backward pass through the softmax can use another temperature T. Let P_T = softmax(scores / T), and
    let g be the gradient with respect to the pattern. The gradient with respect to the scores is then
    factor · P_T ⊙ (g − Σ_k P_T g), with the sum over the keys k of each row. GIM (Edin et al., 2025) uses
    T = 2. With the factor 0 the pattern is a constant (AH-rule, Ali et al., ICML 2022). An attention sink
    (gpt-oss) counts as a key.

    A fused attention kernel shows no pattern, and then nothing is changed. Put the backward pass inside
    `must_fire` too, and use eager attention for such a model.

    Args:
        layer: The layer, counted from 0.
        factor: Any finite number; it multiplies the gradients of queries and keys alike.
        temperature: T, above 0.
        attention: The module's name, as in `zero_values`.

    Returns:
        A pair for `fwd_hooks=`.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: A number is not finite or out of bounds.

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
    temperature = check_number("temperature", temperature, 0, above=True)
    change = functools.partial(_compute_pattern_gradient, temperature, check_number("factor", factor))
    return name, _ScalePatternGradient(name, change)


def freeze_scale(norm: str) -> HookPair:
    """Treat the divisor of a LayerNorm or RMSNorm as a constant in the backward pass.

    The norm is then linear in its input: the LN-rule of Ali et al. (ICML 2022). A TransformerBridge that
    leaves the norm to transformers computes it itself under this hook, and warns that rounding differs. If
    it shows no scale (T5), `calls` stays 0. If the norm has no weight (OLMo), TransformerLens raises an
    error.

    Args:
        norm: The name of the norm, as `"blocks.0.ln1"` or `"ln_final"`.

    Returns:
        A pair for `fwd_hooks=`.

    Raises:
        TypeError: `norm` is not a string.

    Example:
        ```python
        from lens_mix.hooks import freeze_scale

        logits = model.run_with_hooks(tokens, fwd_hooks=[freeze_scale("blocks.0.ln1")])
        logits[:, -1].max(dim=-1).values.sum().backward()
        ```
    """
    name = f"{check_instance('norm', norm, str, 'the name of one norm')}.hook_scale"
    return name, _FreezeScale(name)


def hold_activation_ratio(
    mlp: str,
    act: Callable[[Tensor], Tensor],
    *,
    gated: bool = False,
    gate_up: float = 0.5,
    bias: Float[Tensor, " d_mlp"] | None = None,
) -> list[HookPair]:
    """Treat the ratio act(z) / z of one feed-forward's activation as a constant in the backward pass.

    The backward pass uses act(z) = (act(z) / z) · z with the ratio constant, so that the feed-forward is
    linear (DecompX, Modarressi et al., ACL 2023). In a gated feed-forward, act(gate) · up, each of the two
    factors gets half of the gradient, or the share `gate_up`.

    Args:
        mlp: The name of the feed-forward, as `"blocks.0.mlp"`.
        act: Its activation function; the pass checks that its result is what `hook_post` shows.
        gated: Whether the feed-forward has a gate. `hook_pre` then shows the gate's pre-activation, and
            `hook_pre_linear` the vector that the gate multiplies.
        gate_up: The factor of the gradients of gate and up; any finite number.
        bias: A bias that is added after the activation and before the last matrix, if there is one.

    Returns:
        One pair per hook point, in the order of a pass.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: In the pass: the result of `act` is not what `hook_post` shows.

    Example:
        ```python
        from torch.nn import functional

        from lens_mix.hooks import hold_activation_ratio

        hooks = hold_activation_ratio("blocks.0.mlp", lambda z: functional.gelu(z, approximate="tanh"))
        logits = model.run_with_hooks(tokens, fwd_hooks=hooks)
        logits[:, -1].max(dim=-1).values.sum().backward()
        ```
    """
    check_instance("mlp", mlp, str, "the name of one feed-forward")
    check_instance("act", act, Callable, "an activation function")
    check_flags(gated=gated)
    if bias is not None:
        check_instance("bias", bias, Tensor, "a tensor [d_mlp]")
    post = _HoldActivationRatio(f"{mlp}.hook_post", act, check_number("gate_up", gate_up), bias)
    names = [f"{mlp}.hook_pre", *[f"{mlp}.hook_pre_linear"] * gated]
    return [*((name, _ActivationInput(name, post)) for name in names), (post.name, post)]


# ------------------------------------------------------------------ the gradients


def _compute_pattern_gradient(
    temperature: float,
    factor: float,
    pattern: Float[Tensor, "batch head query key"],
    gradient: Float[Tensor, "batch head query key"],
) -> Float[Tensor, "batch head query key"]:
    """Return the gradient g' with respect to P that gives the wanted gradient with respect to the scores.

    The wanted gradient is factor · P_T ⊙ (g − Σ P_T g), with P_T = softmax(log P / T) = softmax(scores / T).
    The model's own softmax computes P ⊙ (g' − Σ P g') from the gradient that is returned here. The weight
    that a row gives to no key (an attention sink's) counts as the weight of one more key.
    """
    if factor == 0:
        return torch.zeros_like(gradient)
    if temperature == 1:
        return factor * gradient
    heads = heads_at_once(pattern)
    if pattern.shape[1] > heads:
        pairs = zip(pattern.split(heads, 1), gradient.split(heads, 1), strict=True)
        return torch.cat([_compute_pattern_gradient(temperature, factor, *pair) for pair in pairs], 1)
    wide = torch.promote_types(pattern.dtype, torch.float32)
    weights, gradient_of_weights = pattern.to(wide), gradient.to(wide)
    to_no_key = sink(pattern)
    # The softmax of log P / T is P to the power 1/T, divided by its sum. The power 1/2 is a fast square root.
    powers = weights.pow(1 / temperature)
    sums = powers.sum(-1, keepdim=True) + to_no_key.pow(1 / temperature)
    sums = torch.where(sums > 0, sums, 1)
    weighted_sum = torch.linalg.vecdot(powers, gradient_of_weights)[..., None] / sums
    # g' is P_T / P ⊙ (g − Σ P_T g). It is computed in place, because a pattern has many entries. A vectorized
    # backward pass has several gradients for one pattern, so the last product is written into the gradients.
    ratios = powers.div_(weights).nan_to_num_(nan=0, posinf=0).mul_(factor / sums)
    changed: Tensor = gradient_of_weights - weighted_sum
    changed.mul_(ratios)
    if bool(to_no_key.any()):
        # With a sink the gradients of a row do not sum to 0. The softmax subtracts this sum, so it is added.
        total = (changed * weights).sum(-1, keepdim=True)
        changed += torch.where(to_no_key > 0, total / to_no_key, 0)
    return changed.to(gradient.dtype)


def _compute_activation_ratio(
    act: Callable[[Tensor], Tensor], z: Float[Tensor, "*batch d_mlp"]
) -> Float[Tensor, "*batch d_mlp"]:
    """Return act(z) / z; for z next to 0, the mean slope of `act` around 0."""
    near, small = z.abs() < 1e-9, torch.full_like(z[..., :1], 1e-3)
    slope = (act(small) - act(-small)) / (2 * small)
    return torch.where(near, slope, act(z) / torch.where(near, 1, z))


def replace_gradient(linear: Tensor, output: Tensor) -> Tensor:
    """Return the output unchanged, with the gradient of `linear`."""
    return output.detach() + (linear - linear.detach()).to(output.dtype)


def beside(constants: Float[Tensor, " copy"], like: Tensor) -> Tensor:
    """Return one number per copy in a shape that can be multiplied with `like`.

    The first axis of `like` has one entry per copy, or one per copy and position.
    """
    expanded = constants.repeat_interleave(len(like) // len(constants)).to(like.dtype)
    return expanded.reshape(-1, *[1] * (like.ndim - 1))


def is_differentiated(tensor: Tensor) -> bool:
    """Return whether a backward pass may reach the tensor."""
    return torch.is_grad_enabled() and tensor.requires_grad


# ------------------------------------------------------------------ the hooks


class GradientCounter:
    """Count in `calls` the gradients that reach the tensors that it follows."""

    calls: int = 0

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"{type(self).__name__.lstrip('_')}({self.name})"

    def follow(self, tensor: Tensor, change: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Return the tensor, and count its gradient; a function `change` also replaces the gradient."""
        tensor.register_hook(functools.partial(self._count, change))
        return tensor

    def _count(self, change: Callable[[Tensor], Tensor] | None, gradient: Tensor) -> Tensor | None:
        self.calls += 1
        return None if change is None else change(gradient)


class _ScaleGradient(GradientCounter, HookFunction):
    """Replace the gradient by a function of the activation and its gradient."""

    def __init__(self, name: str, change: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__(name)
        self._change = change

    def __call__(self, tensor: Tensor, hook: HookPointLike) -> Tensor | None:
        if not is_differentiated(tensor):
            return None
        # The tensor is followed, not replaced: a TransformerBridge that leaves attention to transformers
        # discards a new pattern.
        self.follow(tensor, functools.partial(self._change, tensor.detach()))
        # A hook point with a conversion shows a rearranged copy. It gets a gradient only if the pass
        # continues with it, and for that the hook has to return it.
        return tensor if getattr(hook, "hook_conversion", None) is not None else None


class _ScalePatternGradient(_ScaleGradient):
    """Replace the gradient of a pattern; a class of its own, because errors show the name of the class."""


class _FreezeScale(GradientCounter, HookFunction):
    def __call__(self, tensor: Tensor, hook: HookPointLike) -> Tensor | None:
        # A TransformerBridge continues with its own norm unless the hook returns another tensor object.
        return self.follow(tensor.view_as(tensor), torch.zeros_like) if is_differentiated(tensor) else None


class _HoldActivationRatio(GradientCounter, HookFunction):
    def __init__(
        self, name: str, act: Callable[[Tensor], Tensor], gate_up: float, bias: Tensor | None
    ) -> None:
        super().__init__(name)
        self._act, self._gate_up, self._bias = act, gate_up, bias
        # The tensors that `_ActivationInput` got earlier in this pass, by the name of their hook point.
        self.factors: dict[str, Tensor] = {}

    def __call__(self, tensor: Tensor, hook: HookPointLike) -> Tensor | None:
        z, up = (self.factors.pop(point, None) for point in ("hook_pre", "hook_pre_linear"))
        if not is_differentiated(tensor):
            return None
        if z is None:
            raise ValueError(f"mlp: expected hook_pre to fire before {self.name} in each pass, it did not")
        product = self._act(z.detach()) if up is None else self._act(z.detach()) * up.detach()
        self._check_activation(product, tensor.detach())
        linear = _compute_activation_ratio(self._act, z.detach()) * z
        if up is not None:
            linear = (linear * up.detach() + linear.detach() * up) * self._gate_up
        return self.follow(replace_gradient(linear, tensor))

    def _check_activation(self, product: Tensor, shown: Tensor) -> None:
        wide, accepted = torch.promote_types(shown.dtype, torch.float32), tolerance(shown.dtype)
        rebuilt = product if self._bias is None else product + self._bias.to(product.dtype)
        error, size = (x.norm(dim=-1) for x in (rebuilt.to(wide) - shown.to(wide), shown.to(wide)))
        if not bool((error <= accepted * size).all()):
            relative = torch.where(error == 0, 0, error / size)
            raise ValueError(
                f"act: expected what {self.name} shows within {accepted:.0e}, got a relative error of "
                f"{float(relative.max()):.1e}. The model has another activation or a gate, or another hook "
                "changes the activation"
            )


class _ActivationInput(GradientCounter, HookFunction):
    """Give the activation's input, or the vector that it multiplies, to the hook at its output."""

    def __init__(self, name: str, post: _HoldActivationRatio) -> None:
        super().__init__(name)
        self._post = post

    def __call__(self, tensor: Tensor, hook: HookPointLike) -> None:
        if is_differentiated(tensor):
            self._post.factors[self.name.rpartition(".")[2]] = self.follow(tensor)


class Constant(GradientCounter, HookFunction):
    """Follow the contribution that comes from no token, by a factor per copy that can be differentiated.

    The contribution is a bias, or the whole activation if `bias` is None. The factor does not change the
    forward pass. Its gradient is the contribution's share of the target.
    """

    def __init__(self, bias: Tensor | None, constants: Float[Tensor, " copy"], name: str) -> None:
        super().__init__(name)
        self._bias, self._constants = bias, constants

    def __call__(self, tensor: Tensor, hook: HookPointLike | None) -> Tensor | None:
        """Return the tensor with the factor in its autograd graph; None if no gradients are computed."""
        if not torch.is_grad_enabled():
            return None
        bias = tensor.detach() if self._bias is None else self._bias.to(tensor.dtype)
        if self._bias is not None and bias.ndim == 2 and tensor.ndim == 3:
            bias = bias.flatten()
        added = beside(self._constants, tensor) * bias
        return self.follow(tensor + (added - added.detach()))
