"""Provide the baselines of integrated gradients, for attention patterns and for embeddings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lens_mix.arguments import check_choice

if TYPE_CHECKING:
    from lens_mix._blocks.block import Block
    from lens_mix.methods.bound_target import BoundRows

# A larger completeness gap than this share of F(x) - F(baseline) gets a note.
LARGE_GAP = 0.1


def check_baseline(baseline: object) -> None:
    """Check that a baseline of attention patterns is a known name, a tensor or a function.

    Raises:
        ValueError: The name is unknown.
        TypeError: The baseline is of another type.
    """
    expected = "baseline: expected 'zero', 'uniform', a tensor or a function"
    if isinstance(baseline, str) and baseline not in ("zero", "uniform"):
        raise ValueError(f"{expected}, got {baseline!r}")
    if not (isinstance(baseline, (str, Tensor)) or callable(baseline)):
        raise TypeError(f"{expected}, got {type(baseline).__name__}")


def describe_baseline(baseline: Any) -> str:
    """Return a short text that describes the baseline, for the map's record."""
    if isinstance(baseline, Tensor):
        return f"a tensor of shape {list(baseline.shape)}"
    if isinstance(baseline, str):
        return baseline
    return getattr(baseline, "__qualname__", type(baseline).__name__)


def make_pattern_baseline(
    baseline: Any, block: Block, pattern: Float[Tensor, "batch head query key"]
) -> Float[Tensor, "batch head query key"]:
    """Return the baseline of one block's pattern.

    Args:
        baseline: "zero", "uniform", a tensor [layer, head, query, key] or a function (pattern, layer) -> the
            baseline.
        block: The block.
        pattern: The pattern of the clean pass.

    Raises:
        ValueError: The baseline has another shape than the pattern, or weight where the mask allows none.
    """
    if isinstance(baseline, str) and baseline == "zero":
        return torch.zeros_like(pattern)
    if isinstance(baseline, str):
        attended = block.attended[:, None].to(pattern.dtype).expand_as(pattern)
        # A row of padding may attend to no key at all.
        return attended / attended.sum(-1, keepdim=True).clamp_min(1)
    whole = isinstance(baseline, Tensor)
    given = _select_layer(baseline, pattern, block.layer) if whole else baseline(pattern, block.layer)
    if not torch.is_tensor(given) or given.shape != pattern.shape:
        got = list(given.shape) if torch.is_tensor(given) else type(given).__name__
        raise ValueError(f"baseline: expected shape {list(pattern.shape)} in layer {block.layer}, got {got}")
    given = given.detach().to(pattern)
    # A row of padding may have any baseline, because nothing reads it.
    hidden = ~block.attended[:, None] & block.real[:, None, :, None]
    if bool((given.masked_select(hidden.expand_as(given)) != 0).any()):
        raise ValueError(
            f"baseline: expected 0 where a query gives no weight to a key, got another weight in layer "
            f"{block.layer}, which would break the attention mask"
        )
    return given


def _select_layer(baseline: Tensor, pattern: Tensor, layer: int) -> Tensor:
    """Return the baseline of one layer, with a batch axis, out of a tensor for all layers."""
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


# ------------------------------------------------------------------ baselines of embeddings


def check_input_baseline(baseline: Any) -> None:
    """Check that a baseline of embeddings is a known name or a tensor [d_model] or [pos, d_model].

    Raises:
        ValueError: The baseline is anything else.
    """
    if not isinstance(baseline, Tensor):
        check_choice("baseline", baseline, ("zero", "mean"))
    elif baseline.ndim not in (1, 2):
        got = list(baseline.shape)
        raise ValueError(f"baseline: expected a tensor [d_model] or [pos, d_model], got shape {got}")


def make_input_baseline(
    baseline: Any, x: Float[Tensor, "row pos d_model"], real: Bool[Tensor, "row pos"]
) -> Float[Tensor, "row pos d_model"]:
    """Return the baseline of embeddings.

    Args:
        baseline: "zero", "mean" over the real positions of each example, or a tensor.
        x: The embeddings.
        real: Which positions are not padding.

    Raises:
        ValueError: A tensor has another width, or another number of positions than the prompt.
    """
    if not isinstance(baseline, Tensor):
        wide = torch.promote_types(x.dtype, torch.float32)
        mean = (x * real[..., None]).to(wide).sum(1, keepdim=True) / real.sum(1)[:, None, None]
        return torch.zeros_like(x) if baseline == "zero" else mean.to(x.dtype).expand_as(x)
    given, counts = baseline.detach().to(x), set(real.sum(1).tolist())
    if given.shape[-1] != x.shape[-1] or (given.ndim == 2 and counts != {len(given)}):
        raise ValueError(
            f"baseline: expected [{x.shape[-1]}], or [pos, {x.shape[-1]}] with the prompt's number of "
            f"tokens ({', '.join(map(str, sorted(counts)))}), got shape {list(given.shape)}"
        )
    # The given vectors are those of the prompt's own tokens, so padding keeps its embedding.
    whole = x.clone()
    whole[real] = given.expand(len(x), -1, -1).flatten(0, 1) if given.ndim == 2 else given
    return whole


def note_convergence(
    bound: BoundRows,
    scores: Float[Tensor, "row key"],
    start: Float[Tensor, " row"],
    n_steps: int,
    last: Block,
) -> None:
    """Record Σ scores − (F(x) − F(x')) of each row, and add a note if it is large.

    Args:
        bound: The target of every row.
        scores: The scores of every row.
        start: F(x'), the target at the baseline, of every row.
        n_steps: The number of points of the path.
        last: The block whose record gets the numbers.
    """
    differences = (bound.clean - start).to(scores.dtype)
    gaps = scores.sum(-1) - differences
    # If the difference is nearly 0, even rounding is a large share of it.
    large = gaps.abs() > (LARGE_GAP * differences.abs()).clamp_min(1e-6)
    for prompt in range(len(last.batch)):
        of_prompt = bound.prompt_index == prompt
        last.detail(prompt, "convergence_delta", gaps[of_prompt].tolist())
        if count := int(large[of_prompt].sum()):
            worst = int((gaps.abs() * of_prompt).argmax())
            last.warn(
                prompt,
                f"convergence delta {float(gaps[worst]):.2g} with {n_steps} points, where F(x) - "
                f"F(baseline) is {float(differences[worst]):.2g} ({count} of {int(of_prompt.sum())} rows "
                "are off by more than 10 %): raise n_steps, or take another baseline",
            )
