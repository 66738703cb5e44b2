"""Test documents and chat messages: where each content is in the text that the chat template makes."""

from __future__ import annotations

import functools

import pytest

import lens_mix as lm
from lens_mix.traces.documents import Documents, Section, render_chat
from tests.traces.readers import PLAIN, STRIPPING, STRIPPING_USERS, WITH_DEFAULT, reader, tokenizer_of

pytestmark = pytest.mark.filterwarnings("ignore")

REPORT, PRESS = "The company was founded in Oslo. It has 120 employees.", "Critics liked it.\n\nTrains run."
QUESTION, INSTRUCTION = "On which hardware?", "Use the documents."
MESSAGES = [
    {"role": "system", "content": INSTRUCTION},
    {"role": "user", "content": REPORT},
    {"role": "assistant", "content": "  On eight GPUs.\n"},
    {"role": "user", "content": QUESTION},
]
TEMPLATES = {
    "plain": PLAIN,
    "with a default system message": WITH_DEFAULT,
    "stripping": STRIPPING,
    "stripping users": STRIPPING_USERS,
}


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
    text, sections = render_chat(tokenizer(PLAIN), messages, inside)
    assert text == tokenizer(PLAIN).apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert [(each.kind, each.message, text[each.start : each.stop]) for each in sections] == [
        ("instruction", "1 system", INSTRUCTION),
        ("document", "2 user", REPORT),
        ("document", "2 user", PRESS),
        ("question", "2 user", QUESTION),
    ]


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_places_of_contents(template):
    given = tokenizer(TEMPLATES[template])
    for messages in (MESSAGES, MESSAGES[1:], MESSAGES[:3]):
        text, sections = render_chat(given, messages)
        for message, section in zip(messages, sections, strict=True):
            found = text[section.start : section.stop]
            is_stripped = template == "stripping" or (
                template == "stripping users" and message["role"] == "user"
            )
            assert found == (message["content"].strip() if is_stripped else message["content"])
            assert section.kind == section.name == message["role"]
        assert text.endswith("assistant\n") == (messages[-1]["role"] == "user")
        assert [section.message for section in sections] == [
            f"{number} {message['role']}" for number, message in enumerate(messages, 1)
        ]


@pytest.mark.parametrize(
    "contents",
    [
        ["Oslo", "Oslo", "Oslo"],
        ["user", "assistant", "<|end|>"],
        ["⟦1⟧", "⟦0⟧", "⟦2⟧ ⟦0⟧"],
        ["", "", ""],
        ["", "Oslo", " "],
        ["<|user|>user\nOslo<|end|>\n", "Oslo", "(a|b)* \\d+ [^x]$"],
        ["Oslo\n", "\n\n", "Os\tlo "],
    ],
)
def test_contents_that_a_search_would_mix_up(contents):
    roles = ("user", "assistant", "user")
    messages = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=True)]
    text, sections = render_chat(tokenizer(PLAIN), messages)
    place = 0
    for role, content, section in zip(roles, contents, sections, strict=True):
        place += len(f"<|user|>{role}\n")
        assert (section.start, section.stop) == (place, place + len(content))
        assert text[section.start : section.stop] == content
        place += len(content) + len("<|end|>\n")


def test_more_messages_than_digits():
    messages = [{"role": "user", "content": f"Oslo {number}"} for number in range(25)]
    text, sections = render_chat(tokenizer(PLAIN), messages)
    assert [text[each.start : each.stop] for each in sections] == [each["content"] for each in messages]


def test_documents_that_a_template_strips():
    given = Documents({"report": f"\n {REPORT} ", "press": f" {PRESS}\n\n"})
    messages, inside = given.to_messages()
    text, sections = render_chat(tokenizer(STRIPPING), messages, inside)
    assert text[sections[0].start : sections[0].stop] == f"\n {REPORT} "
    # The end of the last document is the end of the message, which the template strips.
    assert text[sections[1].start : sections[1].stop] == f" {PRESS}"
    assert all(isinstance(section, Section) for section in sections)


def test_what_a_document_ends_with_is_its_own():
    for end in ("", "\n", "\n\n\n\n", "   "):
        text, sections = Documents({"report": REPORT + end}).to_text()
        assert text == f"report:\n{REPORT}{end}\nAnswer:"
        assert text[sections[0].start : sections[0].stop] == REPORT + end


BAD = {
    "drops a message": PLAIN.replace("for m in messages", "for m in messages[1:]"),
    "repeats a message": PLAIN + "{{ messages[0]['content'] }}",
    "changes contents": PLAIN.replace("m['content']", "m['content'] | upper"),
    "turns messages round": PLAIN.replace("for m in messages", "for m in messages | reverse"),
    "writes no content": PLAIN.replace("{{ m['content'] }}", ""),
    "cuts contents": PLAIN.replace("m['content']", "m['content'][:3]"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_template_that_does_not_write_the_contents(name):
    with pytest.raises(ValueError, match=r"prompt: expected a chat template that writes each .* as a string"):
        render_chat(tokenizer(BAD[name]), MESSAGES)


def test_a_template_that_raises_says_what():
    template = (
        PLAIN + "{% if messages[0]['role'] == 'system' %}{{ raise_exception('No system.') }}{% endif %}"
    )
    model = reader(template=template)
    for prompt in (MESSAGES, documents()):
        with pytest.raises(ValueError, match=r"prompt: expected messages that .* accepts, got .*No system\."):
            lm.trace(model, prompt, answer="Oslo")
    assert lm.trace(model, MESSAGES[1:], answer="Oslo").text == "Oslo"


@pytest.mark.parametrize(
    ("messages", "error", "message"),
    [
        ([{"role": "user"}], ValueError, 'messages with "role" and "content"'),
        ([{"content": "Oslo"}], ValueError, 'messages with "role" and "content"'),
        (
            [{"role": "user", "content": None}],
            TypeError,
            "prompt: expected messages whose content is text, got No",
        ),
        (
            [{"role": "user", "content": 3}],
            TypeError,
            "prompt: expected messages whose content is text, got 3",
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": "Oslo"}]}],
            TypeError,
            "prompt: expected messages whose content is text",
        ),
    ],
)
def test_wrong_messages(messages, error, message):
    with pytest.raises(error, match=message):
        lm.trace(reader(template=PLAIN), messages, answer="Oslo")


def test_messages_need_a_template():
    with pytest.raises(ValueError, match="prompt: expected a tokenizer with a chat template"):
        lm.trace(reader(), MESSAGES, answer="Oslo")


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
