"""Test the page of a trace as a file: its text, its numbers, and that it needs nothing else."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import itertools
import json
import re
import zlib

import numpy as np
import pytest
import torch

from lens_mix.traces.documents import Documents
from lens_mix.traces.trace import Trace
from lens_mix.view.page import Page
from tests.view.page.test_page import Reader
from tests.view.page.tokens import NASTY
from tests.view.page.traces import DOCUMENTS, WRITTEN, make_trace


def contents_of(page):
    return {given.get("id"): text for _, given, text in Reader(page.html).elements}


def data_of(page):
    return json.loads(contents_of(page)["data"])


def decoded(page, packed):
    raw = zlib.decompress(base64.b64decode(contents_of(page)["numbers"][slice(*packed["data"][:2])]))
    return np.frombuffer(raw, "<f2").astype(np.float64) * packed["largest"]


def spread(ranges):
    return [position for start, stop in ranges for position in range(start, stop)]


def test_its_numbers_are_those_of_the_trace():
    t = make_trace()
    page = t.show()
    assert isinstance(page, Page)
    data = data_of(page)
    assert [span["kind"] for span in data["spans"]] == ["sentence", "sentence", "everything"]
    for packed, span in zip(data["spans"], [*t.spans, t[:]], strict=True):
        assert (packed["start"], packed["stop"]) == (span.start, span.stop)
        assert packed["log_probability"] == pytest.approx(span.log_probability, rel=1e-5)
        torch.testing.assert_close(
            torch.from_numpy(decoded(page, packed["scores"])).float(), span.scores, atol=2e-3, rtol=2e-3
        )
    assert data["steps"] is None
    assert data["model"] == "tiny"
    assert "somebody" not in page.html
    assert list(data["sources"]) == ["sentence", "document", "word", "token"]
    for unit in data["sources"]:
        expected = [[each.kind, each.name, list(each.positions)] for each in t.sources(unit)]
        assert [[kind, name, spread(ranges)] for kind, name, ranges in data["sources"][unit]] == expected


def test_single_tokens_are_there_if_they_were_computed():
    t = make_trace()
    assert not t.has_steps
    steps = t.steps
    assert t.has_steps
    page = t.show()
    for packed, row in zip(data_of(page)["steps"], steps.scores[0], strict=True):
        np.testing.assert_allclose(decoded(page, packed), row, atol=2e-3)
    through = make_trace().through(1)
    assert through.has_steps
    assert data_of(through.show())["hops"] == 1


def test_parts_and_losses_that_were_computed_are_there():
    t = make_trace()
    part = t["cat slept"]
    part.top(1)
    source = t.sources("sentence")[3]
    t.keep_loss(part.start, part.stop, source.positions, 2.5)
    (packed,) = [span for span in data_of(t.show())["spans"] if span["kind"] == "part"]
    assert (packed["start"], packed["stop"]) == (part.start, part.stop)
    ((ranges, loss),) = packed["losses"]
    assert (spread(ranges), loss) == (list(source.positions), 2.5)


def test_a_loaded_trace_has_what_was_computed(tmp_path):
    t = make_trace()
    t.spans[1].top(1)
    t.save(tmp_path / "t.safetensors")
    loaded = Trace.load(tmp_path / "t.safetensors")
    found = data_of(loaded.show())["spans"]
    assert [(span["kind"], span["start"]) for span in found] == [("sentence", t.spans[1].start)]


@pytest.mark.parametrize("text", [WRITTEN, " a\U0001f600\U0001f468\u200d\U0001f469 b.\n\n\t c \u202e d!  e "])
def test_boxes_spell_the_text_and_cover_the_tokens(text):
    documents = Documents({"n": text.strip()}, question="?")
    t = make_trace(documents, text)
    boxes = data_of(t.show())["boxes"]
    assert [start for start, *_ in boxes] == [0, *(stop for _, stop, *_ in boxes[:-1])]
    assert boxes[-1][1] == len(t.tokens)
    for low, high, whole in ((0, t.n_prompt, documents.to_text()[0]), (t.n_prompt, len(t.tokens), text)):
        spelled = [piece for start, _, piece, is_mark in boxes if low <= start < high and not is_mark]
        assert "".join(spelled) == whole
    assert [piece for *_, piece, is_mark in boxes if is_mark] == ["<s>"]


def test_blocks_are_the_sections_with_the_template_between_them():
    t = make_trace()
    blocks = data_of(t.show())["blocks"]
    assert [start for *_, start, _ in blocks] == [0, *(stop for *_, stop in blocks[:-1])]
    assert blocks[-1][-1] == t.n_prompt
    named = [(kind, name) for kind, name, *_ in blocks if kind != "template"]
    assert named == [
        ("instruction", "instruction"),
        ("document", "report"),
        ("document", "press note"),
        ("question", "question"),
    ]
    for kind, name, _, start, stop in blocks:
        text = "".join(t.tokens[start:stop])
        if kind == "document":
            assert text.strip() == DOCUMENTS.documents[name]
    assert all(
        first != second for (first, *_), (second, *_) in itertools.pairwise(blocks) if first == "template"
    )


def test_messages_are_a_unit_if_there_are_any():
    t = make_trace()
    sections = [
        section._replace(message=f"{i} user") for i, section in enumerate(t.reading.prompt_text.sections)
    ]
    reading = dataclasses.replace(t.reading, prompt_text=t.reading.prompt_text._replace(sections=sections))
    chat = dataclasses.replace(t, reading=reading, _computed={})
    assert list(data_of(chat.show())["sources"]) == ["sentence", "message", "word", "token"]
    shown = data_of(dataclasses.replace(chat, unit="document").show())
    assert list(shown["sources"]) == ["sentence", "document", "word", "token"]


def test_tokens_without_a_text_are_one_block():
    t = make_trace()
    reading = dataclasses.replace(t.reading, prompt_text=None, written_text=None)
    bare = dataclasses.replace(t, reading=reading, unit="token", _computed={})
    data = data_of(bare.show())
    assert data["blocks"] == [["prompt", "prompt", None, 0, t.n_prompt]]
    assert [(text, is_mark) for *_, text, is_mark in data["boxes"]] == [(token, False) for token in t.tokens]
    assert list(data["sources"]) == ["word", "token"]
    assert [span["kind"] for span in data["spans"]] == ["sentence"]


def test_text_stays_text_and_nothing_else_runs():
    nasty = " ".join(NASTY).encode("utf-8", "ignore").decode()
    t = make_trace(Documents({"</script><b>": nasty}, question="%%DATA%%"), f" {nasty}.", notes=("<i>",))
    page = t.show()
    tags = [tag for tag, *_ in Reader(page.html).elements]
    assert tags.count("script") == 3
    assert not {"b", "i", "img", "link", "iframe"} & set(tags)
    assert data_of(page)["tokens"] == t.tokens
    (policy,) = [given["content"] for tag, given, _ in Reader(page.html).elements if "http-equiv" in given]
    script = page.html.split("<script>")[1].split("</script>")[0]
    style = page.html.split("<style>")[1].split("</style>")[0]
    for name, text in (("script-src", script), ("style-src", style)):
        assert (
            f"{name} 'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" in policy
        )
    pattern = r"(src|href)=|innerHTML|insertAdjacentHTML|document\.write|eval\(|fetch\("
    assert not re.search(pattern, script + style)


def test_a_notebook_shows_a_trace_as_colored_text_without_a_script():
    t = make_trace(Documents({"n<b>": "One <i>. Two."}, question="?"), signed=True)
    shown = t._repr_html_()
    assert "<script" not in shown
    assert "<i>" not in shown
    assert "n&lt;b&gt;" in shown
    reader = Reader(shown)
    spans = {given["title"]: given["style"] for tag, given, _ in reader.elements if tag == "span"}
    strongest = max(t[:].top(99), key=lambda each: each.share)
    alpha = {title: float(re.search(r",([\d.]+)\)", style)[1]) for title, style in spans.items()}
    content = {
        title: value for title, value in alpha.items() if not title.startswith(("template", "written"))
    }
    assert content[f"{strongest.source.name}: {strongest.share:.0%}"] == max(content.values())
    assert [tag for tag, *_ in reader.elements].count("li") == len(t[:].top(5))


def test_a_notebook_gets_the_frame_of_the_page():
    assert 'title="the sources of a text"' in make_trace().show()._repr_html_()
