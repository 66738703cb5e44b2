"""Test that the sources of each unit are a partition of all positions, and that they nest."""

from __future__ import annotations

import functools
import itertools

import hypothesis
import pytest
import torch
from hypothesis import strategies

import lens_mix as lm
from lens_mix.traces.sources import label_positions, split_sentences
from tests.traces.readers import KINDS, PLAIN, WITH_DEFAULT, reader

pytestmark = pytest.mark.filterwarnings("ignore")

UNITS = ("token", "word", "sentence", "message", "document")
TEXTS = strategies.text(strategies.sampled_from("abé東😀 .!?\n\t\"'()-1"), min_size=1, max_size=40)
PROMPT = "The company was founded in Oslo. It has 120 employees. Trains run."


@functools.cache
def reader_of(kind="byte-level", template=None):
    return reader(kind, template=template)


def trace(prompt, answer=" On eight GPUs. Yes.", kind="byte-level", template=None, **options):
    return lm.trace(
        reader_of(kind, template),
        prompt,
        answer=answer,
        method="attention",
        **{"sources": "token", **options},
    )


def positions_of(sources):
    return [position for source in sources for position in source.positions]


def owners(sources):
    return {position: index for index, source in enumerate(sources) for position in source.positions}


def require_partition(t, sources):
    assert sorted(positions_of(sources)) == list(range(len(t.tokens)))
    for source in sources:
        assert list(source.positions) == sorted(source.positions)
        # No source has positions of the prompt and of what was written.
        assert len({position < t.n_prompt for position in source.positions}) == 1
    assert sources == sorted(sources, key=lambda source: source.positions)


def require_nested(t):
    """Check that every sentence lies in one document, and every document in one message."""
    for inner, outer in itertools.combinations(("token", "sentence", "document", "message"), 2):
        owner = owners(t.sources(outer))
        for source in t.sources(inner):
            if source.is_content:
                assert len({owner[position] for position in source.positions}) == 1, (inner, outer, source)
                outside = t.sources(outer)[owner[source.positions[0]]]
                assert outside.is_content, (source, outside)


@hypothesis.settings(
    max_examples=60, deadline=None, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
@hypothesis.given(strategies.lists(TEXTS, min_size=3, max_size=3), strategies.sampled_from(KINDS))
def test_every_unit_is_a_partition(texts, kind):
    first, second, question = texts
    hypothesis.assume(first.strip() and second.strip())
    prompt = lm.Documents({"a": first, "b": second}, question=question)
    for template in (None, PLAIN):
        t = trace(prompt, answer="\nYes 😀. It is.", kind=kind, template=template)
        for unit in UNITS:
            require_partition(t, t.sources(unit))
        require_nested(t)
        shown = [each.text for each in t.sources("document") if each.kind == "document"]
        assert [text.split() for text in shown] == [first.split(), second.split()]


@hypothesis.settings(max_examples=300, deadline=None)
@hypothesis.given(TEXTS)
def test_sentences_are_all_of_a_text(text):
    pieces = split_sentences()(text)
    assert "".join(text[start:stop] for start, stop in pieces) == text


def test_sentences_of_other_languages():
    text = "Das ist bzw. Gut. Ja."
    german, english = (trace(text, language=each, sources="sentence").sources() for each in ("de", "en"))
    assert [each.text for each in german if each.is_content] == ["Das ist bzw. Gut.", "Ja."]
    assert [each.text for each in english if each.is_content] != ["Das ist bzw. Gut.", "Ja."]
    japanese = trace("東京は大きい。電車が走る。", language="ja", sources="sentence").sources()
    assert [each.text for each in japanese if each.is_content] == ["東京は大きい。", "電車が走る。"]


def test_units_of_a_chat():
    messages = [
        {"role": "user", "content": "Where is it? In Oslo."},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "Where is it? In Oslo."},
    ]
    t = trace(messages, template=WITH_DEFAULT)
    found = {
        unit: [(each.text, each.kind, each.name) for each in t.sources(unit) if each.is_content]
        for unit in UNITS
    }
    assert found["sentence"] == [
        ("Where is it?", "user", "user"),
        ("In Oslo.", "user", "user"),
        ("Yes.", "assistant", "assistant"),
        ("Where is it?", "user", "user"),
        ("In Oslo.", "user", "user"),
    ]
    assert found["message"] == [
        ("Where is it? In Oslo.", "user", "1 user"),
        ("Yes.", "assistant", "2 assistant"),
        ("Where is it? In Oslo.", "user", "3 user"),
    ]
    assert [name for _, _, name in found["document"]] == ["user", "assistant", "user"]
    # The system message is the template's own.
    rest = next(each for each in t.sources("message") if each.kind == "template")
    assert "Use the documents." in rest.text


def test_a_message_has_its_documents():
    prompt = lm.Documents({"report": PROMPT, "press": "Critics liked it."}, "Where?", "Use the documents.")
    t = trace(prompt, template=PLAIN)
    by_message = {each.name: each for each in t.sources("message")}
    assert set(by_message) == {"template", "1 system", "2 user", "written"}
    documents = {each.name: set(each.positions) for each in t.sources("document")}
    for name in ("report", "press", "question"):
        assert documents[name] < set(by_message["2 user"].positions)
    assert documents["instruction"] == set(by_message["1 system"].positions)
    kinds = {each.name: each.kind for each in t.sources("document")}
    assert (kinds["report"], kinds["question"], kinds["template"]) == ("document", "question", "template")


def test_white_space_belongs_to_the_text_before_it():
    t = trace("\n\n One.\n\n\n Two. ", sources="sentence", answer="\n\nYes.\n\nNo.")
    first, second = (each for each in t.sources() if each.is_content)
    assert (first.text, second.text) == ("One.", "Two.")
    texts = ["".join(t.tokens[position] for position in each.positions) for each in (first, second)]
    assert [text.strip() for text in texts] == ["One.", "Two."]
    assert texts[0].strip(" ") == "One.\n\n\n"
    # What a model writes before its first sentence is a source, but no sentence.
    assert [span.text.strip() for span in t.spans] == ["Yes.", "No."]
    by_token = [each for each in t.sources("token") if not each.text.strip()]
    assert {each.kind for each in by_token} == {"template", "prompt", "written"}


def test_a_prompt_of_one_sentence():
    t = trace("Oslo", sources="sentence")
    assert [each.text for each in t.sources() if each.is_content] == ["Oslo"]
    t = lm.trace(reader_of(), "The company", answer=" was founded", prepend_bos=False)
    # Nothing would predict the first word.
    assert [each.loss for each in t.verify()] == [None]
    assert [each.share for each in t[:1].top()] == [1.0]


def test_no_prompt_but_the_beginning():
    t = trace("", sources="sentence")
    assert t.n_prompt == 1
    assert not any(each.is_content for each in t.sources())
    assert t.top() == []


@pytest.mark.parametrize("kind", KINDS)
def test_words_of_a_short_answer(kind):
    """Check that an answer without a space, which has no mark of a word, has words too."""
    t = trace(f"{PROMPT}\n", answer="Yes", kind=kind)
    words = [each.text.strip() for each in t.sources("word")]
    assert words[-1] == "Yes"
    assert [word for word in words if word not in ("", "<s>")][:4] == ["The", "company", "was", "founded"]


def test_words_without_marks_say_so(model):
    """Check that the words are those of the text, if it is known."""
    t = lm.trace(model, "w3 w4", answer=" w5 w6", sources="word")
    assert [each.text for each in t.sources()] == ["<bos>", "w3", "w4", "w5", "w6"]
    with pytest.raises(ValueError, match=r"sources: expected a tokenizer that marks the words.*use 'token'"):
        lm.trace(model, torch.tensor([3, 4]), answer=[5], sources="word")


# ------------------------------------------------------------------ sources of the user's own


def test_a_splitter_of_the_users():
    def split(text):
        asked.append(text)
        return ((place, place + 5) for place in range(0, len(text) - 5, 5))

    asked = []
    t = trace(PROMPT, sources=split)
    assert t.unit == "sentence"
    assert asked == [PROMPT, " On eight GPUs. Yes."]
    require_partition(t, t.sources())
    assert t.sources()[1].text == PROMPT[:5].strip()
    # What the function leaves out is content too.
    rest = t.sources()[owners(t.sources())[t.n_prompt - 1]]
    assert PROMPT.endswith(rest.text)
    assert rest.kind == "prompt"


@pytest.mark.parametrize(
    ("split", "error", "message"),
    [
        (lambda text: None, TypeError, "sources: expected pairs of characters, got None"),
        (lambda text: [3], TypeError, "sources: expected pairs of characters, got 3"),
        (lambda text: ["ab"], TypeError, "sources: expected pairs of characters, got 'ab'"),
        (lambda text: [(0.5, 3)], TypeError, "sources: expected a character after the last piece"),
        (lambda text: [(0, "3")], TypeError, "sources: expected the end of a piece"),
        (lambda text: [(0, 10**6)], ValueError, "sources: expected the end of a piece"),
        (lambda text: [(-3, 3)], ValueError, "sources: expected a character after the last piece"),
        (lambda text: [(5, 3)], ValueError, "sources: expected the end of a piece"),
        (lambda text: [(3, 6), (0, 3)], ValueError, "sources: expected a character after the last piece"),
    ],
)
def test_a_splitter_that_splits_wrongly(split, error, message):
    with pytest.raises(error, match=message):
        trace(PROMPT, sources=split)


def test_an_error_of_the_splitter_is_its_own():
    def split(text):
        raise LookupError("mine")

    with pytest.raises(LookupError, match=r"^mine$"):
        trace(PROMPT, sources=split)


def test_groups_of_the_users():
    groups = {"city": " Oslo", "first": [1, 2], "size": ["120", "employees"]}
    t = trace(PROMPT, sources=groups)
    assert t.unit == "given"
    require_partition(t, t.sources())
    found = {each.name: each for each in t.sources()}
    assert [each.kind for each in t.sources()].count("given") == 3
    assert found["city"].text == " Oslo"
    assert found["first"].positions == (1, 2)
    assert found["prompt"].is_content
    # The beginning of the text is not the prompt's.
    assert found["template"].positions == (0,)
    assert {each.source.name for each in t.top(9)} == {"city", "first", "size", "prompt"}
    assert t.by("token").by("given").sources() == t.sources()
    unnamed = trace(PROMPT, sources=[" Oslo", slice(1, 3)])
    assert {each.name for each in unnamed.sources()} == {
        " Oslo",
        "The company",
        "prompt",
        "template",
        "written",
    }
    with pytest.raises(
        ValueError, match=r"unit: expected one of the others, because lm\.trace got no sources="
    ):
        trace(PROMPT).by("given")


@pytest.mark.parametrize(
    ("sources", "error", "message"),
    [
        (3, ValueError, "sources: expected a unit of text, .*got '3 s'"),
        ("paragraph", ValueError, "sources: expected one of .*got 'paragraph'"),
        ("given", ValueError, "sources: expected one of"),
        ([], ValueError, "sources: expected at least one"),
        ([[]], ValueError, "sources: expected at least one"),
        ([[0], [0]], ValueError, "sources: expected each position in one group"),
        ([["Bergen"]], ValueError, "sources: expected a text that the prompt contains, got 'Bergen'"),
        ({"a": [10**6]}, ValueError, r"sources: expected positions 0\.\."),
        (b"token", TypeError, "sources: expected groups of positions"),
        (True, TypeError, "sources: expected groups of positions, got True"),
    ],
)
def test_wrong_sources(sources, error, message):
    with pytest.raises(error, match=message):
        trace(PROMPT, sources=sources)


def test_a_group_of_what_was_written_is_no_source():
    count = trace(PROMPT).n_prompt
    with pytest.raises(ValueError, match=rf"sources: expected positions 0\.\.{count - 1}, got \[{count}\]"):
        trace(PROMPT, sources=[[count]])


def test_tokens_as_prompts(model):
    t = lm.trace(model, torch.tensor([1, 3, 4, 5]), answer=[6, 7], sources=[[1, 2], [3]], method="attention")
    require_partition(t, t.sources())
    assert [(each.kind, each.positions) for each in t.sources()] == [
        ("template", (0,)),
        ("given", (1, 2)),
        ("given", (3,)),
        ("written", (4, 5)),
    ]
    by_token = t.by("token")
    assert [each.kind for each in by_token.sources()] == ["template", *["prompt"] * 3, *["written"] * 2]
    # The beginning is never removed.
    assert {each.source.positions for each in by_token.verify(9)} == {(1,), (2,), (3,)}


def test_labels_and_sources_are_of_one_mind():
    t = trace(lm.Documents({"a": "One.\n\nTwo.", "b": "Three. "}, question="Four?"), template=PLAIN)
    reading = t.reading
    labels = label_positions(reading.prompt_text, t.tokens, t.n_prompt)
    for source in t.sources("document"):
        assert {labels[position] for position in source.positions} == {(source.kind, source.name)}
    again = reading.find_sources("document", split_sentences())
    assert again == t.sources("document")


# ------------------------------------------------------------------ sentences and lines

WRAPPED = (
    "The company was founded in Oslo in the year 1998 by three engineers, and\nit has 120 employees, most "
    "of whom work in the main office in Oslo, which\nis the capital of Norway.",
    "The company was founded in Oslo\nby three engineers, who still own\nmost of it, and plans to open\n"
    "an office.",
    "The company was founded in Oslo,\nwhich is the capital of Norway.",
    "> The company was founded in Oslo in the year 1998 by three engineers and\n> has 120 employees today.",
)
LINES = (
    ["Offices:", "- Oslo", "- Bergen", f"- Trondheim, {'a very long line, ' * 6}and\n  so on", "- Rome"],
    ["1. Oslo. It is large.", "2. Bergen", "3. Rome"],
    ["Oslo", "Bergen", "Rome"],
    ["apples", "pears", "plums"],
    ["| city | people |", "| Oslo | 700,000 |", "| Rome | 2,800,000 |"],
    ["city\tpeople", "Oslo\t700000", "Rome\t2800000"],
    ["2023-01-01,Oslo,120 employees,main office,founded", "2023-01-02,Rome,130 employees,second office,open"],
    ["# Report", "The company was founded in Oslo.", "## Offices", "Oslo"],
    ["Name: Ann Smith", "Born: 1970 in Oslo", "Role: engineer"],
    ["東京", "大阪", "京都"],
)


def sentences_of(text):
    pieces = split_sentences()(text)
    assert "".join(text[start:stop] for start, stop in pieces) == text
    return [text[start:stop].strip() for start, stop in pieces if text[start:stop].strip()]


@pytest.mark.parametrize("text", WRAPPED)
def test_a_wrapped_paragraph_is_not_cut(text):
    assert sentences_of(text) == [text]


@pytest.mark.parametrize("end", ["\n", "\r\n", " \n"])
@pytest.mark.parametrize("lines", LINES)
def test_lines_of_lists_and_tables_are_sentences(lines, end):
    found = sentences_of(end.join(lines))
    if "It is large" in lines[0]:
        lines = ["1. Oslo.", "It is large.", *lines[1:]]
    assert found == lines


def test_lines_are_sources_and_spans():
    t = trace("Offices:\n- Oslo\n- Bergen", answer="\n- Oslo\n- Trains", sources="sentence")
    assert [each.text for each in t.sources() if each.is_content] == ["Offices:", "- Oslo", "- Bergen"]
    assert [span.text.strip() for span in t.spans] == ["- Oslo", "- Trains"]


@pytest.mark.parametrize("space", ["\xa0", "\u3000", "\u2009"])
def test_a_wide_space_before_a_full_stop(space):
    text = f"The office is on plan A{space}. It is big."
    assert sentences_of(text) == [f"The office is on plan A{space}.", "It is big."]


def test_a_panic_of_the_splitter(monkeypatch):
    import sentencex

    class PanicException(BaseException):
        """The name of the error of a panic in Rust."""

    def fail(kind):
        def segment(language, text):
            raise kind

        return segment

    monkeypatch.setattr(sentencex, "segment", fail(PanicException))
    assert sentences_of("Is it so? It is (big.) Yes 3.5! No") == [
        "Is it so?",
        "It is (big.)",
        "Yes 3.5!",
        "No",
    ]
    assert sentences_of("1. Oslo. Yes.\n2. Rome") == ["1. Oslo.", "Yes.", "2. Rome"]
    monkeypatch.setattr(sentencex, "segment", fail(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        split_sentences()("It is.")
