"""Scale or remove what heads pass on, on models of every kind.

Both act on `hook_z`, the values mixed by the pattern (z = pattern @ values), and never on `hook_pattern`:
where a TransformerBridge leaves attention to transformers, an edit of `hook_pattern` is discarded, and with a
fused attention kernel that point does not even fire.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix.hooks._arguments import as_heads, check_heads
from lens_mix.hooks.attention import DEFAULT_ATTENTION, AttentionHook
from lens_mix.hooks.function import HookPair


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
