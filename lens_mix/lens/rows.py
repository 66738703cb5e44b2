"""Which rows (queries) and layers of a map a user asks for."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from lens_mix.arguments import check_items, check_slice, check_whole_number

# What a user may write: a number, numbers in any form, or a slice; negative numbers count from the end.
Selection = int | slice | Iterable[int] | Tensor


def read_selection(selection: Selection | None, count: int, name: str) -> list[int] | None:
    """Numbers from 0 to count - 1, in the order given; None for all.

    Args:
        selection: a number, several in any form, or a slice; negative numbers count from the end.
        count: how many there are.
        name: of the argument, for errors.

    Raises:
        TypeError: no whole numbers.
        ValueError: out of range, the same one twice, or none.
    """
    if selection is None:
        return None
    if isinstance(selection, slice):
        chosen = list(range(count))[check_slice(name, selection)]
    else:
        what = "whole numbers or a slice"
        listed = check_items(name, selection, what, alone=True)
        chosen = [check_whole_number(name, number, -count, count - 1, what) % count for number in listed]
    if not chosen:
        raise ValueError(f"{name}: expected at least one of 0..{count - 1}, got none ({selection!r})")
    if len(set(chosen)) != len(chosen):
        raise ValueError(f"{name}: expected each one once, got {chosen}")
    return chosen


@dataclasses.dataclass(frozen=True)
class Rows:
    """The asked rows of every prompt of a padded batch.

    Attributes:
        by_prompt: per prompt, positions counted in the prompt itself.
        positions: the same in the padded batch; a prompt with fewer rows than another repeats its last one.
    """

    by_prompt: tuple[tuple[int, ...], ...]
    positions: Int[Tensor, "batch query"]

    @classmethod
    def of(cls, queries: Selection, real: Bool[Tensor, "batch pos"]) -> Rows:
        """The rows that `queries` names in each prompt.

        Raises:
            TypeError, ValueError: as `read_selection`.
        """
        places = [row.nonzero()[:, 0] for row in real]
        chosen = [read_selection(queries, len(place), "queries") or [] for place in places]
        # One tensor for all prompts: a short prompt's last row fills it up, and is cut off again.
        longest = max(map(len, chosen))
        filled = [rows + rows[-1:] * (longest - len(rows)) for rows in chosen]
        positions = [place[rows] for place, rows in zip(places, filled, strict=True)]
        return cls(tuple(map(tuple, chosen)), torch.stack(positions))


def rows_at(tensor: Tensor, positions: Int[Tensor, "batch query"] | None, axis: int = 1) -> Tensor:
    """The rows of a tensor over all positions.

    Args:
        tensor: the first axis is the batch.
        positions: which rows of each prompt; None: all of them, as they are.
        axis: the axis of the positions.
    """
    if positions is None:
        return tensor
    places = torch.arange(len(positions), device=positions.device)[:, None]
    return tensor.movedim(axis, 1)[places, positions].movedim(1, axis)


def spread(real: Sequence[Tensor] | Tensor, count: int) -> Int[Tensor, "batch place"]:
    """As many positions of each prompt, spread evenly, its last among them.

    Args:
        real: per prompt, the positions to choose among.
        count: how many; a prompt with fewer has some of them twice.
    """
    chosen = []
    for positions in real:
        steps = torch.linspace(0, len(positions) - 1, count, device=positions.device, dtype=torch.float32)
        # With one place, the last position: in a causal model it reads the whole prompt.
        chosen.append(positions[steps.round().long()] if count > 1 else positions[-1:])
    return torch.stack(chosen)
