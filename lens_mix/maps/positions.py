"""Read positions of a prompt that are given as numbers, as tokens or as a slice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from lens_mix.arguments import check_items, check_slice, check_whole_number

Dropped = int | str | Iterable[int | str] | Callable[[str], bool]


def as_position(value: object, count: int, argument: str = "query", also: str = "") -> int:
    """Return one of `count` positions, from 0; a negative position counts from the end.

    Args:
        value: The position as it was given.
        count: The number of positions.
        argument: The name of the argument, for errors.
        also: What else the caller accepts, for errors, such as "a token or ".

    Raises:
        TypeError: If `value` is not a whole number.
        ValueError: If the position does not exist.
    """
    return check_whole_number(argument, value, -count, count - 1, f"{also}a position") % count


def as_positions(values: object, count: int, argument: str = "queries") -> list[int]:
    """Return different positions, from 0, that are given as a number, a slice or several numbers.

    Raises:
        TypeError: If a position is not a whole number.
        ValueError: If a position does not exist or occurs twice, or if there are none.
    """
    if isinstance(values, slice):
        values = range(count)[check_slice(argument, values)]
    items = check_items(argument, values, "positions", alone=True)
    positions = [as_position(value, count, argument) for value in items]
    if not positions or len(set(positions)) != len(positions):
        raise ValueError(f"{argument}: expected at least one position, each once, got {items}")
    return positions


def shorten(values: Sequence[int]) -> str:
    """Return the numbers as a list for a message, of which only the first eight are written."""
    return str(list(values)) if len(values) <= 8 else f"{str(list(values[:8]))[:-1]}, …]"
