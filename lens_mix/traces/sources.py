"""Divide a prompt and what was written into sources: tokens, words, sentences, messages or documents."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple, get_args

from lens_mix.arguments import check_pairs, check_whole_number
from lens_mix.maps.characters import join_tokens
from lens_mix.maps.grid import Grid
from lens_mix.maps.spans import check_groups, read_groups
from lens_mix.maps.words import find_words, is_special
from lens_mix.traces.documents import PADDING, PICTURE, SOUND, TEMPLATE, WRITTEN, Section

Unit = Literal["token", "word", "sentence", "message", "document", "given"]
UNITS: tuple[str, ...] = get_args(Unit)

# The unit of stretches of sound, such as "0.2 s".
_SECONDS = re.compile(r"(\d+(?:\.\d+)?(?:e-?\d+)?) s")
_WORD = re.compile(r"\S+")
# A sentence by a simple rule: up to a stop before white space.
_SENTENCE = re.compile(r".+?(?:[.!?…。！？]+[\"'”’»)\]]*(?=\s|$)|$)\s*|\s+", re.DOTALL)
# A shorter line is not taken for one of a wrapped paragraph.
_WRAPPED = 24
_WIDE_SPACE = re.compile(r"[^\S\x00-\x7f]")
_HEADLINE = re.compile(r"\s*#{1,6}\s")
_ITEM = re.compile(r"\s*([-*+•‣◦▪·]|\d{1,3}[.)]|[a-zA-Z][)])\s")
# What divides the columns of a table: a tab, a bar, or a comma or semicolon of a file of values.
_BAR = re.compile(r"\S.*\t|\s\|(\s|$)|^\s*\||\|$")
_DIVISION = re.compile(r"[,;](?!\s)")
# A function from a text to its pieces, as pairs of the first character and the one after the last.
Splitter = Callable[[str], Iterable[tuple[int, int]]]


@dataclasses.dataclass(frozen=True)
class TextSource:
    """A piece of the prompt, or of what was written, that later text may have come from.

    Attributes:
        text: The text.
        kind: The kind of the section that contains it (`lens_mix.traces.documents.Section`), "template" for
            what the chat template adds, or "written" for what the model wrote itself.
        name: The name of the document, else the role or the kind.
        positions: The positions of its tokens, in ascending order.
    """

    text: str
    kind: str
    name: str
    positions: tuple[int, ...]

    @property
    def is_content(self) -> bool:
        """Return whether it is content of the prompt, and neither template nor written by the model."""
        return self.kind not in (TEMPLATE, WRITTEN, PADDING)

    def __str__(self) -> str:
        """Return the name and the text on one line, shortened."""
        if self.kind == SOUND:
            return self.text
        text = " ".join(self.text.split())
        text = text if len(text) <= 72 else f"{text[:71]}…"
        return repr(text) if self.name in (self.text, "prompt", "given") else f"{self.name}: {text!r}"


class PlacedText(NamedTuple):
    """A text and the tokens that spell it.

    Attributes:
        text: The text.
        sections: The sections of the text, in order; between them is the template.
        first: The position of its first token.
        offsets: For each token, the first character and the one after the last; both are equal for a token
            that spells nothing, such as <s>.
    """

    text: str
    sections: Sequence[Section]
    first: int
    offsets: Sequence[tuple[int, int]]

    def find_tokens(self, start: int, stop: int) -> list[int]:
        """Return the positions of the tokens with a character of a span of the text that is not a space."""
        return [
            self.first + index
            for index, (low, high) in enumerate(self.offsets)
            if max(low, start) < min(high, stop) and self.text[max(low, start) : min(high, stop)].strip()
        ]


def split_sentences(language: str = "en") -> Splitter:
    """Return the function that splits a text into sentences, by the package sentencex and by lines.

    A line break ends a sentence in a list or a table, and not in a paragraph that is wrapped at a width. It
    does in these cases:

    - The line before or after it is empty, or is a headline (`# `).
    - The line after it begins with a mark (`- `, `* `, `• `, `1. `, `a) `), as another line of the paragraph.
    - Both lines are rows of a table: they have tabs, or bars with spaces around them or at an end, or are
      divided by as many commas or semicolons without a space after them, at least two.
    - The next line's first word would have had room on the line. The room is the longest line of the
      paragraph, or 40 characters if that is more. It is not 40 in a paragraph with a line of at least 24 and
      a later one that begins with a lower-case letter, because such a text is wrapped. For the same reason no
      sentence ends between such two lines.

    Args:
        language: The code of the language, as in ISO 639-1.
    """

    def split(text: str) -> list[tuple[int, int]]:
        ends = [0]
        for block in _split_lines(text):
            start = ends[-1]
            ends += [start + end for end in _find_ends(language, block)]
        return list(itertools.pairwise(ends))

    return split


def _find_ends(language: str, text: str) -> list[int]:
    """Return the characters after the sentences of a text that no line break divides."""
    import sentencex

    mark = _ITEM.match(text)
    start = mark.end() if mark else 0
    # Some releases of the package panic at a wide space between a letter and a full stop. The error of a
    # panic is a BaseException.
    plain = _WIDE_SPACE.sub(" ", text[start:])
    try:
        sentences = list(sentencex.segment(language, plain))
    except BaseException as problem:
        if type(problem).__name__ != "PanicException":
            raise
        return [start + match.end() for match in _SENTENCE.finditer(plain)]
    # The indices of `sentencex.get_sentence_boundaries` are wrong after some characters in old releases.
    ends, end = [], 0
    for sentence in sentences:
        end = plain.index(sentence, end) + len(sentence)
        ends.append(start + end)
    return ends or [len(text)]


def _split_lines(text: str) -> list[str]:
    """Return the blocks of a text that line breaks divide, as `split_sentences` says."""
    lines = text.splitlines(keepends=True)
    blocks: list[str] = []
    is_empty = [not line.strip() for line in lines]
    for _, numbers in itertools.groupby(range(len(lines)), lambda number: is_empty[number]):
        paragraph = [lines[number] for number in numbers]
        width = max(len(line.rstrip()) for line in paragraph)
        is_wrapped = width >= _WRAPPED and any(line.lstrip()[:1].islower() for line in paragraph[1:])
        width = width if is_wrapped else max(width, 40)
        has_marks = sum(_ITEM.match(line) is not None for line in paragraph) > 1
        for number, line in enumerate(paragraph):
            # An empty line belongs to what is before it.
            starts_block = not blocks or (number == 0 and bool(line.strip()))
            if number and line.strip():
                starts_block = _ends_sentence(paragraph[number - 1].rstrip(), line.rstrip(), width, has_marks)
            if starts_block:
                blocks.append(line)
            else:
                blocks[-1] += line
    return blocks


def _ends_sentence(line: str, following: str, width: int, has_marks: bool) -> bool:
    """Return whether the break between two lines of a paragraph ends a sentence; see `split_sentences`."""
    if _HEADLINE.match(line) or _HEADLINE.match(following) or (has_marks and _ITEM.match(following)):
        return True
    if _BAR.search(line) and _BAR.search(following):
        return True
    commas = [len(_DIVISION.findall(each)) for each in (line, following)]
    if min(commas) >= 2 and commas[0] == commas[1]:
        return True
    words = following.split(maxsplit=1)
    has_room = len(line) + 1 + len(words[0]) <= width
    return has_room and not (len(line) >= _WRAPPED and words[0][0].islower())


def find_sources(
    unit: str,
    prompt: PlacedText | None,
    written: PlacedText | None,
    tokens: Sequence[str],
    n_prompt: int,
    split: Splitter,
    groups: Any = None,
    n_source: int = 0,
    grid: Grid | None = None,
) -> list[TextSource]:
    """Return the sources of a unit. Each position belongs to exactly one of them.

    Args:
        unit: The unit.
        prompt: The text of the prompt; None if it was given as tokens.
        written: The text that was written; None if it was given as tokens.
        tokens: The tokens of the prompt and then those that were written.
        n_prompt: The number of tokens of the prompt.
        split: The function that splits a text into sentences.
        groups: For the unit "given", groups of the prompt's positions or texts, as in `lm.methods.Occlusion`.
        n_source: The number of tokens that an encoder reads; 0 without an encoder.
        grid: The frames of a sound that an encoder reads; None for text.

    Raises:
        TypeError: If the function that splits a text does not return pairs of whole numbers.
        ValueError: If the unit needs a text and the prompt was given as tokens, or words have no marks; or if
            it is one of text and the prompt is sound, or the reverse.
    """
    labels = label_positions(prompt, tokens, n_prompt, n_source, grid)
    seconds = read_seconds(unit)
    if (seconds is None) != (grid is None) and unit not in ("token", "given"):
        units = "a number of seconds" if grid else "a unit of text"
        raise ValueError(
            f"sources: expected {units}, 'token' or groups of positions for this prompt, got {unit!r}"
        )
    if seconds is not None and grid is not None:
        return _with_rest(_find_stretches(grid, seconds), tokens, n_prompt, labels)
    if unit == "token":
        return [_make_source(tokens, [position], labels) for position in range(len(tokens))]
    if unit == "word":
        return [_make_source(tokens, word, labels) for word in _find_words(prompt, written, tokens, n_prompt)]
    if unit == "given":
        readable = tokens[: n_source or n_prompt]
        found = [
            TextSource(
                join_tokens([tokens[each] for each in group.positions]),
                "given",
                group.name,
                tuple(group.positions),
            )
            for group in read_groups(readable, check_groups("sources", groups), "sources")
        ]
        return _with_rest(found, tokens, n_prompt, labels)
    if prompt is None:
        raise ValueError(
            f"sources: expected 'token', 'word' or groups of positions, because the prompt was given as "
            f"tokens, got {unit!r}; give it as text"
        )
    found = []
    for section in _merge_messages(prompt.sections) if unit == "message" else prompt.sections:
        is_picture = section.kind == PICTURE
        splits = unit == "sentence" and not is_picture
        for start, stop in _split_section(prompt.text, section, split if splits else None):
            positions = prompt.find_tokens(start, stop)
            if positions:
                text = section.name if is_picture else prompt.text[start:stop]
                found.append(TextSource(text, section.kind, section.name, tuple(positions)))
    if unit == "sentence" and written is not None:
        whole = Section(WRITTEN, WRITTEN, 0, len(written.text))
        for start, stop in _split_section(written.text, whole, split):
            positions = written.find_tokens(start, stop)
            if positions:
                found.append(TextSource(written.text[start:stop], WRITTEN, WRITTEN, tuple(positions)))
    return _with_rest(found, tokens, n_prompt, labels)


def name_seconds(seconds: float) -> str:
    """Return the name of the unit whose sources are stretches of sound of this length."""
    return f"{seconds:g} s"


def read_seconds(unit: str) -> float | None:
    """Return the length of the stretches of sound that a unit names; None for a unit of text."""
    found = _SECONDS.fullmatch(unit)
    return float(found[1]) or None if found else None


def _find_stretches(grid: Grid, seconds: float) -> list[TextSource]:
    """Return stretches of sound of equal length, of at least one frame."""
    step, end = grid.step[1] * (grid.seconds or 0), grid.size[1] * (grid.seconds or 0)
    size = max(1, round(seconds / step))
    return [
        TextSource(
            f"{first * step:.2f}–{min((first + size) * step, end):.2f} s",
            SOUND,
            SOUND,
            grid.positions[first : first + size],
        )
        for first in range(0, grid.columns, size)
    ]


def label_positions(
    prompt: PlacedText | None,
    tokens: Sequence[str],
    n_prompt: int,
    n_source: int = 0,
    grid: Grid | None = None,
) -> list[tuple[str, str]]:
    """Return the kind and the name of the section of each position.

    Special tokens are template, and so is the start of a decoder.

    Args:
        prompt: The text of the prompt; None if it was given as tokens.
        tokens: The tokens of the prompt and then those that were written.
        n_prompt: The number of tokens of the prompt.
        n_source: The number of tokens that an encoder reads; 0 without an encoder.
        grid: The frames of a sound that an encoder reads; None for text.
    """
    labels = [(TEMPLATE, TEMPLATE)] * n_prompt + [(WRITTEN, WRITTEN)] * (len(tokens) - n_prompt)
    if grid is not None:
        labels[:n_source] = [(PADDING, PADDING)] * n_source
        for position in grid.positions:
            labels[position] = (SOUND, SOUND)
        return labels
    if prompt is None:
        for position in range(n_source or n_prompt):
            if not is_special(tokens[position]):
                labels[position] = ("prompt", "prompt")
        return labels
    pieces = [prompt.find_tokens(section.start, section.stop) for section in prompt.sections]
    for position, index in _find_owners(pieces, tokens, n_prompt).items():
        labels[position] = (prompt.sections[index].kind, prompt.sections[index].name)
    return labels


def _make_source(
    tokens: Sequence[str], positions: Sequence[int], labels: Sequence[tuple[str, str]]
) -> TextSource:
    label = labels[positions[-1]]
    text = join_tokens([tokens[each] for each in positions])
    if label[0] == PADDING and len(positions) > 1:
        text = f"{PADDING} from {tokens[positions[0]].removeprefix(PADDING).strip()} on"
    return TextSource(text, *label, tuple(positions))


def _find_words(
    prompt: PlacedText | None, written: PlacedText | None, tokens: Sequence[str], n_prompt: int
) -> list[list[int]]:
    """Return the positions of each word, of the prompt or of what was written.

    Raises:
        ValueError: If the tokens have no marks of words, and their text is not known.
    """
    try:
        # A short answer may have no mark of its own.
        words = find_words(tokens)
    except ValueError as problem:
        if prompt is None or written is None:
            raise ValueError(
                f"sources: expected a tokenizer that marks the words, got tokens {list(tokens)[:8]}; use "
                "'token', or groups of positions"
            ) from problem
        spelled = [
            text.find_tokens(*match.span())
            for text in (prompt, written)
            for match in _WORD.finditer(text.text)
        ]
        owner = _find_owners(spelled, tokens, n_prompt)
        found: dict[tuple[str, int], list[int]] = {}
        for position in range(len(tokens)):
            key = ("word", owner[position]) if position in owner else ("token", position)
            found.setdefault(key, []).append(position)
        words = list(found.values())
    halves = [
        ([each for each in word if each < n_prompt], [each for each in word if each >= n_prompt])
        for word in words
    ]
    return [half for pair in halves for half in pair if half]


def _merge_messages(sections: Sequence[Section]) -> list[Section]:
    """Return one section per message, from its first section to its last."""
    merged: list[Section] = []
    for section in sections:
        if merged and section.message is not None and merged[-1].message == section.message:
            merged[-1] = merged[-1]._replace(stop=section.stop)
        else:
            name = section.name if section.message is None else section.message
            kind = section.kind if section.message is None else name.partition(" ")[2]
            merged.append(section._replace(kind=kind, name=name))
    return merged


def _split_section(text: str, section: Section, split: Splitter | None) -> list[tuple[int, int]]:
    """Return the pieces of a section without white space around them, as indices of the whole text.

    Raises:
        TypeError: If the pieces are not pairs of whole numbers.
        ValueError: If they are not in order, or end after the text.
    """
    own = text[section.start : section.stop]
    pieces = [(0, len(own))] if split is None else check_pairs("sources", split(own), "pairs of characters")
    placed, last = [], 0
    for start, stop in pieces:
        start = check_whole_number("sources", start, last, len(own), what="a character after the last piece")
        stop = check_whole_number("sources", stop, start, len(own), what="the end of a piece")
        last, piece = stop, own[start:stop]
        start += len(piece) - len(piece.lstrip())
        if piece.strip():
            placed.append((section.start + start, section.start + start + len(piece.strip())))
    return placed


def _find_owners(pieces: Sequence[Sequence[int]], tokens: Sequence[str], n_prompt: int) -> dict[int, int]:
    """Return the index of the piece that each position belongs to, if it belongs to one.

    A position that two pieces share, because a token has characters of both, belongs to the first of them.
    White space belongs to the piece before it.
    """
    owner: dict[int, int] = {}
    for index, positions in enumerate(pieces):
        for position in positions:
            owner.setdefault(position, index)
    for position, token in enumerate(tokens):
        is_free = position not in owner and not token.strip() and position != n_prompt
        if is_free and position - 1 in owner:
            owner[position] = owner[position - 1]
    return owner


def _with_rest(
    found: Sequence[TextSource], tokens: Sequence[str], n_prompt: int, labels: Sequence[tuple[str, str]]
) -> list[TextSource]:
    """Return the sources and those of the other positions, in the order of their first tokens.

    The other positions of a section are one source, and so are those of the template.
    """
    owner = _find_owners([source.positions for source in found], tokens, n_prompt)
    positions: list[list[int]] = [[] for _ in found]
    others: dict[tuple[str, str], list[int]] = {}
    for position, label in enumerate(labels):
        own = positions[owner[position]] if position in owner else others.setdefault(label, [])
        own.append(position)
    kept = [
        dataclasses.replace(source, positions=tuple(own))
        for source, own in zip(found, positions, strict=True)
        if own
    ]
    kept += [_make_source(tokens, own, labels) for own in others.values()]
    return sorted(kept, key=lambda source: source.positions)
