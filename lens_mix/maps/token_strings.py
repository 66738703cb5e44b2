"""Convert the tokens of a tokenizer to text, one string per token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lens_mix.maps.characters import spell_tokens

# Byte-level tokenizers write each byte of a token as one character. A byte that is a visible character of
# Latin-1 is written as this character, and the 68 others as U+0100, U+0101 and so on. (ByT5 writes all 256
# bytes as their characters in Latin-1.)
_VISIBLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_INVISIBLE = [byte for byte in range(256) if byte not in set(_VISIBLE)]
_BYTES = {chr(byte): byte for byte in range(256)} | {chr(256 + i): byte for i, byte in enumerate(_INVISIBLE)}


def strings_of(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Return one string per token of a tokenizer, with its leading space if it has one.

    If several tokens make one character, each has the whole character and a number, `é[1/2]`
    (`lens_mix.maps.characters`).
    """
    ids = list(ids)
    pieces = tokenizer.convert_ids_to_tokens(ids)
    special = set(getattr(tokenizer, "all_special_ids", ()))
    read = [
        piece
        if token in special and isinstance(piece, str) and "▁" in piece
        else _text_or_bytes(tokenizer, token, piece)
        for token, piece in zip(ids, pieces, strict=True)
    ]
    return spell_tokens(read, [position for position, token in enumerate(ids) if token in special])


def _text_or_bytes(tokenizer: Any, token: int, piece: object) -> str | bytes:
    """Return the text of a token, or its bytes if these are not text on their own."""
    # SentencePiece drops the leading space when it decodes a single token.
    if isinstance(piece, str) and "▁" in piece:
        return piece.replace("▁", " ")
    text: str = tokenizer.decode([token], clean_up_tokenization_spaces=False)
    if text and "\ufffd" not in text:
        return text
    data = _bytes_of(piece)
    # The bytes are correct if the tokenizer decodes the same text. It replaces bytes that are not text, or
    # (ByT5) drops them. A replacement character may also be what the bytes spell.
    if data is None or data.decode("utf-8", "ignore").replace("\ufffd", "") != text.replace("\ufffd", ""):
        return text
    return data


def _bytes_of(piece: object) -> bytes | None:
    """Return the bytes of a vocabulary's entry; None if the entry is not written in bytes."""
    if isinstance(piece, bytes):
        return piece
    if not isinstance(piece, str):
        return None
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes.fromhex(piece[3:5])
    numbers = [_BYTES.get(character) for character in piece]
    return None if None in numbers else bytes(number for number in numbers if number is not None)
