"""Find the words that tokens spell, and merge the rows and columns of their tokens."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence

import regex
import torch
from torch import Tensor

from lens_mix.arguments import check_choice, check_items, check_whole_number, describe_value
from lens_mix.maps.characters import find_character_runs, join_characters
from lens_mix.maps.positions import shorten

# Tokens are decoded, or as in the vocabulary, where byte-level BPE writes Ġ and Ċ, and SentencePiece ▁.
_SPACE_MARKS = (" ", "\u00a0", "Ġ", "▁")
_LINE_MARKS = ("\n", "\r", "\t", "Ċ")
_SPECIAL = re.compile(r"<(?!0x)[^<>\s]+>|\[[A-Z]+\d*\]|\[unused\d+\]")
# These scripts have no spaces between words; Common and Inherited are characters without a script.
_UNSPACED = "".join(
    rf"\p{{{script}}}"
    for script in "Han Hiragana Katakana Thai Lao Khmer Myanmar Tibetan Common Inherited".split()
)
_SPACED_SCRIPT = regex.compile(rf"(?![{_UNSPACED}])\p{{L}}")
_PUNCTUATION = regex.compile(r"\p{P}+")
_WORDPIECE_SPECIALS = {"[CLS]", "[SEP]", "[MASK]", "[PAD]", "[UNK]"}

Reduction = Callable[[Tensor, int], Tensor]
_REDUCTIONS: dict[str, Reduction] = {
    **{"sum": torch.sum, "mean": torch.mean, "max": torch.amax, "min": torch.amin},
    "first": lambda pieces, axis: pieces.select(axis, 0),
    "last": lambda pieces, axis: pieces.select(axis, -1),
}


def is_special(token: str) -> bool:
    """Return whether a token looks like a special one: `<s>`, `<|endoftext|>`, `[CLS]`, but not `<0x0A>`."""
    return _SPECIAL.fullmatch(token.strip()) is not None


def find_words(tokens: Sequence[str]) -> list[list[int]]:
    """Return the positions of each word, found from the marks that tokenizers write into tokens.

    A piece is a token, or all tokens of one character (`é[1/2]`, `é[2/2]`). The first rule that applies
    decides:

    1. WordPiece, if some piece starts with `##` or is a special token of BERT, and none starts with a space
       mark: pieces with `##` continue a word, and all others start one.
    2. If some piece starts with a space mark (white space, `Ġ` or `▁`): a piece starts a word if it has such
       a mark, is a special token, or follows a special token or a line break. Punctuation without a space
       before it therefore belongs to the word before it.
    3. If no piece has a mark and all letters belong to scripts without spaces (Chinese, Japanese, Thai, …):
       each piece is a word, but punctuation belongs to the word before it.
    4. If no piece has a mark and a character is split over tokens: the text is one word. Tokenizers that
       split characters keep spaces, so this text has none.

    Raises:
        ValueError: If no piece has a mark in any other text, so that the words cannot be found. Tokenizers
            such as SentencePiece lose the marks if tokens are decoded one by one.
    """
    wholes = join_characters(tokens)
    texts = [text for _, text in wholes]
    groups: list[list[int]] = []
    keeps_spaces = any(len(positions) > 1 for positions, _ in wholes)
    for (positions, _), starts in zip(wholes, _word_starts(texts, keeps_spaces), strict=True):
        if starts:
            groups.append([])
        groups[-1] += positions
    return groups


def _word_starts(texts: Sequence[str], keeps_spaces: bool) -> list[bool]:
    """Return whether each piece starts a word.

    Args:
        texts: The pieces, which consist of whole characters.
        keeps_spaces: Whether the tokenizer keeps spaces, so that a text without a mark has no space.
    """
    has_marks = any(text.startswith(_SPACE_MARKS) for text in texts)
    if _is_wordpiece(texts):
        return [index == 0 or not text.startswith("##") for index, text in enumerate(texts)]
    starts = [index == 0 or _starts_word(text, texts[index - 1]) for index, text in enumerate(texts)]
    if has_marks or all(starts):
        return starts
    letters = "".join(text for text in texts if not is_special(text))
    if _SPACED_SCRIPT.search(letters):
        if keeps_spaces:
            return starts
        raise ValueError(
            f"groups: expected the words, because no token has a word mark (a leading space, 'Ġ', '▁' "
            f"or '##'), got tokens {list(texts)[:8]}; give groups= as words or as lists of positions"
        )
    special = [index for index, text in enumerate(texts) if is_special(text)]
    runs = find_character_runs([text.encode("utf-8", "surrogatepass") for text in texts], special)
    firsts = {run[0] for run in runs if run[0] == 0 or not _PUNCTUATION.fullmatch(texts[run[0]])}
    return [starts[index] or index in firsts for index in range(len(texts))]


def _is_wordpiece(texts: Sequence[str]) -> bool:
    has_marks = any(text.startswith(_SPACE_MARKS) for text in texts)
    return not has_marks and any(text in _WORDPIECE_SPECIALS or _continues_word(text) for text in texts)


def _continues_word(text: str) -> bool:
    # The token "##" is two characters of the text, not a mark.
    return text.startswith("##") and len(text) > 2


def _starts_word(token: str, previous: str) -> bool:
    if is_special(token) or is_special(previous):
        return True
    return token.startswith(_SPACE_MARKS + _LINE_MARKS) or previous.endswith(_LINE_MARKS)


def spell(tokens: Sequence[str]) -> list[tuple[list[int], str]]:
    """Return the positions and the text of each piece, as they are in running text.

    A piece is a token, or all tokens of one character. Marks of tokenizers become spaces, or disappear: the
    pieces `Ġcat`, `▁cat` and (in WordPiece) `cat` are " cat", and `##s` is "s".
    """
    wholes = join_characters(tokens)
    texts = [text for _, text in wholes]
    if _is_wordpiece(texts):
        texts = [text[2:] if _continues_word(text) else f" {text}" for text in texts]
    else:
        texts = [re.sub("^[Ġ▁\u00a0]", " ", text).replace("Ċ", "\n") for text in texts]
    return [(positions, text) for (positions, _), text in zip(wholes, texts, strict=True)]


def simplify(text: str) -> str:
    """Return the text without white space, in lower case and in the Unicode form NFKD."""
    return unicodedata.normalize("NFKD", re.sub(r"[ĠĊ▁\s]", "", text).casefold())


def _is_accent(character: str) -> bool:
    return unicodedata.category(character) == "Mn"


def align_words(tokens: Sequence[str], words: Sequence[str]) -> tuple[list[list[int]], list[str]]:
    """Return the positions and the name of each word, for words that are given as text in order.

    Case, white space and Unicode form (é as one character or as two) are ignored. Accents are ignored if the
    tokens have none, because BERT's uncased models drop them. A special token between words is a word.

    Raises:
        ValueError: If the words do not spell the tokens; the error names the first position that differs.
    """
    wholes = join_characters(tokens)
    texts = [text for _, text in wholes]
    is_wordpiece = not any(text.startswith(_SPACE_MARKS) for text in texts)
    pieces = [simplify(text.removeprefix("##") if is_wordpiece else text) for text in texts]
    has_accents = any(map(_is_accent, "".join(pieces)))
    found: list[tuple[range, str]] = []
    piece = 0
    for index, word in enumerate(words):
        target, text = simplify(word), ""
        target = target if has_accents else "".join(letter for letter in target if not _is_accent(letter))
        while piece < len(texts) and is_special(texts[piece]) and pieces[piece] != target:
            found.append((range(piece, piece + 1), texts[piece]))
            piece += 1
        start = piece
        while text != target or not text:
            if not target or piece == len(texts) or not target.startswith(text + pieces[piece]):
                raise ValueError(
                    f"groups: expected words that spell the tokens, got word {index} {word!r} where the "
                    f"tokens are {texts[start : start + 5]} (position {_first_position(wholes, start)})"
                )
            text += pieces[piece]
            piece += 1
        found.append((range(start, piece), word))
    for rest in range(piece, len(texts)):
        if pieces[rest] and not is_special(texts[rest]):
            raise ValueError(
                f"groups: expected words for all tokens, got none from position "
                f"{_first_position(wholes, rest)} ({texts[rest]!r}) on"
            )
        found.append((range(rest, rest + 1), texts[rest]))
    positions = [[position for index in span for position in wholes[index][0]] for span, _ in found]
    return positions, [name for _, name in found]


def _first_position(wholes: Sequence[tuple[list[int], str]], piece: int) -> int:
    """Return the position of a piece's first token; after the last piece, return the number of tokens."""
    return sum(len(positions) for positions, _ in wholes[:piece])


def resolve_groups(
    tokens: Sequence[str], groups: Sequence[str] | Sequence[Sequence[int]] | None, argument: str
) -> tuple[list[list[int]], list[str]]:
    """Return the positions and the names of the words.

    Args:
        tokens: The tokens.
        groups: The words as text, or the positions of each word. None: the words are found by `find_words`.
        argument: The name of the argument, for errors.

    Raises:
        TypeError: If `groups` are neither text nor lists of positions.
        ValueError: If the words do not spell the tokens, or if a position is not in exactly one list.
    """
    if groups is None:
        positions = find_words(tokens)
    else:
        expected = "a list of words or of lists of positions"
        listed = check_items(argument, groups, expected)
        words = [group for group in listed if isinstance(group, str)]
        if words and len(words) == len(listed):
            return align_words(tokens, words)
        if words or not listed:
            raise TypeError(f"{argument}: expected {expected}, all of one kind, got {describe_value(groups)}")
        positions = [
            [check_whole_number(argument, position) for position in check_items(argument, group, expected)]
            for group in listed
        ]
        named = sorted(position for group in positions for position in group)
        if not all(positions) or named != list(range(len(tokens))):
            raise ValueError(
                f"{argument}: expected each position from 0 to {len(tokens) - 1} in exactly one list, got "
                f"{positions}; drop positions first with .drop()"
            )
    return positions, [_join_word([tokens[position] for position in group]) for group in positions]


def _join_word(pieces: Sequence[str]) -> str:
    texts = [text for _, text in join_characters(pieces)]
    return "".join([texts[0], *(text[2:] if _continues_word(text) else text for text in texts[1:])])


def find_word_rows(
    groups: Sequence[Sequence[int]],
    names: Sequence[str],
    queries: Sequence[int],
    how: str,
    explained: int | None = None,
) -> tuple[list[int], list[list[int]], tuple[str, ...]]:
    """Return which words have their rows in a map, the indices of these rows, and notes.

    The word at the position `explained` is merged from the rows that are present, and a note names these if
    some are missing. Another note names the words that are left out although one of their rows is present.

    Args:
        groups: The positions of each word.
        names: The name of each word.
        queries: The position of each row of the map.
        how: The name of the reduction. "first" and "last" need only that row of a word.
        explained: The position whose word is kept with any of its rows.

    Raises:
        ValueError: If no word has its rows in the map.
    """
    row_of = {position: row for row, position in enumerate(queries)}
    needed = {"first": slice(0, 1), "last": slice(-1, None)}.get(how, slice(None))
    rows = [[row_of[position] for position in word if position in row_of] for word in groups]
    is_complete = [all(position in row_of for position in word[needed]) for word in groups]
    has_some = [bool(present) and not whole for present, whole in zip(rows, is_complete, strict=True)]
    is_kept = [some and explained in word for some, word in zip(has_some, groups, strict=True)]
    indices = [index for index in range(len(groups)) if is_complete[index] or is_kept[index]]
    if not indices:
        raise ValueError(
            f"queries: expected a map with all rows of some word, got the rows {shorten(queries)}; compute "
            "the other rows with lm.run(..., queries=...), or merge with queries='last' if the map has a "
            "word's last row"
        )
    notes = [
        f"the row of {names[index]!r} (positions {shorten(groups[index])}) is merged from "
        f"{shorten(present)} alone, because the map does not have the word's other rows"
        for index in indices
        if is_kept[index] and (present := [position for position in groups[index] if position in row_of])
    ]
    left_out = [index for index in range(len(groups)) if has_some[index] and not is_kept[index]]
    texts = [f"{names[index]!r} (positions {shorten(groups[index])})" for index in left_out]
    if texts:
        notes.append(f"words without a row, because the map does not have all their rows: {', '.join(texts)}")
    return indices, [rows[index] for index in indices], tuple(notes)


def find_reduction(name: str, argument: str) -> Reduction:
    """Return the reduction with this name; raise a ValueError if there is none."""
    check_choice(argument, name, _REDUCTIONS)
    return _REDUCTIONS[name]


def merge_axis(scores: Tensor, groups: Sequence[Sequence[int]], axis: int, reduce: Reduction) -> Tensor:
    """Merge the positions of each group along one axis."""
    indices = [torch.tensor(list(group), device=scores.device, dtype=torch.long) for group in groups]
    return torch.stack([reduce(scores.index_select(axis, index), axis) for index in indices], dim=axis)
