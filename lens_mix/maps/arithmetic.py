"""The arithmetic of `MixingMap`: scaling rows to sum 1, and merging heads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lens_mix.arguments import check_choice, check_real_tensor


def at_least_float32(tensor: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return the same numbers in float32; a float64 tensor is returned unchanged."""
    return tensor if tensor.dtype == torch.float64 else tensor.to(torch.float32)


def normalize_rows(
    scores: Float[Tensor, "layer *head query key"], negative: str
) -> tuple[Float[Tensor, "layer *head query key"], Bool[Tensor, "layer *head query"]]:
    """Return each row divided by its sum, and whether each row is all zero.

    An all-zero row stays zero. `MixingMap.normalized` explains `negative`.
    """
    check_choice("negative", negative, ("refuse", "clip", "absolute"))
    scores = at_least_float32(scores)
    if negative == "clip":
        scores = scores.clamp(min=0)
    elif negative == "absolute":
        scores = scores.abs()
    else:
        require_no_negative(scores)
    # A float64 sum is accurate for tiny and for huge rows, but Apple's GPU backend has no float64.
    sum_dtype = scores.dtype if scores.device.type == "mps" else torch.float64
    shares = torch.empty_like(scores)
    empty = torch.empty(scores.shape[:-1], dtype=torch.bool, device=scores.device)
    for index, matrix in enumerate(scores):
        totals = matrix.sum(-1, keepdim=True, dtype=sum_dtype)
        empty[index] = (totals == 0).squeeze(-1)
        shares[index] = matrix / totals.masked_fill(totals == 0, 1)
    return shares, empty


def normalize_by_magnitude(scores: Float[Tensor, "*axes key"]) -> Float[Tensor, "*axes key"]:
    """Return each row divided by the sum of its magnitudes. Signs are kept; an all-zero row stays zero."""
    scores = at_least_float32(scores)
    total = scores.abs().sum(-1, keepdim=True)
    return scores / total.masked_fill(total == 0, 1)


def require_no_negative(scores: Float[Tensor, "*axes query key"]) -> None:
    """Raise a ValueError that names the smallest score, if it is below 0."""
    smallest = scores.min().item()
    if smallest < 0:
        raise ValueError(
            f"scores: expected none below 0 to make rows sum to 1, got {smallest:.6g}; "
            "normalize first with .normalized(negative='clip') or .normalized(negative='absolute')"
        )


def add_empty_rows_note(
    notes: tuple[str, ...],
    empty: Bool[Tensor, "layer *head query"],
    layers: Sequence[int],
    queries: Sequence[int],
) -> tuple[str, ...]:
    """Return the notes, and one more if there are all-zero rows.

    The note names the layer label, the head and the position of the first ten of these rows.
    """
    rows = empty.nonzero().tolist()
    texts = []
    for layer, *head, query in rows[:10]:
        heads = f" head {head[0]}" if head else ""
        texts.append(f"layer {layers[layer]}{heads} query {queries[query]}")
    more = f"; and {len(rows) - 10} more" if len(rows) > 10 else ""
    note = f"all-zero rows stay zero: {'; '.join(texts)}{more}"
    return (*notes, note) if rows and note not in notes else notes


def merge_heads(
    scores: Float[Tensor, "layer head query key"], how: str, weights: Tensor | Sequence[float] | None
) -> Float[Tensor, "layer query key"]:
    """Return the mean, the weighted mean or the maximum over heads, as `MixingMap.merge_heads` explains."""
    scores = at_least_float32(scores)
    if how == "max":
        return scores.amax(1)
    if weights is None:
        return scores.mean(1)
    share = check_real_tensor("weights", weights).to(scores)
    shapes = (tuple(scores.shape[1:2]), tuple(scores.shape[:2]))
    if tuple(share.shape) not in shapes:
        raise ValueError(
            f"weights: expected shape {shapes[0]} [head] or {shapes[1]} [layer, head], "
            f"got {tuple(share.shape)}"
        )
    total = share.sum(-1, keepdim=True)
    if not bool(torch.isfinite(share).all() and (share >= 0).all() and (total > 0).all()):
        raise ValueError(f"weights: expected finite numbers, 0 or more, not all 0, got {weights}")
    return torch.einsum("lhqk,lh->lqk", scores, (share / total).expand(scores.shape[:2]))
