"""Test the offsets of written tokens against their bytes, for characters that tokens cut."""

from __future__ import annotations

import functools
import itertools

import hypothesis
import pytest
import torch
from hypothesis import strategies

import lens_mix as lm
from lens_mix.maps.token_strings import strings_of
from lens_mix.traces.reading import _place_written
from tests.traces.readers import KINDS, reader, tokenizer_of

pytestmark = pytest.mark.filterwarnings("ignore")

# Bytes of characters of one to four bytes, of U+FFFD, and bytes that no character has.
PIECES = ["a", ".", " ", "é", "東", "京", "😀", "\ufffd", "e\u0301"]
BYTES = [
    *(piece.encode() for piece in PIECES),
    b"\xf0",
    b"\xf0\x9f",
    b"\xe6\x9d",
    b"\x80",
    b"\xff",
    b"\xef\xbf",
]


@functools.cache
def tokenizer(kind):
    return tokenizer_of(kind)


def tokens_of(kind, data):
    """Return one token per byte."""
    if kind == "byte-level":
        from lens_mix.maps.token_strings import _BYTES

        # A byte has one character here; ByT5 writes some in another way.
        visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        names = {
            byte: character
            for character, byte in _BYTES.items()
            if (byte in visible and ord(character) == byte) or ord(character) > 255
        }
        return tokenizer(kind).convert_tokens_to_ids([names[byte] for byte in data])
    names = [f"<0x{byte:02X}>" if byte > 0x7F else chr(byte).replace(" ", "▁") for byte in data]
    return tokenizer(kind).convert_tokens_to_ids(names)


def expected_offsets(data, text):
    """Return the characters of each byte, from the text of the bytes alone.

    Each byte of a complete character is on the character. The others are on the replacement characters in
    their place: one for each byte, or one for several.
    """
    runs = []
    for is_lone, group in itertools.groupby(
        data.decode("utf-8", "surrogateescape"), lambda character: "\udc80" <= character <= "\udcff"
    ):
        listed = list(group)
        runs += [(len(listed), None)] if is_lone else [(len(one.encode()), one) for one in listed]
    place, found = 0, []
    for count, character in runs:
        if character is not None:
            found += [(place, place + 1)] * count
            place += 1
        else:
            # The bytes of broken characters, in the order of their replacement characters.
            start = place
            while place < len(text) and text[place] == "\ufffd" and place - start < count:
                place += 1
            found += [(start, place)] * count
    return found


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(strategies.lists(strategies.sampled_from(BYTES), min_size=1, max_size=7))
@pytest.mark.parametrize("before", ["", "a", "東"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_token_is_where_its_bytes_are(kind, before, pieces):
    data = b"".join(pieces)
    # Llama 2 writes a space before a text, and its decoder drops it.
    hypothesis.assume(before or kind != "metaspace" or data[:1] != b" ")
    prompt = torch.tensor(tokens_of(kind, before.encode()), dtype=torch.long)
    placed = _place_written(tokenizer(kind), prompt, torch.tensor(tokens_of(kind, data), dtype=torch.long))
    offsets = placed.offsets
    assert len(offsets) == len(data)
    # They cover the text in order.
    assert offsets[0][0] == 0
    assert max(stop for _, stop in offsets) == len(placed.text)
    assert all(start < stop for start, stop in offsets)
    for (start, stop), (following, last) in itertools.pairwise(offsets):
        assert start <= following <= stop
        assert stop <= last
    # Characters before and after broken ones are on their own bytes.
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return
    assert placed.text == text
    assert offsets == expected_offsets(data, text)


@pytest.mark.parametrize("kind", KINDS)
def test_broken_characters_among_whole_ones(kind):
    for data in (
        b"\xf0\x9fa.",
        "東".encode() + b"\xf0.",
        b"a\xe6\x9d\xe6a",
        b"\xef\xbfa",
    ):
        placed = _place_written(
            tokenizer(kind), torch.tensor([], dtype=torch.long), torch.tensor(tokens_of(kind, data))
        )
        for index, byte in enumerate(data):
            start, stop = placed.offsets[index]
            if byte < 0x80:
                assert placed.text[start:stop] == chr(byte), (data, index, placed)
            elif placed.text.count("\ufffd") == len(data) - sum(byte < 0x80 for byte in data):
                assert (start, stop) == (index, index + 1), (data, placed)
            else:
                assert not set(placed.text[start:stop]) & set("a."), (data, index, placed)


@pytest.mark.parametrize("kind", KINDS)
def test_a_replacement_character_that_was_written(kind):
    model = reader(kind)
    by_text = lm.trace(model, "The company", answer=" is \ufffd. Yes \ufffd\ufffd 😀\ufffd.")
    by_tokens = lm.trace(model, "The company", answer=by_text.reading.ids[by_text.n_prompt :])
    assert by_tokens.text == by_text.text
    for part in (".", ". Yes", "😀", "😀\ufffd", "Yes \ufffd"):
        if by_text.text.count(part) == 1:
            assert by_tokens[part].positions == by_text[part].positions, part
    assert [span.text for span in by_tokens.spans] == [span.text for span in by_text.spans]


def test_a_token_of_a_replacement_character_and_half_of_another():
    own = tokenizer("byte-level")
    ids = tokens_of("byte-level", "\ufffd😀".encode())
    strings = strings_of(own, ids)
    assert strings[:3] == [f"\ufffd[{number}/3]" for number in (1, 2, 3)]
    assert strings[3:] == [f"😀[{number}/4]" for number in (1, 2, 3, 4)]
