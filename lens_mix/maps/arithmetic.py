"""The arithmetic behind `MixingMap`: rows, heads, and which positions are kept."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

Dropped = int | str | Iterable[int | str] | Callable[[str], bool]


def at_least_float32(tensor: Tensor) -> Tensor:
    """The same numbers in float32 or, where they are float64, as they are."""
    return tensor if tensor.dtype == torch.float64 else tensor.to(torch.float32)


def normalise_rows(scores: Tensor, negative: str) -> tuple[Tensor, Tensor]:
    """Rows divided by their sum, and which rows were all zero (they stay zeros).

    Args:
        scores: `[*axes, query, key]`.
        negative: "refuse", "clip" or "absolute".

    Raises:
        ValueError: negative scores with "refuse"; an unknown `negative`.
    """
    if negative not in ("refuse", "clip", "absolute"):
        raise ValueError(f"negative: expected 'refuse', 'clip' or 'absolute', got {negative!r}")
    scores = at_least_float32(scores)
    if negative == "clip":
        scores = scores.clamp(min=0)
    elif negative == "absolute":
        scores = scores.abs()
    elif bool((scores < 0).any()):
        raise ValueError(
            f"scores: expected none below 0 to make rows sum to 1, got {scores.min().item():.6g}; "
            "normalise first with .normalized(negative='clip') or .normalized(negative='absolute')"
        )
    # Apple's GPU backend has no float64; everywhere else it keeps sums of tiny or huge rows exact.
    wide = scores.dtype if scores.device.type == "mps" else torch.float64
    shares = torch.empty_like(scores)
    empty = torch.empty(scores.shape[:-1], dtype=torch.bool, device=scores.device)
    for place, matrix in enumerate(scores):
        totals = matrix.sum(-1, keepdim=True, dtype=wide)
        empty[place] = (totals == 0).squeeze(-1)
        shares[place] = matrix / totals.masked_fill(totals == 0, 1)
    return shares, empty


def empty_rows_note(empty: Tensor, layers: Sequence[int]) -> str:
    """A note that names the all-zero rows, `empty` of shape `[layer, query]` or `[layer, head, query]`."""
    rows = empty.nonzero().tolist()
    names = ("layer", "head", "query") if empty.ndim == 3 else ("layer", "query")
    texts = []
    for row in rows[:10]:
        row[0] = layers[row[0]]
        texts.append(" ".join(f"{name} {value}" for name, value in zip(names, row, strict=True)))
    more = f"; and {len(rows) - 10} more" if len(rows) > 10 else ""
    return f"all-zero rows, left as zeros: {'; '.join(texts)}{more}"


def added(notes: tuple[str, ...], note: str) -> tuple[str, ...]:
    """The notes with one more, unless it is already there."""
    return notes if note in notes else (*notes, note)


def merge_heads(scores: Tensor, how: str, weights: Tensor | Sequence[float] | None) -> Tensor:
    """`[layer, head, query, key]` to `[layer, query, key]` by mean, weighted mean or maximum.

    Raises:
        ValueError: weights of a wrong shape, negative, not finite, or summing to 0.
    """
    scores = at_least_float32(scores)
    if how == "max":
        return scores.amax(1)
    if weights is None:
        return scores.mean(1)
    share = torch.as_tensor(weights, dtype=scores.dtype, device=scores.device).detach()
    shapes = (tuple(scores.shape[1:2]), tuple(scores.shape[:2]))
    if tuple(share.shape) not in shapes:
        raise ValueError(
            f"weights: expected shape {shapes[0]} [head] or {shapes[1]} [layer, head], "
            f"got {tuple(share.shape)}"
        )
    total = share.sum(-1, keepdim=True)
    if not bool(torch.isfinite(share).all() and (share >= 0).all() and (total > 0).all()):
        raise ValueError(f"weights: expected finite numbers, 0 or more, not all 0, got {weights}")
    share = (share / total).expand(scores.shape[:2])
    return torch.einsum("lhqk,lh->lqk", scores, share)


def kept_positions(tokens: Sequence[str], dropped: Dropped) -> list[int]:
    """The positions left when some are dropped by position, by token, or by a function of the token.

    Raises:
        TypeError: anything else.
        ValueError: no such position or token; nothing left.
    """
    count = len(tokens)
    if callable(dropped):
        gone = {position for position, token in enumerate(tokens) if dropped(token)}
    else:
        if not isinstance(dropped, (numbers.Integral, Iterable)):
            raise TypeError(f"tokens: expected positions, tokens or a function, got {dropped!r}")
        items = [dropped] if isinstance(dropped, (numbers.Integral, str)) else list(dropped)
        gone = {position for item in items for position in _positions(tokens, item)}
    kept = [position for position in range(count) if position not in gone]
    if not kept:
        raise ValueError(f"tokens: expected some token to be left, got all {count} dropped")
    return kept


def _positions(tokens: Sequence[str], item: object) -> list[int]:
    count = len(tokens)
    if isinstance(item, bool) or not isinstance(item, (numbers.Integral, str)):
        raise TypeError(f"tokens: expected positions, tokens or a function, got {item!r}")
    if isinstance(item, str):
        found = [position for position, token in enumerate(tokens) if token == item]
    else:
        found = [int(item) % count] if -count <= int(item) < count else []
    if not found:
        raise ValueError(
            f"tokens: expected positions from {-count} to {count - 1} or some of {list(tokens)}, got {item!r}"
        )
    return found


def query_position(tokens: Sequence[str], query: int | str) -> int:
    """The position of a query given as a position (negative: from the end) or as a token.

    Raises:
        ValueError: no such position; a token that does not occur exactly once.
    """
    count = len(tokens)
    if isinstance(query, str):
        found = [position for position, token in enumerate(tokens) if token == query]
        if len(found) != 1:
            raise ValueError(
                f"query: expected a token that occurs once in {list(tokens)}, got {query!r}, "
                f"which occurs {len(found)} times"
            )
        return found[0]
    if isinstance(query, bool) or not isinstance(query, int) or not -count <= query < count:
        raise ValueError(f"query: expected a position from {-count} to {count - 1}, got {query!r}")
    return query % count
