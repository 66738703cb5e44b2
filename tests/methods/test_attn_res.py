"""AttnRes, AttnResLn and AttnRes-W against norm-analysis-of-transformer and the dense oracle."""

import pytest
import torch

import lens_mix as lm
from lens_mix.algebra.vectors import attention_vectors
from tests.norm_cases import CASES, blocks_of, largest
from tests.norm_oracle import mixing_ratio, norms, oracle, through_norm
from tests.norm_reference import BERT_CLASSES, reference, reference_bert, reference_inputs
from tests.tiny_models import available

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


@CASES
def test_equals_the_vectors_written_out(case):
    for block in blocks_of(case, lm.AttnResLn()):
        written_out = oracle(block, feed_forward=False)
        vectors = attention_vectors(block)
        assert largest(lm.AttnRes()(block)[0], norms(written_out.residual)) < 1e-10
        assert largest(lm.AttnResLn()(block)[0], norms(written_out.normed)) < 1e-10
        assert largest(vectors.residual.mixing_ratio()[0], mixing_ratio(written_out.residual)) < 1e-10
        assert largest(vectors.normed.mixing_ratio()[0], mixing_ratio(written_out.normed)) < 1e-10
        # The vectors and the column of the biases add up to the true states.
        assert largest(written_out.residual.sum(1), vectors.summed[0]) < 1e-10
        assert largest(written_out.normed.sum(1), vectors.mid[0]) < 1e-10


@CASES
def test_next_norm_is_the_one_that_reads_the_sum(case):
    for block in blocks_of(case, lm.AttnResLn()):
        anatomy = block.anatomy
        written_out = oracle(block, feed_forward=False)
        norm = anatomy.cross_input if anatomy.cross else anatomy.feed_forward_input
        if anatomy.attention_residual is not None or anatomy.parallel:
            norm = None
        expected = norms(through_norm(norm, written_out.normed, written_out.mid))
        assert largest(lm.AttnResLn(next_norm=True)(block)[0], expected) < 1e-10


def test_weights_with_the_residual_are_half_an_identity():
    from tests.tiny_models import bridge

    if not available(bridge, "gpt2"):
        pytest.skip("no TransformerBridge in this TransformerLens")
    maps = lm.run(bridge("gpt2"), torch.arange(3, 9), ["attention", "attn_res_w"])
    expected = (maps["attention"].scores + torch.eye(6)) / 2
    assert largest(maps["attn_res_w"].scores, expected) < 1e-7
    assert largest(maps["attn_res_w"].scores.sum(-1), 1) < 1e-6


def test_the_record_names_the_norm_that_was_taken():
    assert lm.AttnResLn(next_norm=True).parameters() == {"next_norm": True}
