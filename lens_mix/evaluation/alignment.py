"""Word alignments read off cross-attention (Kobayashi et al., EMNLP 2020, §5).

A link is a pair (source word, target word), both counted from 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix.arguments import instance, one_of, several, whole_number
from lens_mix.maps import MixingMap

Link = tuple[int, int]
Words = Sequence[Sequence[int]]
# "AWI": the row whose input is the target word; "AWO": the row whose output it is, one before.
Rows = Literal["AWI", "AWO"]


def align(
    cross: MixingMap,
    source_words: Words,
    target_words: Words,
    *,
    rows: Rows = "AWO",
    layer: int = -1,
    head: int | None = None,
    null_keys: Sequence[int] = (),
) -> frozenset[Link]:
    """The link of each target word to the source word that a cross-attention map gives the most.

    The scores of a word's pieces are summed over the source's and averaged over the target's. A key of no
    word is left out (a prompt before the sentence, the decoder's own residual) unless it is one of
    `null_keys`: those compete, and a word that one of them wins has no link. The paper's rule is
    `null_keys=[position of the end of the sentence]`.

    Args:
        cross: rows are the decoder's input tokens [start, y1, …], keys the source's tokens.
        source_words: key positions of each word.
        target_words: positions of each word's pieces among the decoder's *input* tokens: y1 is 1.
        rows: "AWO", alignment with the output word: the row that predicts a piece, one before its own;
            "AWI", with the input word: the row whose input it is.
        layer: label of the layer; negative: from the end.
        head: None: of maps with heads their mean, as merged by `cross.merge_heads()`.
        null_keys: positions of keys that are no word and compete all the same.

    Raises:
        TypeError, ValueError: positions outside the map or twice, a word without pieces, a target word whose
            row is not held, a head of a map without heads.
    """
    instance("cross", cross, MixingMap, "a MixingMap")
    if head is not None and not cross.has_heads:
        raise ValueError("head: expected None, because the map has no heads; ask for per_head=True")
    merged = cross.merge_heads() if head is None else cross
    scores = merged.scores[merged.layer_index(layer)]
    if head is not None:
        if not -len(scores) <= (head := whole_number("head", head)) < len(scores):
            raise ValueError(f"head: expected one of {len(scores)} heads, from 0, got {head}")
        scores = scores[head]
    one_of("rows", rows, ("AWI", "AWO"))
    back = 1 if rows == "AWO" else 0
    pieces = _word_positions("target_words", target_words, len(cross.tokens), first=back)
    held = {position: row for row, position in enumerate(cross.query_positions)}
    if missing := sorted({place - back for word in pieces for place in word} - held.keys()):
        raise ValueError(f"target_words: expected words whose rows the map holds, got none for {missing}")
    target_rows = [[held[place - back] for place in word] for word in pieces]
    best = align_words(scores, source_words, target_rows, null_keys)
    return frozenset((source, target) for target, source in enumerate(best) if source is not None)


def align_words(
    scores: Float[Tensor, "query key"], source_words: Words, target_rows: Words, null_keys: Sequence[int] = ()
) -> list[int | None]:
    """The source word of each target word, whose rows are given; None where a null key wins.

    Of equal scores the first word's counts, a null key's only if it is higher. Errors are as of `align`.
    """
    queries, keys = scores.shape
    source = _word_positions("source_words", source_words, keys)
    nulls = _word_positions("null_keys", [null_keys], keys, empty=True)
    if both := {key for word in source for key in word} & set(nulls[0]):
        raise ValueError(f"null_keys: expected keys of no source word, got {sorted(both)}")
    rows = _word_positions("target_rows", target_rows, queries)
    groups = [*source, *([key] for key in nulls[0])]
    if not rows or not groups:
        return [None] * len(rows)
    words = torch.stack([scores[:, list(word)].sum(1) for word in groups], 1)
    means = torch.stack([words[list(word)].mean(0) for word in rows])
    best = means.cpu().argmax(1).tolist()  # on the CPU the first of equal ones
    return [place if place < len(source) else None for place in best]


def _word_positions(name: str, words: object, count: int, first: int = 0, empty: bool = False) -> Words:
    """Lists of positions from `first` to below `count`, each position once."""
    read: list[list[int]] = []
    for word in several(name, words, "a list of positions per word"):
        places = [whole_number(name, place, first) for place in several(name, word, "positions")]
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
    """The floor of any aligner: each of `target` words to the one of `source` words at the same share."""
    source, target = whole_number("source", source, 1), whole_number("target", target, 0)
    return frozenset(((2 * word + 1) * source // (2 * target), word) for word in range(target))
