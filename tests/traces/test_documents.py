"""Test documents: where each of them is in the text of a prompt."""

from __future__ import annotations

import functools

import pytest

from lens_mix.traces.chat import render_chat
from lens_mix.traces.documents import Documents, Section
from tests.traces.readers import PLAIN, STRIPPING, tokenizer_of

pytestmark = pytest.mark.filterwarnings("ignore")

REPORT, PRESS = "The company was founded in Oslo. It has 120 employees.", "Critics liked it.\n\nTrains run."
QUESTION, INSTRUCTION = "On which hardware?", "Use the documents."


@functools.cache
def tokenizer(template):
    return tokenizer_of(template=template)


def documents():
    return Documents({"report": REPORT, "press": PRESS}, question=QUESTION, instruction=INSTRUCTION)


def test_documents_without_a_template():
    text, sections = documents().to_text()
    assert text == (f"{INSTRUCTION}\n\nreport:\n{REPORT}\n\npress:\n{PRESS}\n\nQuestion: {QUESTION}\nAnswer:")
    assert [(each.kind, each.name, text[each.start : each.stop]) for each in sections] == [
        ("instruction", "instruction", INSTRUCTION),
        ("document", "report", REPORT),
        ("document", "press", PRESS),
        ("question", "question", f"Question: {QUESTION}"),
    ]


def test_documents_with_a_template():
    messages, inside = documents().to_messages()
    assert [message["role"] for message in messages] == ["system", "user"]
    text, sections, _ = render_chat(tokenizer(PLAIN), messages, inside)
    assert text == tokenizer(PLAIN).apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert [(each.kind, each.message, text[each.start : each.stop]) for each in sections] == [
        ("instruction", "1 system", INSTRUCTION),
        ("document", "2 user", REPORT),
        ("document", "2 user", PRESS),
        ("question", "2 user", QUESTION),
    ]


def test_documents_that_a_template_strips():
    given = Documents({"report": f"\n {REPORT} ", "press": f" {PRESS}\n\n"})
    messages, inside = given.to_messages()
    text, sections, _ = render_chat(tokenizer(STRIPPING), messages, inside)
    assert text[sections[0].start : sections[0].stop] == f"\n {REPORT} "
    # The end of the last document is the end of the message, which the template strips.
    assert text[sections[1].start : sections[1].stop] == f" {PRESS}"
    assert all(isinstance(section, Section) for section in sections)


def test_what_a_document_ends_with_is_its_own():
    for end in ("", "\n", "\n\n\n\n", "   "):
        text, sections = Documents({"report": REPORT + end}).to_text()
        assert text == f"report:\n{REPORT}{end}\nAnswer:"
        assert text[sections[0].start : sections[0].stop] == REPORT + end


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"documents": {}}, ValueError, "documents: expected at least one document"),
        (
            {"documents": {"a": " \n"}},
            ValueError,
            "documents: expected at least one document, each with a name",
        ),
        (
            {"documents": {"": "Oslo"}},
            ValueError,
            "documents: expected at least one document, each with a name",
        ),
        ({"documents": {3: "Oslo"}}, TypeError, "documents: expected texts by name"),
        ({"documents": {"a": 3}}, TypeError, "documents: expected texts by name"),
        ({"documents": ["Oslo"]}, TypeError, "documents: expected texts by name"),
        ({"documents": "Oslo"}, TypeError, "documents: expected texts by name"),
        ({"documents": {"a": "b"}, "question": None}, TypeError, "question: expected a text, got None"),
        ({"documents": {"a": "b"}, "instruction": 3}, TypeError, "instruction: expected a text, got 3"),
    ],
)
def test_wrong_documents(arguments, error, message):
    with pytest.raises(error, match=message):
        Documents(**arguments)
