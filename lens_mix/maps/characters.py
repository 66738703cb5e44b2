"""Characters that are split over tokens: how such tokens are written, and how they are joined again.

Tokenizers that work on bytes (GPT-2, Llama 3, Qwen; SentencePiece for what it has no piece for) may cut a
character into tokens that are not text on their own. Each of these is written as the text that they spell
together, followed by its number among them: the two tokens of an é are `é[1/2]` and `é[2/2]`.
"""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Collection, Sequence

import regex

_NUMBERED = re.compile(r"(.+)(\[([0-9]{1,6})/([0-9]{1,6})\])", re.DOTALL)
# A byte that is not UTF-8 at its place, as `surrogateescape` decodes it.
_LONE_BYTE = re.compile("[\udc80-\udcff]")


def character_runs(tokens: Sequence[bytes], alone: Collection[int] = ()) -> list[list[int]]:
    """Return the smallest runs of neighbouring tokens that start and end between two characters.

    A character is what a reader takes for one (a grapheme cluster of Unicode): an emoji with its skin tone, a
    flag, a letter with its accents. Tokens at the positions `alone` are runs of their own.
    """
    ends = list(itertools.accumulate(map(len, tokens)))
    boundaries = {0}
    for start, stop in _stretches(len(tokens), alone):
        text = b"".join(tokens[start:stop]).decode("utf-8", "surrogateescape")
        sizes = (
            len(character.encode("utf-8", "surrogateescape")) for character in regex.findall(r"\X", text)
        )
        boundaries.update(itertools.accumulate(sizes, initial=ends[start - 1] if start else 0))
    runs: list[list[int]] = []
    for position in range(len(tokens)):
        if position == 0 or ends[position - 1] in boundaries:
            runs.append([])
        runs[-1].append(position)
    return runs


def _stretches(count: int, alone: Collection[int]) -> list[tuple[int, int]]:
    """Return the spans between the positions `alone`, and these positions as spans."""
    cuts = sorted({0, count, *alone, *(position + 1 for position in alone)})
    return list(itertools.pairwise(cuts))


def spell(tokens: Sequence[str | bytes], alone: Collection[int] = ()) -> list[str]:
    """Return each token as text; `bytes` are tokens that are not text on their own.

    Tokens that share a character are written as the text that they spell together, numbered; a byte that
    belongs to no character as `<0xE2>`.
    """
    if all(isinstance(token, str) for token in tokens):
        return [str(token) for token in tokens]
    data = [token if isinstance(token, bytes) else token.encode("utf-8", "surrogatepass") for token in tokens]
    written: list[str] = []
    for run in character_runs(data, alone):
        parts = [tokens[position] for position in run]
        text = b"".join(data[position] for position in run).decode("utf-8", "surrogateescape")
        text = _LONE_BYTE.sub(lambda byte: f"<0x{ord(byte[0]) - 0xDC00:02X}>", text)
        if not any(isinstance(part, bytes) for part in parts):
            written += map(str, parts)
        elif len(run) == 1:
            written.append(text)
        else:
            written += (f"{text}[{number}/{len(run)}]" for number in range(1, len(run) + 1))
    return written


def whole_texts(tokens: Sequence[str]) -> list[tuple[list[int], str]]:
    """Return the positions and the text of each whole: the tokens of a split character, or one other token.

    If a token of a character is missing (some were dropped), its other tokens stay as they are written.
    """
    wholes: list[tuple[list[int], str]] = []
    position = 0
    while position < len(tokens):
        text, count = _numbered_from(tokens, position)
        wholes.append((list(range(position, position + count)), text))
        position += count
    return wholes


def _numbered_from(tokens: Sequence[str], position: int) -> tuple[str, int]:
    """Return the text that starts at a token, and how many tokens it takes."""
    found = _NUMBERED.fullmatch(tokens[position])
    if found is not None and found[3] == "1":
        text, count = found[1], int(found[4])
        following = tokens[position : position + count]
        expected = (f"{text}[{number}/{count}]" for number in itertools.count(1))
        if len(following) == count > 0 and all(map(operator.eq, following, expected)):
            return text, count
    return tokens[position], 1


def without_number(token: str) -> tuple[str, str]:
    """Return a token's text, and the number `[1/2]` behind it if it has one."""
    found = _NUMBERED.fullmatch(token)
    return (token, "") if found is None else (found[1], found[2])


def joined(tokens: Sequence[str]) -> str:
    """Return the text that neighbouring tokens spell."""
    return "".join(text for _, text in whole_texts(tokens))
