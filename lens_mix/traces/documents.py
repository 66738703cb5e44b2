"""Write documents, a question and chat messages as one text, and keep where each of them is."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lens_mix.arguments import check_instance, describe_value
from lens_mix.lens import texts

# Sources of these kinds are not content that a reader could have given or left out.
TEMPLATE, WRITTEN = "template", "written"
# The kind of a picture among the tokens of a prompt.
PICTURE = "picture"


class Section(NamedTuple):
    """A section of the prompt's text.

    Attributes:
        kind: "document", "question" or "instruction"; the role of a message ("user", "system", "assistant",
            "tool"); "prompt" for a plain string; "source" for the input of an encoder; "picture".
        name: The name of the document, else the kind.
        start: The index of its first character.
        stop: The index after its last character.
        message: The number and the role of the message that contains it ("2 user"); None if the prompt has
            no messages.
    """

    kind: str
    name: str
    start: int
    stop: int
    message: str | None = None


@dataclasses.dataclass(frozen=True)
class Documents:
    """Named documents and a question about them: a prompt for `lens_mix.trace`.

    If the tokenizer has a chat template, the instruction is the system's message, and the documents and the
    question are one message of the user. Otherwise they are one text that ends in "Answer:".

    Attributes:
        documents: The text of each document by its name, which the prompt contains as a headline.
        question: The question, which follows the documents.
        instruction: The instruction to the model, before the documents.

    Raises:
        TypeError: If a name or a text is not a string.
        ValueError: If there are no documents, or one of them is empty.
    """

    documents: Mapping[str, str]
    question: str = ""
    instruction: str = ""

    def __post_init__(self) -> None:
        check_instance("documents", self.documents, Mapping, "texts by name")
        for name in ("question", "instruction"):
            check_instance(name, getattr(self, name), str, "a text")
        texts = [*self.documents, *self.documents.values()]
        if not all(isinstance(text, str) for text in texts):
            raise TypeError(f"documents: expected texts by name, got {describe_value(dict(self.documents))}")
        if not texts or not all(text.strip() for text in texts):
            raise ValueError(
                f"documents: expected at least one document, each with a name and a text, got "
                f"{describe_value(dict(self.documents))}"
            )

    def to_messages(self) -> tuple[list[dict[str, str]], list[list[Section]]]:
        """Return the chat messages, and the sections of each message's content."""
        content, sections = self._join(self.question)
        messages, inside = [{"role": "user", "content": content}], [sections]
        if self.instruction:
            messages.insert(0, {"role": "system", "content": self.instruction})
            inside.insert(0, [Section("instruction", "instruction", 0, len(self.instruction))])
        return messages, inside

    def to_text(self) -> tuple[str, list[Section]]:
        """Return the documents as one text for a model without a chat template, and its sections."""
        start = f"{self.instruction}\n\n" if self.instruction else ""
        content, sections = self._join(f"Question: {self.question}" if self.question else "")
        moved = [_shift(section, len(start)) for section in sections]
        if self.instruction:
            moved.insert(0, Section("instruction", "instruction", 0, len(self.instruction)))
        return f"{start}{content}\nAnswer:", moved

    def _join(self, question: str) -> tuple[str, list[Section]]:
        """Return the documents under their names and then the question, and their sections."""
        text, sections = "", []
        for name, document in self.documents.items():
            text += f"\n\n{name}:\n" if text else f"{name}:\n"
            sections.append(Section("document", name, len(text), len(text) + len(document)))
            text += document
        if question:
            text += "\n\n"
            sections.append(Section("question", "question", len(text), len(text) + len(question)))
        return text + question, sections


def _shift(section: Section, by: int, message: str | None = None) -> Section:
    """Return a section at a later place of a text."""
    return section._replace(start=section.start + by, stop=section.stop + by, message=message)


def render_chat(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], inside: Sequence[Sequence[Section]] | None = None
) -> tuple[str, list[Section]]:
    """Return the text that the chat template makes of messages, and the sections of their contents.

    The places of the contents are found by rendering marks in their stead, and not by searching the text, in
    which a content may occur twice.

    Args:
        tokenizer: The tokenizer with its chat template.
        messages: The messages, each with "role" and "content".
        inside: The sections of each message's content. None: each content is one section.

    Raises:
        TypeError: If a content is not text.
        ValueError: If there is no template, a message has no role or content, or the template raises an
            error, changes the contents, or repeats or leaves out one of them.
    """
    for message in messages:
        check_instance("prompt", message.get("content", ""), str, "messages whose content is text")
    contents = [message.get("content", "") for message in messages]
    marks = [f"⟦{number}⟧" for number in range(len(messages))]
    rendered = _render(tokenizer, messages)
    filled = [{**message, "content": mark} for message, mark in zip(messages, marks, strict=True)]
    found = re.fullmatch(_make_pattern(_render(tokenizer, filled), marks, contents), rendered)
    if found is None:
        raise ValueError(
            "prompt: expected a chat template that writes each message's content once and unchanged, got one "
            "that does not; give the text of the template as a string"
        )
    sections = []
    for index, (message, content) in enumerate(zip(messages, contents, strict=True)):
        role, kept = str(message["role"]), found[index + 1]
        own = inside[index] if inside is not None else [Section(role, role, 0, len(content))]
        # A template that strips the contents moves their sections.
        cut = content.find(kept)
        for section in own:
            start, stop = (min(max(end - cut, 0), len(kept)) for end in (section.start, section.stop))
            moved = section._replace(start=start, stop=stop)
            sections.append(_shift(moved, found.start(index + 1), f"{index + 1} {role}"))
    return rendered, sections


def _render(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the text that the chat template makes of messages.

    Raises:
        ValueError: If there is no template, a message has no role or content, or the template raises one.
    """
    texts.check_messages(tokenizer, messages)
    try:
        return texts.render_messages(tokenizer, messages)
    except Exception as problem:
        raise ValueError(
            "prompt: expected messages that the tokenizer's chat template accepts, got "
            f"{type(problem).__name__}: {problem}"
        ) from problem


def _make_pattern(marked: str, marks: Sequence[str], contents: Sequence[str]) -> str:
    """Return a pattern of the text with the contents in place of the marks, white space stripped or not."""
    pattern = ""
    for mark, content in zip(marks, contents, strict=True):
        before, _, marked = marked.partition(mark)
        forms = dict.fromkeys([content, content.rstrip(), content.lstrip(), content.strip()])
        pattern += f"{re.escape(before)}({'|'.join(map(re.escape, forms))})"
    return pattern + re.escape(marked)
