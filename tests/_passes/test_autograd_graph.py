"""Test that blocks that are run again in the backward pass give the gradients of a graph that is kept."""

from __future__ import annotations

import re

import pytest
import torch

import lens_mix as lm
from lens_mix._passes import autograd_graph
from lens_mix._passes.autograd_graph import AutogradGraph
from tests.matrix import build_or_skip, cases, prompt_of
from tests.tiny_models import bridge, gpt2_like

pytestmark = pytest.mark.filterwarnings("ignore")
METHODS = {
    "gim": lm.methods.Gim(activations="ratio"),
    "plain activations": lm.methods.Gim(),
    "streams": lm.methods.Gim(after_blocks=1, readout="absolute"),
    "patching": lm.methods.TokenPatching(replacements=[5], n_exact=2),
}


def run_each(model, prompt, part):
    """Return the maps of the methods that can run on a model, each in a run of its own."""
    maps = {}
    for label, method in METHODS.items():
        try:
            maps[label] = lm.run(model, prompt, method, queries=[-1], part=part).scores
        except (lm.UnsupportedModelError, ValueError) as problem:
            maps[label] = str(problem)
    return maps


@pytest.mark.parametrize("case", cases(refused=False), ids=lambda case: case.label)
def test_blocks_that_are_run_again_give_the_same_gradients(case, monkeypatch):
    if case.wrong_logits:
        pytest.skip("this release computes wrong logits")
    model = case.build(torch.float64)
    prompt = prompt_of(model)
    kept = run_each(model, prompt, case.part)
    monkeypatch.setattr(autograd_graph, "_MOST_KEPT", 0)
    again = run_each(model, prompt, case.part)
    for label, expected in kept.items():
        if isinstance(expected, str):
            # The error may name another layer first.
            assert re.sub(r"\d", "", again[label]) == re.sub(r"\d", "", expected)
        else:
            bound = 1e-10 * float(expected.abs().max())
            torch.testing.assert_close(again[label], expected, atol=bound, rtol=0)


def count_passes(model, prompt, method):
    """Return how often each block runs in a run of a method."""
    counts = dict.fromkeys(range(len(model.blocks)), 0)
    lm.run(model, prompt, method, queries=[-1])
    handles = [
        block.register_forward_pre_hook(lambda *_, layer=layer: counts.update({layer: counts[layer] + 1}))
        for layer, block in enumerate(model.blocks)
    ]
    lm.run(model, prompt, method, queries=[-1])
    for handle in handles:
        handle.remove()
    return set(counts.values())


def test_a_block_runs_twice_only_if_the_prompt_is_long(monkeypatch):
    model, prompt = gpt2_like(), torch.arange(3, 12)
    few = count_passes(model, prompt, lm.methods.Gim())
    monkeypatch.setattr(autograd_graph, "_MOST_KEPT", 0)
    more = count_passes(model, prompt, lm.methods.Gim())
    # A pass that computes logits from the last block's output calls the blocks too, without running them.
    assert {count + 2 for count in few} == more


def test_a_block_that_gives_another_output_is_an_error(monkeypatch):
    model, prompt = build_or_skip(bridge, "llama", torch.float64), torch.arange(3, 12)
    monkeypatch.setattr(autograd_graph, "_MOST_KEPT", 0)
    original = AutogradGraph.read

    def read_wrong(self, calls):
        original(self, calls)
        self._calls = {**calls, 1: calls[0]}

    monkeypatch.setattr(AutogradGraph, "read", read_wrong)
    with pytest.raises(lm.UnsupportedModelError, match="run again for its gradient"):
        lm.run(model, prompt, lm.methods.Gim(), queries=[-1])


def test_models_whose_blocks_share_keys_are_kept(monkeypatch):
    """Gradients of such a model also pass between blocks outside of the residual stream."""
    model = build_or_skip(bridge, "llama", torch.float64)
    monkeypatch.setattr(autograd_graph, "_MOST_KEPT", 0)
    lens = lm.Lens(model)
    assert not autograd_graph._shares_keys(lens)
    monkeypatch.setattr(model.original_model.config, "num_kv_shared_layers", 1, raising=False)
    assert autograd_graph._shares_keys(lens)
    assert AutogradGraph(lens, [], lm.methods.Gim(), 9).is_kept
