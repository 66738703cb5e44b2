"""Test ALTI and ALTI-Logit against the authors' numbers, the dense oracle, and a sum that is the logit."""

import ast

import pytest
import torch

import lens_mix as lm
from lens_mix._algebra.distances import distances, lengths
from lens_mix._algebra.logit_shares import logit_shares, through_unembedding, token_directions
from lens_mix._algebra.vectors import attention_vectors
from lens_mix.experiments.passes import run_prompt
from lens_mix.methods.alti import alti, normalize_rows
from lens_mix.methods.alti_logit import alti_logit
from tests.matrix import build_or_skip
from tests.norm_cases import blocks_of, each_model, each_model_with, largest, written_out
from tests.norm_reference import (
    BERT_CLASSES,
    GPT2_CLASSES,
    reference,
    reference_bert,
    reference_gpt2,
)
from tests.tiny_models import available, bridge, hooked_transformer, tokens

# torch.nn.functional.pairwise_distance, which the released code calls, adds this to every coordinate.
QUIRK = 1e-6


@pytest.fixture(params=BERT_CLASSES)
def bert(request):
    if not available(reference_bert, request.param):
        pytest.skip(f"no {request.param} in this TransformerLens")
    known = reference("alti_tiny_f64")
    return reference_bert(request.param), {
        "prompt": known["input_ids"][0],
        "token_type_ids": known["token_type_ids"][0],
    }


@pytest.fixture(params=GPT2_CLASSES)
def gpt2(request):
    if not available(reference_gpt2, request.param):
        pytest.skip(f"no {request.param} in this TransformerLens")
    return reference_gpt2(request.param)


def test_equals_alti(bert):
    model, inputs = bert
    known = reference("alti_tiny_f64")
    found = lm.run(model, methods="alti", **inputs)
    assert largest(found.scores, known["contributions_norm"]) < 1e-5
    assert largest(lm.rollout(found).scores, known["alti_rollout"]) < 1e-5


@pytest.mark.parametrize(("order", "name"), [(1, "contributions"), (2, "contributions_l2")])
def test_distances_equal_alti_to_the_last_digit_with_its_quirk(bert, order, name):
    model, inputs = bert
    blocks = run_prompt(model, methods=lm.methods.Alti(), **inputs).blocks
    for layer, block in enumerate(blocks):
        vectors = attention_vectors(block)
        found = distances(vectors.normed, vectors.states.mid - QUIRK, order)[0]
        assert largest(-found, reference("alti_tiny_f64")[name][layer]) < 1e-10


def test_contributions_equal_alti_logit(gpt2):
    known = reference("altilogit_gpt2_tiny_f64")
    blocks = run_prompt(gpt2, known["input_ids"][0], lm.methods.Alti()).blocks
    for layer, block in enumerate(blocks):
        vectors = attention_vectors(block)
        assert largest(vectors.states.mid[0], known["attn_res_outputs"][layer]) < 1e-10
        found = -distances(vectors.normed, vectors.states.mid - QUIRK, 1)[0]
        assert largest(found, known["contrib_l1"][layer]) < 1e-10
        nearer = (found + vectors.states.mid[0].abs().sum(-1, keepdim=True)).clamp_min(0)
        assert largest(nearer / nearer.sum(-1, keepdim=True), known["alti_norm"][layer]) < 1e-10
    assert largest(lm.run(gpt2, known["input_ids"][0], "alti").scores, known["alti_norm"]) < 1e-5


def test_logit_shares_equal_alti_logit(gpt2):
    known = reference("altilogit_gpt2_tiny_f64")
    blocks = run_prompt(gpt2, known["input_ids"][0], lm.methods.AltiLogit()).blocks
    head = blocks[-1].unembedding()
    # The two tokens for which the authors' code was run.
    for place, token in enumerate((7, 9)):
        columns = head.W_U.T[torch.full((1, 9), token)]
        directions = through_unembedding(head, blocks[-1].resid_post, columns)
        for layer, block in enumerate(blocks):
            assert largest(logit_shares(block, directions)[0], known["aff_x_j"][layer, :, place]) < 1e-10


def test_alti_logit_and_what_it_leaves_out_add_up_to_the_logit(gpt2):
    tokens = reference("altilogit_gpt2_tiny_f64")["input_ids"][0]
    token = 11
    found = lm.run(gpt2, tokens, lm.methods.AltiLogit(token=token))
    checked = run_prompt(gpt2, tokens, lm.methods.AltiLogit())
    head = checked.blocks[-1].unembedding()
    columns = head.W_U.T[torch.full((1, len(tokens)), token)]
    direction = through_unembedding(head, checked.blocks[-1].resid_post, columns)[0]
    rest = checked.blocks[0].resid_pre[0] + sum(
        block.resid_post[0] - attention_vectors(block).residual.total[0] for block in checked.blocks
    )
    logits = found.scores.sum((0, 2)) + (rest * direction).sum(-1) + (head.norm.bias @ head.W_U)[token]
    assert largest(logits, checked.blocks[-1].continuation().logits()[0, :, token]) < 1e-10


def test_a_contrast_is_a_difference(gpt2):
    tokens = reference("altilogit_gpt2_tiny_f64")["input_ids"][0]
    for_one, for_other, both = (
        lm.run(gpt2, tokens, method).scores
        for method in (
            lm.methods.AltiLogit(token=5),
            lm.methods.AltiLogit(token=6),
            lm.methods.AltiLogit(token=5, against=6),
        )
    )
    assert largest(for_one - for_other, both) < 1e-10
    following = lm.run(gpt2, tokens, lm.methods.AltiLogit(token="next")).scores
    first = lm.run(gpt2, tokens, lm.methods.AltiLogit(token=int(tokens[1]))).scores
    assert largest(following[:, 0], first[:, 0]) < 1e-10


@each_model_with("distance", ["l1", "l2"], "alti")
def test_equals_the_definition_written_out(case, distance):
    order = 1 if distance == "l1" else 2
    for block in blocks_of(case):
        definition = written_out(block)
        nearer = alti(definition.normed, definition.mid, order)
        assert largest(lm.methods.Alti(distance, normalize=False)(block), nearer) < 1e-10
        rows = lm.methods.Alti(distance)(block)
        assert largest(rows, normalize_rows(nearer)) < 1e-8
        assert largest(rows.sum(-1), (nearer.sum(-1) > 0).double()) < 1e-12


@each_model("alti_logit")
def test_alti_logit_equals_the_definition_written_out(case):
    blocks = blocks_of(case)
    directions = torch.randn(blocks[-1].resid_pre.shape, generator=torch.Generator().manual_seed(0)).double()
    branches = [written_out(block).branch for block in blocks]
    found = alti_logit(branches, directions, [lm.methods.Alti()(block) for block in blocks])
    below = torch.eye(directions.shape[1], dtype=torch.float64)[None]
    for block, scores in zip(blocks, found, strict=True):
        assert largest(logit_shares(block, directions) @ below, scores) < 1e-9
        below = lm.methods.Alti()(block) @ below


@each_model("alti_logit", "no logits", "changed logits")
def test_the_methods_logits_are_those_of_the_definition(case):
    method = lm.methods.AltiLogit(token=5, against=7)
    blocks = blocks_of(case)
    directions = token_directions(blocks[-1], method.token, method.against)
    definitions = [written_out(block) for block in blocks]
    maps = [normalize_rows(alti(definition.normed, definition.mid)) for definition in definitions]
    expected = alti_logit([definition.branch for definition in definitions], directions, maps)
    for found, scores in zip(method.of_blocks(blocks), expected, strict=True):
        assert largest(found, scores) < 1e-9


@pytest.mark.parametrize("order", [1, 2])
def test_lengths_keep_the_digits_that_a_small_share_is_a_difference_of(order):
    vectors = torch.randn(256, 3072, generator=torch.Generator().manual_seed(0))
    expected = torch.linalg.vector_norm(vectors.double(), ord=order, dim=-1)
    assert largest(lengths(vectors, order) / expected, torch.ones(256)) < 3e-7


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="distance: expected 'l1' or 'l2', got 'l3'"):
        lm.methods.Alti("l3")
    with pytest.raises(ValueError, match="token: expected 'predicted' or 'next', got 'last'"):
        lm.methods.AltiLogit(token="last")
    if available(bridge, "gemma2"):
        with pytest.raises(lm.UnsupportedModelError, match="a soft cap"):
            lm.run(_large_logits(bridge("gemma2")), torch.arange(3, 9), "alti_logit")
    if available(bridge, "bert"):
        with pytest.raises(lm.UnsupportedModelError, match="post-norm"):
            lm.run(bridge("bert"), torch.arange(3, 9), "alti_logit")
    if available(hooked_transformer, "LN"):
        with pytest.raises(ValueError, match=r"token: expected 0\.\.49, got 50"):
            lm.run(hooked_transformer("LN"), torch.arange(3, 9), lm.methods.AltiLogit(token=50))


def _large_logits(model):
    """Make logits so large that the soft cap changes them more than rounding does."""
    with torch.no_grad():
        model.W_U.mul_(20)
    return model


HALF_THE_ENTRY = [("gpt2", 0), ("mpt", 1), ("stablelm", 0), ("gpt_bigcode", 1)]


@pytest.mark.parametrize(("name", "seed"), HALF_THE_ENTRY)
def test_a_token_that_only_rounding_decides_is_noted(name, seed):
    """In bfloat16 the model may predict another token, but the map of the same token is the same."""
    single = build_or_skip(bridge, name, seed=seed)
    half = build_or_skip(bridge, name, torch.bfloat16, seed)
    pairs = zip(single.original_model.parameters(), half.original_model.parameters(), strict=True)
    for parameter, rounded in pairs:
        parameter.data = rounded.data.float()
    prompt = tokens(single, 1, 24, seed)
    expected, found = (lm.run(model, prompt, "alti_logit") for model in (single, half))
    off = (found.scores - expected.scores).abs().amax(dim=(0, 2)) > 0.1 * expected.scores.abs().max()
    (note,) = [note for note in found.notes if "equal but for rounding" in note]
    assert not [note for note in expected.notes if "equal but for rounding" in note]
    assert set(off.nonzero()[:, 0].tolist()) <= set(ast.literal_eval(note[note.index("{") :]))
    for token in (7, "next"):
        one, other = (
            lm.run(model, prompt, lm.methods.AltiLogit(token=token)).scores for model in (single, half)
        )
        rows = slice(None) if token == 7 else slice(0, -1)
        assert (one - other)[:, rows].abs().max() < 0.05 * one.abs().max()


def test_the_note_speaks_of_the_asked_rows_of_each_prompt():
    model = build_or_skip(bridge, "gpt2", torch.bfloat16)
    with torch.no_grad():
        model.unembed.original_component.weight[8] = model.unembed.original_component.weight[7] * 1.001
        model.unembed.original_component.weight[7:9] *= 20
    prompts = [tokens(model, 1, length, seed)[0] for length, seed in ((12, 1), (7, 2))]
    alone = [lm.run(model, prompt, "alti_logit").notes for prompt in prompts]
    assert all(alone)
    together = lm.run_many(model, prompts, "alti_logit", batch_size=2, padding_side="left")
    assert [found.notes for found in together] == alone
    asked = lm.run(model, prompts[0], "alti_logit", queries=[3, 5]).notes
    positions = [set(ast.literal_eval(note[note.index("{") :])) for note in (*alone[0], *asked)]
    assert positions[0] & {3, 5} == (positions[1] if asked else set())
    assert lm.run(model, prompts[0], lm.methods.AltiLogit(token=7)).notes == ()
