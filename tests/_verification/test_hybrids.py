"""Test models in which some blocks have no attention. tests/test_wide.py compares their numbers."""

from __future__ import annotations

import pytest
import torch

import lens_mix as lm
from lens_mix.experiments import ablation_importance, head_importance, pruned, pruning_curves
from lens_mix.experiments.expansion_rate import expansion_rates
from tests.hugging_face_oracle import Reference
from tests.matrix import slow
from tests.tiny_models import available, bridge, tokens, wrapped_model

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not available(bridge, "lfm2"), reason="this TransformerLens has no such bridge"),
]

HYBRID = r"a hybrid: of 4 blocks of 'blocks' only \[1, 3\] have attention"


@pytest.fixture(scope="module")
def model():
    return bridge("lfm2", torch.float64)


@pytest.fixture(scope="module")
def prompt(model):
    return tokens(model, 1)


def test_the_layers_that_have_attention_are_mapped(model, prompt):
    found = lm.run(model, prompt, ["attention", "value_zeroing"])
    oracle = Reference(wrapped_model("lfm2", torch.float64, attn_implementation="eager"), prompt)
    assert found["attention"].layers == found["value_zeroing"].layers == [1, 3]
    torch.testing.assert_close(found["attention"].scores, oracle.attention().mean(dim=1))
    torch.testing.assert_close(found["value_zeroing"].scores, oracle.value_zeroing())
    assert found["attention"].notes[0].startswith("a hybrid: of 4 blocks")
    last = lm.run(model, prompt, "value_zeroing", layers=-1)
    assert last.layers == [3]
    torch.testing.assert_close(last.scores, found["value_zeroing"].scores[1:])


@pytest.mark.parametrize("layers", [0, [1, 2], slice(0, 4), -2])
def test_a_layer_without_attention_is_an_error(model, prompt, layers):
    with pytest.raises(ValueError, match=rf"layers: expected some of \[1, 3\], got .*{HYBRID}"):
        lm.run(model, prompt, "attention", layers=layers)


def test_heads_of_a_layer_without_attention_are_an_error(model, prompt):
    with pytest.raises(
        ValueError, match=r"heads: expected some of the layers with attention \[1, 3\], got \[0, 1\]"
    ):
        lm.run(model, prompt, lm.methods.ValueZeroing(heads={0: [0], 1: [1]}))
    assert lm.run(model, prompt, lm.methods.ValueZeroing(heads={1: [1]})).layers == [1, 3]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["lfm2", *map(slow, ("bamba", "falcon_h1"))])
def test_prompts_of_different_lengths_give_what_each_gives_alone(name, side):
    model = bridge(name, torch.float64)
    prompts = [tokens(model, 1, length, length) for length in (7, 4, 5)]
    maps = lm.run_many(model, prompts, ["attention", "value_zeroing"], padding_side=side)
    for found, one in zip(maps, prompts, strict=True):
        alone = lm.run(model, one, ["attention", "value_zeroing"])
        for label, mixing_map in found.items():
            torch.testing.assert_close(mixing_map.scores, alone[label].scores)


@pytest.mark.parametrize("name", ["alti_logit", "decompx"])
def test_what_speaks_of_the_whole_stack_is_refused(model, prompt, name):
    with pytest.raises(lm.UnsupportedModelError, match=rf"{name} can't run on this model: {HYBRID}"):
        lm.run(model, prompt, name)
    assert "a hybrid" in lm.support(model)[name]


def test_maps_do_not_chain_over_blocks_without_attention(model, prompt):
    found = lm.run(model, prompt, "gradient_attention")
    aggregated = (lm.rollout, lm.flow, lm.gradient_rollout, lambda m: m.to_networkx())
    for function in aggregated:
        with pytest.raises(ValueError, match=r"got layers \[1, 3\].* over blocks without attention"):
            function(found)
    one = lm.rollout(found.select_layers([3]), residual=0.5)
    assert any("a hybrid" in note for note in one.notes)
    assert any("from layer 3 on" in note for note in one.notes)


def test_the_next_norm_is_known_only_below_a_block_that_has_attention(model, prompt):
    with pytest.raises(lm.UnsupportedModelError, match=r"next norm: block 2 has no attention"):
        lm.run(model, prompt, "globenc")
    assert lm.support(model)["globenc"].startswith("next norm: block 2 has no attention")
    assert lm.run(model, prompt, "globenc", layers=[3]).layers == [3]
    apart = bridge("lfm2", torch.float64, layer_types=["conv", "full_attention", "full_attention", "conv"])
    assert lm.run(apart, prompt, "globenc", layers=[1]).layers == [1]
    rolled = lm.rollout(lm.run(apart, prompt, "attention"))
    assert rolled.layers == [1, 2]


def test_the_blocks_with_attention_are_verified(model, prompt):
    report = lm.check(model, prompt)
    assert report.ok
    assert list(report.verification.anatomy) == [1, 3]
    assert "unembedding: verified" in str(report)
    assert set(expansion_rates(model)["layer"]) == {1, 3}


def test_tables_of_all_heads_are_refused_and_heads_that_are_there_pruned(model, prompt):
    for measured in (
        lambda: head_importance(model, [prompt]),
        lambda: ablation_importance(model, lambda m: 0.0),
        lambda: pruning_curves(model, lambda m: 0.0, {}),
    ):
        with pytest.raises(lm.UnsupportedModelError, match=f"expected heads in every block, got {HYBRID}"):
            measured()
    whole = model(prompt)
    with pruned(model, [(1, 0)]):
        assert not torch.allclose(model(prompt), whole)
    with pytest.raises(ValueError, match=rf"got layer 2 \({HYBRID}"), pruned(model, [(2, 0)]):
        pass
