"""Baselines of attention patterns: where a path to the pattern starts."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

if TYPE_CHECKING:
    from lens_mix.lens.block import Block

# A completeness gap is noted where it is larger than this share of F(x) - F(baseline).
LARGE_GAP = 0.1


def check_baseline(baseline: object) -> None:
    """Refuse (TypeError, ValueError) what is neither a known name, a tensor nor a function."""
    expected = "baseline: expected 'zero', 'uniform', a tensor or a function"
    if isinstance(baseline, str) and baseline not in ("zero", "uniform"):
        raise ValueError(f"{expected}, got {baseline!r}")
    if not (isinstance(baseline, (str, Tensor)) or callable(baseline)):
        raise TypeError(f"{expected}, got {type(baseline).__name__}")


def describe_baseline(baseline: Any) -> str:
    """The baseline in words, for records."""
    if isinstance(baseline, Tensor):
        return f"a tensor of shape {list(baseline.shape)}"
    if isinstance(baseline, str):
        return baseline
    return getattr(baseline, "__qualname__", type(baseline).__name__)


def baseline_of(
    baseline: Any, block: Block, pattern: Float[Tensor, "batch head query key"]
) -> Float[Tensor, "batch head query key"]:
    """The baseline of one block's pattern: "zero", "uniform", a tensor or a function (pattern, layer) -> it.

    Raises ValueError: another shape than the pattern's, or weight where the mask allows none.
    """
    if isinstance(baseline, str) and baseline == "zero":
        return torch.zeros_like(pattern)
    if isinstance(baseline, str):
        attended = block.attended[:, None].to(pattern.dtype).expand_as(pattern)
        return attended / attended.sum(-1, keepdim=True).clamp_min(1)
    function = functools.partial(_of_layer, baseline) if isinstance(baseline, Tensor) else baseline
    given = function(pattern, block.layer)
    if not torch.is_tensor(given) or given.shape != pattern.shape:
        got = list(given.shape) if torch.is_tensor(given) else type(given).__name__
        raise ValueError(f"baseline: expected shape {list(pattern.shape)} in layer {block.layer}, got {got}")
    given = given.detach().to(pattern)
    hidden = ~block.attended[:, None] & block.real[:, None, :, None]
    if bool((given.masked_select(hidden.expand_as(given)) != 0).any()):
        raise ValueError(
            f"baseline: expected 0 where a query gives no weight to a key (layer {block.layer}), "
            "got weight there: the attention mask would be broken"
        )
    return given


def _of_layer(baseline: Tensor, pattern: Tensor, layer: int) -> Tensor:
    if baseline.ndim != 4 or len(baseline) <= layer:
        shape = list(baseline.shape)
        raise ValueError(
            f"baseline: expected a tensor [layer, head, query, key], got shape {shape} in layer {layer}"
        )
    if len(pattern) != 1:
        raise ValueError(
            f"baseline: a tensor is for one prompt, got a batch of {len(pattern)}; give a function "
            "(pattern, layer) -> baseline"
        )
    return baseline[layer][None]
