"""Zero the queries of a layer: what its attention does without looking at the tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lens_mix.hooks.attention import DEFAULT_ATTENTION, AttentionHook
from lens_mix.hooks.function import HookPair


def zero_queries(layer: int, *, attention: str = DEFAULT_ATTENTION) -> HookPair:
    """Replace one layer's query vectors by zeros: all scores are then 0, but for a bias of the position.

    The pattern that is left depends on no token: uniform over the keys that the mask allows, or what a bias
    by position (ALiBi, T5) makes of it. A key without any weight in any head is then masked.

    Args:
        layer: the layer, from 0.
        attention: name of the attention module, with `{layer}`; see `zero_values`.

    Returns:
        `(hook_name, hook_function)` for `fwd_hooks=`. `hook_function.calls` counts the edits.

    Example:
        ```python
        from lens_mix.hooks import record, zero_queries

        store = {}
        hooks = [zero_queries(0), record(store, "blocks.0.attn.hook_pattern")]
        model.run_with_hooks(tokens, fwd_hooks=hooks)
        allowed = (store["blocks.0.attn.hook_pattern"] != 0).any(dim=1)  # [batch query key]
        ```
    """
    zeroed = _ZeroQueries(layer, attention)
    return f"{zeroed.module}.hook_q", zeroed


class _ZeroQueries(AttentionHook):
    points = ("queries",)

    def __call__(self, tensor: Tensor, hook: Any) -> Tensor:
        self.calls += 1
        return torch.zeros_like(tensor)
