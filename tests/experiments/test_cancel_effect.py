"""Test the tables of attention weight and ‖f(x)‖."""

import pytest
import torch

import lens_mix as lm
from lens_mix.experiments.cancel_effect import (
    cancelled_tokens,
    correlations,
    no_op_table,
    weights_and_norms,
)
from tests.matrix import build_or_skip
from tests.norm_cases import largest
from tests.norm_reference import BERT_CLASSES, reference, reference_bert, reference_inputs
from tests.tiny_models import available, bridge


@pytest.mark.parametrize("class_name", BERT_CLASSES)
def test_norms_equal_norm_analysis(class_name):
    if not available(reference_bert, class_name):
        pytest.skip(f"no {class_name} in this TransformerLens")
    inputs = reference_inputs(0)
    table = weights_and_norms(reference_bert(class_name), inputs.pop("prompt"), **inputs)
    known = reference("norm_analysis_tiny_f64")
    for layer, part in table.groupby("layer"):
        norm = torch.tensor(part["norm"].to_numpy().reshape(9, 4)).T
        weight = torch.tensor(part["weight"].to_numpy().reshape(9, 4)).T
        assert largest(norm, known[f"fx_norm.{layer}"][0]) < 1e-10
        assert largest(weight, known[f"attn.{layer}"][0].mean(1)) < 1e-10
        weighted = torch.tensor(part["weighted_norm"].to_numpy().reshape(9, 4)).T
        assert largest(weighted, known[f"attn_n_head.{layer}"][0].mean(1)) < 1e-10


@pytest.fixture
def silenced():
    """Return a model with a known cancel effect: in its first block, position 1 has very short vectors."""
    if not available(bridge, "llama", torch.float64):
        pytest.skip("no TransformerBridge in this TransformerLens")
    model, tokens = bridge("llama", torch.float64), torch.tensor([4, 5, 6, 7, 8, 9])
    with torch.no_grad():
        _, cache = model.run_with_cache(tokens[None])
        read = cache["blocks.0.ln1.hook_out"][0, 1]
        weight = model.blocks[0].attn.v.original_component.weight
        weight -= torch.outer(weight @ read, read) / (read @ read) * 0.999
    return model, tokens


def test_weights_are_means_over_the_queries_that_see_the_key(silenced):
    model, tokens = silenced
    table = weights_and_norms(model, tokens)
    first = table[(table["layer"] == 0) & (table["position"] == 5)]
    with torch.no_grad():
        _, cache = model.run_with_cache(tokens[None])
    pattern = cache["blocks.0.attn.hook_pattern"][0]
    assert first["weight"].tolist() == pytest.approx(pattern[:, 5, 5].tolist())


def test_the_silenced_token_is_named(silenced):
    model, tokens = silenced
    table = weights_and_norms(model, tokens)
    best = cancelled_tokens(table, 1).iloc[0]
    expected = table[table["position"] == 1]["token"].iloc[0]
    assert (best["layer"], best["token"]) == (0, expected)
    assert best["norm"] < 0.01 * best["others_norm"]


def test_tables_group_as_asked(silenced):
    model, tokens = silenced
    table = weights_and_norms(model, tokens)
    kinds = no_op_table(table, lambda token: "one")
    assert kinds.loc[(0, "one"), "norm"] == pytest.approx(table[table["layer"] == 0]["norm"].mean())
    assert correlations(table).shape == (2, 1)
    by_head = correlations(table, ("layer", "head"))["spearman"]
    assert by_head.shape == (8,)
    assert by_head.between(-1, 1).all()


@pytest.mark.parametrize("name", ["t5", "bart", "marian"])
def test_cross_attention_has_the_sources_positions(name):
    model = build_or_skip(bridge, name)
    pair = (torch.tensor([5, 9, 3, 7, 2]), torch.tensor([0, 8, 6]))
    try:
        table = weights_and_norms(model, pair, part="cross")
    except lm.UnsupportedModelError as problem:  # happens for T5 before TransformerLens 4
        pytest.skip(str(problem))
    methods = [lm.methods.AttentionWeights(per_head=True), lm.methods.ValueNorms(per_head=True)]
    weights, weighted = lm.run(model, pair, methods, part="cross").values()
    assert list(table["token"].unique()) == list(dict.fromkeys(weights.key_tokens))
    for layer, part in table.groupby("layer"):
        heads = weights.scores.shape[1]
        weight = torch.tensor(part["weight"].to_numpy().reshape(5, heads)).T
        both = torch.tensor(part["weighted_norm"].to_numpy().reshape(5, heads)).T
        assert largest(weight, weights.layer(layer).scores[0].mean(1).double()) < 1e-6
        assert largest(both, weighted.layer(layer).scores[0].mean(1).double()) < 1e-5
