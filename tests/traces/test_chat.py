"""Test chat messages: where each content is in the text that the chat template makes."""

from __future__ import annotations

import functools

import pytest
import torch

import lens_mix as lm
from lens_mix.traces.chat import find_template_options, render_chat
from lens_mix.traces.documents import Documents
from tests.traces.readers import PLAIN, STRIPPING, STRIPPING_USERS, WITH_DEFAULT, reader, tokenizer_of

pytestmark = pytest.mark.filterwarnings("ignore")

REPORT, QUESTION, INSTRUCTION = (
    "The company was founded in Oslo. It has 120 employees.",
    "On which hardware?",
    "Use the documents.",
)
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


# Qwen 3 leaves the thinking out of earlier answers, and writes tool calls itself.
THINKING = """{%- for m in messages %}<|user|>{{ m.role }}
{% set content = m.content if m.content is string else '' %}
{%- if m.role == 'assistant' and '</think>' in content %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}
{%- endif %}
{{- content }}
{%- for call in m.tool_calls or [] %}{% if content %}{{ '\n' }}{% endif %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|end|>
{% endfor %}{% if add_generation_prompt %}<|user|>assistant
{% endif %}"""
# Mistral writes the system prompt in the last turn.
MOVING = """<s>
{%- set first = messages[0].content + '\n\n' if messages[0].role == 'system' else '' %}
{%- for m in messages if m.role != 'system' %}
{%- if m.role == 'user' %}[INST] {{ (first if loop.last else '') + m.content }}[/INST]
{%- else %} {{ m.content }}</s>{% endif %}
{%- endfor %}"""
PARTS = PLAIN.replace(
    "{{ m['content'] }}",
    "{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text | trim }}\n{% endfor %}{% endif %}",
)
TOOLS = (
    """{% if tools %}<|user|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|end|>
{% endif %}{% for document in documents or [] %}<|user|>document
{{ document.title }}: {{ document.text }}<|end|>
{% endfor %}"""
    + PLAIN
    + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)


@functools.cache
def tokenizer(template):
    return tokenizer_of(template=template)


def documents():
    return Documents({"report": REPORT}, question=QUESTION, instruction=INSTRUCTION)


def written(template, messages, **options):
    """Return the message and the text of each section, and the notes."""
    text, sections, notes = render_chat(tokenizer(template), messages, options=options)
    own = tokenizer(template).apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, **options
    )
    assert text == own
    return [(each.message, text[each.start : each.stop].strip()) for each in sections], notes


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_places_of_contents(template):
    given = tokenizer(TEMPLATES[template])
    for messages in (MESSAGES, MESSAGES[1:], MESSAGES[:3]):
        text, sections, _ = render_chat(given, messages)
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
    text, sections, _ = render_chat(tokenizer(PLAIN), messages)
    place, places = 0, []
    for role, content in zip(roles, contents, strict=True):
        place += len(f"<|user|>{role}\n")
        # White space alone is not a source.
        places += [(place, place + len(content))] if content.strip() else []
        place += len(content) + len("<|end|>\n")
    assert [(section.start, section.stop) for section in sections] == places
    assert [text[start:stop] for start, stop in places] == [each for each in contents if each.strip()]


def test_more_messages_than_digits():
    messages = [{"role": "user", "content": f"Oslo {number}"} for number in range(25)]
    text, sections, _ = render_chat(tokenizer(PLAIN), messages)
    assert [text[each.start : each.stop] for each in sections] == [each["content"] for each in messages]


CHANGES = {
    "cuts contents": "m['content'][:9]",
    "compares and repeats": "m['content'] ~ (m['content'] if m['content'] == 'On which hardware?' else '')",
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_content_that_cannot_be_followed(name):
    given = tokenizer(PLAIN.replace("m['content']", CHANGES[name]))
    with pytest.raises(
        ValueError, match=r"prompt: expected a chat template that writes the content .* times"
    ):
        render_chat(given, MESSAGES)


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
            r"prompt: expected messages whose content is text, .* in message 1 \(user\), got None",
        ),
        (
            [{"role": "user", "content": 3}],
            TypeError,
            r"prompt: expected messages whose content is text, .* in message 1 \(user\), got 3",
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": "Oslo"}]}],
            ValueError,
            "prompt: expected messages whose content is one string, .* Python code, got parts in message 1",
        ),
        (
            [{"role": "user", "content": [{"type": "image", "url": "x"}]}],
            TypeError,
            r"prompt: expected messages whose content is text, .* in message 1 \(user\), got {.*image",
        ),
    ],
)
def test_wrong_messages(messages, error, message):
    with pytest.raises(error, match=message):
        lm.trace(reader(template=PLAIN), messages, answer="Oslo")


def test_messages_need_a_template():
    with pytest.raises(ValueError, match="prompt: expected a tokenizer with a chat template"):
        lm.trace(reader(), MESSAGES, answer="Oslo")


# ------------------------------------------------------------------ histories that every user has

CALL = [{"type": "function", "function": {"name": "office", "arguments": {"q": "main"}}}]
WHERE, ANSWERED = {"role": "user", "content": "Where?"}, {"role": "tool", "content": "In Oslo."}


@pytest.mark.parametrize("content", [{"content": ""}, {"content": None}, {}])
@pytest.mark.parametrize("template", [PLAIN, THINKING])
def test_tool_calls_without_content(template, content):
    messages = [WHERE, {"role": "assistant", **content, "tool_calls": CALL}, ANSWERED]
    found, notes = written(template, messages)
    assert found == [("1 user", "Where?"), ("3 tool", "In Oslo.")]
    # The transformers of TransformerLens 2 gives None to the template, which writes it.
    text = render_chat(tokenizer(template), messages)[0]
    assert [note.partition(" as the text ")[2] for note in notes] == ['"None"'] * ("None" in text)
    t = lm.trace(reader(template=template), messages, answer="Oslo", method="attention", sources="message")
    assert [each.name for each in t.sources() if each.is_content] == ["1 user", "3 tool"]


def test_tool_calls_with_content():
    messages = [WHERE, {"role": "assistant", "content": "I look.", "tool_calls": CALL}, ANSWERED]
    found, notes = written(THINKING, messages)
    assert found == [("1 user", "Where?"), ("2 assistant", "I look."), ("3 tool", "In Oslo.")]
    assert not notes


def test_thinking_that_the_template_leaves_out():
    thought = "<think>\nThe office is in Oslo.\n</think>\n\nIn Oslo."
    messages = [WHERE, {"role": "assistant", "content": thought}, {"role": "user", "content": "And trains?"}]
    found, notes = written(THINKING, messages)
    assert found == [("1 user", "Where?"), ("2 assistant", "In Oslo."), ("3 user", "And trains?")]
    assert notes == (
        "prompt: the chat template leaves out a part of message 2 assistant, so it is not a source",
    )
    # The template's own text is not taken for the content, though both end in the same way.
    t = lm.trace(reader(template=THINKING), messages, answer="Yes.", method="attention")
    assert notes[0] in t.notes
    assert not any("think" in each.text for each in t.sources())


def test_a_system_prompt_in_the_last_turn():
    messages = [
        {"role": "system", "content": INSTRUCTION},
        WHERE,
        {"role": "assistant", "content": "In Oslo."},
        WHERE,
    ]
    found, notes = written(MOVING, messages)
    expected = [
        ("2 user", "Where?"),
        ("3 assistant", "In Oslo."),
        ("1 system", INSTRUCTION),
        ("4 user", "Where?"),
    ]
    assert found == expected
    assert not notes


def test_a_message_that_is_left_out():
    given = PLAIN.replace("for m in messages", "for m in messages[1:]")
    found, notes = written(given, MESSAGES)
    assert [name for name, _ in found] == ["2 user", "3 assistant", "4 user"]
    assert notes == ("prompt: the chat template leaves out message 1 system, so it is not a source",)


@pytest.mark.parametrize("change", ["upper", "replace('o', '0')", "tojson", "escape", "replace(' ', '  ')"])
def test_contents_that_the_template_changes(change):
    found, notes = written(PLAIN.replace("m['content']", f"m['content'] | {change}"), MESSAGES)
    assert [name for name, _ in found] == [
        f"{number} {each['role']}" for number, each in enumerate(MESSAGES, 1)
    ]
    assert not notes
    assert len(found[1][1]) >= len(REPORT)


def test_contents_in_another_order_and_twice():
    reverse = PLAIN.replace("for m in messages", "for m in messages | reverse")
    assert [name for name, _ in written(reverse, MESSAGES[1:])[0]] == ["3 user", "2 assistant", "1 user"]
    found, _ = written(PLAIN + "{{ messages[0]['content'] }}", MESSAGES[1:])
    assert [name for name, _ in found] == ["1 user", "2 assistant", "3 user", "1 user"]
    assert found[0][1] == found[-1][1]


def test_text_in_parts():
    parts = [{"type": "text", "text": REPORT}, {"type": "text", "text": " Where?\n"}]
    messages = [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": parts}]
    found, notes = written(PARTS, messages)
    assert found == [("1 system", INSTRUCTION), ("2 user", REPORT), ("2 user", "Where?")]
    assert not notes
    t = lm.trace(reader(template=PARTS), messages, answer="Oslo", method="attention", sources="message")
    assert [each.name for each in t.sources() if each.is_content] == ["1 system", "2 user"]
    # This template takes strings alone, and leaves the parts out.
    found, notes = written(THINKING, messages)
    assert found == [("1 system", INSTRUCTION)]
    assert len(notes) == 2


@pytest.mark.parametrize("contents", [["\U000f0000\U00100000 x", "y"], ["\uf8ff\ufffd", "\U0010fffd"]])
def test_contents_with_private_characters(contents):
    messages = [{"role": "user", "content": content} for content in contents]
    found, _ = written(PLAIN, messages)
    assert [text for _, text in found] == contents


def test_a_template_that_looks_at_the_beginning_of_a_content():
    given = PLAIN.replace(
        "m['content']", "m['content'][2:] if m['content'].startswith('/x') else m['content']"
    )
    messages = [WHERE, {"role": "assistant", "content": "/x On eight GPUs."}, WHERE]
    found, notes = written(given, messages)
    assert found == [("1 user", "Where?"), ("2 assistant", "On eight GPUs."), ("3 user", "Where?")]
    assert len(notes) == 1


def test_tools_documents_and_variables_of_the_template():
    tools = [
        {"type": "function", "function": {"name": "office", "description": "Find it.", "parameters": {}}}
    ]
    given = [{"title": "report", "text": REPORT}, {"title": "press", "text": "Critics liked it."}]
    model = reader(template=TOOLS)
    options = {"tools": tools, "documents": given, "enable_thinking": False}
    t = lm.trace(model, [WHERE], answer="Oslo", method="attention", sources="document", **options)
    own = model.tokenizer.apply_chat_template([WHERE], tokenize=False, add_generation_prompt=True, **options)
    assert t.reading.prompt_text.text == own
    assert [(each.kind, each.name, each.text) for each in t.sources() if each.is_content] == [
        ("document", "report", REPORT),
        ("document", "press", "Critics liked it."),
        ("user", "user", "Where?"),
    ]
    ids = model.tokenizer(own, add_special_tokens=False)["input_ids"]
    assert torch.equal(t.reading.ids[: t.n_prompt], torch.tensor(ids))
    assert (
        lm.trace(model, [WHERE], generate=1, tools=tools).n_prompt
        > lm.trace(model, [WHERE], generate=1).n_prompt
    )
    assert find_template_options(model.tokenizer, {"other": 1, "tools": None}) == {"tools": None}
    for name in ("tools", "enable_thinking"):
        with pytest.raises(
            TypeError, match=f"{name}: expected an argument of lm.trace, a variable of the chat templ"
        ):
            lm.trace(reader(template=PLAIN), [WHERE], answer="Oslo", **{name: options[name]})
    with pytest.raises(
        TypeError, match=r"tools: expected an argument of lm.trace or an option of model.generate \("
    ):
        lm.trace(model, "Where?", answer=" Oslo", tools=tools)
