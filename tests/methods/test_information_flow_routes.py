"""Test information flow routes against a case by hand and the definition, on every kind of block."""

import functools

import pytest
import torch

import lens_mix as lm
from lens_mix._algebra.definitions import head_parts, through_norm
from lens_mix._algebra.distances import head_proximities
from lens_mix._algebra.head_vectors import HeadVectors
from lens_mix._algebra.vectors import Pairs, Vectors
from lens_mix._model.anatomy import ValuePath
from lens_mix.experiments.passes import run_prompt
from lens_mix.hooks.mixing import mix
from lens_mix.methods.component_shares import part_shares
from lens_mix.methods.information_flow_routes import importance
from tests.matrix import build_or_skip, prompt_of
from tests.norm_cases import blocks_of, each_model_with, heads_of, largest, written_out
from tests.tiny_models import bridge, hooked_encoder, hooked_encoder_decoder, hooked_transformer, tokens

# The authors' code uses this instead of 0.
FLOOR = 1e-5

# ---------------------------------------------------------------------- the definition


def test_importance_by_hand():
    """‖s‖ = 6. Removing a component leaves 3, 3 and 7, so the proximities are 3, 3 and 0."""
    parts = torch.tensor([[[[3.0, 0.0], [1.0, -2.0], [-1.0, 0.0]]]])
    assert importance(parts, torch.tensor([[[4.0, -2.0]]])).tolist() == [[[0.5, 0.5, 0.0]]]
    # No component brings (1, 1) closer, and nothing is divided by 0.
    parts = torch.tensor([[[[-1.0, 0.0], [0.0, -3.0]]]])
    assert importance(parts, torch.tensor([[[1.0, 1.0]]])).tolist() == [[[0.0, 0.0]]]


@pytest.mark.parametrize("bound", [None, 1])
def test_proximities_of_heads_by_hand(bound):
    """Two heads of two keys have identities as output matrices. The state is (4, -2) and the scale 2."""
    eye = torch.eye(2).expand(2, 2, 2)
    value = torch.tensor([[[[2.0, 0.0], [0.0, -1.0]], [[-1.0, 0.0], [1.0, 1.0]]]])
    pattern = torch.tensor([[[[0.5, 0.5]], [[1.0, 0.0]]]])
    heads = HeadVectors(ValuePath(eye, None, eye, None), value, budget=bound)
    pairs = Pairs(pattern, heads, queries=torch.tensor([[1]]))
    vectors = Vectors(pairs, torch.full((1, 1, 1), 2.0), lambda: torch.zeros(1, 1, 2))
    state = torch.tensor([[[4.0, -2.0]]])
    # Head 0 sent (2, 0) from key 0 and (-1, 0) from key 1. Head 1 sent only (0, -2), from key 0.
    expected = torch.tensor([[[[2.0, 0.0]], [[2.0, 0.0]]]])
    assert head_proximities(vectors, state, per_head=True).equal(expected)
    assert head_proximities(vectors, state, per_head=False).equal(expected.sum(1))


@pytest.mark.parametrize("size", [0.0, 1e-3, 0.3, 30.0])
def test_proximities_equal_the_norms_of_whole_vectors(size):
    """Small vectors change a few dimensions' signs, large ones all. Weights may be negative or 0."""
    generator = torch.Generator().manual_seed(0)
    draw = functools.partial(torch.randn, generator=generator, dtype=torch.float64)
    value, W_O, pattern = draw(2, 9, 1, 4), size * draw(3, 4, 64), draw(2, 3, 5, 9)
    pattern[pattern.abs() < 0.3] = 0
    heads = HeadVectors(ValuePath(W_O.mT, None, W_O, None), value, budget=20_000)
    vectors = Vectors(Pairs(pattern, heads), draw(2, 5, 1), lambda: torch.zeros(2, 5, 64))
    state = draw(2, 5, 64)
    state[:, :, :6] = 0
    sent = torch.einsum("bhqk,bkd,hdm,bq->bhqkm", pattern, value[:, :, 0], W_O, vectors.scale[..., 0])
    whole = state[:, None, :, None]
    expected = (whole.abs().sum(-1) - (whole - sent).abs().sum(-1)).clamp_min(0)
    torch.testing.assert_close(head_proximities(vectors, state, per_head=True), expected, rtol=0, atol=1e-11)
    summed = head_proximities(vectors, state, per_head=False)
    torch.testing.assert_close(summed, expected.sum(1), rtol=0, atol=1e-11)


def definition(block, biases="whole"):
    """Return the importance of each head's vector of each key, and of the other components by name."""
    anatomy, x, path = block.anatomy, block.resid_pre, block.anatomy.value_path
    attention_out = path.project(mix(*heads_of(block)[:2]))
    true = written_out(block)
    parts = head_parts(*heads_of(block))
    shape = parts.shape
    parts = through_norm(anatomy.attention_branch, parts.flatten(2, 3), attention_out)
    parts = torch.cat([parts * anatomy.residual_multiplier, x[:, :, None]], dim=2)
    parts = through_norm(anatomy.attention_residual, parts, true.summed)
    if biases == "part":
        parts = torch.cat([parts, (true.mid - parts.sum(2))[:, :, None]], dim=2)
    shares = importance(parts, true.mid)
    pairs = shape[2] * shape[3]
    names = ["resid_pre", "biases_mid"][: shares.shape[2] - pairs]
    others = dict(zip(names, shares[:, :, pairs:].unbind(2), strict=True))
    return shares[:, :, :pairs].unflatten(2, shape[2:4]).transpose(1, 2), others


@each_model_with("biases", ["whole", "part"], "information_flow_routes")
def test_equals_the_definition_written_out(case, biases):
    for block in blocks_of(case):
        by_head, others = definition(block, biases)
        own = torch.diag_embed(others["resid_pre"])
        scores = lm.methods.InformationFlowRoutes(biases=biases)(block)
        assert largest(scores, by_head.sum(1) + own) < 1e-10
        kept_apart = lm.methods.InformationFlowRoutes(per_head=True, biases=biases)(block)
        assert largest(kept_apart, by_head + (own / by_head.shape[1])[:, None]) < 1e-10
        total = scores.sum(-1) + others.get("biases_mid", 0)
        assert largest(total, torch.ones_like(total)) < 1e-10


@each_model_with("biases", ["whole", "part"], "information_flow_routes")
def test_residual_and_feed_forward_equal_their_definition(case, biases):
    for block in blocks_of(case):
        anatomy, mid = block.anatomy, written_out(block).mid
        lm.methods.InformationFlowRoutes(biases=biases)(block)
        found = block.record.details[0]["parts"]
        _, others = definition(block, biases)
        for name, value in others.items():
            assert largest(torch.tensor(found[name], dtype=torch.float64), value[0]) < 1e-10
        if anatomy.cross:
            assert "mlp_out" not in found
            continue
        if anatomy.feed_forward is None:
            continue
        added = anatomy.feed_forward(anatomy.feed_forward_in(block.resid_pre, mid))
        added = added if anatomy.feed_forward_branch is None else anatomy.feed_forward_branch(added)
        parts = torch.stack([mid, added * anatomy.residual_multiplier], dim=2)
        names, norm = ["resid_mid", "mlp_out"], anatomy.feed_forward_residual
        parts = through_norm(norm, parts, parts.sum(2))
        if biases == "part" and norm is not None:
            parts = torch.cat([parts, (block.resid_post - parts.sum(2))[:, :, None]], dim=2)
            names.append("biases_post")
        shares = importance(parts, block.resid_post)[0]
        # If the model's norms are Hugging Face's, its own output is less exact than float64.
        assert largest(torch.tensor([found[name] for name in names], dtype=torch.float64).T, shares) < 1e-5
        assert largest(shares.sum(-1), torch.ones(len(shares))) < 1e-10


@pytest.mark.parametrize("name", ["t5", "t5_gated", "bart", "marian", "HookedEncoderDecoder"])
@pytest.mark.parametrize("biases", ["whole", "part"])
def test_on_cross_attention_the_residual_is_a_key_of_its_own(name, biases):
    hooked = name == "HookedEncoderDecoder"
    model = build_or_skip(*((hooked_encoder_decoder,) if hooked else (bridge, name)), torch.float64)
    try:
        checked = run_prompt(model, prompt_of(model), lm.methods.InformationFlowRoutes(), part="cross")
    except lm.UnsupportedModelError as reason:
        pytest.skip(str(reason))
    for block in checked.blocks:
        by_head, others = definition(block, biases)
        own = others["resid_pre"][..., None]
        merged = lm.methods.InformationFlowRoutes(biases=biases)(block)
        assert largest(merged, torch.cat([by_head.sum(1), own], -1)) < 1e-10
        apart = lm.methods.InformationFlowRoutes(per_head=True, biases=biases)(block)
        heads = by_head.shape[1]
        each = (own / heads)[:, None].expand(-1, heads, -1, -1)
        assert largest(apart, torch.cat([by_head, each], -1)) < 1e-10
        # Only a feed-forward follows the cross-attention, so its share is known.
        parts = block.record.details[0]["parts"]
        total = [sum(parts[part][row] for part in ("resid_mid", "mlp_out")) for row in range(len(own[0]))]
        assert total == pytest.approx([1.0] * len(own[0]))


# ---------------------------------------------------------------------- properties

MODELS = pytest.mark.parametrize(
    "build",
    [
        lambda: build_or_skip(hooked_transformer, "LN", torch.float64),
        lambda: build_or_skip(hooked_encoder, torch.float64),
        lambda: build_or_skip(bridge, "gpt2", torch.float64),
        lambda: build_or_skip(bridge, "bert", torch.float64),
        lambda: build_or_skip(bridge, "gpt_neox", torch.float64),
    ],
    ids=["HookedTransformer", "HookedEncoder", "gpt2", "bert", "gpt_neox"],
)


@MODELS
def test_heads_together_are_the_map(build):
    model = build()
    prompt = tokens(model, 1, 7, 1)
    maps = lm.run(
        model, prompt, [lm.methods.InformationFlowRoutes(), lm.methods.InformationFlowRoutes(per_head=True)]
    )
    merged, by_head = maps.values()
    assert merged.scores.min() >= 0
    assert largest(merged.scores, by_head.scores.sum(1)) < 1e-12
    assert largest(merged.scores.sum(-1), torch.ones(merged.scores.shape[:2])) < 1e-12
    assert largest(lm.rollout(merged).scores, lm.rollout(by_head).scores) < 1e-12
    shares = part_shares(merged)
    assert bool((shares.resid_pre <= merged.scores.diagonal(dim1=1, dim2=2) + 1e-12).all())
    assert largest(shares.resid_mid + shares.mlp_out, torch.ones_like(shares.mlp_out)) < 1e-12
    for share, other in zip(shares[:3], part_shares(by_head)[:3], strict=True):
        assert largest(share, other) < 1e-12


@MODELS
def test_rows_and_padding_change_nothing(build):
    model = build()
    prompts = [tokens(model, 1, length, seed)[0] for length, seed in ((9, 1), (5, 2))]
    alone = [lm.run(model, prompt, "information_flow_routes") for prompt in prompts]
    for options in ({}, {"queries": [-1, 2]}, {"queries": slice(3, None)}):
        found = lm.run_many(model, prompts, "information_flow_routes", batch_size=2, **options)
        for one, other in zip(found, alone, strict=True):
            rows = other.select_queries(one.query_positions)
            assert largest(one.scores, rows.scores) < 1e-10
            for share, expected in zip(part_shares(one)[:3], part_shares(rows)[:3], strict=True):
                assert largest(share, expected) < 1e-10


def test_permuting_heads_permutes_the_map():
    model = build_or_skip(hooked_transformer, "LN", torch.float64)
    prompt, order = tokens(model, 1, 7, 1), [2, 0, 3, 1]
    before = lm.run(model, prompt, lm.methods.InformationFlowRoutes(per_head=True)).scores
    with torch.no_grad():
        for block in model.blocks:
            for name in ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V"):
                weight = getattr(block.attn, name)
                weight.copy_(weight[order].clone())
    after = lm.run(model, prompt, lm.methods.InformationFlowRoutes(per_head=True)).scores
    assert largest(after, before[:, order]) < 1e-12
    assert largest(after, before) > 1e-3


def test_the_authors_floor_is_all_that_differs_where_there_is_no_value_bias():
    """Their code gives each component at least 1e-5, also for hidden keys, and then normalizes."""
    model = build_or_skip(bridge, "llama", torch.float64)
    method = lm.methods.InformationFlowRoutes()
    for block in run_prompt(model, tokens(model, 1, 7, 1), method).blocks:
        parts, whole = head_parts(*heads_of(block)), written_out(block).mid
        parts = torch.cat([parts.flatten(2, 3), block.resid_pre[:, :, None]], dim=2)
        apart = torch.nn.functional.pairwise_distance(parts, whole[:, :, None].expand(parts.shape), p=1)
        near = (whole.abs().sum(-1, keepdim=True) - apart).clamp_min(FLOOR)
        theirs = near / near.sum(-1, keepdim=True)
        theirs = theirs[:, :, :-1].unflatten(2, (-1, 7)).sum(2) + torch.diag_embed(theirs[:, :, -1])
        assert largest(method(block), theirs) < 1e-4


def test_tokens_and_layers_left_out_later():
    model = build_or_skip(hooked_transformer, "LN", torch.float64)
    found = lm.run(model, tokens(model, 1, 7, 1), "information_flow_routes")
    whole, part = part_shares(found), part_shares(found.select_layers([1]).select_queries([-1, 0]))
    assert part.mlp_out.equal(whole.mlp_out[1:, [6, 0]])
    with pytest.raises(ValueError, match="expected the 7 tokens of the run, got 6"):
        part_shares(found.drop(0))


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="biases: expected 'whole' or 'part', got 'none'"):
        lm.methods.InformationFlowRoutes(biases="none")
    model = build_or_skip(hooked_transformer, "LN", torch.float64)
    with pytest.raises(ValueError, match="expected a map of information_flow_routes, got method 'alti'"):
        part_shares(lm.run(model, tokens(model, 1, 7, 1), "alti"))
    pair = build_or_skip(bridge, "bart", torch.float64)
    prompt = (tokens(pair, 1, 7, 1), tokens(pair, 1, 5, 2))
    found = lm.run(pair, prompt, "information_flow_routes", part="decoder")
    with pytest.raises(ValueError, match="got block 0, which has cross-attention"):
        part_shares(found)
