from .base import DEFAULT_ATTENTION, AttentionHook, HookFunction, HookName, HookPair, must_fire
from .gradient import freeze_scale, hold_activation_ratio, scale_gradient, scale_pattern_gradient
from .mask import mask_attention, mask_keys
from .pattern import add_to_pattern, freeze_pattern, prune_heads, replace_pattern, scale_pattern
from .recording import record, record_all, record_attention, record_mixing, watch_pattern
from .vectors import zero_queries, zero_values

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
