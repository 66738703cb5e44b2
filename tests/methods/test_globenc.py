"""Test GlobEnc against its own code's numbers and the dense oracle."""

import pytest
import torch

import lens_mix as lm
from lens_mix.methods.globenc import globenc, rollout
from tests.norm_cases import blocks_of, each_model, largest, read_by_a_norm, written_out
from tests.norm_oracle import oracle
from tests.norm_reference import BERT_CLASSES, reference, reference_bert, reference_inputs
from tests.tiny_models import available, bridge


@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("class_name", BERT_CLASSES)
def test_equals_globenc(class_name, row):
    if not available(reference_bert, class_name):
        pytest.skip(f"no {class_name} in this TransformerLens")
    found = lm.run(reference_bert(class_name), methods="globenc", **reference_inputs(row))
    known, size = reference("globenc_tiny_f64"), len(found.tokens)
    for layer in range(3):
        assert largest(found.scores[layer], known[f"enc_n.{layer}"][row, :size, :size]) < 1e-10
    assert largest(rollout(found.scores)[-1], known["globenc"][row, :size, :size]) < 1e-10


@each_model("globenc")
def test_equals_the_definition_written_out(case):
    blocks = read_by_a_norm(blocks_of(case))
    maps = [lm.methods.GlobEnc()(block) for block in blocks]
    for scores, block in zip(maps, blocks, strict=True):
        anatomy, definition = block.anatomy, written_out(block)
        second, output = anatomy.feed_forward_residual, block.resid_post
        if second is None:
            second = block.next_norm()
        else:
            # Of the feed-forward, only the output that the second implementation computes is used here.
            output = oracle(block).feed_forward_residual.sum(1)[None]
        first, mid = anatomy.attention_residual, definition.summed
        assert largest(scores, globenc(definition.residual, first, mid, second, output)) < 1e-10


def test_decoders_of_encoder_decoders_are_refused():
    if not available(bridge, "bart"):
        pytest.skip("no TransformerBridge in this TransformerLens")
    with pytest.raises(lm.UnsupportedModelError, match="cross-attention lies between the two norms"):
        lm.run(bridge("bart"), (torch.arange(3, 9), torch.arange(3, 8)), "globenc", part="decoder")


def test_rollout_refuses_heads():
    with pytest.raises(ValueError, match=r"scores: expected \[layer, query, key\], got shape \[2, 4, 5, 5\]"):
        rollout(torch.ones(2, 4, 5, 5))
