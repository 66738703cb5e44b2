"""Positions of a prompt, given as numbers, as tokens or as a slice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from lens_mix.arguments import several, shown, whole_number, whole_slice

Dropped = int | str | Iterable[int | str] | Callable[[str], bool]
Queries = int | slice | Iterable[int]


def as_position(value: object, count: int, argument: str = "query", also: str = "") -> int:
    """One of `count` positions (negative: from the end); `also`: what else may be given."""
    return whole_number(argument, value, -count, count - 1, f"{also}a position") % count


def as_positions(values: object, count: int, argument: str = "queries") -> list[int]:
    """Different positions: a number, a slice, or several numbers.

    No whole number is a TypeError; no such position, none at all, or one twice a ValueError.
    """
    if isinstance(values, slice):
        values = range(count)[whole_slice(argument, values)]
    given = several(argument, values, "positions", alone=True)
    positions = [as_position(value, count, argument) for value in given]
    if not positions or len(set(positions)) != len(positions):
        raise ValueError(f"{argument}: expected at least one position, none twice, got {given}")
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


def kept_positions(tokens: Sequence[str], dropped: Dropped, argument: str = "tokens") -> list[int]:
    """The positions left when others are dropped by position, by token, or by a function of the token.

    Anything else is a TypeError; no such position or token, or nothing left, a ValueError.
    """
    if callable(dropped):
        gone = {position for position, token in enumerate(tokens) if dropped(token)}
    else:
        items = several(argument, dropped, "positions, tokens or a function", alone=True)
        gone = {position for item in items for position in _positions_of(tokens, item, argument)}
    positions = [position for position in range(len(tokens)) if position not in gone]
    if not positions:
        raise ValueError(f"{argument}: expected some token to be left, got all {len(tokens)} dropped")
    return positions


def _positions_of(tokens: Sequence[str], item: object, argument: str) -> list[int]:
    if not isinstance(item, str):
        return [as_position(item, len(tokens), argument, "tokens, a function or ")]
    positions = [position for position, token in enumerate(tokens) if token == item]
    if not positions:
        raise ValueError(f"{argument}: expected positions or some of {list(tokens)}, got {shown(item)}")
    return positions


def shortened(values: Sequence[int]) -> str:
    """The numbers as a list for a message, cut after eight of them."""
    return str(list(values)) if len(values) <= 8 else f"{str(list(values[:8]))[:-1]}, …]"
