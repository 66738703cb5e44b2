"""Test DecompX against its own code's numbers, with every rule for biases, and its completeness."""

import pytest
import torch

import lens_mix as lm
from benchmarks.common import PeakMemory
from lens_mix._algebra.bias_split import SPLITS, split_bias, through_linear
from lens_mix._algebra.linear_block import SLOPES
from lens_mix._blocks.block import Block
from lens_mix.experiments.passes import run_prompt
from lens_mix.methods.decompx import decompx
from lens_mix.methods.decompx_logits import input_shares_of_logits, logit_shares
from tests.matrix import build_or_skip, maps_of, prompt_of, slow
from tests.norm_cases import blocks_of, each_model, each_model_with, largest
from tests.norm_oracle import norms, oracle
from tests.norm_reference import BERT_CLASSES, reference, reference_bert, reference_gpt2, reference_inputs
from tests.tiny_models import available, bridge, gpt2_like, tokens

STAGES = {"attention": "attention", "mid": "LN1", "feed_forward": "FFN", "output": "encoder"}
# The key in the reference, and the options with which it was made.
CLASSIFIERS = {
    "": lm.methods.DecompX(),
    ".abssim": lm.methods.DecompX("abssim"),
    ".norm": lm.methods.DecompX("norm"),
    ".equal": lm.methods.DecompX("equal"),
    ".cls": lm.methods.DecompX("first"),
    ".nobias": lm.methods.DecompX("drop"),
    ".GeLU_LA": lm.methods.DecompX(slope="tangent"),
    ".ReLU": lm.methods.DecompX(slope="relu"),
}


@pytest.fixture(params=[(name, row) for name in BERT_CLASSES for row in (0, 1)])
def reference_blocks(request):
    class_name, row = request.param
    if not available(reference_bert, class_name):
        pytest.skip(f"no {class_name} in this TransformerLens")
    found = run_prompt(reference_bert(class_name), methods=lm.methods.DecompX(), **reference_inputs(row))
    return found.blocks, row, len(found.tokens)


def test_vectors_through_all_layers_equal_decompx(reference_blocks):
    blocks, row, size = reference_blocks
    known = reference("decompx_tiny_f64")
    for layer, found in enumerate(lm.methods.DecompX().vectors(blocks)):
        for ours, theirs in STAGES.items():
            vectors = known[f"{theirs}_vec.{layer}"][row, :size, :size]
            assert largest(getattr(found, ours)[0], vectors) < 1e-10, (layer, theirs)


def test_single_layers_without_biases_equal_decompx(reference_blocks):
    blocks, row, size = reference_blocks
    known = reference("decompx_tiny_f64")
    for layer, found in enumerate(lm.methods.DecompXLocal("drop").vectors(blocks)):
        for ours, theirs in STAGES.items():
            sizes = known[f"local_nobias_{theirs}_norm.{layer}"][row, :size, :size]
            assert largest(getattr(found, ours)[0].norm(dim=-1), sizes) < 1e-10, (layer, theirs)


@pytest.mark.parametrize("key", CLASSIFIERS)
def test_classifier_importance_equals_decompx(reference_blocks, key):
    """The pooler and the classifier are DecompX's, not TransformerLens's, so they are added by hand."""
    blocks, row, size = reference_blocks
    method, known = CLASSIFIERS[key], reference("decompx_tiny_f64")
    weights = reference("tiny_bert_weights_f32")
    pooler, bias = weights["pooler.dense.weight"].double().T, weights["pooler.dense.bias"].double()
    *_, last = method.vectors(blocks)
    state = blocks[-1].resid_post[0, 0] @ pooler + bias
    pooled = through_linear(pooler, bias, last.output[0, 0], method.biases) * (state.tanh() / state)
    found = through_linear(
        known["classifier.weight"].double().T, known["classifier.bias"].double(), pooled, method.biases
    )
    assert largest(found, known[f"classifier_importance{key}"][row, :size]) < 1e-10
    if key not in (".nobias", ".ReLU"):
        assert largest(found.sum(0), known["logits"][row]) < 1e-10


@each_model("decompx")
def test_shares_add_up_to_the_residual_stream(case):
    blocks = blocks_of(case)
    for method in (lm.methods.DecompX(), lm.methods.DecompX("norm"), lm.methods.DecompXLocal("equal")):
        for block, found in zip(blocks, method.vectors(blocks), strict=True):
            assert largest(found.output.sum(2), block.resid_post) < 1e-9


@each_model_with("rule", ["absdot", "norm"], "decompx", "no feed-forward", "changed branch")
def test_equals_the_definition_written_out(case, rule):
    blocks = blocks_of(case)
    tokens = torch.diag_embed(torch.ones_like(blocks[0].resid_pre[..., 0]))[..., None]
    shares = tokens * blocks[0].resid_pre[:, :, None]
    maps, local = maps_of(lm.methods.DecompX(rule), blocks), maps_of(lm.methods.DecompXLocal(rule), blocks)
    for block, carried, alone in zip(blocks, maps, local, strict=True):
        pattern, of_block = block.recorded("pattern"), tokens * block.resid_pre[:, :, None]
        shares = decompx(shares, pattern, block.anatomy, rule, alone=block is blocks[0])
        torch.testing.assert_close(carried, shares.norm(dim=-1), rtol=1e-10, atol=1e-10)
        of_block = decompx(of_block, pattern, block.anatomy, rule, alone=True)
        torch.testing.assert_close(alone, of_block.norm(dim=-1), rtol=1e-10, atol=1e-10)


@each_model("decompx")
def test_maps_are_those_of_all_pairs_at_once(case):
    blocks = blocks_of(case)
    for method in (
        lm.methods.DecompX(),
        lm.methods.DecompX("first"),
        lm.methods.DecompX("drop"),
        lm.methods.DecompXLocal("equal"),
    ):
        maps = maps_of(method, blocks)
        for layer, stages in enumerate(method.vectors(blocks)):
            assert largest(maps[layer], stages.output.norm(dim=-1)) < 1e-10


def at_rows(block, queries):
    """Return the same block with only these rows."""
    return Block(block.clean, block.layer, block.verification, block.engine, block.max_memory, queries)


@pytest.mark.parametrize(
    "name", ["gpt2", "llama", *map(slow, ("phi", "gemma", "olmo2", "mistral", "granite"))]
)
@pytest.mark.parametrize("chunk", [None, 1])
def test_logits_read_backwards_are_those_of_the_shares(name, chunk, monkeypatch):
    if chunk is not None:
        monkeypatch.setattr("lens_mix.methods.decompx_logits._count_logits_per_chunk", lambda block: chunk)
    model = gpt2_like(torch.float64) if name == "gpt2" else build_or_skip(bridge, name, torch.float64)
    wanted = torch.tensor([3, 17, 4])
    slopes = ("zero_origin",) if name in ("llama", "gemma", "olmo2", "mistral", "granite") else SLOPES
    blocks = run_prompt(model, prompt_of(model), lm.methods.DecompX()).blocks
    last = torch.tensor([[blocks[0].real.shape[1] - 1, 2]])
    few = [*blocks[:-1], at_rows(blocks[-1], last)]
    for slope in slopes:
        method = lm.methods.DecompX("drop", slope)
        *_, shares = method.vectors(blocks)
        forward = logit_shares(blocks[-1], shares.output, wanted, "drop")
        assert largest(input_shares_of_logits(method, blocks, wanted), forward) < 1e-10
        found = input_shares_of_logits(method, few, wanted)
        assert largest(found, few[-1].rows_of(forward)) < 1e-10
    with torch.inference_mode():
        inside = input_shares_of_logits(lm.methods.DecompX("drop"), few, wanted).clone()
    assert largest(inside, input_shares_of_logits(lm.methods.DecompX("drop"), few, wanted)) == 0
    with_biases = input_shares_of_logits(lm.methods.DecompX("norm"), few, wanted)
    logits = few[-1].rows_of(blocks[-1].continuation().logits())
    assert largest(with_biases.sum(2), logits[..., wanted]) < 1e-9


def test_logits_read_backwards_have_no_tensor_of_all_pairs():
    """The peak is that of the forward pass. The shares of one block would need 32 × 32 × 24 numbers."""
    model = gpt2_like()
    blocks = run_prompt(model, tokens(model, 1, 32)[0], lm.methods.DecompX()).blocks
    few = [*blocks[:-1], at_rows(blocks[-1], torch.tensor([[31]]))]
    blocks[-1].unembedding()
    with PeakMemory() as backwards:
        input_shares_of_logits(lm.methods.DecompX("drop"), few, torch.tensor([5]))
    with PeakMemory() as carried:
        input_shares_of_logits(lm.methods.DecompX("norm"), few, torch.tensor([5]))
    assert backwards.peak < 0.6 * carried.peak


@each_model("decompx_local")
def test_single_layers_without_biases_are_atb_ff_res_ln(case):
    blocks = blocks_of(case)
    for block, found in zip(blocks, lm.methods.DecompXLocal("drop").vectors(blocks), strict=True):
        assert largest(found.output[0].norm(dim=-1), norms(oracle(block).output)) < 1e-10


@pytest.mark.parametrize("class_name", ["TransformerBridge", "HookedTransformer"])
def test_shares_add_up_to_the_logits(class_name):
    if not available(reference_gpt2, class_name):
        pytest.skip(f"no {class_name} in this TransformerLens")
    tokens = reference("altilogit_gpt2_tiny_f64")["input_ids"][0]
    blocks = run_prompt(reference_gpt2(class_name), tokens, lm.methods.DecompX()).blocks
    *_, last = lm.methods.DecompX().vectors(blocks)
    found = logit_shares(blocks[-1], last.output)
    logits = blocks[-1].continuation().logits()
    assert largest(found.sum(2), logits) < 1e-10
    some = logit_shares(blocks[-1], last.output, torch.tensor([3, 70]))
    assert largest(some.sum(2), logits[..., [3, 70]]) < 1e-10
    with pytest.raises(ValueError, match="block: expected the last block, got block 0"):
        logit_shares(blocks[0], last.output)


def test_inputs_beyond_a_window_reach_through_the_layers():
    """Layer 1 of a window of 4 has what layer 0 moved from up to 6 positions before, and not more."""
    if not available(bridge, "mistral"):
        pytest.skip("no TransformerBridge in this TransformerLens")
    found = lm.run(bridge("mistral"), torch.arange(3, 13), "decompx")
    assert found.kind == "input"
    back = torch.arange(10)[:, None] - torch.arange(10)
    for layer, reach in enumerate((3, 6)):
        assert torch.equal(found.scores[layer] > 0, (back >= 0) & (back <= reach))


@pytest.mark.parametrize("rule", SPLITS)
def test_a_split_bias_adds_up(rule):
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(3, 5, 8, dtype=torch.float64, generator=generator)
    vectors[:, 4] = 0
    bias = torch.randn(3, 8, dtype=torch.float64, generator=generator)
    added = split_bias(vectors, bias, rule) - vectors
    assert largest(added.sum(1), 0 if rule == "drop" else bias) < 1e-12
    if rule != "first":
        assert largest(added[:, 4], 0) == 0


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match=r"biases: expected one of .*, got 'none'"):
        lm.methods.DecompX("none")
    with pytest.raises(ValueError, match=r"slope: expected .*, got 'gelu'"):
        lm.methods.DecompX(slope="gelu")
    if available(bridge, "llama"):
        with pytest.raises(lm.UnsupportedModelError, match="a gated feed-forward has 'zero_origin' only"):
            lm.run(bridge("llama"), torch.arange(3, 9), lm.methods.DecompX(slope="tangent"))


@pytest.mark.parametrize("method", [lm.methods.DecompX("first"), lm.methods.DecompXLocal("first")])
def test_no_padding_gets_the_biases(method):
    """Check that the rule "first" is refused where padding comes first; the maps had other numbers there."""
    model = build_or_skip(bridge, "gpt2", torch.float64)
    prompts = [tokens(model, 1, length)[0] for length in (7, 4)]
    alone = [lm.run(model, prompt, method).scores for prompt in prompts]
    for found, expected in zip(lm.run_many(model, prompts, method), alone, strict=True):
        torch.testing.assert_close(found.scores, expected)
    with pytest.raises(
        lm.UnsupportedModelError, match="padding_side: expected 'right', because biases='first'"
    ):
        list(lm.run_many(model, prompts, method, padding_side="left"))
