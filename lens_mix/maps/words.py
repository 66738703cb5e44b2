"""Subword pieces to words: which positions make up a word, and how their rows and columns merge."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lens_mix.arguments import one_of
from lens_mix.maps.positions import shortened

# As tokens are decoded, and as byte-level BPE (Ġ, Ċ) and SentencePiece (▁) have them in their vocabularies.
_SPACE_MARKS = (" ", "\u00a0", "Ġ", "▁")
_LINE_MARKS = ("\n", "\r", "\t", "Ċ")
_SPECIAL = re.compile(r"<(?!0x)[^<>\s]+>|\[[A-Z]+\d*\]|\[unused\d+\]")
_WORDPIECE_SPECIALS = {"[CLS]", "[SEP]", "[MASK]", "[PAD]", "[UNK]"}

Reduction = Callable[[Tensor, int], Tensor]
_REDUCTIONS: dict[str, Reduction] = {
    **{"sum": torch.sum, "mean": torch.mean, "max": torch.amax, "min": torch.amin},
    "first": lambda pieces, axis: pieces.select(axis, 0),
    "last": lambda pieces, axis: pieces.select(axis, -1),
}


def is_special(token: str) -> bool:
    """Whether a token looks like a special one: `<s>`, `<|endoftext|>`, `[CLS]`, …; not a byte `<0x0A>`."""
    return _SPECIAL.fullmatch(token.strip()) is not None


def word_groups(tokens: Sequence[str]) -> list[list[int]]:
    """Positions of each word, found from the marks that tokenizers leave in their pieces.

    WordPiece (some piece starts with `##` and none with a space mark): `##` pieces continue a word.
    Otherwise a piece starts a word if it starts with white space, `Ġ` or `▁`, is a special token, or follows
    a special token or a line break. Punctuation without a space before it belongs to the word before it, as
    in the text. Where no piece carries a mark words cannot be told from pieces, which is a ValueError
    (tokenizers of the SentencePiece kind lose their marks when tokens are decoded one by one).
    """
    marked = any(token.startswith(_SPACE_MARKS) for token in tokens)
    wordpiece = not marked and any(
        token in _WORDPIECE_SPECIALS or (token.startswith("##") and len(token) > 2) for token in tokens
    )
    groups: list[list[int]] = []
    for position, token in enumerate(tokens):
        starts = not token.startswith("##") if wordpiece else _starts_word(token, tokens[position - 1])
        if not groups or starts:
            groups.append([position])
        else:
            groups[-1].append(position)
    if not marked and not wordpiece and len(groups) < len(tokens):
        raise ValueError(
            f"groups: expected the words, because no token carries a word mark (a leading space, 'Ġ', '▁' "
            f"or '##'); got tokens {list(tokens)[:8]}; pass groups= as words or as lists of positions"
        )
    return groups


def _starts_word(token: str, previous: str) -> bool:
    if is_special(token) or is_special(previous):
        return True
    return token.startswith(_SPACE_MARKS + _LINE_MARKS) or previous.endswith(_LINE_MARKS)


def _bare(text: str) -> str:
    return re.sub(r"[ĠĊ▁\s]", "", text).casefold()


def align_words(tokens: Sequence[str], words: Sequence[str]) -> tuple[list[list[int]], list[str]]:
    """Positions and name of each word, for words given as text in the order of the tokens.

    Case and white space do not count. Special tokens between the words stay on their own. Words that do not
    spell the tokens are a ValueError, which says from which position on.
    """
    wordpiece = not any(token.startswith(_SPACE_MARKS) for token in tokens)
    pieces = [_bare(token.removeprefix("##") if wordpiece else token) for token in tokens]
    placed: list[tuple[list[int], str]] = []
    position = 0
    for index, word in enumerate(words):
        target, text = _bare(word), ""
        while position < len(tokens) and is_special(tokens[position]) and pieces[position] != target:
            placed.append(([position], tokens[position]))
            position += 1
        start = position
        while text != target or not text:
            if not target or position == len(tokens) or not target.startswith(text + pieces[position]):
                raise ValueError(
                    f"groups: expected words that spell the tokens, got word {index} {word!r} where the "
                    f"tokens go on with {list(tokens[start : start + 5])} (position {start})"
                )
            text += pieces[position]
            position += 1
        placed.append((list(range(start, position)), word))
    for rest in range(position, len(tokens)):
        if pieces[rest] and not is_special(tokens[rest]):
            raise ValueError(
                f"groups: expected words for all tokens, got none from position {rest} ({tokens[rest]!r}) on"
            )
        placed.append(([rest], tokens[rest]))
    return [group for group, _ in placed], [name for _, name in placed]


def resolve_groups(
    tokens: Sequence[str], groups: Sequence[str] | Sequence[Sequence[int]] | None, argument: str
) -> tuple[list[list[int]], list[str]]:
    """Positions and names of the words: found (`None`), by their text, or by their positions.

    Neither words nor lists of positions is a TypeError; positions that are not each named exactly once, or
    words that do not spell the tokens, a ValueError.
    """
    if groups is None:
        positions = word_groups(tokens)
    else:
        listed = isinstance(groups, Sequence) and all(isinstance(group, Sequence) for group in groups)
        if isinstance(groups, str) or not listed or not groups:
            raise TypeError(f"{argument}: expected a list of words or of lists of positions, got {groups!r}")
        words = [group for group in groups if isinstance(group, str)]
        if len(words) == len(groups):
            return align_words(tokens, words)
        positions = [list(group) for group in groups if not isinstance(group, str)]
        named = sorted(position for group in positions for position in group)
        if words or not all(positions) or named != list(range(len(tokens))):
            raise ValueError(
                f"{argument}: expected each position from 0 to {len(tokens) - 1} in exactly one list, got "
                f"{list(groups)}; drop positions first with .drop()"
            )
    return positions, [_join([tokens[position] for position in group]) for group in positions]


def _join(pieces: Sequence[str]) -> str:
    # "##" alone is a token that spells itself.
    rest = (piece[2:] if piece.startswith("##") and len(piece) > 2 else piece for piece in pieces[1:])
    return "".join([pieces[0], *rest])


def rows_of_words(
    groups: Sequence[Sequence[int]], names: Sequence[str], queries: Sequence[int], how: str
) -> tuple[list[int], list[list[int]], tuple[str, ...]]:
    """The words whose rows can be merged, and the places of their rows among `queries`, those that are held.

    With a note that names the words of which only other rows are held, if any. No word whose rows can be
    merged is a ValueError.
    """
    place_of = {position: place for place, position in enumerate(queries)}
    span = {"first": slice(0, 1), "last": slice(-1, None)}.get(how, slice(None))
    numbers = [i for i, word in enumerate(groups) if all(position in place_of for position in word[span])]
    if not numbers:
        raise ValueError(
            f"queries: expected all rows of a word to be held, got the rows {shortened(queries)}; ask for "
            "its other rows with lm.run(..., queries=...), or merge with queries='last' if the last is held"
        )
    rows = [[place_of[i] for i in word if i in place_of] for word in groups]
    partly = [i for i, held in enumerate(rows) if held and i not in numbers]
    texts = [f"{names[i]!r} (rows {shortened(groups[i])})" for i in partly]
    note = f"words without a row, because not all their rows are held: {', '.join(texts)}"
    return numbers, [rows[number] for number in numbers], (note,) if texts else ()


def reduction(name: str, argument: str) -> Reduction:
    """The reduction of that name; an unknown one is a ValueError."""
    one_of(argument, name, _REDUCTIONS)
    return _REDUCTIONS[name]


def merge_axis(scores: Tensor, groups: Sequence[Sequence[int]], axis: int, reduce: Reduction) -> Tensor:
    """Merge the positions of each group along one axis."""
    indices = [torch.tensor(list(group), device=scores.device, dtype=torch.long) for group in groups]
    return torch.stack([reduce(scores.index_select(axis, index), axis) for index in indices], dim=axis)
