"""Test written spans: which tokens a text, a number or a slice names, their sources, and their removal."""

from __future__ import annotations

import functools
import math

import pytest
import torch

import lens_mix as lm
from lens_mix._classes.model_classes import transformer_lens_version
from lens_mix.traces.spans import find_span
from tests.matrix import build_or_skip
from tests.tiny_models import bridge, hooked_transformer, wrapped_model
from tests.traces.readers import PLAIN, reader, tokenizer_of

pytestmark = pytest.mark.filterwarnings("ignore")

PROMPT = "The company was founded in Oslo. It has 120 employees. Trains run every hour."
ANSWER = " Oslo has trains. Oslo has 😀 GPUs."


@functools.cache
def traced():
    return lm.trace(reader(), PROMPT, answer=ANSWER)


# ------------------------------------------------------------------ which tokens


def test_texts_numbers_and_slices():
    t = traced()
    count = t.reading.n_written
    for part, start, stop in [
        (ANSWER, 0, count),
        (0, 0, 1),
        (-1, count - 1, count),
        (slice(None), 0, count),
        (slice(2, 5), 2, 5),
        (slice(-3, None), count - 3, count),
        (slice(0, 99), 0, count),
        (slice(-99, 1), 0, 1),
        (slice(1, 3, 1), 1, 3),
    ]:
        span = t[part]
        assert (span.start, span.stop) == (start, stop), part
        assert list(span.positions) == list(range(t.n_prompt + start, t.n_prompt + stop))
        expected = t.log_probabilities[start:stop].sum().item()
        assert span.log_probability == pytest.approx(expected, abs=1e-12)
        assert span.probability == pytest.approx(math.exp(expected))
    assert "".join(t[index].text for index in range(count) if "😀" not in t[index].text) == ANSWER.replace(
        "😀", ""
    )
    assert t.text == ANSWER == t[:].text


@pytest.mark.parametrize(
    "part", ["trains", " trains", "trains. Oslo", "ains. O", "  \n", "😀 GPUs", ". Oslo has 😀"]
)
def test_a_text_has_all_tokens_that_it_cuts(part):
    t = traced()
    if not part.strip() or part.startswith("  "):
        with pytest.raises(ValueError, match=r"span: expected a text that was written, got .* not in"):
            t[part]
        return
    span, placed = t[part], t.reading.written_text
    low = ANSWER.index(part.strip())
    high = low + len(part.strip())
    touched = [i for i, (start, stop) in enumerate(placed.offsets) if start < high and stop > low]
    assert [each - t.n_prompt for each in span.positions] == touched
    assert part.strip() in span.text


@pytest.mark.parametrize(
    ("part", "error", "message"),
    [
        ("Oslo", ValueError, "span: .* 'Oslo', which occurs 2 times in .*write more of the text around it"),
        ("Bergen", ValueError, "span: .* 'Bergen', which is not in .*; correct it"),
        ("oslo has t", ValueError, "which is not in"),
        ("", ValueError, "span: .* got '', which is not in"),
        (" ", ValueError, "span: .* got ' ', which is not in"),
        (99, ValueError, "span: expected .* got 99"),
        (-99, ValueError, "span: expected .* got -99"),
        (1.0, TypeError, "span: expected a text, a number or a slice"),
        (True, TypeError, "span: expected a text, a number or a slice"),
        (None, TypeError, "span: expected a text, a number or a slice"),
        (b"Oslo", TypeError, "span: expected a text, a number or a slice"),
        ((0, 2), TypeError, "span: expected a text, a number or a slice"),
        (slice(3, 3), ValueError, r"span: expected neighboring tokens of 0\.\."),
        (slice(5, 2), ValueError, r"span: expected neighboring tokens of 0\.\."),
        (slice(0, 6, 2), ValueError, r"span: expected neighboring tokens of 0\.\."),
        (slice(None, None, -1), ValueError, r"span: expected neighboring tokens of 0\.\."),
        (slice("a", None), TypeError, "span: expected"),
        (slice(0.5, None), TypeError, "span: expected"),
    ],
)
def test_parts_that_do_not_exist(part, error, message):
    with pytest.raises(error, match=message):
        traced()[part]


def test_occurrences_that_overlap_are_several():
    offsets = [(index, index + 1) for index in range(5)]
    with pytest.raises(ValueError, match="occurs 2 times"):
        find_span("ababa", offsets, "aba")
    assert find_span("ababa", offsets, "abab") == (0, 4)


def test_sentences():
    t = traced()
    assert [span.text.strip() for span in t.spans] == ["Oslo has trains.", "Oslo has 😀 GPUs."]
    assert [each for span in t.spans for each in span.positions] == list(t[:].positions)


# ------------------------------------------------------------------ sources of a span


@pytest.mark.parametrize("unit", ["token", "word", "sentence", "message", "document"])
@pytest.mark.parametrize("method", [None, "attention", "alti"])
def test_a_source_has_the_sum_of_its_tokens(unit, method):
    t = lm.trace(reader(), PROMPT, answer=ANSWER, method=method).by(unit)
    for span in (t[:], t[3], t["trains"]):
        listed = span.top(999, everything=True)
        last = span.positions[-1]
        assert {each.source for each in listed} == {
            source for source in t.sources() if source.positions[0] < last
        }
        total = 0.0
        for each in listed:
            assert each.score == pytest.approx(
                span.scores[list(each.source.positions)].sum().item(), abs=1e-12
            )
            total += abs(each.score)
        for each in listed:
            assert each.share == pytest.approx(abs(each.score) / total)
        assert [abs(each.score) for each in listed] == sorted(
            (abs(each.score) for each in listed), reverse=True
        )
        content = [each for each in listed if each.source.is_content]
        assert span.top(999) == content
        assert span.top(2) == content[:2]
        assert sum(each.share for each in listed) == pytest.approx(1)
        assert not span.scores[last:].any()


def test_the_map_of_a_span():
    span = traced()["trains"]
    made = span.map
    sources = span.top(999, everything=True)
    assert made.scores.shape == (1, 1, len(sources))
    assert made.kind == "input"
    by_name = dict(zip(made.key_tokens, made.scores[0, 0].tolist(), strict=True))
    assert by_name == pytest.approx({str(each.source): each.score for each in sources})
    assert made.explained[0].value == span.log_probability
    assert "trains" in made.explained[0].target
    assert made.top(1)


def test_the_map_of_the_first_token_and_of_equal_sentences():
    t = lm.trace(reader(), "Oslo. Oslo. Oslo.", answer=" Oslo", prepend_bos=False)
    assert t[0].map.scores.shape == (1, 1, 3)
    assert lm.trace(reader(), "Oslo", answer=" is", prepend_bos=False)[0].map.scores.shape == (1, 1, 1)


def test_what_is_printed():
    span = traced()["trains"]
    text = repr(span.top(2))
    assert text.startswith("' trains': probability ")
    assert "not listed: " in text
    assert len(text.splitlines()) == 3
    assert "nats" not in text
    assert "nats" in repr(span.verify(1))
    assert "'Trains run every hour.'" in repr(span.top(9))
    assert "not listed" not in repr(span.top(9, everything=True))
    assert repr(traced()).startswith("Trace(")
    assert "3 sources by sentence" in repr(traced())
    assert repr(span).startswith("WrittenSpan")


@pytest.mark.parametrize("k", [0, -1, 1.5, "3", True, None])
def test_wrong_numbers_of_sources(k):
    for function in (traced().top, traced().verify, traced()[0].top, traced()[0].verify):
        with pytest.raises((TypeError, ValueError), match="k: expected"):
            function(k)
    with pytest.raises(TypeError, match="everything: expected True or False"):
        traced().top(3, everything="no")


# ------------------------------------------------------------------ removal, with transformers alone


def log_probabilities(model, ids, count, **inputs):
    """Return the log probabilities of the last tokens of a prompt, from plain logits."""
    with torch.no_grad():
        output = model(ids[None], **inputs)
    logits = (output if torch.is_tensor(output) else output.logits)[0]
    rows = logits[-1 - count : -1].double().log_softmax(-1)
    return rows.gather(-1, ids[-count:, None])[:, 0]


# The tolerances are for each written token. In float64, transformers computes Llama's softmax in float32.
@pytest.mark.parametrize(
    ("name", "dtype", "tolerance"),
    [("gpt2", torch.float64, 1e-10), ("gpt2", torch.float32, 1e-6), ("llama", torch.float64, 1e-6)],
)
@pytest.mark.parametrize("unit", ["token", "sentence", "given"])
def test_verify_is_a_pass_of_transformers_without_the_source(name, dtype, tolerance, unit):
    tokenizer = tokenizer_of()
    size = {"vocab_size": len(tokenizer), "max_position_embeddings": 512}
    model = build_or_skip(bridge, name, dtype, tokenizer=tokenizer, **size)
    plain = wrapped_model(name, dtype, **size)
    # The groups are at the start, in the middle, and several pieces at once.
    groups = {"start": [1, 2], "middle": "founded", "pieces": ["Oslo", "It has", " hour"]}
    t = lm.trace(model, PROMPT, answer=ANSWER, sources=groups if unit == "given" else unit)
    ids, count = t.reading.ids, t.reading.n_written
    assert ids[0] == tokenizer.bos_token_id
    clean = log_probabilities(plain, ids, count)
    for span, rows in ((t[:], slice(None)), (t[1], slice(1, 2)), (t["GPUs"], None)):
        rows = slice(span.start, span.stop) if rows is None else rows
        assert span.log_probability == pytest.approx(clean[rows].sum().item(), abs=count * tolerance)
        measured = span.verify(99)
        assert len(measured) == sum(each.is_content for each in t.sources())
        for each in measured:
            kept = [place for place in range(len(ids)) if place not in each.source.positions]
            assert kept[0] == 0
            without = log_probabilities(plain, ids[kept], count)
            assert each.loss == pytest.approx((clean - without)[rows].sum().item(), abs=count * tolerance)
    assert measured == span.top(99)


def test_verify_of_a_hooked_transformer_in_own_code():
    tokenizer = tokenizer_of()
    options = {"tokenizer": tokenizer, "d_vocab": len(tokenizer), "n_ctx": 512}
    model = build_or_skip(hooked_transformer, "LN", torch.float64, **options)
    t = lm.trace(model, PROMPT, answer=ANSWER)
    ids, count = t.reading.ids, t.reading.n_written
    clean = log_probabilities(model, ids, count)
    for each in t.verify(9):
        kept = [place for place in range(len(ids)) if place not in each.source.positions]
        without = log_probabilities(model, ids[kept], count)
        assert each.loss == pytest.approx((clean - without).sum().item(), abs=1e-10)


@pytest.mark.parametrize("name", ["bart", "t5", "marian"])
def test_verify_of_an_encoder_decoder_in_transformers(name):
    tokenizer = tokenizer_of()
    size = {"vocab_size": len(tokenizer)}
    if name != "t5":
        size |= {"max_position_embeddings": 99}
    if name == "marian":
        size |= {"decoder_vocab_size": len(tokenizer)}
    model = build_or_skip(bridge, name, torch.float64, tokenizer=tokenizer, **size)
    plain = wrapped_model(name, torch.float64, **size)
    try:
        t = lm.trace(model, PROMPT, answer="Oslo has GPUs. Trains.")
    except lm.UnsupportedModelError as problem:
        # It is T5 before TransformerLens 4.
        pytest.skip(str(problem))
    source, target, count = t.reading.prompt.tokens, t.reading.prompt.target, t.reading.n_written

    def read(source):
        with torch.no_grad():
            logits = plain(source[None], decoder_input_ids=target[None]).logits[0]
        return logits[-1 - count : -1].log_softmax(-1).gather(-1, target[-count:, None])[:, 0]

    clean = read(source)
    torch.testing.assert_close(t.log_probabilities, clean, atol=1e-9, rtol=0)
    measured = t["GPUs"].verify(9)
    assert len(measured) == 3
    rows = slice(t["GPUs"].start, t["GPUs"].stop)
    for each in measured:
        kept = [place for place in range(len(source)) if place not in each.source.positions]
        assert each.loss == pytest.approx((clean - read(source[kept]))[rows].sum().item(), abs=1e-9)


def test_verify_of_documents_of_a_chat():
    model = reader(template=PLAIN)
    prompt = lm.Documents({"report": PROMPT, "press": "Critics liked it."}, "Where?", "Use the documents.")
    t = lm.trace(model, prompt, answer="In Oslo.", sources="document")
    ids, count = t.reading.ids, t.reading.n_written
    clean = log_probabilities(model, ids, count).sum().item()
    measured = {each.source.name: each for each in t.verify(9)}
    assert set(measured) == {"report", "press", "question", "instruction"}
    for each in measured.values():
        kept = [place for place in range(len(ids)) if place not in each.source.positions]
        lost = clean - log_probabilities(model, ids[kept], count).sum().item()
        assert each.loss == pytest.approx(lost, abs=1e-10)
    # The report's headline and the marks of the template stay.
    without = t.reading.without(measured["report"].source.positions)
    text = model.tokenizer.decode(without.tokens.tolist())
    assert text.startswith("<|user|>system\nUse the documents.<|end|>\n<|user|>user\nreport:\n")
    assert "employees" not in text


def test_a_source_that_cannot_be_removed(monkeypatch):
    t = lm.trace(reader(), PROMPT, answer=ANSWER)
    cannot = next(each.positions for each in t.sources() if "employees" in each.text)
    without = type(t.reading).without

    def refuse(self, positions, fill):
        if tuple(positions) == cannot:
            raise lm.UnsupportedModelError("a part of a picture")
        return without(self, positions, fill)

    monkeypatch.setattr(type(t.reading), "without", refuse)
    found = t.verify(9)
    assert len(found) == 3
    for each in found:
        is_cannot = each.source.positions == cannot
        assert (each.loss is None) == is_cannot
        assert each.reason == ("a part of a picture" if is_cannot else "")
    assert "(cannot be removed: a part of a picture)" in repr(found)
    alone = lm.trace(reader(), "Oslo", answer=" is", prepend_bos=False).verify(1)
    assert (alone[0].loss, alone[0].reason) == (None, "the prompt has no other token")


@pytest.mark.parametrize("name", ["llava", "gemma3_pictures"])
def test_the_text_between_two_pictures(name):
    if name == "gemma3_pictures" and transformer_lens_version() < (4,):
        pytest.skip("only TransformerLens 4 computes Gemma 3 with pictures rightly")
    from tests.pictured_models import picture_prompt, pictured

    model = build_or_skip(pictured, name, tokenizer=tokenizer_of())
    t = lm.trace(model, picture_prompt(name, 2), answer=torch.tensor([10, 11]))
    found = t.verify(9)
    assert sum(each.loss is not None for each in found) >= 2
    assert all(bool(each.reason) == (each.loss is None) for each in found)
