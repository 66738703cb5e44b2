"""Test AttnN against norm-analysis-of-transformer's numbers, the dense oracle, and heads that cancel."""

import pytest
import torch

import lens_mix as lm
from lens_mix._algebra.definitions import head_parts
from lens_mix._algebra.head_vectors import HeadVectors
from lens_mix._algebra.pair_norms import _factor_norms, _gram, _qr_factor, by_key
from lens_mix._algebra.vectors import Pairs, attention_vectors
from lens_mix._model.anatomy import Norm, ValuePath
from lens_mix.methods.value_norms import value_norms
from tests.norm_cases import blocks_of, each_model, heads_of, largest, written_out
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
        methods=["value_norm", lm.methods.ValueNorms(per_head=True)],
        **reference_inputs(row),
    )
    by_layer, by_head = maps.values()
    known = reference("norm_analysis_tiny_f64")
    size = len(by_layer.tokens)
    assert by_head.scores.shape == (3, 4, size, size)
    for layer in range(3):
        assert largest(by_layer.scores[layer], known[f"attn_n.{layer}"][row, :size, :size]) < 1e-10
        assert largest(by_head.scores[layer], known[f"attn_n_head.{layer}"][row, :, :size, :size]) < 1e-10


@each_model("value_norm")
def test_equals_the_vectors_written_out(case):
    for block in blocks_of(case):
        found = lm.methods.ValueNorms()(block)
        assert largest(found, value_norms(*heads_of(block))) < 1e-10
        by_head = head_parts(*heads_of(block)).norm(dim=-1).transpose(1, 2)
        assert largest(lm.methods.ValueNorms(per_head=True)(block), by_head) < 1e-10
        assert largest(attention_vectors(block).pairs.written_out(), written_out(block).attention) < 1e-10
        # A second implementation uses the model's weights and its input alone.
        assert largest(found[0], norms(oracle(block, feed_forward=False).attention)) < 1e-10


def _pairs(weights: torch.Tensor, vectors: torch.Tensor) -> Pairs:
    """Make pairs of given vectors, [batch, key, head, d_model], with identities as output matrices."""
    heads, d_model = vectors.shape[-2:]
    matrices = torch.eye(d_model, dtype=vectors.dtype).expand(heads, d_model, d_model)
    path = ValuePath(matrices, None, matrices, None)
    return Pairs(weights.permute(0, 3, 2, 1), HeadVectors(path, vectors))


def test_heads_that_cancel_keep_their_digits():
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(1, 5, 2, 64, generator=generator)
    vectors[:, :, 1] = -vectors[:, :, 0] * (1 + 1e-4 * torch.rand(1, 5, 64, generator=generator))
    weights = torch.full((1, 5, 5, 2), 0.5)
    exact = (weights.double() @ vectors.double()).norm(dim=-1)
    assert largest(_pairs(weights, vectors).norms.transpose(1, 2) / exact, 1) < 1e-5
    wide = _pairs(weights.double(), vectors.double()).norms.transpose(1, 2)
    assert largest(wide / exact, 1) < 1e-10
    # This is what a float32 Gram matrix would give, and why none is used.
    narrow = ((weights @ (vectors @ vectors.transpose(-1, -2))) * weights).sum(-1).clamp_min(0).sqrt()
    assert largest(narrow / exact, 1) > 0.01


def test_factors_are_the_vectors_products():
    generator = torch.Generator().manual_seed(1)
    vectors = torch.randn(4, 3, 16, dtype=torch.float64, generator=generator)
    factor = _qr_factor(vectors)
    assert largest(factor.transpose(-1, -2) @ factor, _gram(vectors)) < 1e-12
    weights = torch.randn(4, 3, 5, dtype=torch.float64, generator=generator)
    sizes = (weights.mT @ vectors).norm(dim=-1)
    assert largest(_factor_norms(factor, weights, exact=True), sizes) < 1e-12
    assert largest(_factor_norms(_gram(vectors), weights, exact=False), sizes) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("budget", [1, 1 << 13, None])
@pytest.mark.parametrize("asked", [None, [3], [6, 2], [0, 5, 5, 1]])
def test_chunks_of_any_size_and_rows_give_the_same(budget, dtype, asked):
    """Stages pass through one and two norms, with grouped values. The smallest chunks have one key."""
    generator = torch.Generator().manual_seed(2)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=dtype)  # noqa: E731
    pattern, value, matrices = draw(2, 4, 7, 7).softmax(-1), draw(2, 7, 2, 3), draw(4, 3, 12)
    layers = (Norm("layer", draw(12), None, 1e-5), Norm("rms", draw(12), None, 1e-5))
    heads = HeadVectors(ValuePath(matrices.mT, None, matrices, None), value, budget)
    rows = list(range(7)) if asked is None else asked
    queries = None if asked is None else torch.tensor([asked, asked])
    root = Pairs(pattern[:, :, rows], heads, queries)
    stages = [root, root.through(layers[0]), root.through(layers[0]).through(layers[1])]
    vectors = torch.einsum("bkhe,hed->bkhd", value.repeat_interleave(2, dim=2), matrices).double()
    tolerance = 3e-4 if dtype == torch.float32 else 3e-11
    assert largest(heads.norms(), vectors.norm(dim=-1)) < tolerance
    for number, stage in enumerate(stages):
        if number:
            vectors = layers[number - 1].linear_part(vectors)
        dense = torch.einsum("bhqk,bkhd->bqkd", pattern.double(), vectors)
        own = dense.diagonal(dim1=1, dim2=2).transpose(1, 2)[:, rows]
        assert largest(stage.norms, dense.norm(dim=-1)[:, rows]) < tolerance
        # The norms come from the factors of all pairs, if these are made.
        assert largest(root.head_norms, heads.norms()) < tolerance
        assert largest(stage.diagonal, own) < tolerance
        alone = Pairs(stage.pattern, heads, queries, stage.chain)
        assert largest(alone.diagonal, own) < tolerance
        assert largest(alone.written_out(), dense[:, rows]) < tolerance
        assert largest(heads.times(heads.after(stage.chain)), vectors) < tolerance


def test_ranges_are_the_queries_that_give_weight():
    pattern = torch.zeros(1, 2, 5, 5)
    pattern[0, 0, 1, 0] = pattern[0, 1, 3, 0] = pattern[0, 0, 4, 4] = 1
    vectors = torch.randn(1, 5, 2, 8)
    pairs = _pairs(pattern.permute(0, 3, 2, 1), vectors)
    assert pairs.ranges() == [(1, 4), (0, 0), (0, 0), (0, 0), (4, 5)]


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


@pytest.mark.parametrize("queries", [1, 150])
def test_a_pattern_by_key_is_the_pattern_turned_round(queries: int) -> None:
    pattern = torch.rand(2, 3, queries, 5)
    turned = by_key(pattern, torch.empty(2, 5, 3, queries, dtype=torch.float64))
    assert torch.equal(turned, pattern.permute(0, 3, 1, 2).double())
