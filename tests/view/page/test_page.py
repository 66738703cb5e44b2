"""Test the page as a file: its numbers, its size, and that its tokens are text only."""

from __future__ import annotations

import base64
import hashlib
import html.parser
import json
import re
import zlib

import numpy as np
import pytest
import torch

import lens_mix as lm
from lens_mix.maps.words import find_words
from lens_mix.methods.component_shares import part_shares
from tests.random_maps import map_of, random_attention
from tests.view.page.routes import routes_map
from tests.view.page.tokens import NASTY


class Reader(html.parser.HTMLParser):
    """Collect the elements of a page, with their attributes and contents."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[list] = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.elements.append([tag, dict(attributes), ""])

    def handle_data(self, data):
        if self.elements:
            self.elements[-1][2] += data


def data_of(page):
    """Return the data of a page, with the numbers of each layer at its place."""
    texts = {given.get("id"): text for _, given, text in Reader(page.html).elements}
    data = json.loads(texts["data"])

    def read(place):
        start, end, which = place
        return texts[("numbers", "later")[which]][start:end]

    for packed in (one for prompt in data["prompts"] for one in prompt):
        for layer in (*packed["layers"], *(packed["mean"] or {"layers": ()})["layers"]):
            layer["data"] = read(layer["data"])
        packed["visible"] = packed["visible"] and [read(one) for one in packed["visible"]]
    return data


def decoded(packed, code):
    raw = zlib.decompress(base64.b64decode(packed["data"]))
    if code == "float16":
        return np.frombuffer(raw, "<f2").astype(np.float64) * packed["largest"]
    part = np.frombuffer(raw, code).astype(np.float64) / {"uint8": 255, "int8": 127}[code]
    return np.sign(part) * part**2 * packed["largest"]


def test_the_numbers_of_single_heads_come_after_the_script():
    m = map_of(random_attention(2, 3, 5))
    elements = Reader(lm.page({"heads": m, "mean": m.merge_heads()}).html).elements
    order = [given.get("id", "script") for tag, given, _ in elements if tag == "script"]
    assert order == ["data", "numbers", "script", "later"]
    (packed, merged), *_ = json.loads(elements[[e[1].get("id") for e in elements].index("data")][2])[
        "prompts"
    ]
    assert {layer["data"][2] for layer in packed["layers"]} == {1}
    assert {layer["data"][2] for layer in (*packed["mean"]["layers"], *merged["layers"])} == {0}


def test_it_holds_the_numbers_within_the_error_that_it_states():
    for scores, code in (
        (random_attention(heads=2, size=6), "float16"),
        (random_attention(layers=2, heads=3, size=400), "uint8"),
        (random_attention(layers=2, heads=3, size=400) - 0.1 * torch.ones(400, 400).tril(), "int8"),
    ):
        m = map_of(scores)
        (packed,) = data_of(lm.page(m))["prompts"][0]
        assert packed["code"] == code
        assert packed["signed"] == bool((scores < 0).any())
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        means = [scores.mean(1), packed["mean"]] if scores.ndim == 4 else [scores, packed]
        for numbers, stored in ((scores, packed), means):
            for layer, one in zip(numbers, stored["layers"], strict=True):
                difference = np.abs(decoded(one, stored["code"]) - layer[..., visible].numpy().ravel())
                assert difference.max() == pytest.approx(one["error"])
                relative = {"float16": 1e-3, "uint8": 4e-3, "int8": 8e-3}[stored["code"]]
                assert one["error"] <= relative * one["largest"]


def test_masks_rows_and_keys_of_another_kind():
    mask = torch.rand(4, 6, 6, generator=torch.Generator().manual_seed(0)) < 0.5
    m = map_of(random_attention(causal=False) * mask, causal=False, mask=mask).select_queries([4, 1])
    (packed,) = data_of(lm.page({"mine": m}))["prompts"][0]
    assert (packed["label"], packed["queries"], packed["query"]) == ("mine", [4, 1], 4)
    for stored, seen in zip(packed["visible"], m.visible(), strict=True):
        bits = np.frombuffer(zlib.decompress(base64.b64decode(stored)), np.uint8)
        assert np.unpackbits(bits, bitorder="little")[:12].reshape(2, 6).tolist() == seen.int().tolist()
    cross = lm.MixingMap(torch.rand(2, 3, 5), ["a", "b", "c"], key_tokens=list("vwxyz"))
    (packed,) = data_of(lm.page(cross))["prompts"][0]
    assert (packed["tokens"], packed["keys"]) == (["a", "b", "c"], list("vwxyz"))


def test_words_and_sentences():
    tokens = [
        "<bos>",
        "A",
        " b",
        ".",
        " \u00bfC",
        "\u3002",
        "d",
        "\n",
        "e",
        ". ",
        " f!",
        "[SEP]",
        "g?",
        "h\u010a",
        "i",
    ]
    (packed,) = data_of(lm.page(map_of(random_attention(size=len(tokens)), tokens=tokens)))["prompts"][0]
    assert packed["words"]["sentence"] == [0, 1, 4, 6, 8, 11, 12, 13, 14]
    assert packed["words"]["word"] == [words[0] for words in find_words(tokens)]
    assert packed["key_words"] is None
    cross = lm.MixingMap(torch.rand(2, 3, 2), ["a.", "b", "c"], key_tokens=["x", "y"])
    (packed,) = data_of(lm.page(cross))["prompts"][0]
    assert (packed["words"], packed["key_words"]) == ({"sentence": [0, 1]}, {"sentence": [0]})


def test_feed_forwards_of_routes_and_of_no_other_map():
    m = routes_map()
    packed = data_of(lm.page({"routes": m, "rolled": lm.rollout(m), "plain": map_of()}))["prompts"][0]
    expected = part_shares(m).mlp_out.numpy()
    np.testing.assert_allclose(packed[0]["feed_forward"], expected, rtol=1e-3)
    assert [one["feed_forward"] for one in packed[1:]] == [None, None]
    # The details of each block are left out, because they can be larger than the map.
    assert "details" not in packed[0]["provenance"]


@pytest.mark.parametrize(
    ("layers", "heads", "size", "rows", "most"),
    [(30, 9, 64, None, 1e6), (30, None, 512, None, 5e6), (30, None, 2000, [-1], 1e6)],
)
def test_its_size(layers, heads, size, rows, most):
    if rows is None:
        m = map_of(random_attention(layers, heads, size))
    else:
        scores = torch.rand(layers, 1, size).softmax(-1)
        m = map_of(scores, tokens=[f" t{i}" for i in range(size)], queries=[size - 1], causal=False)
    assert len(lm.page(m).html.encode()) < most


@pytest.mark.slow
def test_its_size_with_feed_forwards_and_routes():
    page = lm.page(routes_map(30, 512))
    assert len(data_of(page)["trees"][0][0]["edges"]) > 1000
    assert len(page.html.encode()) < 5e6


def test_tokens_stay_text():
    page = lm.page(map_of(random_attention(size=len(NASTY)), tokens=list(NASTY), notes=("</script><b>",)))
    elements = Reader(page.html).elements
    assert [tag for tag, _, _ in elements if tag in ("script", "style", "b", "img", "iframe")] == [
        "style",
        *4 * ["script"],
    ]
    (packed,) = data_of(page)["prompts"][0]
    assert packed["tokens"] == list(NASTY)
    assert packed["notes"] == ["</script><b>"]
    # The inserted data is ASCII, so that the file can be encoded although a token is a lone surrogate.
    page.html.encode("utf-8")


def test_ten_thousand_random_tokens_stay_text():
    generator = np.random.default_rng(0)
    points = generator.integers(0, 0x10FFFF, (10_000, 3))
    tokens = ["".join(chr(point) for point in row) for row in points]
    m = map_of(torch.rand(1, 1, 10_000), tokens=tokens, queries=[9_999], causal=False)
    page = lm.page(m)
    assert data_of(page)["prompts"][0][0]["tokens"] == tokens
    assert page.html.count("</script>") == 4


def test_nothing_runs_but_its_own_script_and_nothing_is_fetched():
    page = lm.page(map_of())
    elements = Reader(page.html).elements
    (policy,) = [given["content"] for tag, given, _ in elements if "http-equiv" in given]
    script = page.html.split("<script>")[1].split("</script>")[0]
    style = page.html.split("<style>")[1].split("</style>")[0]
    for name, text in (("script-src", script), ("style-src", style)):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{name} 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'")
    assert not re.search(
        r"(src|href)=|innerHTML|insertAdjacentHTML|document\.write|eval\(|fetch\(", page.html
    )


def test_numbers_that_are_not_finite_are_text():
    m = map_of(parameters={"floor": float("inf")}, provenance={"gap": float("nan")})
    (told,) = data_of(lm.page(m))["prompts"][0]
    assert told["parameters"] == {"floor": "Infinity"}
    assert told["provenance"]["gap"] == "NaN"


def test_several_maps_and_several_prompts(tmp_path):
    m = map_of()
    place = tmp_path / "page.html"
    page = lm.page([{"one": m, "two": m.layer(1)}, lm.rollout(m)], place)
    assert place.read_text(encoding="utf-8") == page.html
    first, second = data_of(page)["prompts"]
    assert [one["label"] for one in first] == ["one", "two"]
    assert [one["label"] for one in second] == ["attention rollout"]
    shown = page._repr_html_()
    assert shown.startswith("<iframe")
    assert "<script type" not in shown.split("<script>")[0].split("srcdoc=")[0]


def test_it_opens_in_the_browser(monkeypatch, tmp_path):
    opened = []
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("webbrowser.open", opened.append)
    page = lm.page(map_of())
    path = page.open()
    assert opened == [path.as_uri()]
    assert path.is_relative_to(tmp_path)
    assert path.read_text(encoding="utf-8") == page.html


def test_it_contains_no_path_of_this_computer():
    m = map_of(provenance={"model": "/home/somebody/tiny"})
    page = lm.page({"one": m, "rolled": lm.rollout(m), "difference": m - map_of(provenance=m.provenance)})
    assert "somebody" not in page.html
    packed = data_of(page)["prompts"][0]
    assert [one["provenance"].get("model") for one in packed[:2]] == ["tiny", "tiny"]


def test_what_is_no_map():
    with pytest.raises(TypeError, match="maps: expected a MixingMap"):
        lm.page("text")
    with pytest.raises(TypeError, match="maps: expected"):
        lm.page([1])
    for nothing in ([], {}):
        with pytest.raises(ValueError, match="expected at least one map"):
            lm.page(nothing)
    with pytest.raises(FileNotFoundError, match="path: expected a folder"):
        lm.page(map_of(), "no/such/folder/page.html")
