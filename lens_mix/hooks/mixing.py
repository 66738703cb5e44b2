"""z = pattern @ values: how attention mixes, and how closely a tensor that is computed anew must agree."""

from __future__ import annotations

import torch
from einops import einsum, repeat
from jaxtyping import Bool, Float
from torch import Tensor

# Largest accepted error of a tensor that is computed anew, relative to its largest entry (or, for the lens's
# verification, to the length of each vector). A wrong reading of a block is off by 1e-2 or more. Hugging Face's
# RMSNorms compute in float32 even in a float64 model: 1e-7 is the best they can agree.
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 8e-2}


def tolerance(dtype: torch.dtype) -> float:
    """The largest accepted relative error in a dtype; float32's for a dtype that is not in the table."""
    return _TOLERANCES.get(dtype, _TOLERANCES[torch.float32])


def pass_tolerance(dtype: torch.dtype) -> float:
    """The same for what two whole passes differ by: rounding grows with depth, so it is never below 1e-3."""
    return max(1e-3, tolerance(dtype))


def sink(
    pattern: Float[Tensor, "*axes query key"], scores: Float[Tensor, "*axes query key"] | None = None
) -> Float[Tensor, "*axes query 1"]:
    """The weight that each row gives to no key, in at least float32: an attention sink's (gpt-oss), or 0.

    With the `scores` of the same pass, small weights are as exact as the largest one of their head.
    """
    # As each weight is rounded, a row's sum is off by up to half an epsilon, by a whole one where the row was
    # normalised once more. What a row of a float64 model lacks, up to 1e-6, may come from transformers'
    # float32 softmax.
    rounding = max(1e-6, 2 * torch.finfo(pattern.dtype).eps)
    wide = torch.promote_types(pattern.dtype, torch.float32)
    lacking = 1 - pattern.sum(-1, keepdim=True, dtype=wide)
    rough = torch.where(lacking > rounding, lacking, 0)
    if scores is None or not bool(rough.any()):
        return rough
    # A sink is one more score, the same in every row of a head, read off the row where its weight is largest.
    largest, key = pattern.to(wide).max(-1, keepdim=True)
    log_total = scores.to(wide).gather(-1, key) - largest.log()
    has_total = (largest > 0) & log_total.isfinite()
    row = torch.where(has_total, lacking, -1).argmax(-2, keepdim=True)
    score = (lacking.clamp_min(0).log() + log_total).gather(-2, row)
    fine = (score - log_total).exp()
    # Another hook may have scaled the pattern: then what a row lacks is not the weight of such a sink.
    return torch.where(has_total & ((fine - lacking).abs() <= rounding), fine, rough)


def visible(scores: Float[Tensor, "*axes query key"]) -> Bool[Tensor, "*axes query key"]:
    """Return which keys each row of masked scores, or of an additive mask, can see; all in a row of NaN."""
    # Masks are -inf, the lowest number of a dtype, or -1e4 (OpenAI GPT); no score is so far below others.
    return ~(scores < scores.amax(-1, keepdim=True) - 5e3)


def mix(
    pattern: Float[Tensor, "batch head query key"], values: Float[Tensor, "batch key value_head d_head"]
) -> Float[Tensor, "batch query head d_head"]:
    """`pattern @ values` in the dtype of the values; each value head serves neighbouring query heads."""
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
    """Raise RuntimeError unless the mixed values are what the pattern and the values of this pass say.

    `argument` is what the user gave that makes this necessary, for the error.
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
            "Either the model does more there (a gate, a norm, dropout, cached keys), or another hook edits "
            "the values or the pattern of this layer after this one, or its hook_z before it. List edits of "
            "the values first (of some heads on shared values: after a mask), and give all positions and "
            "heads of one edit in one call"
        )
