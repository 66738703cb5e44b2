"""Write documents and a question as one text or as chat messages, and keep where each of them is."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from lens_mix.arguments import check_instance, describe_value

# Sources of these kinds are not content that a reader could have given or left out.
TEMPLATE, WRITTEN, PADDING = "template", "written", "padding"
# The kind of a picture among the tokens of a prompt, and that of a stretch of sound.
PICTURE, SOUND = "picture", "sound"


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

        >>> report = "The models were trained on eight GPUs."
        >>> documents = lm.Documents({"report": report}, question="On what were they trained?")
        >>> lm.trace(model, documents, generate=8).top(3)

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


def _shift(section: Section, by: int) -> Section:
    """Return a section at a later place of a text."""
    return section._replace(start=section.start + by, stop=section.stop + by)
