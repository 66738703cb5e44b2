"""Run the demo of attribution on a tiny model whose words are w3 ... w49."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tests.tiny_models import bridge_or_hooked, toy_tokenizer

pytest.importorskip("matplotlib")
DEMOS = Path(__file__).parents[2] / "demos"


@pytest.fixture
def demo(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(DEMOS))
    for name in ("attribution", "models"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import attribution

    monkeypatch.setattr(attribution, "OUTPUTS", tmp_path)
    return attribution


@pytest.fixture
def model():
    return bridge_or_hooked("llama", "rotary", tokenizer=toy_tokenizer())


def toy_pairs(demo, task="anaphor", count=4):
    rows = [("w5 w6 w7", "w8", "w9"), ("w10 w11", "w12", "w13"), ("w14 w15 w16 w17", "w9", "w8")]
    pairs = [demo.Pair(*row) for row in rows] + [demo.Pair("w20 w21", "themselves", "w4")]
    return pairs[:count]


def test_the_sentences(demo):
    for task in demo.TASKS:
        pairs = demo.read_pairs(task, 48)
        assert len(pairs) == 48
        assert all(pair.prefix and pair.good != pair.bad for pair in pairs)
    assert demo.read_pairs("determiner-noun", 1)[0] == demo.Pair("Eva has scared these", "children", "child")


def test_margins_of_a_padded_batch(demo, model):
    pairs = toy_pairs(demo, count=3)
    with torch.no_grad():
        found = demo.margins(model, pairs)
        for pair, margin in zip(pairs, found.tolist(), strict=True):
            logits = model(model.to_tokens(pair.prefix))[0, -1]
            alone = logits[int(pair.good[1:])] - logits[int(pair.bad[1:])]
            assert margin == pytest.approx(alone.item(), abs=1e-5)
    assert demo.accuracy(pairs)(model) == pytest.approx((found > 0).double().mean().item())


def test_the_whole_story(demo, model, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(demo.models, "smollm2", lambda: model)
    monkeypatch.setattr(demo, "read_pairs", lambda task, count: toy_pairs(demo, task, min(count, 3)))
    monkeypatch.setattr(sys, "argv", ["attribution.py", "--pairs", "2"])
    demo.main()
    printed = capsys.readouterr().out
    expected = ["logit(w12) - logit(w13)", "Correlation of head importance", "mean over the fractions"]
    for text in [*expected, "Triggers"]:
        assert text in printed
    assert {path.name for path in tmp_path.glob("*.png")} == {
        "attribution_layers.png",
        "attribution_tree.png",
        "attribution_heads.png",
        "attribution_pruning.png",
    }
