"""Compare mixing ratios with norm-analysis-of-transformer and with a dense computation; test the tables."""

import numpy as np
import pandas as pd
import pytest
import torch

import lens_mix as lm
from lens_mix._algebra import definitions
from lens_mix.evaluation.ranks import spearman
from lens_mix.experiments import mixing_ratio as ratios
from lens_mix.experiments.passes import run_prompt
from lens_mix.maps.token_kinds import token_kind
from tests.matrix import cases, model_of, prompt_of
from tests.norm_cases import blocks_of, each_model, largest, written_out
from tests.norm_oracle import mixing_ratio, oracle
from tests.norm_reference import BERT_CLASSES, reference, reference_bert, reference_inputs
from tests.tiny_models import available, bridge, gpt2_like

NAMES = {
    "attn_w": "attn_w",
    "attn_n": "attn_n",
    "attn_res_w": "attnres_w",
    "attn_res": "attnres_n",
    "attn_res_ln": "attnresln_n",
}


@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("class_name", BERT_CLASSES)
def test_equals_norm_analysis(class_name, row):
    if not available(reference_bert, class_name):
        pytest.skip(f"no {class_name} in this TransformerLens")
    inputs = reference_inputs(row)
    table = ratios.mixing_ratios(reference_bert(class_name), inputs.pop("prompt"), **inputs)
    known, size = reference("norm_analysis_tiny_f64"), 9 - 3 * row
    assert set(table["stage"]) == set(ratios._STAGES)
    for (layer, stage), part in table.groupby(["layer", "stage"]):
        assert part["position"].tolist() == list(range(size))
        if stage in NAMES:
            theirs = known[f"{NAMES[stage]}_mixing.{layer}"][row, :size]
            assert largest(part["ratio"].to_numpy(), theirs) < 1e-10


@each_model("attn_res")
def test_before_the_feed_forward_equals_the_vectors_written_out(case):
    for block in blocks_of(case):
        found, definition = ratios.block_mixing_ratios(block), written_out(block)
        assert largest(found["attn_res"], definitions.mixing_ratio(definition.residual)) < 1e-10
        assert largest(found["attn_res_ln"], definitions.mixing_ratio(definition.normed)) < 1e-10


@each_model("atb_ff_res_ln")
def test_after_the_feed_forward_equals_the_vectors_written_out(case):
    for block in blocks_of(case):
        found = ratios.block_mixing_ratios(block, ["atb_ff_res_ln"])["atb_ff_res_ln"][0]
        assert largest(found, mixing_ratio(oracle(block).output)) < 1e-10


def test_the_first_token_of_a_causal_model_mixes_nothing():
    if not available(bridge, "gpt2", torch.float64):
        pytest.skip("no TransformerBridge in this TransformerLens")
    table = ratios.mixing_ratios(bridge("gpt2", torch.float64), torch.arange(3, 9))
    assert table[table["position"] == 0]["ratio"].max() < 1e-12
    assert table[table["position"] > 0]["ratio"].min() > 0.01


def test_models_without_a_plain_feed_forward_have_the_stages_before_it():
    if not available(bridge, "mixtral"):
        pytest.skip("no TransformerBridge in this TransformerLens")
    table = ratios.mixing_ratios(bridge("mixtral"), torch.arange(3, 9))
    assert set(table["stage"]) == set(ratios._ATTENTION_STAGES)
    with pytest.raises(lm.UnsupportedModelError, match="mixture feed-forward"):
        ratios.mixing_ratios(bridge("mixtral"), torch.arange(3, 9), ["atb_ff_res_ln"])


def test_several_prompts_are_numbered():
    model = gpt2_like()
    table = ratios.mixing_ratios(model, [torch.arange(3, 7), torch.arange(3, 9)], ["attn_w"])
    assert table.groupby("prompt")["position"].max().tolist() == [3, 5]


def test_an_unsupported_prompt_does_not_restart_the_table(monkeypatch):
    """Otherwise the table would contain the rows of the first prompts twice."""
    run = ratios.iterate_prompts

    def refused_after_one(model, prompts, methods, **options):
        yield from run(model, prompts[:1], methods, **options)
        raise lm.UnsupportedModelError("the second prompt")

    monkeypatch.setattr(ratios, "iterate_prompts", refused_after_one)
    with pytest.raises(lm.UnsupportedModelError, match="the second prompt"):
        ratios.mixing_ratios(gpt2_like(), [torch.arange(3, 7), torch.arange(3, 9)])


@pytest.fixture
def table():
    rows = []
    for prompt, tokens in enumerate(
        (["[CLS]", "the", "cat", ".", "[SEP]"], ["[CLS]", "the", "[MASK]", "[SEP]"])
    ):
        for position, token in enumerate(tokens):
            for layer in (0, 1):
                for stage, base in (("attn_w", 0.5), ("attn_res_ln", 0.1)):
                    ratio = base + 0.1 * layer + 0.01 * position
                    rows.append((prompt, layer, position, token, position, stage, ratio))
    columns = ["prompt", "layer", "position", "token", "token_id", "stage", "ratio"]
    return pd.DataFrame(rows, columns=columns)


def test_by_layer_averages_tokens_and_ends_in_the_mean(table):
    found = ratios.by_layer(table)
    assert list(found.columns) == ["attn_w", "attn_res_ln"]
    assert list(found.index) == [0, 1, "mean"]
    position = np.mean([0, 1, 2, 3, 4, 0, 1, 2, 3])
    assert found.loc[0, "attn_w"] == pytest.approx(0.5 + 0.01 * position)
    assert found.loc["mean", "attn_res_ln"] == pytest.approx(0.15 + 0.01 * position)


def test_by_kind_takes_the_users_function(table):
    found = ratios.by_kind(table)
    assert found["tokens"].to_dict() == {"mask": 1, "other": 3, "punctuation": 1, "special": 4}
    assert found.loc["mask", "attn_w"] == pytest.approx(0.55 + 0.02)
    own = ratios.by_kind(table, lambda token: "animal" if token == "cat" else "none")
    assert own.loc["animal", "attn_res_ln"] == pytest.approx(0.15 + 0.02)


def test_by_rank_counts_or_takes_ranks(table):
    assert ratios.counted_ranks(table)["[CLS]"] == ratios.counted_ranks(table)["the"] == 2
    falling = {"the": 3, "cat": 2, ".": 1}
    found = ratios.by_rank(table, falling)
    # The positions have the mean ranks 1, 2, 3, 1 and the given ranks 3, 2, 1, 3: the opposite order.
    assert found.loc[0, "attn_w"] == pytest.approx(-1)
    assert found.shape == (2, 2)


@pytest.mark.parametrize(
    ("token", "kind"),
    [
        ("[CLS]", "special"),
        ("</s>", "special"),
        ("<|endoftext|>", "special"),
        ("<bos>", "special"),
        ("[MASK]", "mask"),
        ("<mask>", "mask"),
        (".", "punctuation"),
        ("\u0120,", "punctuation"),
        ("\u2581\u2014", "punctuation"),
        ("##s", "other"),
        ("#", "punctuation"),
        (" cat", "other"),
        ("\u0120the", "other"),
        ("<", "punctuation"),
    ],
)
def test_kinds_of_token(token, kind):
    assert token_kind(token) == kind


def test_spearman_is_scipys():
    from scipy.stats import spearmanr

    generator = np.random.default_rng(0)
    x, y = generator.integers(0, 6, 50), generator.normal(size=50)
    assert spearman(x, y) == pytest.approx(spearmanr(x, y).statistic)
    for constant in (np.ones(4), np.ones(1)):
        assert np.isnan(spearman(constant, np.arange(len(constant))))
    with pytest.raises(ValueError, match="y: expected as many values as x, 3, got 4"):
        spearman(np.arange(3), np.arange(4))


def test_an_unknown_stage_is_refused():
    with pytest.raises(ValueError, match=r"stages: expected one of .*, got 'attn'"):
        ratios.mixing_ratios(None, "", ["attn"])


@pytest.mark.parametrize("name", ["gpt2", "gemma2"])
def test_rows_and_layers_that_are_asked_for_are_those_of_the_whole_table(name):
    if not available(bridge, name, torch.float64):
        pytest.skip("no TransformerBridge in this TransformerLens")
    model = bridge(name, torch.float64)
    table = ratios.mixing_ratios(model, torch.arange(3, 9))
    part = ratios.mixing_ratios(model, torch.arange(3, 9), queries=[-1, 2], layers=[1])
    chosen = table[(table["layer"] == 1) & table["position"].isin([5, 2])]
    keys = ["layer", "position", "token", "token_id", "stage"]
    both = chosen.merge(part, on=keys, suffixes=("", "_part"))
    assert len(both) == len(chosen) == len(part)
    assert largest(both["ratio"].to_numpy(), both["ratio_part"].to_numpy()) < 1e-10


def test_a_block_of_cross_attention_is_refused():
    case = next(case for case in cases(cross=True, refused=False) if case.part == "cross")
    model, method = model_of(case, torch.float64), lm.methods.AttentionWeights()
    (block, *_) = run_prompt(model, prompt_of(model), method, part="cross", cross=True).blocks
    with pytest.raises(lm.UnsupportedModelError, match="expected self-attention, got cross-attention"):
        ratios.block_mixing_ratios(block)
