"""Test AttnRes, AttnResLn and AttnRes-W against norm-analysis-of-transformer and the dense oracle."""

import pytest

import lens_mix as lm
from lens_mix._algebra.definitions import norms
from lens_mix._algebra.vectors import attention_vectors
from lens_mix.methods.attention import attention_weights, attn_res_w
from lens_mix.methods.attn_res import attn_res, attn_res_ln
from tests.matrix import build_or_skip
from tests.norm_cases import blocks_of, each_model, heads_of, largest, written_out
from tests.norm_oracle import oracle
from tests.norm_reference import BERT_CLASSES, reference, reference_bert, reference_inputs
from tests.tiny_models import available, bridge, tokens

NAMES = {
    "attn_res": "attnres_n",
    "attn_res_ln": "attnresln_n",
    "attn_res_w": "attnres_w",
    "attention": "attn_w",
}


@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("class_name", BERT_CLASSES)
def test_equals_norm_analysis(class_name, row):
    if not available(reference_bert, class_name):
        pytest.skip(f"no {class_name} in this TransformerLens")
    maps = lm.run(reference_bert(class_name), methods=list(NAMES), **reference_inputs(row))
    known = reference("norm_analysis_tiny_f64")
    for name, theirs in NAMES.items():
        size = len(maps[name].tokens)
        for layer in range(3):
            assert largest(maps[name].scores[layer], known[f"{theirs}.{layer}"][row, :size, :size]) < 1e-10, (
                name
            )


@each_model("attn_res")
def test_equals_the_definition_written_out(case):
    for block in blocks_of(case):
        anatomy, definition = block.anatomy, written_out(block)
        expected = attn_res_ln(definition.residual, anatomy.attention_residual, definition.summed)
        assert largest(lm.methods.AttnResLn()(block), expected) < 1e-10
        assert largest(lm.methods.AttnRes()(block), norms(definition.residual)) < 1e-10
        if anatomy.attention_branch is None and anatomy.residual_multiplier == 1:
            assert largest(lm.methods.AttnRes()(block), attn_res(*heads_of(block), block.resid_pre)) < 1e-10


@each_model("attn_res")
def test_a_second_opinion_whose_vectors_add_up_to_the_true_states(case):
    """Compute the vectors from the weights and the block's input alone, with a column for the biases."""
    for block in blocks_of(case):
        second = oracle(block, feed_forward=False)
        vectors, definition = attention_vectors(block), written_out(block)
        assert largest(definition.residual[0], second.residual[:, :-1]) < 1e-10
        assert largest(definition.normed[0], second.normed[:, :-1]) < 1e-10
        assert largest(second.residual.sum(1), vectors.states.attention_sum[0]) < 1e-10
        assert largest(second.normed.sum(1), vectors.states.mid[0]) < 1e-10


@each_model("attn_res")
def test_next_norm_is_the_one_that_reads_the_sum(case):
    for block in blocks_of(case):
        anatomy, definition = block.anatomy, written_out(block)
        norm = anatomy.cross_input if anatomy.cross else anatomy.feed_forward_input
        if anatomy.attention_residual is not None or anatomy.parallel:
            norm = None
        expected = attn_res_ln(definition.normed, norm, definition.mid)
        assert largest(lm.methods.AttnResLn(next_norm=True)(block), expected) < 1e-10


@each_model("attn_res")
def test_weights_equal_their_definitions(case):
    for block in blocks_of(case):
        pattern = block.recorded("pattern")
        assert largest(lm.methods.AttentionWeights()(block), attention_weights(pattern)) < 1e-10
        assert largest(lm.methods.AttnResWeights()(block), attn_res_w(pattern)) < 1e-10


def test_the_record_names_the_norm_that_was_taken():
    assert lm.methods.AttnResLn(next_norm=True).parameters() == {"next_norm": True}


def test_a_norm_that_an_unknown_feed_forward_reads_is_refused():
    model = build_or_skip(bridge, "granite_moe")
    prompt = tokens(model, 1, 8)
    assert lm.run(model, prompt, "attn_res_ln").scores.isfinite().all()
    with pytest.raises(lm.UnsupportedModelError, match=r"its mixture feed-forward is not verified"):
        lm.run(model, prompt, lm.methods.AttnResLn(next_norm=True))
