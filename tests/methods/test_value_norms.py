"""AttnN against norm-analysis-of-transformer's numbers, the dense oracle, and heads that cancel."""

import pytest
import torch

import lens_mix as lm
from lens_mix.lens.anatomy import Norm
from lens_mix.methods.factors import (
    Pairs,
    attention_vectors,
    gram,
    gram_after,
    linear_part,
    pattern_by_key,
    qr_factor,
    sum_norms,
)
from tests.norm_cases import CASES, blocks_of, largest
from tests.norm_oracle import norms, oracle
from tests.norm_reference import BERT_CLASSES, reference, reference_bert, reference_inputs
from tests.tiny_models import available


@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("class_name", BERT_CLASSES)
def test_equals_norm_analysis(class_name, row):
    if not available(reference_bert, class_name):
        pytest.skip(f"no {class_name} in this TransformerLens")
    maps = lm.run(
        reference_bert(class_name),
        methods=["value_norm", lm.ValueNorms(per_head=True)],
        **reference_inputs(row),
    )
    by_layer, by_head = maps.values()
    known = reference("norm_analysis_tiny_f64")
    size = len(by_layer.tokens)
    assert by_head.scores.shape == (3, 4, size, size)
    for layer in range(3):
        assert largest(by_layer.scores[layer], known[f"attn_n.{layer}"][row, :size, :size]) < 1e-10
        assert largest(by_head.scores[layer], known[f"attn_n_head.{layer}"][row, :, :size, :size]) < 1e-10


@CASES
def test_equals_the_vectors_written_out(case):
    for block in blocks_of(case, lm.ValueNorms()):
        written_out = oracle(block, feed_forward=False).attention
        assert largest(lm.ValueNorms()(block)[0], norms(written_out)) < 1e-10
        assert largest(attention_vectors(block).attention.dense()[0], written_out[:, :-1]) < 1e-10


def test_heads_that_cancel_keep_their_digits():
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(1, 3, 2, 64, generator=generator)
    vectors[:, :, 1] = -vectors[:, :, 0] * (1 + 1e-4 * torch.rand(1, 3, 64, generator=generator))
    weights = torch.full((1, 3, 5, 2), 0.5)
    exact = (weights.double() @ vectors.double()).norm(dim=-1)
    assert largest(Pairs(weights, vectors).norms().transpose(1, 2) / exact, 1) < 1e-5
    wide = sum_norms(weights.double(), vectors.double())
    assert largest(wide / exact, 1) < 1e-10
    # What a Gram matrix in float32 would give: the reason why it is forbidden.
    narrow = ((weights @ (vectors @ vectors.transpose(-1, -2))) * weights).sum(-1).clamp_min(0).sqrt()
    assert largest(narrow / exact, 1) > 0.01


def test_factors_are_the_vectors_products():
    vectors = torch.randn(4, 3, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    factor = qr_factor(vectors)
    assert largest(factor.transpose(-1, -2) @ factor, gram(vectors)) < 1e-12
    pattern = torch.rand(2, 3, 4, 5)
    assert torch.equal(pattern_by_key(pattern)[1, 2, 3, 0], pattern[1, 0, 3, 2])


def test_folded_value_biases_change_the_map_and_the_record_says_so():
    from tests.tiny_models import hooked_transformer

    if not available(hooked_transformer, "LN", torch.float64):
        pytest.skip("no HookedTransformer in this TransformerLens")
    model = hooked_transformer("LN", torch.float64)
    tokens = torch.arange(3, 10)
    plain = lm.run(model, tokens, "value_norm")
    model.load_state_dict(model.fold_value_biases(model.state_dict()))
    folded = lm.run(model, tokens, "value_norm")
    assert plain.provenance["value_biases"] == "present"
    assert folded.provenance["value_biases"].startswith("none")
    assert largest(plain.scores, folded.scores) > 0.01


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("weighted", [True, False])
def test_gram_after_a_norm_needs_no_centred_copy(kind: str, weighted: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(1, 3, 4, 16, generator=generator, dtype=torch.float64) + 5
    weight = torch.randn(16, generator=generator, dtype=torch.float64) if weighted else None
    norm = Norm(kind, weight, None, 1e-5)
    torch.testing.assert_close(
        gram_after(norm, vectors), gram(linear_part(norm, vectors)), rtol=0, atol=1e-11
    )
