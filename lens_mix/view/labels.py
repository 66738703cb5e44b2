"""Tokens as axis labels: visible whitespace, bounded length, no more of them than there is room for."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import regex

from lens_mix.maps.characters import without_number

FONT = 7.0
NAME_FONT = 8.0
TITLE_FONT = 11.0
INK = "#333333"
QUIET = "#8a8a8a"

# Decoded tokens hold the characters themselves, raw ones the marks of byte-level BPE (Ġ, Ċ, ĉ) and of
# SentencePiece (▁).
_VISIBLE = str.maketrans(
    {" ": "·", "Ġ": "·", "▁": "·", "\n": "⏎", "Ċ": "⏎", "\r": "␍", "\t": "⇥", "ĉ": "⇥", "\xa0": "⍽"}
)

# What joins two emoji that are drawn as one.
_JOINER = regex.compile(r"(?<=.)\u200d(?=\p{Extended_Pictographic})")


def visible_token(token: str, longest: int = 16) -> str:
    """The token as one line of visible characters, cut after `longest` of them.

    Spaces become ·, line ends ⏎, tabs ⇥; other characters that print nothing become their escape. The number
    of a token that is a part of a character (`é[1/2]`) is never cut.
    """
    text, number = without_number(token.translate(_VISIBLE))
    joiners = {found.start() for found in _JOINER.finditer(text)}
    shown = "".join(
        character
        if character.isprintable() or place in joiners
        else character.encode("unicode_escape").decode("ascii")
        for place, character in enumerate(text)
    )
    return ((shown if len(shown) <= longest else shown[: longest - 1] + "…") or "∅") + number


def _shown_positions(count: int, limit: int) -> list[int]:
    """At most `limit` of `count` positions, evenly spaced; the first and, with room for two, the last are in.

    Both are 1 or more.
    """
    if limit <= 1:
        return [0]
    step = math.ceil(count / limit)
    # The last label takes the place of a neighbour that would stand closer than a step.
    return [*range(0, count - step, step), count - 1]


def label_places(count: int, limit: int, strongest: Sequence[int] = ()) -> list[tuple[int, float]]:
    """Which of `count` positions get a label, and where it stands: labels keep `count / limit` apart.

    Where there is no room for all, the strongest have theirs whatever happens (as many as half of the labels,
    at least one), moved aside where two of them are neighbours; the others are spread over the rest.
    """
    if count <= limit:
        return [(position, float(position)) for position in range(count)]
    gap = count / limit
    chosen = sorted(strongest[: max(1, limit // 2)])
    places = list(itertools.accumulate(map(float, chosen), lambda left, place: max(place, left + gap)))
    end = count - 1.0
    for left in reversed(range(len(places))):
        places[left] = end = max(min(places[left], end), 0.0)
        end -= gap
    placed = list(zip(chosen, places, strict=True))
    rest = [(p, float(p)) for p in _shown_positions(count, limit) if all(abs(p - at) >= gap for at in places)]
    return sorted([*placed, *rest], key=lambda each: each[1])


def labels_that_fit(inches: float, points: float) -> int:
    """How many labels of a font of `points` fit on `inches`, across their reading direction (at least 1)."""
    return max(1, int(inches * 72 / (points * 1.3)))
