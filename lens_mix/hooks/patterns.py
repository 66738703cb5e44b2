"""Scale, replace, freeze and prune attention patterns, on models of every kind.

All act on `hook_z`, the values mixed by the pattern (z = pattern @ values), and never on `hook_pattern`:
where a TransformerBridge leaves attention to transformers, an edit of `hook_pattern` is discarded, and with a
fused attention kernel that point does not even fire.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix.hooks._shared import (
    DEFAULT_ATTENTION,
    AttentionHook,
    HookPair,
    as_heads,
    check_heads,
    check_mixing,
    mix,
)


def scale_pattern(
    layer: int,
    factor: float | int | Float[Tensor, ""] | Float[Tensor, " head"],
    *,
    attention: str = DEFAULT_ATTENTION,
) -> HookPair:
    """Multiply one layer's attention pattern by a factor; rows then no longer sum to one.

    z is linear in the pattern, so z is scaled: the same number, on every model. Twice 0.5 is 0.25.

    Args:
        layer: the layer, from 0.
        factor: a number, or one per query head [head]. A tensor that requires grad gets its gradient. For a
            factor per query and key use `replace_pattern`.
        attention: name of the attention module, with `{layer}`; see `zero_values`.

    Returns:
        `(hook_name, hook_function)` for `fwd_hooks=`. `hook_function.calls` counts the edits.

    Raises:
        TypeError: `factor` is no real number and no tensor of real numbers.
        ValueError: `factor` is not finite, or has other dimensions; in the pass: not one per query head.

    Example:
        ```python
        from lens_mix.hooks import scale_pattern

        halved = model.run_with_hooks(tokens, fwd_hooks=[scale_pattern(0, 0.5)])
        ```
    """
    if isinstance(factor, bool) or not isinstance(factor, Tensor | float | int):
        raise TypeError(f"factor: expected a number or a tensor [head]; got {factor!r}")
    if isinstance(factor, Tensor):
        if factor.dtype == torch.bool or factor.is_complex():
            raise TypeError(f"factor: expected real numbers; got a tensor of {factor.dtype}")
        if factor.ndim > 1:
            raise ValueError(
                f"factor: expected a number or a tensor [head]; got shape {tuple(factor.shape)} "
                "(for a factor per query and key use replace_pattern)"
            )
        if factor.ndim == 1:
            per_head = _ScalePatternPerHead(layer, attention, factor)
            return per_head.matches, per_head
    elif not math.isfinite(factor):
        raise ValueError(f"factor: expected a finite number; got {factor}")
    uniform = _ScalePattern(layer, attention, factor)
    return f"{uniform.module}.hook_z", uniform


def replace_pattern(
    layer: int,
    pattern: Float[Tensor, "*batch head query key"],
    *,
    attention: str = DEFAULT_ATTENTION,
) -> HookPair:
    """Use a given attention pattern in one layer: z = pattern @ values, with the values of the running pass.

    The pattern is used as it is: it is not masked, and its rows need not sum to one. Gradients reach both the
    pattern and the values, so that a leaf put in here is differentiated on every model.

    Args:
        layer: the layer, from 0.
        pattern: [head query key] for every batch row, or [batch head query key]; one pattern per QUERY head.
        attention: name of the attention module, with `{layer}`; see `zero_values`.

    Returns:
        `(hook_name, hook_function)` for `fwd_hooks=`. `hook_function.calls` counts the edits.

    Raises:
        TypeError: `pattern` is no tensor of real numbers.
        ValueError: here or in the pass: other dimensions, heads, positions or batch than the model's.
        RuntimeError: in the pass: the model's own `pattern @ values` is not `hook_z` (where `hook_pattern`
            fires before it; elsewhere this cannot be seen).

    Example:
        ```python
        from lens_mix.hooks import record, replace_pattern

        store = {}
        model.run_with_hooks(tokens, fwd_hooks=[record(store, "blocks.0.attn.hook_pattern")])
        leaf = store["blocks.0.attn.hook_pattern"].clone().requires_grad_()
        logits = model.run_with_hooks(tokens, fwd_hooks=[replace_pattern(0, leaf)])
        logits[:, -1].max(dim=-1).values.sum().backward()
        influence = leaf.grad * leaf
        ```
    """
    replacement = _ReplacePattern(layer, attention, _checked_pattern("pattern", pattern))
    return replacement.matches, replacement


def freeze_pattern(
    layer: int,
    source: Mapping[str, Tensor] | Tensor | Any,
    *,
    attention: str = DEFAULT_ATTENTION,
) -> HookPair:
    """Hold one layer's attention pattern at its value of an earlier pass, while the inputs change.

    `replace_pattern` with the pattern looked up by name and cut off from its gradient: a frozen pattern is a
    constant, as the "frozen" attention of circuit analysis means it.

    Args:
        layer: the layer, from 0.
        source: where the pattern [batch head query key] is: a dict filled by `record`, a TransformerLens
            ActivationCache, or the tensor itself.
        attention: name of the attention module, with `{layer}`; see `zero_values`.

    Returns:
        `(hook_name, hook_function)` for `fwd_hooks=`. `hook_function.calls` counts the edits.

    Raises:
        TypeError: `source` is neither a tensor nor a mapping of names.
        ValueError: `source` does not hold this layer's `hook_pattern`; further as `replace_pattern`.
        RuntimeError: as `replace_pattern`.

    Example:
        ```python
        from lens_mix.hooks import freeze_pattern

        _, cache = model.run_with_cache(tokens)
        other = tokens.roll(1, dims=-1)
        frozen = model.run_with_hooks(other, fwd_hooks=[freeze_pattern(0, cache), freeze_pattern(1, cache)])
        ```
    """
    frozen = _ReplacePattern(layer, attention, None)
    if isinstance(source, Tensor):
        pattern = source
    elif hasattr(source, "keys") and hasattr(source, "__getitem__"):
        name = f"{frozen.module}.hook_pattern"
        names = set(source.keys())
        if name not in names:
            held = sorted(str(one) for one in names if str(one).endswith("hook_pattern")) or sorted(
                map(str, names)
            )
            raise ValueError(
                f"source: expected it to hold {name}; got {', '.join(held[:8]) or 'nothing'}. Where "
                "attention is left to transformers, the pattern fires only with eager attention"
            )
        pattern = source[name]
    else:
        raise TypeError(
            "source: expected a tensor, a dict filled by record, or an ActivationCache; got "
            f"{type(source).__name__}"
        )
    frozen.pattern = _checked_pattern("source", pattern).detach()
    return frozen.matches, frozen


def prune_heads(layer: int, heads: Iterable[int] | int, *, attention: str = DEFAULT_ATTENTION) -> HookPair:
    """Remove attention heads: their z is zero, so that they add nothing to the attention output but its bias.

    Args:
        layer: the layer, from 0.
        heads: the query heads to remove, from 0.
        attention: name of the attention module, with `{layer}`; see `zero_values`.

    Returns:
        `(hook_name, hook_function)` for `fwd_hooks=`. `hook_function.calls` counts the edits.

    Raises:
        TypeError: `heads` holds no integers.
        ValueError: no heads given; in the pass: a head the model does not have.

    Example:
        ```python
        from lens_mix.hooks import prune_heads

        logits = model.run_with_hooks(tokens, fwd_hooks=[prune_heads(0, [1, 2]), prune_heads(1, 0)])
        ```
    """
    pruned = _PruneHeads(layer, attention, as_heads(heads))
    return pruned.matches, pruned


def _checked_pattern(argument: str, pattern: Tensor) -> Tensor:
    if not isinstance(pattern, Tensor) or not pattern.is_floating_point():
        got = f"a tensor of {pattern.dtype}" if isinstance(pattern, Tensor) else type(pattern).__name__
        raise TypeError(f"{argument}: expected a tensor of real numbers; got {got}")
    if pattern.ndim not in (3, 4):
        raise ValueError(
            f"{argument}: expected [head query key] or [batch head query key]; got shape "
            f"{tuple(pattern.shape)}"
        )
    return pattern if pattern.ndim == 4 else pattern[None]


class _ScalePattern(AttentionHook):
    points = ("mixed",)

    def __init__(self, layer: int, attention: str, factor: float | int | Tensor) -> None:
        super().__init__(layer, attention)
        self._factor = factor

    def __call__(self, tensor: Tensor, hook: Any) -> Tensor:
        factor = self._factor
        self.calls += 1
        return tensor * (factor.to(tensor) if isinstance(factor, Tensor) else factor)


class _ScalePatternPerHead(AttentionHook):
    points = ("values", "mixed")

    def __init__(self, layer: int, attention: str, factor: Tensor) -> None:
        super().__init__(layer, attention)
        self._factor = factor

    def on_mixed(self, mixed: Tensor, values: Tensor, pattern: Tensor | None) -> Tensor:
        if len(self._factor) != mixed.shape[2]:
            raise ValueError(
                f"factor: expected one number for each of {mixed.shape[2]} query heads; got "
                f"{len(self._factor)}"
            )
        self.calls += 1
        return mixed * self._factor.to(mixed)[:, None]


class _PruneHeads(AttentionHook):
    points = ("values", "mixed")

    def __init__(self, layer: int, attention: str, heads: tuple[int, ...]) -> None:
        super().__init__(layer, attention)
        self._heads = heads

    def on_mixed(self, mixed: Tensor, values: Tensor, pattern: Tensor | None) -> Tensor:
        check_heads(self._heads, mixed.shape[2])
        edited = mixed.clone()
        edited[:, :, list(self._heads)] = 0
        self.calls += 1
        return edited


class _ReplacePattern(AttentionHook):
    points = ("values", "pattern", "mixed")

    def __init__(self, layer: int, attention: str, pattern: Tensor | None) -> None:
        super().__init__(layer, attention)
        self.pattern = pattern

    def on_mixed(self, mixed: Tensor, values: Tensor, pattern: Tensor | None) -> Tensor:
        if self.pattern is None:
            raise RuntimeError(f"{self!r}: no pattern was given")
        batch, query, head = mixed.shape[:3]
        expected = (head, query, values.shape[1])
        if tuple(self.pattern.shape[1:]) != expected or self.pattern.shape[0] not in (1, batch):
            raise ValueError(
                f"pattern: expected [head query key] = {list(expected)}, alone or for a batch of {batch}; "
                f"got shape {list(self.pattern.shape)}"
            )
        if pattern is not None:
            check_mixing("pattern", mixed, pattern, values)
        self.calls += 1
        return mix(self.pattern.to(values).expand(batch, -1, -1, -1), values)
