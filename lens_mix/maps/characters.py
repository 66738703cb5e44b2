"""Write and join the tokens of a character that the tokenizer has split.

A tokenizer that works on bytes may cut a character into tokens that are not text on their own. GPT-2, Llama 3
and Qwen do so, and SentencePiece does so for characters without a piece. Each such token is written as the
whole character, followed by the token's number. The two tokens of an é are `é[1/2]` and `é[2/2]`.
"""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Collection, Sequence

import regex

_NUMBERED = re.compile(r"(.+)(\[([0-9]{1,6})/([0-9]{1,6})\])", re.DOTALL)
# Python's error handler `surrogateescape` decodes a byte that is not valid UTF-8 to one of these.
_LONE_BYTE = re.compile("[\udc80-\udcff]")


def find_character_runs(tokens: Sequence[bytes], alone: Collection[int] = ()) -> list[list[int]]:
    """Return the smallest runs of neighboring tokens that start and end at a boundary between characters.

    A character is a grapheme cluster of Unicode: an emoji with its skin tone, a flag, a letter with its
    accents.

    Args:
        tokens: The bytes of each token.
        alone: The positions of tokens that must be runs of their own, such as special tokens.
    """
    ends = list(itertools.accumulate(map(len, tokens)))
    boundaries = {0}
    for start, stop in _split_at(len(tokens), alone):
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


def _split_at(count: int, alone: Collection[int]) -> list[tuple[int, int]]:
    """Return (start, stop) of each position in `alone` and of the spans between them, in order."""
    cuts = sorted({0, count, *alone, *(position + 1 for position in alone)})
    return list(itertools.pairwise(cuts))


def spell_tokens(tokens: Sequence[str | bytes], alone: Collection[int] = ()) -> list[str]:
    """Return one string per token.

    Tokens that share a character are written as the text that they spell together, with a number. A byte that
    belongs to no character is written like `<0xE2>`.

    Args:
        tokens: The tokens. A token that is not text on its own is given as `bytes`.
        alone: The positions of tokens that share no character with their neighbors.
    """
    if all(isinstance(token, str) for token in tokens):
        return [str(token) for token in tokens]
    data = [token if isinstance(token, bytes) else token.encode("utf-8", "surrogatepass") for token in tokens]
    written: list[str] = []
    for run in find_character_runs(data, alone):
        run_tokens = [tokens[position] for position in run]
        text = b"".join(data[position] for position in run).decode("utf-8", "surrogateescape")
        text = _LONE_BYTE.sub(lambda byte: f"<0x{ord(byte[0]) - 0xDC00:02X}>", text)
        if not any(isinstance(token, bytes) for token in run_tokens):
            written += map(str, run_tokens)
        elif len(run) == 1:
            written.append(text)
        else:
            written += (f"{text}[{number}/{len(run)}]" for number in range(1, len(run) + 1))
    return written


def join_characters(tokens: Sequence[str]) -> list[tuple[list[int], str]]:
    """Return the positions and the text of each piece: all tokens of a split character, or one other token.

    If a token of a split character is missing, because it was dropped, each of the others is its own piece.
    """
    wholes: list[tuple[list[int], str]] = []
    position = 0
    while position < len(tokens):
        text, count = _read_from(tokens, position)
        wholes.append((list(range(position, position + count)), text))
        position += count
    return wholes


def _read_from(tokens: Sequence[str], position: int) -> tuple[str, int]:
    """Return the text of the piece that starts at a position, and the number of its tokens."""
    match = _NUMBERED.fullmatch(tokens[position])
    if match is not None and match[3] == "1":
        text, count = match[1], int(match[4])
        following = tokens[position : position + count]
        expected = (f"{text}[{number}/{count}]" for number in itertools.count(1))
        if len(following) == count > 0 and all(map(operator.eq, following, expected)):
            return text, count
    return tokens[position], 1


def split_number(token: str) -> tuple[str, str]:
    """Return a token's text and its number, such as `[1/2]`; the number is "" if it has none."""
    match = _NUMBERED.fullmatch(token)
    return (token, "") if match is None else (match[1], match[2])


def join_tokens(tokens: Sequence[str]) -> str:
    """Return the text that neighboring tokens spell."""
    return "".join(text for _, text in join_characters(tokens))
