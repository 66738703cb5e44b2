"""Test how a cost is written, what it grows with, and how a method's parameters scale it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import lens_mix as lm
from lens_mix._blocks.cost import COSTS, Cost, count_passes, describe_seconds, suggest_less


@pytest.mark.parametrize(
    ("cost", "text"),
    [
        (Cost(1), "about 1 forward pass"),
        (Cost(1.5), "about 1.5 forward passes"),
        (Cost(2, per_row=3), "about 5 forward passes for one position, 194 for all 64"),
        (Cost(1, per_token=3), "about 3 forward passes per token"),
        (Cost(1.5, per_layer=6), "about 6 forward passes per layer"),
    ],
)
def test_the_cost_in_words(cost, text):
    assert str(cost) == text


def test_the_cost_grows_with_what_is_computed():
    cost = Cost(1, 2, 3, 4, bidirectional=5)
    assert cost.passes(tokens=10, rows=5, layers=2) == 1 + 2 * 5 + 3 * 10 + 4 * 2
    # A row or a token of half of the layers takes half of the passes.
    assert cost.passes(10, 5, 2, n_layers=4) == 1 + (2 * 5 + 3 * 10) / 2 + 4 * 2
    assert cost.passes(10, 5, 2, is_causal=False) == 1 + 5 * (2 * 5 + 3 * 10) + 4 * 2
    assert cost.times(3) == Cost(1, 6, 9, 12, 5)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.123, "0.12 s"), (4, "4 s"), (41.4, "41 s"), (119, "119 s"), (300, "5 min"), (9000, "2.5 h")],
)
def test_seconds_in_words(seconds, text):
    assert describe_seconds(seconds) == text


class Blocks:
    """What a cost reads of the blocks of a model with 4 layers."""

    def __init__(self, lengths, rows, layers=4, causal=True):
        keys = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        block = type("Block", (), {})()
        block.real = block.real_keys = block.real_inputs = keys
        block.real_queries = keys if rows is None else keys[:, :rows]
        block.stack = type("Stack", (), {"is_joint": False, "reads_target": False, "__len__": lambda _: 4})()
        block.verification = type("Verification", (), {"causal": causal})()
        block.clean = type("Clean", (), {"predictions": []})()
        self.blocks = [block] * layers


def test_a_batch_takes_the_mean_of_the_passes_of_its_prompts():
    # The clean pass is not counted, because the user has asked for it in any case.
    assert count_passes(Cost(1, per_row=1), Blocks([20, 200], None).blocks) == 110
    assert count_passes(Cost(3, per_token=1), Blocks([20], 1, layers=2).blocks) == 12


@pytest.mark.parametrize(
    ("options", "blocks", "words"),
    [
        ({"by_rows": True}, Blocks([9], None, causal=False), "queries=[0] makes the first row alone"),
        ({"by_rows": True}, Blocks([9], 2), "queries=[-1] makes the last row alone"),
        ({"by_rows": True}, Blocks([9], 1), "gim with queries=[-1] takes about 8 s"),
        ({"by_rows": True, "by_layers": True}, Blocks([9], 1), "layers=[-1] maps the last layer alone"),
        ({"by_layers": True}, Blocks([9], None), "layers=[-1] maps the last layer alone"),
        ({}, Blocks([9], None, causal=False), "gim with queries=[0] takes about 8 s"),
    ],
)
def test_what_takes_less_time(options, blocks, words, monkeypatch):
    monkeypatch.setitem(COSTS, "gim", Cost(1.6, per_row=0.4))
    given = {"by_rows": False, "by_layers": False, **options}
    assert suggest_less(blocks.blocks, **given, pass_seconds=4) == words


def passes(method, blocks):
    default = method.default_cost()
    return method.scale_cost(default, blocks.blocks)


def test_parameters_scale_the_recorded_cost():
    blocks = Blocks([24], None)
    occlusion = COSTS["occlusion"]
    assert passes(lm.methods.Occlusion(), blocks) == occlusion
    assert passes(lm.methods.Occlusion(replacements=[3, 5]), blocks) == occlusion.times(0.5)
    assert passes(lm.methods.Occlusion(by="values"), blocks) == occlusion.times(0.25)
    spans = passes(lm.methods.Occlusion(spans=[(4, 2), (20,)]), blocks)
    assert spans.passes(24, 1, 4) == pytest.approx(occlusion.base + 2 * occlusion.per_token)
    gradients = COSTS["input_gradients"]
    path = passes(lm.methods.InputGradients(score="integrated", n_steps=4), blocks)
    assert path.per_row == pytest.approx(4 * (1 + gradients.per_row))
    points = passes(lm.methods.AttentionAttribution(n_steps=8), blocks)
    assert points == passes(lm.methods.AttentionAttribution(n_steps=4), blocks).times(2)
    patching = COSTS["token_patching"]
    assert passes(lm.methods.TokenPatching(), blocks) == patching
    assert passes(lm.methods.TokenPatching(n_measured="auto"), blocks) == patching.times(2)


def read_records() -> dict[tuple[str, int, str], tuple[int, float]]:
    """Return the layers of the model and the recorded forward passes, by method, tokens and rows."""
    text = (Path(__file__).parents[2] / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
    found = {}
    for section, layers, first in (("Every method, gpt2-like", 3, 2), ("What calls cost", 30, 0)):
        lines = text.partition(f"## {section}\n")[2].partition("\n## ")[0].splitlines()
        header, _, *rows = (
            [cell.strip() for cell in line[1:-1].split("|")] for line in lines if line[:1] == "|"
        )
        tokens, passes = (
            header.index(name) for name in ("tokens" if first == 0 else "positions", "÷ forward")
        )
        for row in rows:
            name, _, which = row[first].removeprefix("lm.").partition(", ")
            if name in COSTS and row[passes] and which in ("", "last row", "all rows"):
                which = "last row" if name == "input_map" else which or "all rows"
                found[name, int(row[tokens]), which] = (layers, float(row[passes]))
    newer = {name for (name, _, _), (layers, _) in found.items() if layers == 30}
    return {key: value for key, value in found.items() if key[0] not in newer or value[0] == 30}


@pytest.mark.once
def test_every_cost_is_within_a_factor_of_two_of_its_record():
    records = read_records()
    assert {name for name, _, _ in records} == set(COSTS)
    for (name, tokens, which), (layers, recorded) in records.items():
        rows = 1 if which == "last row" else tokens
        said = COSTS[name].passes(tokens, rows, layers)
        assert 0.5 <= said / recorded <= 2, (name, tokens, which, said, recorded)
