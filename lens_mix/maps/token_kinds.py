"""Classify tokens into the kinds that the papers distinguish: special, punctuation, [MASK], other."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable

from lens_mix.maps.characters import split_number

TokenKind = Callable[[str], str]

# The marks that tokenizers write for the space before a word, and for a piece that continues a word.
_MARKS = re.compile(r"^(##|[\u0120\u2581\u010a\s])+|[\s]+$")
_SPECIAL = re.compile(r"^(\[[A-Z]+\d*\]|<\|?[\w/ -]+\|?>|<s>|</s>)$")


def token_kind(token: str) -> str:
    """Return "mask", "special", "punctuation" or "other", judged by the token's text alone.

    Args:
        token: The token as the tokenizer writes it; marks of spaces and of word pieces are ignored.
    """
    if token.strip().lower() in ("[mask]", "<mask>"):
        return "mask"
    if _SPECIAL.match(token.strip()):
        return "special"
    text = _MARKS.sub("", split_number(token)[0])
    if text and all(unicodedata.category(letter)[0] in "PS" for letter in text):
        return "punctuation"
    return "other"
