"""Check the arguments that several hook functions take, and turn positions into a mask of a batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, SupportsIndex

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lens_mix.arguments import check_dense_tensor, check_items, check_whole_number

Position = (
    SupportsIndex
    | Sequence[int]
    | slice
    | Int[Tensor, "batch"]
    | Bool[Tensor, "batch key"]
    | Bool[Tensor, "key"]
)
Chosen = int | slice | Tensor | tuple[int, ...]


def read_heads(heads: Iterable[int] | int) -> tuple[int, ...]:
    """Return query heads as sorted distinct numbers; only the pass shows how many the model has."""
    listed = check_items("heads", heads, "query heads as integers", least=1, alone=True)
    return tuple(
        sorted({check_whole_number("heads", head, 0, what="query heads as integers") for head in listed})
    )


def check_heads(heads: tuple[int, ...], n_heads: int) -> None:
    """Raise a ValueError if the model has fewer query heads than the largest number needs."""
    if heads[-1] >= n_heads:
        raise ValueError(f"heads: expected query heads from 0 to {n_heads - 1}; got {heads[-1]}")


def read_pattern(argument: str, pattern: Any) -> Tensor:
    """Return a pattern, or numbers to add to one, as [batch head query key]; a new batch axis has size 1."""
    if not isinstance(pattern, Tensor) or not pattern.is_floating_point():
        got = f"a tensor of {pattern.dtype}" if isinstance(pattern, Tensor) else type(pattern).__name__
        raise TypeError(f"{argument}: expected a tensor of real numbers; got {got}")
    check_dense_tensor(argument, pattern)
    if not bool(torch.isfinite(pattern).all()):
        raise ValueError(f"{argument}: expected finite numbers; got NaN or infinity")
    if pattern.ndim not in (3, 4):
        raise ValueError(
            f"{argument}: expected [head query key] or [batch head query key]; got shape "
            f"{tuple(pattern.shape)}"
        )
    return pattern if pattern.ndim == 4 else pattern[None]


def read_mask(argument: str, mask: Any) -> Bool[Tensor, "batch head query key"]:
    """Return which keys each query may attend to; axes that were not given have size 1."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        got = f"a tensor of {mask.dtype}" if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"{argument}: expected a bool tensor; got {got}")
    check_dense_tensor(argument, mask)
    if mask.ndim not in (2, 3, 4):
        raise ValueError(
            f"{argument}: expected [query key], [head query key] or [batch head query key]; got shape "
            f"{tuple(mask.shape)}"
        )
    return mask.detach()[(None,) * (4 - mask.ndim)]


def read_position(position: Position | None, positions: Sequence[int] | None = None) -> Chosen:
    """Return the position or positions, checked as far as possible without the batch.

    `positions` is the name that `position` had for a list.
    """
    if (position is None) == (positions is None):
        given = "both" if position is not None else "neither"
        raise TypeError(f"position: expected position or positions; got {given}")
    position = positions if position is None else position
    if isinstance(position, str):
        raise TypeError(
            f"position: expected numbers, because a hook has no tokenizer; got {position!r}; write "
            f"position=m.positions({position!r}) with a map of the prompt, or "
            f"lens_mix.models.find_positions(model, prompt, {position!r})"
        )
    if isinstance(position, slice):
        return position
    if isinstance(position, Tensor) and position.ndim > 0:
        is_mask = position.dtype == torch.bool
        if position.is_floating_point() or position.is_complex() or position.ndim > (2 if is_mask else 1):
            raise TypeError(
                "position: expected an integer tensor [batch], or a bool tensor [batch key] or [key]; "
                f"got {position.dtype} of shape {tuple(position.shape)}"
            )
        return position.detach().cpu()
    if isinstance(position, Sequence | set | frozenset):
        listed = check_items("position", position, "an int, a list of them, a slice or a tensor", least=1)
        return tuple(check_whole_number("position", item, what="an integer") for item in listed)
    return check_whole_number("position", position, what="an integer")


def make_position_mask(
    chosen: Chosen, values: Float[Tensor, "batch key value_head d_head"]
) -> Bool[Tensor, "#batch key"]:
    """Return True at the chosen positions; the batch axis has size 1 if all examples have the same ones."""
    batch, length = values.shape[:2]
    if isinstance(chosen, Tensor) and chosen.dtype == torch.bool:
        if tuple(chosen.shape) not in ((length,), (batch, length)):
            raise ValueError(
                f"position: expected a bool tensor [{batch}, {length}] or [{length}]; got shape "
                f"{tuple(chosen.shape)}"
            )
        return chosen.reshape(-1, length).to(values.device)
    if isinstance(chosen, slice) and not range(length)[chosen]:
        raise ValueError(f"position: expected a slice of {length} positions; got {chosen}, which is empty")
    if isinstance(chosen, Tensor) and len(chosen) != batch:
        raise ValueError(
            f"position: expected one position for each of {batch} examples; got {len(chosen)} "
            "(for several positions in every example use a list)"
        )
    listed = range(length)[chosen] if isinstance(chosen, slice) else chosen
    positions = torch.as_tensor(listed, dtype=torch.long, device=values.device).reshape(-1)
    for position in (int(positions.min()), int(positions.max())):
        if not -length <= position < length:
            raise ValueError(
                f"position: expected a position from {-length} to {length - 1}, as there are {length}; "
                f"got {position}"
            )
    is_per_example = isinstance(chosen, Tensor)
    mask = torch.zeros(batch if is_per_example else 1, length, dtype=torch.bool, device=values.device)
    mask[torch.arange(batch, device=values.device) if is_per_example else 0, positions] = True
    return mask
