"""Arguments that several hook functions take, checked."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def as_index(argument: str, value: Any) -> int:
    """An integer of any library, but no bool."""
    if isinstance(value, bool) or (
        isinstance(value, Tensor) and (value.ndim > 0 or value.dtype == torch.bool)
    ):
        raise TypeError(f"{argument}: expected an integer; got {value!r}")
    try:
        return operator.index(value)
    except TypeError as error:
        raise TypeError(f"{argument}: expected an integer; got {value!r}") from error


def as_heads(heads: Iterable[int] | int) -> tuple[int, ...]:
    """Query heads as sorted distinct numbers; how many the model has is known only in the pass."""
    if isinstance(heads, str | dict):
        raise TypeError(f"heads: expected query heads as integers; got {heads!r}")
    if isinstance(heads, Tensor):
        heads = heads.tolist()
    listed = list(heads) if isinstance(heads, Iterable) else [heads]
    chosen = sorted({as_index("heads", head) for head in listed})
    if not chosen:
        raise ValueError("heads: expected at least one query head; got none")
    if chosen[0] < 0:
        raise ValueError(f"heads: expected query heads counted from 0; got {chosen[0]}")
    return tuple(chosen)


def check_heads(heads: tuple[int, ...], n_heads: int) -> None:
    """Raise if a head is beyond the model's query heads."""
    if heads[-1] >= n_heads:
        raise ValueError(f"heads: expected query heads from 0 to {n_heads - 1}; got {heads[-1]}")


def as_patterns(argument: str, pattern: Any) -> Tensor:
    """A pattern, or a change of one, as [batch head query key]: batch 1 where none was given."""
    if not isinstance(pattern, Tensor) or not pattern.is_floating_point():
        got = f"a tensor of {pattern.dtype}" if isinstance(pattern, Tensor) else type(pattern).__name__
        raise TypeError(f"{argument}: expected a tensor of real numbers; got {got}")
    if pattern.ndim not in (3, 4):
        raise ValueError(
            f"{argument}: expected [head query key] or [batch head query key]; got shape "
            f"{tuple(pattern.shape)}"
        )
    return pattern if pattern.ndim == 4 else pattern[None]
