"""Positions of a prompt, given as numbers, as tokens or as a slice."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterable, Sequence
from typing import TypeGuard

Dropped = int | str | Iterable[int | str] | Callable[[str], bool]
Queries = int | slice | Iterable[int]


def is_whole(value: object) -> TypeGuard[int]:
    """Whether a value is a whole number: an int or one of numpy's, and no boolean."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def as_count(value: object, argument: str) -> int:
    """A whole number, 1 or more; anything else is a ValueError."""
    if not is_whole(value) or value < 1:
        raise ValueError(f"{argument}: expected a whole number, 1 or more, got {value!r}")
    return value


def as_position(value: object, count: int, argument: str = "query", also: str = "") -> int:
    """One of `count` positions (negative: from the end), or a ValueError; `also`: what else may be given."""
    if not is_whole(value) or not -count <= value < count:
        raise ValueError(f"{argument}: expected {also}a position from {-count} to {count - 1}, got {value!r}")
    return int(value) % count


def as_positions(values: object, count: int) -> list[int]:
    """Different positions of the `queries` argument: a number, a slice, or several numbers.

    No such position, none at all, or one twice is a ValueError.
    """
    if isinstance(values, slice):
        values = range(count)[values]
    if isinstance(values, str) or not isinstance(values, Iterable):
        values = [values]
    given = list(values)
    positions = [as_position(value, count, "queries") for value in given]
    if not positions or len(set(positions)) != len(positions):
        raise ValueError(f"queries: expected at least one position, none twice, got {given}")
    return positions


def query_position(tokens: Sequence[str], query: int | str, argument: str = "query") -> int:
    """The position of a query given as a position (negative: from the end) or as a token.

    No such position, or a token that does not occur exactly once, is a ValueError.
    """
    if not isinstance(query, str):
        return as_position(query, len(tokens), argument)
    positions = [position for position, token in enumerate(tokens) if token == query]
    if len(positions) != 1:
        raise ValueError(
            f"{argument}: expected a token that occurs once in {list(tokens)}, got {query!r}, "
            f"which occurs {len(positions)} times"
        )
    return positions[0]


def kept_positions(tokens: Sequence[str], dropped: Dropped) -> list[int]:
    """The positions left when others are dropped by position, by token, or by a function of the token.

    Anything else is a TypeError; no such position or token, or nothing left, a ValueError.
    """
    if callable(dropped):
        gone = {position for position, token in enumerate(tokens) if dropped(token)}
    else:
        items = [dropped] if isinstance(dropped, str) or not isinstance(dropped, Iterable) else dropped
        gone = {position for item in items for position in _positions_of(tokens, item)}
    kept = [position for position in range(len(tokens)) if position not in gone]
    if not kept:
        raise ValueError(f"tokens: expected some token to be left, got all {len(tokens)} dropped")
    return kept


def _positions_of(tokens: Sequence[str], item: object) -> list[int]:
    count = len(tokens)
    if isinstance(item, str):
        positions = [position for position, token in enumerate(tokens) if token == item]
    elif is_whole(item):
        positions = [int(item) % count] if -count <= item < count else []
    else:
        raise TypeError(f"tokens: expected positions, tokens or a function, got {item!r}")
    if not positions:
        raise ValueError(
            f"tokens: expected positions from {-count} to {count - 1} or some of {list(tokens)}, got {item!r}"
        )
    return positions


def shortened(values: Sequence[int], longest: int = 8) -> str:
    """The numbers as a list for a message, cut after `longest` of them."""
    return str(list(values)) if len(values) <= longest else f"{str(list(values[:longest]))[:-1]}, …]"
