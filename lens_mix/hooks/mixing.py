"""Compute z = pattern @ values, and define how closely a recomputed tensor must agree with the model's."""

from __future__ import annotations

import torch
from einops import einsum, repeat
from jaxtyping import Bool, Float
from torch import Tensor

# The largest accepted error of a recomputed tensor, relative to its largest entry (in the verification,
# relative to the length of each vector). A block with a wrong component differs by 1e-2 or more. In float64
# the bound is far above rounding, because transformers' RMSNorms compute in float32 and agree to 1e-7 only.
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 8e-2}

# The most weights of a pattern whose temporary tensors are in memory at once, except for a single head.
_MOST_WEIGHTS = 1 << 20


def tolerance(dtype: torch.dtype) -> float:
    """Return the largest accepted relative error in a dtype; for other dtypes, that of float32."""
    return _TOLERANCES.get(dtype, _TOLERANCES[torch.float32])


def pass_tolerance(dtype: torch.dtype) -> float:
    """Return the largest accepted relative difference of two whole passes: at least 1e-3.

    It is larger than `tolerance`, because rounding errors grow with the depth of the model.
    """
    return max(1e-3, tolerance(dtype))


def heads_at_once(pattern: Float[Tensor, "*axes head query key"]) -> int:
    """Return how many heads of a pattern have temporary tensors at once, at least 1.

    The patterns of all heads of a long prompt do not fit into a processor's caches, and each new tensor of
    their size is memory that the system has to prepare first.
    """
    return max(1, _MOST_WEIGHTS // max(1, pattern[..., :1, :, :].numel()))


def sink(
    pattern: Float[Tensor, "*axes query key"], scores: Float[Tensor, "*axes query key"] | None = None
) -> Float[Tensor, "*axes query 1"]:
    """Return the weight that each row gives to no key: that of an attention sink (gpt-oss), or 0.

    The result is in float32 or wider.

    Args:
        pattern: The attention pattern.
        scores: The scores of the same pass. With them, small weights are as exact as the largest of their
            head.
    """
    # Each weight is rounded, so the sum of a row is wrong by up to half an epsilon, and by a whole one if the
    # row was normalized twice. In a float64 model, transformers' float32 softmax leaves errors up to 1e-6.
    rounding = max(1e-6, 2 * torch.finfo(pattern.dtype).eps)
    wide = torch.promote_types(pattern.dtype, torch.float32)
    missing = 1 - pattern.sum(-1, keepdim=True, dtype=wide)
    rough = torch.where(missing > rounding, missing, 0)
    if scores is None or not bool(rough.any()):
        return rough
    # A sink is one more score, the same in every row of a head. It is computed from the row in which its
    # weight is largest, where it has the most digits.
    largest, key = pattern.to(wide).max(-1, keepdim=True)
    log_total = scores.to(wide).gather(-1, key) - largest.log()
    has_total = (largest > 0) & log_total.isfinite()
    row = torch.where(has_total, missing, -1).argmax(-2, keepdim=True)
    score = (missing.clamp_min(0).log() + log_total).gather(-2, row)
    exact = (score - log_total).exp()
    # If another hook has scaled the pattern, the missing weight is not that of such a sink.
    return torch.where(has_total & ((exact - missing).abs() <= rounding), exact, rough)


def visible(scores: Float[Tensor, "*axes query key"]) -> Bool[Tensor, "*axes query key"]:
    """Return which keys are visible in each row of masked scores or of an additive mask.

    In a row of NaN all keys are visible.
    """
    # Models mask by -inf, by the lowest number of a dtype, or by -1e4 (OpenAI GPT). No score is 5e3 below
    # another one.
    return ~(scores < scores.amax(-1, keepdim=True) - 5e3)


def mix(
    pattern: Float[Tensor, "batch head query key"], values: Float[Tensor, "batch key value_head d_head"]
) -> Float[Tensor, "batch query head d_head"]:
    """Return `pattern @ values` in the dtype of the values; neighboring query heads share a value head."""
    repeats = pattern.shape[1] // values.shape[2]
    values = repeat(values, "batch key value_head d_head -> batch key (value_head n) d_head", n=repeats)
    axes = "batch head query key, batch key head d_head -> batch query head d_head"
    return einsum(pattern.to(values.dtype), values, axes)


def check_mixing(
    argument: str,
    mixed: Float[Tensor, "batch query head d_head"],
    pattern: Float[Tensor, "batch head query key"],
    values: Float[Tensor, "batch key value_head d_head"],
) -> None:
    """Raise an error unless z is pattern @ values in this pass.

    Args:
        argument: The user's argument that makes the check necessary; the error names it.
        mixed: z, as the model computed it.
        pattern: The pattern of the pass.
        values: The values of the pass.

    Raises:
        RuntimeError: z is something else, or the shapes do not fit.
    """
    reason = ""
    if pattern.shape[3] != values.shape[1] or pattern.shape[1] != mixed.shape[2]:
        reason = f"the pattern has shape {tuple(pattern.shape)}, the values have {tuple(values.shape)}"
    else:
        with torch.no_grad():
            expected = mix(pattern, values).to(mixed.dtype)
            bound = tolerance(mixed.dtype) * max(expected.nan_to_num().abs().max().item(), 1e-6)
            if not torch.allclose(mixed, expected, rtol=0.0, atol=bound, equal_nan=True):
                reason = f"they differ by up to {(mixed - expected).abs().max().item():.3g}"
    if reason:
        raise RuntimeError(
            f"{argument}: expected hook_z = pattern @ values; got {reason}. "
            "Either the model computes more there (a gate, a norm, dropout, cached keys), or another hook "
            "changes the values or the pattern of this layer after this one, or its hook_z before this one. "
            "List hooks that change the values first (zero_values(heads=) on shared values: after a mask), "
            "and give all positions and heads in one call"
        )
