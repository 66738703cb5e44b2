"""Make labels of tokens: visible whitespace, a limited length, and only as many as fit on an axis."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import regex

from lens_mix.maps.characters import split_number

FONT = 7.0
NAME_FONT = 8.0
TITLE_FONT = 11.0
INK = "#333333"
QUIET = "#8a8a8a"

# Decoded tokens contain whitespace itself. Raw tokens contain the marks of byte-level BPE (Ġ, Ċ, ĉ) and of
# SentencePiece (▁) instead.
_VISIBLE = str.maketrans(
    {" ": "·", "Ġ": "·", "▁": "·", "\n": "⏎", "Ċ": "⏎", "\r": "␍", "\t": "⇥", "ĉ": "⇥", "\xa0": "⍽"}
)

# Names of folders that do not name a model: a hash, and those that tools give to every model's folder.
_MEANS_NOTHING = regex.compile(r"[0-9a-f]{16,}|snapshots|models?|weights|main|checkpoints?|[A-Za-z]:")

# The character that joins two emoji, which are then drawn as one.
_JOINER = regex.compile(r"(?<=.)\u200d(?=\p{Extended_Pictographic})")


def make_visible(token: str, longest: int = 16) -> str:
    """Return the token as one line of visible characters, cut after `longest` of them.

    A space becomes ·, a line end ⏎ and a tab ⇥; other invisible characters become their escape sequence. The
    number of a token that is a piece of a character (`é[1/2]`) is never cut.
    """
    text, number = split_number(token.translate(_VISIBLE))
    joiners = {found.start() for found in _JOINER.finditer(text)}
    shown = "".join(
        character
        if character.isprintable() or index in joiners
        else character.encode("unicode_escape").decode("ascii")
        for index, character in enumerate(text)
    )
    return ((shown if len(shown) <= longest else shown[: longest - 1] + "…") or "∅") + number


def name_model(provenance: Mapping[str, Any]) -> str:
    """Return the name of a map's model, never a path of this computer; "" if it is unknown.

    A folder of the Hugging Face cache (`models--org--name/snapshots/…`) becomes `org/name`, and any other
    folder its own name, or the nearest folder above it that has a meaningful one.

    Args:
        provenance: `MixingMap.provenance`.
    """
    given = provenance.get("model")
    name = given if isinstance(given, str) else ""
    folders = [folder for folder in regex.split(r"[\\/]+", name) if folder not in ("", ".", "..", "~")]
    cached = [folder for folder in folders if folder.startswith("models--")]
    if cached:
        return "/".join(cached[-1].split("--")[1:])
    if len(folders) <= 2 and regex.match(r"[\w.-]+(/[\w.-]+)?$", name) and name[0] != ".":
        return name
    meaningful = [folder for folder in folders if not _MEANS_NOTHING.fullmatch(folder)]
    return (meaningful or folders or [""])[-1]


def make_row_visible(label: str) -> str:
    """Return a label of a row (`MixingMap.row_labels`) as visible characters, with spaces at its arrow."""
    return make_visible(label, 30).replace("·→·", " → ")


def _space_evenly(count: int, limit: int) -> list[int]:
    """Return at most `limit` of `count` positions, evenly spaced.

    The first position is one of them and, with a limit of 2 or more, also the last one.
    """
    if limit <= 1:
        return [0]
    step = math.ceil(count / limit)
    # The last position replaces a position that would be closer to it than one step.
    return [*range(0, count - step, step), count - 1]


def place_labels(count: int, limit: int, strongest: Sequence[int] = ()) -> list[tuple[int, float]]:
    """Return the positions that get a label, each with the place of its label.

    The distance of two labels is at least `count / limit`. If there are too many positions, the strongest get
    labels first (at most half of the labels, at least one), which are moved if two of them are neighbours.
    The other labels are spread over the remaining places.

    Args:
        count: The number of positions.
        limit: The largest number of labels.
        strongest: The positions to label first, in this order.
    """
    if count <= limit:
        return [(position, float(position)) for position in range(count)]
    gap = count / limit
    chosen = sorted(strongest[: max(1, limit // 2)])
    places = list(itertools.accumulate(map(float, chosen), lambda left, place: max(place, left + gap)))
    end = count - 1.0
    for index in reversed(range(len(places))):
        places[index] = end = max(min(places[index], end), 0.0)
        end -= gap
    placed = list(zip(chosen, places, strict=True))
    others = [
        (position, float(position))
        for position in _space_evenly(count, limit)
        if all(abs(position - place) >= gap for place in places)
    ]
    return sorted([*placed, *others], key=lambda label: label[1])


def count_labels(inches: float, points: float) -> int:
    """Return how many lines of a font of `points` fit on `inches`, at least 1."""
    return max(1, int(inches * 72 / (points * 1.3)))
