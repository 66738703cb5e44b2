"""Write chat messages with the tokenizer's template, and find where it writes each content."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from lens_mix._inputs import texts
from lens_mix.arguments import check_instance, describe_value
from lens_mix.traces.documents import Section

_WORD = re.compile(r"\S+")
# A mark in a content is two characters of the two private planes of Unicode: the digits of its number.
_HIGH, _LOW, _BASE = 0xF0000, 0x100000, 0xFFFE
_MARK = re.compile("[\U000f0000-\U000ffffd][\U00100000-\U0010fffd]")


class _Content(NamedTuple):
    """A text that the user gave to the chat template.

    Attributes:
        text: The text.
        sections: Its sections, with the message that contains it.
    """

    text: str
    sections: list[Section]


class _TemplatePiece(NamedTuple):
    """A part of a content that the chat template has written, from its first to its last anchor.

    Attributes:
        content: The index of the content.
        anchors: Pairs of a character of the content and its character in the text, in order.
    """

    content: int
    anchors: list[tuple[int, int]]

    def place(self, character: int) -> int:
        """Return the character of the text that a character of the content has become."""
        starts = [start for start, _ in self.anchors]
        after = bisect.bisect_right(starts, character)
        start, place = self.anchors[max(after - 1, 0)]
        limit = self.anchors[min(after, len(self.anchors) - 1)][1]
        return min(place + max(character - start, 0), limit)


def render_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    inside: Sequence[Sequence[Section]] | None = None,
    options: Mapping[str, Any] | None = None,
) -> tuple[str, list[Section], tuple[str, ...]]:
    """Return the text that the chat template makes of messages, the sections of their contents, and notes.

    The template is rendered again with marks between the words of the contents. Without the marks, its text
    must be the same. Then the marks show where the words are, in any order. What the template leaves out,
    such as the thinking in earlier answers, is in no section, and a note says so. Text that the template
    itself writes, such as tool calls and tools, is in no section either.

    Args:
        tokenizer: The tokenizer with its chat template.
        messages: The messages, each with "role" and "content". A content is text or a list of parts of text.
            A message with tool calls needs none.
        inside: The sections of each message's content. None: each content is one section.
        options: What the template gets besides the messages: `tools`, `documents`, and its own variables. The
            texts of `documents` are sections too.

    Raises:
        TypeError: If a content is not text.
        ValueError: If there is no template, a message has no role or content, or the template raises an
            error, or changes a content in a way that cannot be followed.
    """
    given = dict(options or {})
    contents = _list_contents(messages, inside, given.get("documents"))

    def render(texts_of_contents: Sequence[str]) -> str:
        remaining = iter(texts_of_contents)
        filled = [_fill_message(message, remaining) for message in messages]
        if given.get("documents"):
            filled_documents = [_fill_document(document, remaining) for document in given["documents"]]
            return _render(tokenizer, filled, {**given, "documents": filled_documents})
        return _render(tokenizer, filled, given)

    own = [content.text for content in contents]
    rendered = render(own)
    for number, message in enumerate(messages, 1):
        parts = message.get("content")
        if isinstance(parts, (list, tuple)) and parts and repr(parts) in rendered:
            raise ValueError(
                "prompt: expected messages whose content is one string, because the chat template writes a "
                f"list of parts as Python code, got parts in message {number}; join their texts"
            )
    pieces = _find_pieces(render, own, rendered)
    sections = [
        section._replace(start=piece.place(start), stop=piece.place(stop))
        for piece in pieces
        for section in contents[piece.content].sections
        for start, stop in [
            (max(section.start, piece.anchors[0][0]), min(section.stop, piece.anchors[-1][0]))
        ]
        if start < stop
    ]
    notes = (*_note_missing(contents, pieces), *_note_none(tokenizer, messages, given, rendered))
    return rendered, sorted(sections, key=lambda section: section.start), notes


def find_template_options(tokenizer: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of some options that the chat template reads, such as `tools` and `enable_thinking`."""
    if not options or not getattr(tokenizer, "chat_template", None):
        return {}
    template = tokenizer.get_chat_template(tools=options.get("tools"))
    return {name: value for name, value in options.items() if re.search(rf"\b{re.escape(name)}\b", template)}


def _list_contents(
    messages: Sequence[Mapping[str, Any]], inside: Sequence[Sequence[Section]] | None, documents: Any
) -> list[_Content]:
    """Return the texts of messages and of the template's documents, in the order of `_fill_message`.

    Raises:
        TypeError: If a content is neither text nor a list of parts of text.
    """
    contents = []
    for number, message in enumerate(messages, 1):
        content, role = message.get("content"), str(message.get("role"))
        if "content" not in message or (content is None and texts.needs_no_content(message)):
            continue
        parts: Sequence[Any] = content if isinstance(content, (list, tuple)) else [content]
        for part in parts:
            is_part = isinstance(part, Mapping) and part is not content
            text: Any = part["text"] if is_part and isinstance(part.get("text"), str) else part
            check_instance(
                "prompt",
                text,
                str,
                f"messages whose content is text, or a list of parts of text, in message {number} ({role})",
            )
            own = [Section(role, role, 0, len(text))] if inside is None else inside[number - 1]
            label = f"{number} {role}"
            contents.append(_Content(text, [section._replace(message=label) for section in own]))
    for number, document in enumerate(documents or (), 1):
        name = str(document.get("title") or f"document {number}") if isinstance(document, Mapping) else ""
        contents += [
            _Content(text, [Section("document", name, 0, len(text))]) for text in _texts_of(document).values()
        ]
    return contents


def _texts_of(document: Any) -> dict[str, str]:
    """Return the texts of a document for a chat template, by their keys; its title is only a name."""
    if not isinstance(document, Mapping):
        return {}
    return {key: text for key, text in document.items() if isinstance(text, str) and key != "title"}


def _fill_message(message: Mapping[str, Any], contents: Iterator[str]) -> dict[str, Any]:
    """Return a message with other texts as its content."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": next(contents)}
    if not isinstance(content, (list, tuple)):
        return dict(message)
    parts = [
        {**part, "text": next(contents)} if isinstance(part, Mapping) else next(contents) for part in content
    ]
    return {**message, "content": parts}


def _fill_document(document: Any, contents: Iterator[str]) -> Any:
    """Return a document for a chat template with other texts."""
    texts_by_key = _texts_of(document)
    return {**document, **{key: next(contents) for key in texts_by_key}} if texts_by_key else document


def _render(tokenizer: Any, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
    """Return the text that the chat template makes of messages.

    Raises:
        ValueError: If there is no template, a message has no role or content, or the template raises one.
    """
    texts.check_messages(tokenizer, messages)
    try:
        return texts.render_messages(tokenizer, messages, options)
    except Exception as problem:
        raise ValueError(
            "prompt: expected messages that the tokenizer's chat template accepts, got "
            f"{type(problem).__name__}: {problem}"
        ) from problem


def _find_pieces(
    render: Callable[[Sequence[str]], str], contents: Sequence[str], rendered: str
) -> list[_TemplatePiece]:
    """Return the pieces of contents that a template has written.

    Args:
        render: A function from other contents to the text of the template.
        contents: The contents.
        rendered: The text of the template.

    Raises:
        ValueError: If the template changes a content in a way that cannot be followed.
    """
    # Marks are at the start of each word and after the last one, where no white space is next to them that a
    # template may strip.
    cuts = [[match.start() for match in _WORD.finditer(content)] for content in contents]
    cuts = [
        [*starts, len(content.rstrip())] if starts else []
        for starts, content in zip(cuts, contents, strict=True)
    ]
    found = _follow(render, contents, rendered, cuts)
    if found is not None:
        return found
    # A template that compares one content, or its beginning, with some text does something else with marks.
    pieces: list[_TemplatePiece] = []
    unknown = []
    for index, own in enumerate(cuts):
        others: list[list[int]] = [[]] * index
        alone = None
        for tried in (own, own[1:-1]) if own else ():
            if alone is None and tried:
                rest: list[list[int]] = [[]] * (len(cuts) - index - 1)
                alone = _follow(render, contents, rendered, [*others, tried, *rest])
        pieces += alone or []
        if own and alone is None:
            unknown.append(index)
    for index in unknown:
        text = contents[index].strip()
        taken = [(piece.anchors[0][1], piece.anchors[-1][1]) for piece in pieces]
        places = [
            match.start()
            for match in re.finditer(f"(?={re.escape(text)})", rendered)
            if all(match.start() >= stop or match.start() + len(text) <= start for start, stop in taken)
        ]
        if len(places) != 1:
            raise ValueError(
                f"prompt: expected a chat template that writes the content {describe_value(text)} where it "
                f"can be found, got one whose text has it {len(places)} times and changes with marks in it; "
                "give the text of the template as a string"
            )
        start = cuts[index][0]
        pieces.append(_TemplatePiece(index, [(start, places[0]), (start + len(text), places[0] + len(text))]))
    return pieces


def _follow(
    render: Callable[[Sequence[str]], str],
    contents: Sequence[str],
    rendered: str,
    cuts: Sequence[Sequence[int]],
) -> list[_TemplatePiece] | None:
    """Return the pieces of contents with marks at some characters; None if the marks change the text."""
    owners = [(index, place) for index, own in enumerate(cuts) for place in range(len(own))]
    numbers = itertools.count()
    marked = []
    for content, own in zip(contents, cuts, strict=True):
        ends = [0, *own, len(content)]
        words = [content[start:stop] for start, stop in itertools.pairwise(ends)]
        marked.append(words[0] + "".join(_make_mark(next(numbers)) + word for word in words[1:]))
    try:
        text = render(marked)
    except ValueError:
        return None
    if _MARK.sub("", text) != rendered:
        return None
    anchors, removed = [], 0
    for match in _MARK.finditer(text):
        anchors.append((*owners[_read_mark(match[0])], match.start() - removed))
        removed += len(match[0])
    pieces: list[_TemplatePiece] = []
    # Each run of marks that follow each other in a content is a piece of it.
    runs = itertools.groupby(enumerate(anchors), lambda each: (each[1][0], each[1][1] - each[0]))
    for (index, _), run in runs:
        listed = list(run)
        content, own = contents[index], cuts[index]
        (first, (_, low, start)), (last, (_, high, stop)) = listed[0], listed[-1]
        earlier = content[own[low - 1] if low else 0 : own[low]]
        later = content[own[high] : own[high + 1] if high + 1 < len(own) else len(content)]
        before = rendered[anchors[first - 1][2] if first else 0 : start]
        after = rendered[stop : anchors[last + 1][2] if last + 1 < len(anchors) else len(rendered)]
        # A template may cut a content between two marks.
        back = count_equal(earlier[::-1], before[::-1])
        ahead = count_equal(later, after)
        inner = [(own[place], at) for _, (_, place, at) in listed]
        begin, end = (own[low] - back, start - back), (own[high] + ahead, stop + ahead)
        pieces.append(_TemplatePiece(index, [begin, *inner, end]))
    return pieces


def count_equal(first: str, second: str) -> int:
    """Return the number of characters that two texts begin with together."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(first), len(second)))


def _make_mark(number: int) -> str:
    return chr(_HIGH + number // _BASE) + chr(_LOW + number % _BASE)


def _read_mark(mark: str) -> int:
    return (ord(mark[0]) - _HIGH) * _BASE + ord(mark[1]) - _LOW


def _note_missing(contents: Sequence[_Content], pieces: Sequence[_TemplatePiece]) -> list[str]:
    """Return a note for each content that the template has left out, or of which it has left out a part."""
    notes = []
    for index, (text, sections) in enumerate(contents):
        left = list(text)
        own = [piece for piece in pieces if piece.content == index]
        for piece in own:
            start, stop = piece.anchors[0][0], piece.anchors[-1][0]
            left[start:stop] = " " * (stop - start)
        if "".join(left).strip():
            section = sections[0]
            name = f"message {section.message}" if section.message else f"document {section.name!r}"
            what = f"a part of {name}" if own else name
            notes.append(f"prompt: the chat template leaves out {what}, so it is not a source")
    return notes


def _note_none(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any], rendered: str
) -> list[str]:
    """Return a note if the template writes a content that is None as text."""
    if not any(message.get("content", "") is None for message in messages):
        return []
    empty = [{**message, "content": message.get("content") or ""} for message in messages]
    with contextlib.suppress(ValueError):
        other = _render(tokenizer, empty, options)
        if other != rendered and rendered.replace("None", "") == other.replace("None", ""):
            return ['prompt: the chat template writes a content that is None as the text "None"']
    return []
