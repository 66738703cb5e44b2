"""Make labels of tokens: visible whitespace, a limited length, and only as many as fit on an axis."""

from __future__ import annotations

import bisect
import math
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import regex

from lens_mix._classes.model_names import strip_path
from lens_mix.maps import MixingMap
from lens_mix.maps.characters import join_tokens, split_number
from lens_mix.maps.exchange import full_name

FONT = 7.0
NAME_FONT = 8.0
TITLE_FONT = 11.0
INK = "#333333"
QUIET = "#6f6f6f"
Style = Literal["screen", "paper"]
# In the style "paper", the width in inches of a column, and the size of the text there.
PAPER_WIDTH, PAPER_FONT = 3.3, 8.0
_LONGEST_PROMPT = 60  # the most characters of a prompt in a subtitle

# Decoded tokens contain whitespace itself. Raw tokens contain the marks of byte-level BPE (Ġ, Ċ, ĉ) and of
# SentencePiece (▁) instead.
_VISIBLE = str.maketrans(
    {" ": "·", "Ġ": "·", "▁": "·", "\n": "⏎", "Ċ": "⏎", "\r": "␍", "\t": "⇥", "ĉ": "⇥", "\xa0": "⍽"}
)

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


# Words of method names that are not written as ordinary words.
_SPELLED = {
    **{"alti": "ALTI", "gim": "GIM", "globenc": "GlobEnc", "decompx": "DecompX", "atb": "AtB", "ff": "FF"},
    **{"res": "Res", "ln": "LN", "attn": "Attn"},
}


def name_method(name: str) -> str:
    """Return the name of a method as a title: "value_zeroing" becomes "Value Zeroing".

    A name that is not made of lower-case words is returned unchanged.
    """
    if not regex.fullmatch(r"[a-z]+(_[a-z]+)*", name):
        return name
    return " ".join(_SPELLED.get(word, word.capitalize()) for word in name.split("_"))


def name_map(mixing_map: MixingMap) -> str:
    """Return the title of a map: its method, and the aggregation if there was one."""
    name, _, aggregation = full_name(mixing_map, "\n").partition("\n")
    return ", ".join(filter(None, (name_method(name), aggregation.replace("_", " "))))


def name_positions(text: str, mixing_map: MixingMap) -> str:
    """Return a text about tokens as one about patches or frames, if these are the map's positions."""
    if mixing_map.grid is None:
        return text
    noun = mixing_map.grid.noun
    plural = "patches" if noun == "patch" else "frames"
    return str(regex.sub(r"\btoken\b", noun, regex.sub(r"\btokens\b", plural, text)))


def name_model(provenance: Mapping[str, Any]) -> str:
    """Return the name of a map's model, never a path of this computer; "" if it is unknown.

    Args:
        provenance: `MixingMap.provenance`.
    """
    model = provenance.get("model")
    return strip_path(model) if isinstance(model, str) else ""


def quote(token: str) -> str:
    """Return a token in quotation marks, for a sentence.

    A token of a script that is written from right to left does not change the order of the words around it.
    """
    isolated = any(unicodedata.bidirectional(character) in ("R", "AL") for character in token)
    return f"\u2068{token!r}\u2069" if isolated else repr(token)


def make_row_visible(label: str) -> str:
    """Return a label of a row (`MixingMap.row_labels`) as visible characters, with spaces at its arrow."""
    return make_visible(label, 30).replace("·→·", " → ")


def make_subtitle(mixing_map: MixingMap, unit: str) -> str:
    """Return the model, the prompt and the unit, as far as the map's record contains them."""
    model, text = name_model(mixing_map.provenance), mixing_map.provenance.get("prompt")
    # The labels of patches and frames are not a text.
    has_text = model and mixing_map.grid is None
    prompt = text if isinstance(text, str) else join_tokens(mixing_map.tokens) if has_text else ""
    prompt = prompt and make_visible(prompt, _LONGEST_PROMPT).replace("·", " ").strip()
    return " · ".join(text for text in (model, f"“{prompt}”" if prompt else "", unit) if text)


def space_evenly(count: int, limit: int) -> list[int]:
    """Return at most `limit` of `count` positions, evenly spaced.

    The first position is one of them and, with a limit of 2 or more, also the last one.
    """
    if count <= limit:
        return list(range(count))
    if limit <= 1:
        return [0]
    step = math.ceil(count / limit)
    # The last position replaces a position that would be closer to it than one step.
    return [*range(0, count - step, step), count - 1]


def place_labels(count: int, limit: int, strongest: Sequence[int] = ()) -> list[int]:
    """Return the positions that get a label.

    If there are too many positions, they are taken from the strongest to the weakest, each if its distance to
    those before it is at least `count / limit`.

    Args:
        count: The number of positions.
        limit: The largest number of labels.
        strongest: All positions, the strongest first. Empty: the labels are evenly spaced.
    """
    if count <= limit or not strongest:
        return space_evenly(count, limit)
    chosen: list[int] = []
    for position in strongest:
        place = bisect.bisect(chosen, position)
        if all(abs(position - near) >= count / limit for near in chosen[max(place - 1, 0) : place + 1]):
            chosen.insert(place, position)
    return chosen


def count_labels(inches: float, points: float) -> int:
    """Return how many lines of a font of `points` fit on `inches`, at least 1."""
    return max(1, int(inches * 72 / (points * 1.3)))
