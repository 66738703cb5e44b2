"""Compute word alignments from cross-attention (Kobayashi et al., EMNLP 2020, section 5).

A link is a pair (source word, target word). Both are numbered from 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix.arguments import check_choice, check_instance, check_items, check_whole_number
from lens_mix.maps import MixingMap
from lens_mix.maps.spans import find_positions

Link = tuple[int, int]
AlignedWords = Sequence[Sequence[int]]
# "AWI": the row that has the target word as input. "AWO": the row before, which has it as output.
AlignedRows = Literal["AWI", "AWO"]


def align(
    cross: MixingMap,
    source_words: Sequence[Sequence[int] | str],
    target_words: Sequence[Sequence[int] | str],
    *,
    rows: AlignedRows = "AWO",
    layer: int = -1,
    head: int | None = None,
    null_keys: Sequence[int] = (),
) -> frozenset[Link]:
    """Return the link of each target word to the source word with the highest score in a cross-attention map.

        >>> cross = lm.run(model, ("The cat sleeps", "Le chat dort"), "value_zeroing", part="cross")
        >>> lm.experiments.align(cross, ["The", "cat", "sleeps"], ["Le", "chat", "dort"])

    The scores of a word's tokens are summed over the source and averaged over the target. Keys that belong
    to no word are left out (a prompt before the sentence, the decoder's own residual stream), except the
    `null_keys`. These compete with the words, and a target word whose highest score is on a null key has no
    link. The paper uses `null_keys=[position of the end of the sentence]`.

    Args:
        cross: A map whose rows are the decoder's input tokens [start, y1, …] and whose keys are the tokens of
            the source.
        source_words: The words, as texts that occur once in the source, or as lists of the positions of
            their keys.
        target_words: The same for the target. Positions are those among the decoder's *input* tokens, where
            y1 has position 1.
        rows: "AWO" (alignment with the output word): the row that predicts a token, one before its own.
            "AWI" (alignment with the input word): the row that has it as input.
        layer: The label of the layer. Negative numbers count from the end.
        head: The number of a head. None: the mean over heads, as `cross.merge_heads()` returns it.
        null_keys: Positions of keys that belong to no word and still compete.

    Returns:
        The links, (source word, target word).

    Raises:
        TypeError: `cross` is not a map, or words are neither texts nor lists of positions.
        ValueError: A position is outside the map or occurs twice, a text does not occur exactly once, a word
            has no tokens, the map lacks the row of a target word, or `head` is given for a map without heads.
    """
    check_instance("cross", cross, MixingMap, "a MixingMap")
    if head is not None and not cross.has_heads:
        raise ValueError("head: expected None, because the map has no heads; ask for per_head=True")
    merged = cross.merge_heads() if head is None else cross
    scores = merged.scores[merged.layer_index(layer)]
    if head is not None:
        if not -len(scores) <= (head := check_whole_number("head", head)) < len(scores):
            raise ValueError(f"head: expected one of {len(scores)} heads, from 0, got {head}")
        scores = scores[head]
    check_choice("rows", rows, ("AWI", "AWO"))
    offset = 1 if rows == "AWO" else 0
    source_words = _find_words("source_words", source_words, cross.key_labels)
    target_words = _find_words("target_words", target_words, cross.tokens)
    pieces = _read_word_positions("target_words", target_words, len(cross.tokens), first=offset)
    row_of_position = {position: row for row, position in enumerate(cross.query_positions)}
    if missing := sorted({place - offset for word in pieces for place in word} - row_of_position.keys()):
        raise ValueError(f"target_words: expected words whose rows the map has, got none for {missing}")
    target_rows = [[row_of_position[place - offset] for place in word] for word in pieces]
    best = align_words(scores, source_words, target_rows, null_keys)
    return frozenset((source, target) for target, source in enumerate(best) if source is not None)


def align_words(
    scores: Float[Tensor, "query key"],
    source_words: AlignedWords,
    target_rows: AlignedWords,
    null_keys: Sequence[int] = (),
) -> list[int | None]:
    """Return the source word of each target word, or None if a null key has the highest score.

        >>> scores = torch.tensor([[0.9, 0.1, 0.0], [0.1, 0.2, 0.7]])
        >>> lm.experiments.align_words(scores, source_words=[[0], [1, 2]], target_rows=[[0], [1]])
        [0, 1]

    If scores are equal, the first word is chosen, and a null key only if its score is higher.

    Args:
        scores: The map of one layer.
        source_words: As in `align`.
        target_rows: For each target word, the rows of its tokens.
        null_keys: As in `align`.

    Raises:
        TypeError: As in `align`.
        ValueError: As in `align`.
    """
    queries, keys = scores.shape
    source = _read_word_positions("source_words", source_words, keys)
    nulls = _read_word_positions("null_keys", [null_keys], keys, empty=True)
    if both := {key for word in source for key in word} & set(nulls[0]):
        raise ValueError(f"null_keys: expected keys of no source word, got {sorted(both)}")
    rows = _read_word_positions("target_rows", target_rows, queries)
    groups = [*source, *([key] for key in nulls[0])]
    if not rows or not groups:
        return [None] * len(rows)
    words = torch.stack([scores[:, list(word)].sum(1) for word in groups], 1)
    means = torch.stack([words[list(word)].mean(0) for word in rows])
    best = (
        means.cpu().argmax(1).tolist()
    )  # Only on the CPU is it certain that the first of equal scores wins.
    return [place if place < len(source) else None for place in best]


def _find_words(
    name: str, words: Sequence[Sequence[int] | str], tokens: Sequence[str]
) -> list[Sequence[int]]:
    """Return the words with the positions of those that are texts."""
    expected = "a text or a list of positions per word"
    return [
        find_positions(tokens, word, name) if isinstance(word, str) else word
        for word in check_items(name, words, expected)
    ]


def _read_word_positions(
    name: str, words: object, count: int, first: int = 0, empty: bool = False
) -> AlignedWords:
    """Return lists of positions from `first` to below `count`, in which each position occurs once."""
    read: list[list[int]] = []
    for word in check_items(name, words, "a list of positions per word"):
        places = [check_whole_number(name, place, first) for place in check_items(name, word, "positions")]
        if not places and not empty:
            raise ValueError(f"{name}: expected one position or more per word, got none for word {len(read)}")
        read.append(places)
    flat = sorted(place for word in read for place in word)
    if flat and flat[-1] >= count:
        raise ValueError(f"{name}: expected positions from {first} to {count - 1}, got {flat[-1]}")
    if len(set(flat)) < len(flat):
        raise ValueError(f"{name}: expected each position in one word, got {read}")
    return read


def diagonal(source: int, target: int) -> frozenset[Link]:
    """Return the links of the diagonal, a baseline for aligners.

        >>> sorted(lm.experiments.diagonal(source=2, target=2))
        [(0, 0), (1, 1)]

    Each target word is linked to the source word at the same fraction of the sentence.

    Args:
        source: The number of source words.
        target: The number of target words.
    """
    source, target = check_whole_number("source", source, 1), check_whole_number("target", target, 0)
    return frozenset(((2 * word + 1) * source // (2 * target), word) for word in range(target))
