"""The rows (queries) and layers of a map that a user selects."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from lens_mix.arguments import check_items, check_layer, check_slice, check_whole_number

# A selection is a number, several numbers in any form, or a slice. Negative numbers count from the end.
Selection = int | slice | Iterable[int] | Tensor
# Positions are selected in the same way, and by texts of the prompt.
Positions = int | str | slice | Iterable[int | str | slice] | Tensor


def read_selection(
    selection: Positions | None, count: int, name: str, tokens: Callable[[], Sequence[str]] | None = None
) -> list[int] | None:
    """Return the selected numbers, each from 0 to count - 1, in the order of the selection.

    Args:
        selection: A number, several numbers in any form, or a slice. Negative numbers count from the end.
            None: all.
        count: The number of things to select from.
        name: The name of the argument, for errors.
        tokens: Returns the tokens of all positions, of which texts may select some; None: no texts.

    Returns:
        The numbers; None if `selection` is None.

    Raises:
        TypeError: If they are not whole numbers.
        ValueError: If a number is out of range or occurs twice, if there is none, or a text is not found.
    """
    if selection is None:
        return None
    if isinstance(selection, slice):
        chosen = list(range(count))[check_slice(name, selection)]
    else:
        what = "whole numbers or a slice"
        listed = check_items(name, selection, what, alone=True)
        if tokens is not None and (has_text(listed) or any(isinstance(each, slice) for each in listed)):
            from lens_mix.maps.spans import find_positions

            return find_positions(tokens(), listed, name)
        if name == "layers":
            chosen = [check_layer(name, number, range(count), what) for number in listed]
        else:
            chosen = [check_whole_number(name, number, -count, count - 1, what) % count for number in listed]
    if not chosen:
        raise ValueError(f"{name}: expected at least one of 0..{count - 1}, got none ({selection!r})")
    if len(set(chosen)) != len(chosen):
        raise ValueError(f"{name}: expected each one once, got {chosen}")
    return chosen


def has_text(selection: object) -> bool:
    """Return whether a selection is a text, or contains one."""
    if isinstance(selection, (list, tuple)):
        return any(isinstance(item, str) for item in selection)
    return isinstance(selection, str)


@dataclasses.dataclass(frozen=True)
class Rows:
    """The selected rows of every prompt of a padded batch.

    Attributes:
        by_prompt: The positions of each prompt's rows in the prompt itself.
        positions: Their positions in the padded batch. A prompt with fewer rows repeats its last one.
    """

    by_prompt: tuple[tuple[int, ...], ...]
    positions: Int[Tensor, "batch query"]

    @classmethod
    def of(
        cls,
        queries: Positions,
        real: Bool[Tensor, "batch pos"],
        tokens: Sequence[Callable[[], Sequence[str]]],
    ) -> Rows:
        """Return the rows that `queries` selects in each prompt.

        Args:
            queries: The selection.
            real: Which positions of the batch are not padding.
            tokens: For each prompt, a function that returns the tokens of its positions.

        Raises:
            TypeError: If the selection has no whole numbers.
            ValueError: If a position is out of range or occurs twice, if there is none, or a text is not
                found.
        """
        real_positions = [is_real.nonzero()[:, 0] for is_real in real]
        chosen = [
            read_selection(queries, len(each), "queries", texts) or []
            for each, texts in zip(real_positions, tokens, strict=True)
        ]
        # All prompts need the same number of rows for one tensor. The repeated rows are removed later.
        longest = max(map(len, chosen))
        filled = [rows + rows[-1:] * (longest - len(rows)) for rows in chosen]
        positions = [each[rows] for each, rows in zip(real_positions, filled, strict=True)]
        return cls(tuple(map(tuple, chosen)), torch.stack(positions))


def rows_at(tensor: Tensor, positions: Int[Tensor, "batch query"] | None, axis: int = 1) -> Tensor:
    """Return some rows of a tensor that has all positions.

    Args:
        tensor: A tensor whose first axis is the batch.
        positions: The positions of each prompt's rows. None: return the tensor.
        axis: The axis of the positions.
    """
    if positions is None:
        return tensor
    examples = torch.arange(len(positions), device=positions.device)[:, None]
    return tensor.movedim(axis, 1)[examples, positions].movedim(1, axis)


def spread(real: Sequence[Tensor] | Tensor, count: int) -> Int[Tensor, "batch place"]:
    """Return some positions of each prompt that are evenly spaced; the last position is one of them.

    Args:
        real: The positions of each prompt to choose from.
        count: The number of positions. A prompt with fewer has some of them twice.
    """
    chosen = []
    for positions in real:
        steps = torch.linspace(0, len(positions) - 1, count, device=positions.device, dtype=torch.float32)
        # In a causal model the last position reads the whole prompt, so it is the best single one.
        chosen.append(positions[steps.round().long()] if count > 1 else positions[-1:])
    return torch.stack(chosen)
