"""Test that texts, positions and slices find the positions of a span."""

from __future__ import annotations

import pytest

from lens_mix.maps.spans import Group, _find_text, check_groups, find_positions, find_query, read_groups

TOKENS = ["The", " E", "iff", "el", " Tower", " is", " in", " the", " city", ",", " is", "n't", "\n", " it"]


@pytest.mark.parametrize(
    ("span", "expected"),
    [
        ("The", [0]),
        (" the", [7]),
        ("the", [7]),  # "The" differs by case, which is ignored only if nothing else is found.
        ("Eiff", [1, 2]),
        ("Eiffel Tower", [1, 2, 3, 4]),
        (" Eiffel Tower", [1, 2, 3, 4]),
        ("eiffel tower", [1, 2, 3, 4]),
        ("isn't", [10, 11]),
        ("it", [13]),
        (" city, is", [8, 9, 10]),
        (4, [4]),
        (-1, [13]),
        (slice(1, 4), [1, 2, 3]),
        (slice(-2, None), [12, 13]),
        ([4, 1], [4, 1]),
        (["Tower", 0, slice(9, 11)], [4, 0, 9, 10]),
        (range(2), [0, 1]),
    ],
)
def test_spans(span, expected):
    assert find_positions(TOKENS, span) == expected


@pytest.mark.parametrize(
    ("tokens", "text", "expected"),
    [
        (["[CLS]", "the", "ei", "##ff", "##el", "[SEP]"], "Eiffel", [2, 3, 4]),
        (["[CLS]", "the", "ei", "##ff", "##el", "[SEP]"], "the eiffel", [1, 2, 3, 4]),
        (["[CLS]", "don", "'", "t", "[SEP]"], "don't", [1, 2, 3]),
        (["▁The", "▁cat", "s"], "The cats", [0, 1, 2]),
        (["The", "Ġcat", "s", "Ċ"], " cats", [1, 2]),
        (["caf", "é[1/2]", "é[2/2]", " au"], "café", [0, 1, 2]),
        (["w3", "w4"], "w4", [1]),
        # A token that is written like the text comes first.
        (["caf", "é[1/2]", "é[2/2]", " au"], "é[2/2]", [2]),
        (["[CLS]", "cat", "##s", "s"], "##s", [2]),
        (["1", "2", "12"], "12", [2]),
    ],
)
def test_texts_of_other_tokenizers(tokens, text, expected):
    assert _find_text(tokens, text) == expected


@pytest.mark.parametrize(
    ("span", "error", "message"),
    [
        ("is", ValueError, r"keys: expected a text that occurs once, got 'is', .* \[5, 10\]; write more of"),
        ("at", ValueError, r"keys: expected a text that the prompt contains, got 'at', .*give positions"),
        ("Towers", ValueError, r"which is not in .*; did you mean ' Tower' \(position 4\)\?"),
        (
            "iffe",
            ValueError,
            r"keys: expected a text of whole tokens, got 'iffe', which starts or ends",
        ),
        (" ", ValueError, "expected a text that the prompt contains"),
        ("", ValueError, "expected a text that the prompt contains"),
        (14, ValueError, "keys: expected a position from -14 to 13, got 14"),
        ([0, "The"], ValueError, "each once"),
        ([], ValueError, "expected at least one"),
        (slice(3, 3), ValueError, "at least one position"),
        (1.5, TypeError, "keys: expected a position"),
        (None, TypeError, "keys: expected a position"),
    ],
)
def test_spans_that_are_not_there(span, error, message):
    with pytest.raises(error, match=message):
        find_positions(TOKENS, span, "keys")


@pytest.mark.parametrize(
    ("query", "expected"),
    [("The", 0), (" Tower", 4), ("Eiffel Tower", 4), ("Eiffel", 3), (", is", 10), (4, 4), (-1, 13)],
)
def test_a_query_is_the_last_token_of_its_text(query, expected):
    assert find_query(TOKENS, query) == expected


@pytest.mark.parametrize(
    ("query", "error", "message"),
    [
        (
            " is",
            ValueError,
            r"query: expected a text that occurs once, got ' is', .* \[5, 10\]; write more of",
        ),
        ("Paris", ValueError, "query: expected a text that the prompt contains, got 'Paris'"),
        (14, ValueError, "query: expected a position from -14 to 13, got 14"),
        ([4], TypeError, "query: expected a position"),
    ],
)
def test_queries_that_are_not_there(query, error, message):
    with pytest.raises(error, match=message):
        find_query(TOKENS, query)


@pytest.mark.parametrize(
    ("groups", "plain", "read"),
    [
        ([(0, 1), [4]], [[0, 1], [4]], [("The E", [0, 1]), (" Tower", [4])]),
        ([slice(1, 4)], [[1, 2, 3]], [(" Eiffel", [1, 2, 3])]),
        (["Eiffel Tower"], ["Eiffel Tower"], [(" Eiffel Tower", [1, 2, 3, 4])]),
        ({"place": "Tower", "rest": (5, " city")}, {"place": "Tower", "rest": [5, " city"]}, None),
        ([range(0, 4, 2)], [[0, 2]], [("Theiff", [0, 2])]),
    ],
)
def test_groups(groups, plain, read):
    assert check_groups("spans", groups) == plain
    assert check_groups("spans", plain) == plain
    read = [("place", [4]), ("rest", [5, 8])] if read is None else read
    assert read_groups(TOKENS, plain, "spans") == [Group(*group) for group in read]


@pytest.mark.parametrize(
    ("groups", "error", "message"),
    [
        ([], ValueError, "spans: expected at least one"),
        ({}, ValueError, "spans: expected at least one"),
        ("The", TypeError, "spans: expected groups of positions, got 'The'"),
        ([3], TypeError, "spans: expected a text, a slice, or a list of positions and texts, got 3"),
        ([[]], ValueError, "at least one"),
        ([[0], [0]], ValueError, "each position in one group at most"),
        ([[-1]], ValueError, "0 or more"),
        ([slice(None, 3)], TypeError, "spans: expected a slice with a start and a stop, both whole numbers"),
        ({0: [1]}, TypeError, "names as text"),
    ],
)
def test_groups_that_can_not_be(groups, error, message):
    with pytest.raises(error, match=message):
        check_groups("spans", groups)


def test_a_text_and_a_position_may_not_meet():
    with pytest.raises(ValueError, match="each position in one group at most"):
        read_groups(TOKENS, ["Eiffel Tower", [4]], "spans")
