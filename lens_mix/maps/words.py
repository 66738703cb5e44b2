"""Subword pieces to words: which positions make up a word, and how their rows and columns merge."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence

import regex
import torch
from torch import Tensor

from lens_mix.arguments import one_of, several, shown, whole_number
from lens_mix.maps.characters import character_runs, whole_texts
from lens_mix.maps.positions import shortened

# As tokens are decoded, and as byte-level BPE (Ġ, Ċ) and SentencePiece (▁) have them in their vocabularies.
_SPACE_MARKS = (" ", "\u00a0", "Ġ", "▁")
_LINE_MARKS = ("\n", "\r", "\t", "Ċ")
_SPECIAL = re.compile(r"<(?!0x)[^<>\s]+>|\[[A-Z]+\d*\]|\[unused\d+\]")
# Scripts that are written without spaces between words, and characters of no script; other letters.
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
    """Whether a token looks like a special one: `<s>`, `<|endoftext|>`, `[CLS]`, …; not a byte `<0x0A>`."""
    return _SPECIAL.fullmatch(token.strip()) is not None


def word_groups(tokens: Sequence[str]) -> list[list[int]]:
    """Positions of each word, found from the marks that tokenizers leave in their pieces.

    WordPiece (some piece starts with `##` and none with a space mark): `##` pieces continue a word.
    Otherwise a piece starts a word if it starts with white space, `Ġ` or `▁`, is a special token, or follows
    a special token or a line break. Punctuation without a space before it belongs to the word before it, as
    in the text. The tokens of one character (`é[1/2]`, `é[2/2]`) are one piece. If no piece carries a mark
    and the text has only characters of scripts that are written without spaces (Chinese, Japanese, Thai, …),
    each piece is a word, except that punctuation belongs to the word before it. If no piece carries a mark
    and a character is split over tokens, the text has no space and is one word: tokens that are bytes keep
    their spaces.

    Raises:
        ValueError: in other texts no piece carries a mark, so that words cannot be told from pieces
            (tokenizers of the SentencePiece kind lose their marks when tokens are decoded one by one).
    """
    wholes = whole_texts(tokens)
    texts = [text for _, text in wholes]
    groups: list[list[int]] = []
    keeps_spaces = any(len(positions) > 1 for positions, _ in wholes)
    for (positions, _), starts in zip(wholes, _word_starts(texts, keeps_spaces), strict=True):
        if starts:
            groups.append([])
        groups[-1] += positions
    return groups


def _word_starts(texts: Sequence[str], keeps_spaces: bool) -> list[bool]:
    """Return whether each piece starts a word; the pieces consist of whole characters.

    `keeps_spaces`: a text without a mark has no space.
    """
    marked = any(text.startswith(_SPACE_MARKS) for text in texts)
    if not marked and any(text in _WORDPIECE_SPECIALS or _continues_word(text) for text in texts):
        return [place == 0 or not text.startswith("##") for place, text in enumerate(texts)]
    starts = [place == 0 or _starts_word(text, texts[place - 1]) for place, text in enumerate(texts)]
    if marked or all(starts):
        return starts
    letters = "".join(text for text in texts if not is_special(text))
    if _SPACED_SCRIPT.search(letters):
        if keeps_spaces:
            return starts
        raise ValueError(
            f"groups: expected the words, because no token carries a word mark (a leading space, 'Ġ', '▁' "
            f"or '##'); got tokens {list(texts)[:8]}; pass groups= as words or as lists of positions"
        )
    special = [place for place, text in enumerate(texts) if is_special(text)]
    runs = character_runs([text.encode("utf-8", "surrogatepass") for text in texts], special)
    firsts = {run[0] for run in runs if run[0] == 0 or not _PUNCTUATION.fullmatch(texts[run[0]])}
    return [starts[place] or place in firsts for place in range(len(texts))]


def _continues_word(text: str) -> bool:
    # "##" alone is a token that spells itself.
    return text.startswith("##") and len(text) > 2


def _starts_word(token: str, previous: str) -> bool:
    if is_special(token) or is_special(previous):
        return True
    return token.startswith(_SPACE_MARKS + _LINE_MARKS) or previous.endswith(_LINE_MARKS)


def _bare(text: str) -> str:
    """Return the text without white space, differences of case and of Unicode forms (NFC, NFKC)."""
    return unicodedata.normalize("NFKD", re.sub(r"[ĠĊ▁\s]", "", text).casefold())


def _is_accent(character: str) -> bool:
    return unicodedata.category(character) == "Mn"


def align_words(tokens: Sequence[str], words: Sequence[str]) -> tuple[list[list[int]], list[str]]:
    """Positions and name of each word, for words given as text in the order of the tokens.

    Case, white space and the Unicode form of a text (é as one character or as two) do not count, nor do
    accents if the tokens have none (BERT's uncased models drop them). Special tokens between the words stay
    on their own. Words that do not spell the tokens are a ValueError, which says from which position on.
    """
    wholes = whole_texts(tokens)
    texts = [text for _, text in wholes]
    wordpiece = not any(text.startswith(_SPACE_MARKS) for text in texts)
    pieces = [_bare(text.removeprefix("##") if wordpiece else text) for text in texts]
    accented = any(map(_is_accent, "".join(pieces)))
    placed: list[tuple[range, str]] = []
    place = 0
    for index, word in enumerate(words):
        target, text = _bare(word), ""
        target = target if accented else "".join(c for c in target if not _is_accent(c))
        while place < len(texts) and is_special(texts[place]) and pieces[place] != target:
            placed.append((range(place, place + 1), texts[place]))
            place += 1
        start = place
        while text != target or not text:
            if not target or place == len(texts) or not target.startswith(text + pieces[place]):
                raise ValueError(
                    f"groups: expected words that spell the tokens, got word {index} {word!r} where the "
                    f"tokens go on with {texts[start : start + 5]} (position {_first(wholes, start)})"
                )
            text += pieces[place]
            place += 1
        placed.append((range(start, place), word))
    for rest in range(place, len(texts)):
        if pieces[rest] and not is_special(texts[rest]):
            raise ValueError(
                f"groups: expected words for all tokens, got none from position {_first(wholes, rest)} "
                f"({texts[rest]!r}) on"
            )
        placed.append((range(rest, rest + 1), texts[rest]))
    positions = [[position for place in places for position in wholes[place][0]] for places, _ in placed]
    return positions, [name for _, name in placed]


def _first(wholes: Sequence[tuple[list[int], str]], place: int) -> int:
    """Return the position of the first token of a whole; after the last whole, the number of tokens."""
    return sum(len(positions) for positions, _ in wholes[:place])


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
        expected = "a list of words or of lists of positions"
        listed = several(argument, groups, expected)
        words = [group for group in listed if isinstance(group, str)]
        if words and len(words) == len(listed):
            return align_words(tokens, words)
        if words or not listed:
            raise TypeError(f"{argument}: expected {expected}, all of one kind, got {shown(groups)}")
        positions = [
            [whole_number(argument, position) for position in several(argument, group, expected)]
            for group in listed
        ]
        named = sorted(position for group in positions for position in group)
        if not all(positions) or named != list(range(len(tokens))):
            raise ValueError(
                f"{argument}: expected each position from 0 to {len(tokens) - 1} in exactly one list, got "
                f"{positions}; drop positions first with .drop()"
            )
    return positions, [_join([tokens[position] for position in group]) for group in positions]


def _join(pieces: Sequence[str]) -> str:
    texts = [text for _, text in whole_texts(pieces)]
    return "".join([texts[0], *(text[2:] if _continues_word(text) else text for text in texts[1:])])


def rows_of_words(
    groups: Sequence[Sequence[int]],
    names: Sequence[str],
    queries: Sequence[int],
    how: str,
    explained: int | None = None,
) -> tuple[list[int], list[list[int]], tuple[str, ...]]:
    """The words whose rows can be merged, and the places of their rows among `queries`, those that are held.

    The word at the position `explained` is merged from the rows that are held, which a note names if some are
    missing. Another note names the words that are left out although one of their rows is held.

    Raises:
        ValueError: no word whose rows can be merged.
    """
    place_of = {position: place for place, position in enumerate(queries)}
    span = {"first": slice(0, 1), "last": slice(-1, None)}.get(how, slice(None))
    rows = [[place_of[i] for i in word if i in place_of] for word in groups]
    whole = [all(position in place_of for position in word[span]) for word in groups]
    partly = [bool(held) and not all_held for held, all_held in zip(rows, whole, strict=True)]
    taken = [part and explained in word for part, word in zip(partly, groups, strict=True)]
    numbers = [i for i in range(len(groups)) if whole[i] or taken[i]]
    if not numbers:
        raise ValueError(
            f"queries: expected all rows of a word to be held, got the rows {shortened(queries)}; ask for "
            "its other rows with lm.run(..., queries=...), or merge with queries='last' if the last is held"
        )
    notes = [
        f"the row of {names[i]!r} (rows {shortened(groups[i])}) is that of {shortened(held)} alone, because "
        "the map has no other of its rows"
        for i in numbers
        if taken[i] and (held := [position for position in groups[i] if position in place_of])
    ]
    left_out = [i for i in range(len(groups)) if partly[i] and not taken[i]]
    texts = [f"{names[i]!r} (rows {shortened(groups[i])})" for i in left_out]
    if texts:
        notes.append(f"words without a row, because not all their rows are held: {', '.join(texts)}")
    return numbers, [rows[number] for number in numbers], tuple(notes)


def reduction(name: str, argument: str) -> Reduction:
    """The reduction of that name; an unknown one is a ValueError."""
    one_of(argument, name, _REDUCTIONS)
    return _REDUCTIONS[name]


def merge_axis(scores: Tensor, groups: Sequence[Sequence[int]], axis: int, reduce: Reduction) -> Tensor:
    """Merge the positions of each group along one axis."""
    indices = [torch.tensor(list(group), device=scores.device, dtype=torch.long) for group in groups]
    return torch.stack([reduce(scores.index_select(axis, index), axis) for index in indices], dim=axis)
