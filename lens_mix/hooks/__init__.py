"""Provide reusable hooks for TransformerLens models: most functions return one pair for `fwd_hooks=[...]`.

They have the same effect on HookedTransformer, HookedEncoder, HookedEncoderDecoder and TransformerBridge.
They import nothing else of lens_mix than `lens_mix.arguments`, which checks their arguments:

    model.run_with_hooks(tokens, fwd_hooks=[zero_values(3, position=5), prune_heads(7, [1, 2])])
    with model.hooks(fwd_hooks=[scale_pattern(0, 0.5)]):
        ...

The second entry of a pair is the hook function. Its attribute `calls` counts how often it had its effect.
`AttentionHook` is the base class for an intervention of your own that needs several hook points.
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


def __dir__() -> list[str]:
    return __all__
