"""Test word alignments against those that were read by hand."""

from __future__ import annotations

import pytest
import torch

from lens_mix.experiments.alignment import align, align_words, diagonal
from lens_mix.maps import MixingMap

# The keys are a prompt, word 0 in two tokens, word 1, and the end of the sentence. The rows are start, y1, y2
# (two tokens) and y3.
SCORES = torch.tensor(
    [
        [0.50, 0.05, 0.05, 0.25, 0.15],  # start, which predicts y1
        [0.10, 0.30, 0.30, 0.35, 0.05],  # y1, which predicts y2's first token
        [0.10, 0.05, 0.05, 0.65, 0.15],  # y2's first token, which predicts the second
        [0.00, 0.20, 0.20, 0.10, 0.50],  # y2's second token, which predicts y3
        [0.00, 0.0625, 0.0625, 0.125, 0.75],  # y3, which predicts the end
    ]
)
SOURCE, TARGET = [[1, 2], [3]], [[1], [2, 3], [4]]


def cross_map(scores: torch.Tensor = SCORES[None], **fields: object) -> MixingMap:
    tokens, keys = ["<s>", "▁a", "▁b", "c", "▁d"], ["prompt", "▁A", "B", "▁C", "</s>"]
    return MixingMap(scores=scores, tokens=tokens, key_tokens=keys, method="attention", **fields)


@pytest.mark.parametrize(
    ("rows", "null_keys", "links"),
    [
        # y1: summed tokens .10 < .25. y2: the mean of .60 and .10 is below that of .35 and .65. y3: .40 >
        # .10.
        ("AWO", (), {(1, 0), (1, 1), (0, 2)}),
        # y1: .60 > .35. y2: the mean of .10 and .40 is below that of .65 and .10. y3: a tie, so the first
        # word.
        ("AWI", (), {(0, 0), (1, 1), (0, 2)}),
        # The end of the sentence has the highest score for y3.
        ("AWO", [4], {(1, 0), (1, 1)}),
        ("AWI", [4], {(0, 0), (1, 1)}),
        # In the row that predicts y1, the prompt has the highest score too.
        ("AWO", [4, 0], {(1, 1)}),
    ],
)
def test_links_by_hand(rows: str, null_keys: list, links: set) -> None:
    assert align(cross_map(), SOURCE, TARGET, rows=rows, null_keys=null_keys) == links


def test_words_are_texts() -> None:
    by_text = align(cross_map(), ["A B", "C"], ["a", "bc", [4]], rows="AWI", null_keys=[4])
    assert by_text == align(cross_map(), SOURCE, TARGET, rows="AWI", null_keys=[4])
    with pytest.raises(ValueError, match="source_words: expected a text that the prompt contains, got 'X'"):
        align(cross_map(), ["X"], TARGET)
    with pytest.raises(ValueError, match=r"target_words: expected a text .* got 'X'"):
        align(cross_map(), SOURCE, ["X"])
    with pytest.raises(TypeError, match="source_words: expected a text or a list of positions per word"):
        align(cross_map(), "A B", TARGET)


def test_rows_that_were_asked_for_are_found_by_their_positions() -> None:
    some = cross_map(SCORES[None, [3, 0]], queries=[3, 0])
    assert align(some, SOURCE, [[1], [4]]) == {(1, 0), (0, 1)}
    with pytest.raises(ValueError, match=r"target_words: .* rows the map has, got none for \[1, 2\]"):
        align(some, SOURCE, TARGET)


def test_a_layer_and_a_head_are_chosen() -> None:
    flipped = SCORES.clone()
    flipped[:, [1, 3]] = SCORES[:, [3, 1]]
    stack = torch.stack([torch.stack([SCORES, 0 * SCORES]), torch.stack([flipped, 9 * SCORES])])
    cross = cross_map(stack, layers=[2, 5])
    plain, other = align(cross_map(), SOURCE, TARGET), align(cross_map(flipped[None]), SOURCE, TARGET)
    assert plain != other
    assert align(cross, SOURCE, TARGET, layer=2, head=0) == plain
    assert align(cross, SOURCE, TARGET, layer=5, head=0) == other
    assert align(cross, SOURCE, TARGET, layer=5, head=-1) == plain
    assert align(cross, SOURCE, TARGET) == plain  # This is the mean over heads of the last layer.
    with pytest.raises(ValueError, match="head: expected one of 2 heads, from 0, got 2"):
        align(cross, SOURCE, TARGET, head=2)
    with pytest.raises(ValueError, match="head: expected None"):
        align(cross_map(), SOURCE, TARGET, head=0)


def test_a_null_key_must_be_higher() -> None:
    scores = torch.tensor([[0.5, 0.5, 0.5]])
    assert align_words(scores, [[1], [0]], [[0]], null_keys=[2]) == [0]


def test_no_words() -> None:
    scores = torch.ones(1, 2)
    assert align_words(scores, [], [[0]]) == [None]
    assert align_words(scores, [[0]], []) == []


@pytest.mark.parametrize(
    ("source", "target", "options", "says"),
    [
        ([[1, 5]], [[1]], {}, r"source_words: expected positions from 0 to 4, got 5"),
        ([[1], [1]], [[1]], {}, "source_words: expected each position in one word"),
        ([[1], []], [[1]], {}, "source_words: expected one position or more per word, got none for word 1"),
        ([[1]], [[5]], {}, "target_words: expected positions from 1 to 4, got 5"),
        ([[1]], [[0]], {}, "target_words: expected a whole number, 1 or more, got 0"),
        ([[1]], [[1]], {"null_keys": [1]}, r"null_keys: expected keys of no source word, got \[1\]"),
        ([[1]], [[1]], {"rows": "input"}, "rows: expected 'AWI' or 'AWO'"),
        ([[1]], [[1]], {"layer": 3}, "layer: layer 3 does not exist"),
    ],
)
def test_words_that_the_map_does_not_have_are_refused(source, target, options, says) -> None:
    with pytest.raises(ValueError, match=says):
        align(cross_map(), source, target, **options)


def test_wrong_types_are_refused() -> None:
    with pytest.raises(TypeError, match="cross: expected a MixingMap"):
        align(SCORES, SOURCE, TARGET)
    with pytest.raises(TypeError, match="source_words: expected positions, got 1"):
        align(cross_map(), [1, 2], TARGET)


def test_the_diagonal() -> None:
    assert diagonal(3, 3) == {(0, 0), (1, 1), (2, 2)}
    assert diagonal(2, 4) == {(0, 0), (0, 1), (1, 2), (1, 3)}
    assert diagonal(4, 2) == {(1, 0), (3, 1)}
    assert diagonal(1, 3) == {(0, 0), (0, 1), (0, 2)}
    assert diagonal(5, 0) == frozenset()
