"""Compare input maps of source and target (part="joint") with transformers and autograd alone."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

import lens_mix as lm
from benchmarks.input_map import joint
from tests.matrix import build_or_skip, prompt_of
from tests.methods import changed_rules_reference as by_hand
from tests.tiny_models import bridge, gpt2_like, hooked_encoder_decoder, wrapped_model

pytestmark = pytest.mark.filterwarnings("ignore")
BRIDGES = ["t5", "t5_gated", "mt5", "bart", "marian"]
# Its source is sound, which has no tokens to replace.
SPEECH = "whisper"
ROWS = (-1, 1)
LENGTHS = (7, 5)


@functools.cache
def model_of(name):
    factory = (hooked_encoder_decoder,) if name == "HookedEncoderDecoder" else (bridge, name)
    model = build_or_skip(*factory, torch.float64)
    try:
        lm.run(model, prompt_of(model), "attention", part="cross")
    except lm.UnsupportedModelError as problem:  # It is T5 before TransformerLens 4.
        pytest.skip(str(problem))
    return model


def stacks_of(model):
    """Return the first blocks of encoder and decoder, of transformers' or of TransformerLens's own models."""
    if hasattr(model, "model"):
        return model.model.encoder.layers[0], model.model.decoder.layers[0]
    if hasattr(model.encoder, "block"):
        return model.encoder.block[0], model.decoder.block[0]
    return model.encoder[0], model.decoder[0]


def both_gradients(name, row):
    """Return embeddings and gradients [source + target, d_model] of the largest logit at a row."""
    ours = name == "HookedEncoderDecoder"
    model = model_of(name) if ours else wrapped_model(name, torch.float64)
    source, target = prompt_of(model_of(name))
    leaves = {}

    def enter(side):
        def hook(module, args, kwargs):
            x = args[0] if args else kwargs.get("hidden_states", kwargs.get("resid_pre"))
            leaf = leaves.setdefault(side, x.detach().requires_grad_(True))
            key = next((key for key in ("hidden_states", "resid_pre") if key in kwargs), None)
            return (args, {**kwargs, key: leaf}) if not args else ((leaf, *args[1:]), kwargs)

        return hook

    handles = [
        block.register_forward_pre_hook(enter(side), with_kwargs=True)
        for side, block in enumerate(stacks_of(model))
    ]
    if ours:
        logits = model(source, target, one_zero_attention_mask=torch.ones_like(source).double())[0]
    else:
        model.set_attn_implementation("eager")
        inputs = {model.main_input_name: source, "decoder_input_ids": target}
        logits = model(**inputs, use_cache=False).logits[0]
    for handle in handles:
        handle.remove()
    gradients = torch.autograd.grad(logits[row].max(), [leaves[0], leaves[1]])
    return tuple(torch.cat([each[0].detach() for each in both]) for both in (leaves.values(), gradients))


@pytest.mark.parametrize("name", [*BRIDGES, SPEECH, "HookedEncoderDecoder"])
def test_gradients_equal_autograd_on_both_embeddings(name):
    model = model_of(name)
    methods = [lm.methods.InputGradients(), lm.methods.InputGradients(score="times_input")]
    norm, times_input = lm.run(model, prompt_of(model), methods, part="joint", queries=list(ROWS)).values()
    # Whisper reads nine frames.
    assert norm.scores.shape == (1, 2, sum(LENGTHS) + 2 * (name == SPEECH))
    for place, row in enumerate(ROWS):
        x, gradient = both_gradients(name, row)
        # T5's softmax is float32, whatever the dtype of the model is.
        torch.testing.assert_close(norm.scores[0, place], gradient.norm(dim=-1), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(times_input.scores[0, place], (gradient * x).sum(-1), atol=1e-5, rtol=1e-5)


def test_integrated_gradients_go_down_both_paths_together():
    model = model_of("bart")
    method = lm.methods.InputGradients(score="integrated", baseline="mean", n_steps=64)
    found = lm.run(model, prompt_of(model), method, part="joint", queries=-1)
    (delta,) = found.provenance["details"]["convergence_delta"][0]
    assert abs(delta) < 1e-4 < float(found.scores[0, 0, :7].abs().max())
    x, _ = both_gradients("bart", -1)
    given = lm.methods.InputGradients(score="integrated", baseline=x.mean(0).expand_as(x), n_steps=64)
    again = lm.run(model, prompt_of(model), given, part="joint", queries=-1)
    torch.testing.assert_close(again.scores, found.scores)


@pytest.mark.parametrize("name", BRIDGES)
@pytest.mark.parametrize("measure", ["absolute", "kl"])
def test_replaced_tokens_equal_loops_over_transformers_alone(name, measure):
    model = model_of(name)
    pair = [side.clone() for side in prompt_of(model)]
    # One replacement is the token itself, so the next number replaces it.
    pair[0][0, 2] = 3
    wrapped = wrapped_model(name, torch.float64)
    wrapped.set_attn_implementation("eager")

    def log_p(source, target):
        with torch.no_grad():
            return wrapped(input_ids=source, decoder_input_ids=target).logits[0].log_softmax(-1)

    clean = log_p(*pair)
    predicted = clean.argmax(-1, keepdim=True)
    columns = []
    for side, tokens in enumerate(pair):
        for place in range(tokens.shape[1]):
            changes = []
            for token in (3, 5):
                other = [each.clone() for each in pair]
                other[side][0, place] = token + 1 if tokens[0, place] == token else token
                changed = log_p(*other)
                if measure == "kl":
                    changes.append((clean.exp() * (clean - changed)).sum(-1))
                else:
                    changes.append((clean - changed).gather(-1, predicted)[:, 0].abs())
            columns.append((changes[0] + changes[1]) / 2)
    method = lm.methods.Occlusion(replacements=[3, 5], measure=measure)
    found = lm.run(model, tuple(pair), method, part="joint")
    torch.testing.assert_close(found.scores[0], torch.stack(columns, -1), atol=1e-6, rtol=0)
    few = lm.run(model, tuple(pair), method, part="joint", queries=[-1])
    torch.testing.assert_close(few.scores[0, 0], found.scores[0, -1])


@pytest.mark.parametrize("name", BRIDGES)
def test_replaced_groups_of_both_sides_equal_loops_over_transformers_alone(name):
    model = model_of(name)
    pair = tuple(side.clone() for side in prompt_of(model))
    count = pair[0].shape[1]
    wrapped = wrapped_model(name, torch.float64)
    wrapped.set_attn_implementation("eager")

    def log_p(tokens):
        with torch.no_grad():
            source, target = tokens[None, :count], tokens[None, count:]
            return wrapped(input_ids=source, decoder_input_ids=target).logits[0].log_softmax(-1)

    tokens, spans = torch.cat(pair, 1)[0], [(0, 2), (count, count + 1), (1, count + 2)]
    clean = log_p(tokens)
    predicted = clean.argmax(-1, keepdim=True)
    columns = []
    for span in spans:
        other = tokens.clone()
        for position in span:
            other[position] = 4 if tokens[position] == 3 else 3
        columns.append((clean - log_p(other)).gather(-1, predicted)[:, 0])
    found = lm.run(model, pair, lm.methods.Occlusion(replacements=[3], spans=spans), part="joint")
    torch.testing.assert_close(found.scores[0], torch.stack(columns, -1), atol=1e-6, rtol=0)
    # Padding on either side changes nothing.
    pairs, method = [pair, (pair[0], pair[1][:, :4])], lm.methods.Occlusion(replacements=[3], spans=spans)
    for one, m in zip(pairs, lm.run_many(model, pairs, method, part="joint"), strict=True):
        alone = lm.run(model, one, method, part="joint")
        torch.testing.assert_close(m.scores, alone.scores, atol=1e-8, rtol=1e-6)


@pytest.fixture
def float64_softmax(monkeypatch):
    """Compute T5's softmax in float64, which transformers and the Bridge compute in float32."""
    softmax = torch.nn.functional.softmax

    def wide(x, dim=None, dtype=None, **options):
        return softmax(x.double(), dim=dim)

    monkeypatch.setattr(torch.nn.functional, "softmax", wide)


@pytest.mark.usefixtures("float64_softmax")
@pytest.mark.parametrize("name", ["t5", "t5_gated"])
@pytest.mark.parametrize("method", by_hand.METHODS)
def test_changed_rules_equal_a_t5_written_by_hand(name, method):
    model = model_of(name)
    source, target = prompt_of(model)
    written = by_hand.T5.of(wrapped_model(name, torch.float64))
    logits = written.logits(written.embed(source[0]), written.embed(target[0]), lm.methods.Gim())
    torch.testing.assert_close(model(source, decoder_input=target)[0], logits, atol=1e-5, rtol=1e-5)
    for readout, read in (("signed_sum", lambda product: product), ("absolute", torch.Tensor.abs)):
        asked = dataclasses.replace(method, readout=readout)
        found = lm.run(model, (source, target), asked, part="joint", queries=list(ROWS))
        for place, row in enumerate(ROWS):
            product = by_hand.joint_products(written, source[0], target[0], row, method)
            expected = read(product).sum(-1)
            torch.testing.assert_close(found.scores[0, place], expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", [*BRIDGES, "HookedEncoderDecoder"])
def test_what_both_sides_give_and_the_biases_make_the_logit(name):
    """Check that scores and biases add up to the logit, so that no norm, activation or bias is missing."""
    model = model_of(name)
    method = lm.methods.FrozenGradients(activations="ratio")
    found = lm.run(model, prompt_of(model), method, part="joint")
    ((gaps,), (constants,)) = (
        found.provenance["details"][key] for key in ("conservation_gap", "constant_share")
    )
    assert max(map(abs, gaps)) < 1e-10
    assert not found.notes
    assert (max(map(abs, constants)) > 0.01) is (name in ("bart", "marian", "HookedEncoderDecoder"))
    # In the map of the decoder alone, the effect of the source is constant.
    alone = lm.run(model, prompt_of(model), method, part="decoder")
    assert (alone.provenance["details"]["conservation_gap"][0][-1]) < 1e-10
    torch.testing.assert_close(alone.scores, found.scores[..., 7:])
    source = found.scores[0, :, :7].sum(-1) + torch.tensor(constants, dtype=torch.float64)
    fixed = torch.tensor(alone.provenance["details"]["constant_share"][0], dtype=torch.float64)
    torch.testing.assert_close(source, fixed)


@pytest.mark.parametrize("name", ["t5", "bart", "HookedEncoderDecoder"])
@pytest.mark.parametrize("method", ["input_gradients", "gim", "frozen_gradients", "occlusion"])
def test_padding_and_rows_change_nothing(name, method):
    model = model_of(name)
    source, target = (side[0] for side in prompt_of(model))
    pairs = [(source, target), (source[:3], target[:4]), (source[:1], target[:1])]
    # If source and target have one token each, there is one row.
    asked = {"part": "joint"} if method != "gim" else {"part": "joint", "queries": [0, -1]}
    pairs = pairs if method != "gim" else pairs[:2]
    for pair, one in zip(pairs, lm.run_many(model, pairs, method, **asked), strict=True):
        alone = lm.run(model, pair, method, **asked)
        assert one.key_tokens == alone.key_tokens
        assert len(one.key_tokens) == len(pair[0]) + len(pair[1])
        torch.testing.assert_close(one.scores, alone.scores, atol=1e-8, rtol=1e-6)
        whole = lm.run(model, pair, method, part="joint")
        torch.testing.assert_close(alone.scores, whole.select_queries(one.query_positions).scores)


def test_the_record(tmp_path):
    model = model_of("bart")
    pair = prompt_of(model)
    found = lm.run(model, pair, lm.methods.Gim(readout="absolute"), part="joint", queries=[1, -1])
    assert (found.kind, found.queries, len(found.tokens)) == ("input", [1, 4], 5)
    assert found.key_tokens[7:] == found.tokens
    assert found.provenance["joint"] == {"source": 7, "target": 5}
    assert found.provenance["part"] == "joint"
    # The prefix ends at the row's own position, and the row sees every source token.
    assert found.visible()[0, 0].tolist() == [True] * 9 + [False] * 3
    assert bool((found.scores[0, 0, :9] > 0).all())
    assert not bool(found.scores[0, 0, 9:].any())
    found.save(tmp_path / "map")
    again = lm.run_again(model, lm.MixingMap.load(tmp_path / "map"))
    assert torch.equal(again.scores, found.scores)
    # The target of the map is the same for the decoder alone.
    alone = lm.run(model, pair, lm.methods.Gim(readout="absolute"), part="decoder", queries=[1, -1])
    torch.testing.assert_close(found.scores[..., 7:], alone.scores)


def test_what_is_refused_in_words():
    model = model_of("bart")
    pair = prompt_of(model)
    for method in ("attention", "alti", "value_zeroing", "token_patching"):
        with pytest.raises(
            lm.UnsupportedModelError, match=r"is not defined for part='joint'; lm\.aggregation\.joint"
        ):
            lm.run(model, pair, method, part="joint")
    with pytest.raises(lm.UnsupportedModelError, match="by='mask' can't remove a source token"):
        lm.run(model, pair, lm.methods.Occlusion(by="mask"), part="joint")
    with pytest.raises(ValueError, match=r"after_blocks: expected 0 with part='joint'"):
        lm.run(model, pair, lm.methods.Gim(after_blocks=1), part="joint")
    with pytest.raises(ValueError, match=r"expected a pair \(source, target\) for part='joint'"):
        lm.run(model, pair[0], "gim", part="joint")
    with pytest.raises(ValueError, match=r"expected one of \['blocks'\]"):
        lm.run(gpt2_like(), torch.arange(3, 8), "gim", part="joint")
    with pytest.raises(ValueError, match="already describes all layers down to the input"):
        lm.rollout(lm.run(model, pair, "gim", part="joint"))


def test_the_benchmark_scores_what_may_be_scored():
    # Source a b </s>, target <s> c d e. In the row of d, the largest scores are of tokens that do not count.
    importance = torch.tensor([[3.0, 2.0, 99.0, 99.0, 1.0, 4.0, 99.0]])
    record = {"source": 3, "queries": [2], "importance": [importance, importance], "rows": {}}
    assert joint.scored(record, 0).tolist() == [0, 1, 4, 5]
    record["rows"]["other"] = torch.tensor([[30.0, 20.0, 0.0, 0.0, 10.0, 5.0, 0.0]])
    found = joint.agreement(record, "other")
    # The ranks 3 2 1 4 and 4 3 2 1 correlate with -0.2. Controlled for the position's 1 2 3 4 (0.2 and -1) it
    # is 0.
    assert found["Spearman"] == pytest.approx(-0.2)
    assert found["partial"] == 0
    # Two keys have no partial correlation.
    assert found["source alone"] == 0
    assert found["prefix alone"] == pytest.approx(-1)
    ceiling = joint.agreement(record, "measured with two of the words, against the other two")
    assert ceiling["Spearman"] == pytest.approx(1)
    assert joint.agreement(record, "position")["Spearman"] == pytest.approx(0.2)


def test_support_says_what_there_is():
    table = lm.support(model_of("bart"), part="joint")
    possible = {name for name, engine, _ in table if engine is not None}
    assert possible == {name for name, method in lm.METHODS.items() if "joint" in method.parts}
    assert possible >= {"input_gradients", "gim", "frozen_gradients", "occlusion"}
    assert "lm.aggregation.joint" in table["alti"]
