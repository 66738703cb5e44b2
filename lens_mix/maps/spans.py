"""Find groups of positions that are given as text, as positions or as slices."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from lens_mix.arguments import check_items
from lens_mix.maps.positions import as_positions, shorten
from lens_mix.maps.words import simplify, spell

# One position (negative: from the end), a text of neighbouring tokens, a slice, or several of these.
Span = int | str | slice | Iterable[int | str | slice]

_EXPECTED = "a position, a text of the prompt, a slice, or several of these"
# A text is compared as it is; if it is not found, without white space; and then also without case.
_FORMS: tuple[Callable[[str], str], ...] = (str, lambda text: re.sub(r"\s", "", text), simplify)


def find_positions(tokens: Sequence[str], span: Span, argument: str = "spans") -> list[int]:
    """Return the positions of a span in ascending order.

    Args:
        tokens: The tokens of all positions.
        span: A position (negative: from the end), a text as in `_find_text`, a slice, or several of these.
        argument: The name of the argument, for errors.

    Raises:
        TypeError: If `span` is none of these.
        ValueError: If a position does not exist or occurs twice, there are none, or a text does not occur
            exactly once.
    """
    items = [span] if isinstance(span, slice) else check_items(argument, span, _EXPECTED, least=1, alone=True)
    found: list[int] = []
    for item in items:
        if isinstance(item, str):
            found += _find_text(tokens, item, argument)
        else:
            found += as_positions(item, len(tokens), argument)
    # A position that two items name would count twice.
    return sorted(as_positions(found, len(tokens), argument))


def _find_text(tokens: Sequence[str], text: str, argument: str = "spans") -> list[int]:
    """Return the positions of the neighbouring tokens that spell a text.

    White space and case matter only if the text occurs as it is written. So " Tower", "Tower" and "tower" all
    find the token " Tower", unless the prompt has a token "tower" too.

    Args:
        tokens: The tokens of all positions.
        text: The text, one token or several.
        argument: The name of the argument, for errors.

    Raises:
        ValueError: If the text does not occur, occurs more than once, or does not start and end at the
            boundaries of tokens. The error says what to write.
    """
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
        f"{_quote(tokens)}; correct it, or give positions"
    )


def _find_pieces(texts: Sequence[str], wanted: str) -> list[tuple[int, int]]:
    """Return the first and the last of the neighbouring texts that spell `wanted`, wherever they do."""
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


def _quote(tokens: Sequence[str]) -> str:
    """Return the tokens as a list for a message, of which only the first twelve are written."""
    return f"{list(tokens)}" if len(tokens) <= 12 else f"{str(list(tokens[:12]))[:-1]}, …]"
