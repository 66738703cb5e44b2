"""Find positions, and groups of them, that are given as text, as numbers or as slices.

`_find_text` has the rule for a text, which every argument for positions follows.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from lens_mix.arguments import check_items, check_whole_number
from lens_mix.maps.characters import join_tokens
from lens_mix.maps.positions import Dropped, as_position, as_positions, shorten
from lens_mix.maps.words import resolve_groups, simplify, spell

# One position (negative: from the end), a text of neighboring tokens, a slice, or several of these.
Span = int | str | slice | Iterable[int | str | slice]

# Groups of positions, with names or without; each is a text, a slice, or a list of positions and texts.
Groups = Sequence[Span] | Mapping[str, Span]
# All positions, as words or as lists of positions; or some of them, as named groups. None: words are found.
Words = Sequence[str] | Sequence[Sequence[int]] | Mapping[str, Span] | None

_EXPECTED = "a position, a text of the prompt, a slice, or several of these"
# A text is compared as it is; if it is not found, without white space; and then also without case.
_FORMS: tuple[Callable[[str], str], ...] = (str, lambda text: re.sub(r"\s", "", text), simplify)


def find_positions(tokens: Sequence[str], span: Span, argument: str = "spans") -> list[int]:
    """Return the positions of a span in the given order, those of a text from its first token to its last.

    Args:
        tokens: The tokens of all positions.
        span: A position (negative: from the end), a text as in `_find_text`, a slice, or several of these.
        argument: The name of the argument, for errors.

    Raises:
        TypeError: If `span` is none of these.
        ValueError: If a position does not exist or occurs twice, there are none, or a text is not found.
    """
    items = [span] if isinstance(span, slice) else check_items(argument, span, _EXPECTED, least=1, alone=True)
    found: list[int] = []
    for item in items:
        if isinstance(item, str):
            found += _find_text(tokens, item, argument)
        else:
            found += as_positions(item, len(tokens), argument)
    # A position that two items name would count twice.
    return as_positions(found, len(tokens), argument)


def find_query(tokens: Sequence[str], query: int | str, argument: str = "query") -> int:
    """Return one position that is given as a number or as a text of the prompt.

    A text is found as in `_find_text`. If it is several tokens, the last one is meant, because in a causal
    model this is the only one that has read the whole text.

    Raises:
        TypeError: If it is neither a whole number nor a text.
        ValueError: If the position does not exist, or the text is not found.
    """
    if not isinstance(query, str):
        return as_position(query, len(tokens), argument)
    return _find_text(tokens, query, argument)[-1]


def kept_positions(tokens: Sequence[str], dropped: Dropped, argument: str = "tokens") -> list[int]:
    """Return the positions that remain when others are dropped.

    Args:
        tokens: The tokens of all positions.
        dropped: The positions or tokens to drop, or a function that returns True for each token to drop.
        argument: The name of the argument, for errors.

    Raises:
        TypeError: If `dropped` is none of these.
        ValueError: If a position or token does not exist, or if no position remains.
    """
    if callable(dropped):
        removed = {position for position, token in enumerate(tokens) if dropped(token)}
    else:
        items = check_items(argument, dropped, "positions, tokens or a function", alone=True)
        removed = {position for item in items for position in _find_dropped(tokens, item, argument)}
    positions = [position for position in range(len(tokens)) if position not in removed]
    if not positions:
        raise ValueError(f"{argument}: expected at least one token to remain, got all {len(tokens)} dropped")
    return positions


def _find_dropped(tokens: Sequence[str], item: object, argument: str) -> list[int]:
    if not isinstance(item, str):
        return [as_position(item, len(tokens), argument, "tokens, a function or ")]
    positions = [position for position, token in enumerate(tokens) if token == item]
    if not positions:
        # A text that is not a token as it is written is found as in every other argument.
        return find_positions(tokens, item, argument)
    return positions


class Group(NamedTuple):
    """Positions that are one key.

    Attributes:
        name: The name of the key.
        positions: The positions, in ascending order.
    """

    name: str
    positions: list[int]


def check_groups(argument: str, groups: Any) -> list[Any] | dict[str, Any]:
    """Return groups as a list, or as a dict if they have names, whose items are texts or lists.

    A list contains positions (0 or more) and texts. The texts are found in a prompt by `read_groups`.

    Args:
        argument: The name of the argument, for errors.
        groups: The groups, each a text, a slice, or a list of positions and texts.

    Raises:
        TypeError: If a group or an item is none of these.
        ValueError: If a position is below 0 or in two groups, a slice has no start and stop, a group is
            empty, or there are none.
    """
    if isinstance(groups, Mapping):
        names = check_items(argument, list(groups), "names as text", least=1, kind=str)
        listed = list(groups.values())
    else:
        names, listed = None, check_items(argument, groups, "groups of positions", least=1)
    plain = [_check_group(argument, group) for group in listed]
    _require_disjoint(argument, [[each for each in group if isinstance(each, int)] for group in plain])
    return plain if names is None else dict(zip(names, plain, strict=True))


def _check_group(argument: str, group: Any) -> str | list[int | str]:
    expected = "a text, a slice, or a list of positions and texts"
    if isinstance(group, str):
        return group
    if isinstance(group, slice):
        # The length of the prompt is not known here, so both ends must be given.
        ends = "a slice with a start and a stop, both whole numbers"
        start, stop = (check_whole_number(argument, end, 0, what=ends) for end in (group.start, group.stop))
        group = range(start, stop, 1 if group.step is None else check_whole_number(argument, group.step, 1))
    items = check_items(argument, group, expected, least=1)
    return [each if isinstance(each, str) else check_whole_number(argument, each, 0) for each in items]


def _require_disjoint(argument: str, groups: Sequence[Sequence[int]]) -> None:
    positions = [position for group in groups for position in group]
    if len(set(positions)) != len(positions):
        raise ValueError(f"{argument}: expected each position in one group at most, got {list(groups)}")


def read_groups(
    tokens: Sequence[str], groups: Sequence[Any] | Mapping[str, Any], argument: str
) -> list[Group]:
    """Return the groups of one prompt. A group without a name has the text of its tokens.

    Args:
        tokens: The tokens of all positions.
        groups: The groups, as `check_groups` returns them.
        argument: The name of the argument, for errors.

    Raises:
        ValueError: If the prompt does not have a position, a text does not occur exactly once, or a position
            is in two groups.
    """
    has_names = isinstance(groups, Mapping)
    listed = list(groups.values()) if isinstance(groups, Mapping) else list(groups)
    outside = [each for group in listed for each in group if isinstance(each, int) and each >= len(tokens)]
    if outside:
        raise ValueError(f"{argument}: expected positions 0..{len(tokens) - 1}, got {outside}")
    found = [sorted(find_positions(tokens, group, argument)) for group in listed]
    _require_disjoint(argument, found)
    names = groups if has_names else [join_tokens([tokens[each] for each in group]) for group in found]
    return [Group(name, positions) for name, positions in zip(names, found, strict=True)]


def resolve_words(tokens: Sequence[str], groups: Words, argument: str) -> tuple[list[list[int]], list[str]]:
    """Return the positions and the names of words or named groups, for all positions.

    Args:
        tokens: The tokens of all positions.
        groups: The words as in `resolve_groups`, or a dict of named groups as in `check_groups`. A position
            in no named group is a word of its own.
        argument: The name of the argument, for errors.

    Raises:
        TypeError: As in these functions.
        ValueError: As in these functions.
    """
    if not isinstance(groups, Mapping):
        return resolve_groups(tokens, groups, argument)
    named = read_groups(tokens, check_groups(argument, groups), argument)
    covered = {position for group in named for position in group.positions}
    rest = [Group(token, [place]) for place, token in enumerate(tokens) if place not in covered]
    ordered = sorted([*named, *rest], key=lambda group: group.positions)
    return [group.positions for group in ordered], [group.name for group in ordered]


def _find_text(tokens: Sequence[str], text: str, argument: str = "spans") -> list[int]:
    """Return the positions of the neighboring tokens that spell a text.

    - A text is whole tokens, one or several: " Eiffel Tower". An argument for several positions takes all of
      them. An argument for one position takes the last (`find_query`).
    - White space and case matter only if the text occurs as it is written. So " Tower", "Tower" and "tower"
      all find the token " Tower", unless the prompt has a token "tower" too.
    - A text that occurs more than once is an error with the positions. More of the text around it makes it
      unique (" city of" for the second " of"), or the number of the position does.
    - A token that is written like the text comes first. So a token of a part of a character, `é[1/2]`, and a
      WordPiece token, `##s`, can be named.

    Args:
        tokens: The tokens of all positions.
        text: The text, one token or several.
        argument: The name of the argument, for errors.

    Raises:
        ValueError: If the text does not occur, occurs more than once, or does not start and end at the
            boundaries of tokens. The error says what to write.
    """
    if tokens.count(text) == 1:
        return [tokens.index(text)]
    pieces = spell(tokens)
    for form in _FORMS:
        wanted, texts = form(text), [form(piece) for _, piece in pieces]
        found = _find_pieces(texts, wanted) if wanted else []
        if len(found) == 1:
            first, last = found[0]
            return [position for positions, _ in pieces[first : last + 1] for position in positions]
        if found:
            starts = [pieces[first][0][0] for first, _ in found]
            raise ValueError(
                f"{argument}: expected a text that occurs once, got {text!r}, which starts at the positions "
                f"{shorten(starts)}; write more of the text around it, or give the position"
            )
    last_form = _FORMS[-1]
    if last_form(text) and last_form(text) in last_form("".join(piece for _, piece in pieces)):
        raise ValueError(
            f"{argument}: expected a text of whole tokens, got {text!r}, which starts or ends inside a token "
            f"of {_quote(tokens)}; write the whole tokens, or give their positions"
        )
    raise ValueError(
        f"{argument}: expected a text that the prompt contains, got {text!r}, which is not in "
        f"{_quote(tokens)}; {_suggest(tokens, text)}"
    )


def _find_pieces(texts: Sequence[str], wanted: str) -> list[tuple[int, int]]:
    """Return the first and the last of the neighboring texts that spell `wanted`, wherever they do."""
    found = []
    for first, text in enumerate(texts):
        # White space becomes an empty text, with which no span starts.
        spelled = ""
        for last in range(first, len(texts) if text else first):
            spelled += texts[last]
            if spelled == wanted:
                found.append((first, last))
                break
            if not wanted.startswith(spelled):
                break
    return found


def _suggest(tokens: Sequence[str], text: str) -> str:
    """Return what to do about a text that is not in the prompt: the most similar token, if there is one."""
    simple = {simplify(token): position for position, token in reversed(list(enumerate(tokens)))}
    close = difflib.get_close_matches(simplify(text), simple, 1)
    if not close:
        return "correct it, or give positions"
    position = simple[close[0]]
    return f"did you mean {tokens[position]!r} (position {position})?"


def _quote(tokens: Sequence[str]) -> str:
    """Return the tokens as a list for a message, of which only the first twelve are written."""
    return f"{list(tokens)}" if len(tokens) <= 12 else f"{str(list(tokens[:12]))[:-1]}, …]"
