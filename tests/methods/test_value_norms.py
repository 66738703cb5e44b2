"""AttnN against norm-analysis-of-transformer's numbers, the dense oracle, and heads that cancel."""

import gc

import pytest
import torch

import lens_mix as lm
from lens_mix.algebra.head_vectors import (
    Grams,
    HeadVectors,
    by_key,
    factor_norms,
    gram,
    linear_part,
    qr_factor,
)
from lens_mix.algebra.vectors import Pairs, attention_vectors
from lens_mix.lens.anatomy import Norm, ValuePath
from lens_mix.statistics.passes import prompt_blocks
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


def _pairs(weights: torch.Tensor, vectors: torch.Tensor) -> Pairs:
    """Pairs of given vectors, [batch, key, head, d_model]: the output matrices are identities."""
    heads, d_model = vectors.shape[-2:]
    matrices = torch.eye(d_model, dtype=vectors.dtype).expand(heads, d_model, d_model)
    path = ValuePath(matrices.mT, None, matrices, None)
    return Pairs(weights.permute(0, 3, 2, 1), HeadVectors(path, vectors))


def test_heads_that_cancel_keep_their_digits():
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(1, 5, 2, 64, generator=generator)
    vectors[:, :, 1] = -vectors[:, :, 0] * (1 + 1e-4 * torch.rand(1, 5, 64, generator=generator))
    weights = torch.full((1, 5, 5, 2), 0.5)
    exact = (weights.double() @ vectors.double()).norm(dim=-1)
    assert largest(_pairs(weights, vectors).norms().transpose(1, 2) / exact, 1) < 1e-5
    wide = _pairs(weights.double(), vectors.double()).norms().transpose(1, 2)
    assert largest(wide / exact, 1) < 1e-10
    # What a Gram matrix in float32 would give: the reason why it is forbidden.
    narrow = ((weights @ (vectors @ vectors.transpose(-1, -2))) * weights).sum(-1).clamp_min(0).sqrt()
    assert largest(narrow / exact, 1) > 0.01


def test_factors_are_the_vectors_products():
    generator = torch.Generator().manual_seed(1)
    vectors = torch.randn(4, 3, 16, dtype=torch.float64, generator=generator)
    factor = qr_factor(vectors)
    assert largest(factor.transpose(-1, -2) @ factor, gram(vectors)) < 1e-12
    weights = torch.randn(4, 3, 5, dtype=torch.float64, generator=generator)
    sizes = torch.stack([(weights.mT @ part).norm(dim=-1) for part in (vectors, 2 * vectors)], dim=1)
    assert largest(factor_norms(torch.stack([factor, 2 * factor], dim=1), weights, exact=True), sizes) < 1e-12
    products = torch.stack([gram(vectors), gram(2 * vectors)], dim=1)
    assert largest(factor_norms(products, weights, exact=False), sizes) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("room", [1, 1 << 13, None])
def test_pieces_of_any_size_give_the_same(room, dtype):
    """Stages through one and two norms, two prompts, grouped values; the smallest pieces hold one key."""
    generator = torch.Generator().manual_seed(2)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=dtype)  # noqa: E731
    pattern, value, matrices = draw(2, 4, 7, 7).softmax(-1), draw(2, 7, 2, 3), draw(4, 3, 12)
    norms = (Norm("layer", draw(12), None, 1e-5), Norm("rms", draw(12), None, 1e-5))
    root = Pairs(pattern, HeadVectors(ValuePath(matrices.mT, None, matrices, None), value, room))
    stages = [root, root.through(norms[0]), root.through(norms[0]).through(norms[1])]
    vectors = torch.einsum("bkhe,hed->bkhd", value.repeat_interleave(2, dim=2), matrices).double()
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    for number, stage in enumerate(stages):
        if number:
            vectors = linear_part(norms[number - 1], vectors)
        dense = torch.einsum("bhqk,bkhd->bqkd", pattern.double(), vectors)
        assert largest(stage.norms(), dense.norm(dim=-1)) < tolerance * 30
        assert largest(stage.head_norms(), vectors.norm(dim=-1)) < tolerance * 30
        assert largest(stage.own(), dense.diagonal(dim1=1, dim2=2).transpose(1, 2)) < tolerance * 30
        assert largest(stage.vectors, vectors) < tolerance * 30


def test_ranges_are_the_queries_that_give_weight():
    pattern = torch.zeros(1, 2, 5, 5)
    pattern[0, 0, 1, 0] = pattern[0, 1, 3, 0] = pattern[0, 0, 4, 4] = 1
    vectors = torch.randn(1, 5, 2, 8)
    pairs = _pairs(pattern.permute(0, 3, 2, 1), vectors)
    assert pairs.ranges() == [(1, 4), (0, 0), (0, 0), (0, 0), (4, 5)]
    width = 10
    assert list(pairs.chunks(width, room=2 * 5 * width, keys=slice(0, 5))) == [
        (slice(0, 2), slice(1, 4)),
        (slice(4, 5), slice(4, 5)),
    ]


def test_what_is_shared_dies_with_the_clean_pass():
    from lens_mix.algebra.vectors import _last, _shared
    from tests.tiny_models import hooked_transformer

    if not available(hooked_transformer, "LN"):
        pytest.skip("no HookedTransformer in this TransformerLens")
    gc.collect()
    before = len(_shared)
    passed = prompt_blocks(hooked_transformer("LN"), torch.arange(3, 10), lm.ValueNorms())
    for block in passed.blocks:
        lm.AttnRes()(block)
    assert len(_shared) == before + len(passed.blocks)
    assert len(_last) == 1
    del block, passed
    gc.collect()
    assert len(_shared) == before
    assert not _last


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
    vectors = torch.randn(3, 4, 16, generator=generator, dtype=torch.float64) + 5
    weight = torch.randn(16, generator=generator, dtype=torch.float64) if weighted else None
    stages = [None, Norm(kind, weight, None, 1e-5), Norm("layer", None, None, 1e-5)]
    lines = Grams.lines(stages, heads=4)
    found = vectors.new_empty((3, lines, 4))
    grams = Grams(stages, 4, vectors.new_empty((lines, 5, 16)))
    grams.read(vectors.transpose(0, 1), found)
    for norm, products in zip(stages, grams.put_together(found), strict=True):
        torch.testing.assert_close(products, gram(linear_part(norm, vectors)), rtol=0, atol=1e-11)


@pytest.mark.parametrize("queries", [1, 64, 150])
def test_a_pattern_by_key_is_the_pattern_turned_round(queries: int) -> None:
    pattern = torch.rand(2, 3, queries, 5)
    found = by_key(pattern, torch.empty(2, 5, 3, queries, dtype=torch.float64))
    assert torch.equal(found, pattern.permute(0, 3, 1, 2).double())
