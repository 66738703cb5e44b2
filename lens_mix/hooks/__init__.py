"""Reusable hooks for TransformerLens models: each function returns one pair for `fwd_hooks=[...]`.

They work alike on HookedTransformer, HookedEncoder, HookedEncoderDecoder and TransformerBridge, and need of
lens_mix only `lens_mix.arguments`, which checks what they are given:

    model.run_with_hooks(tokens, fwd_hooks=[zero_values(3, position=5), prune_heads(7, [1, 2])])
    with model.hooks(fwd_hooks=[scale_pattern(0, 0.5)]):
        ...

The second part of a pair counts in `calls` how often it had its effect. `AttentionHook` is the base for an
edit of your own that needs several hook points.
"""

from lens_mix.hooks.base import DEFAULT_ATTENTION, AttentionHook, HookFunction, HookName, HookPair, must_fire
from lens_mix.hooks.gradient import (
    freeze_scale,
    hold_activation_ratio,
    scale_gradient,
    scale_pattern_gradient,
)
from lens_mix.hooks.mask import mask_attention, mask_keys
from lens_mix.hooks.pattern import add_to_pattern, freeze_pattern, prune_heads, replace_pattern, scale_pattern
from lens_mix.hooks.record import record, record_all, record_attention, record_mixing, watch_pattern
from lens_mix.hooks.vectors import zero_queries, zero_values

__all__ = [
    "DEFAULT_ATTENTION",
    "AttentionHook",
    "HookFunction",
    "HookName",
    "HookPair",
    "add_to_pattern",
    "freeze_pattern",
    "freeze_scale",
    "hold_activation_ratio",
    "mask_attention",
    "mask_keys",
    "must_fire",
    "prune_heads",
    "record",
    "record_all",
    "record_attention",
    "record_mixing",
    "replace_pattern",
    "scale_gradient",
    "scale_pattern",
    "scale_pattern_gradient",
    "watch_pattern",
    "zero_queries",
    "zero_values",
]
