from __future__ import annotations

import inspect

import pytest
import torch

import lens_mix as lm
from lens_mix._blocks.cost import Cost
from lens_mix.experiments.passes import run_prompt
from lens_mix.hooks import mask_keys, zero_values
from lens_mix.methods.occlusion import lost_without_key
from tests.matrix import build_or_skip, prompt_of
from tests.tiny_models import (
    available,
    bridge,
    gpt2_like,
    hooked_encoder,
    hooked_transformer,
    toy_tokenizer,
)

NAMES = ("gpt2", "llama", "gemma2", "opt", "bert", "bloom", "gpt_neox")


def log_probabilities(model, tokens, **inputs):
    """The wrapped model of transformers on its own."""
    wrapped = model.original_model
    wrapped.set_attn_implementation("eager")
    with torch.no_grad():
        return wrapped(tokens[None], **inputs).logits[0].log_softmax(-1)


def at_tokens(log_p, tokens):
    return log_p.gather(-1, tokens[:, None])[:, 0]


@pytest.mark.parametrize("name", NAMES)
def test_replaced_tokens_against_the_wrapped_model(name):
    model = build_or_skip(bridge, name, torch.float64)
    tokens = prompt_of(model).flatten()
    tokens[2] = 3  # one replacement is the token itself: the next number serves
    clean = log_probabilities(model, tokens)
    predicted = clean.argmax(-1)

    def replaced(position):
        others = tokens.repeat(2, 1)
        others[:, position] = torch.tensor([token + (tokens[position] == token) for token in (3, 5)])
        return torch.stack([log_probabilities(model, other) for other in others])

    def target(key):
        log_p = clean[None] if key is None else replaced(key)
        return torch.stack([at_tokens(sample, predicted) for sample in log_p])

    found = lm.run(model, tokens, lm.methods.Occlusion(replacements=[3, 5]))
    expected = lost_without_key(target, len(tokens))
    torch.testing.assert_close(found.scores[0], expected, atol=1e-6, rtol=0)
    absolute, divergence = torch.zeros(2, len(tokens), len(tokens), dtype=torch.float64)
    for position in range(len(tokens)):
        absolute[:, position] = (target(None) - target(position)).abs().mean(0)
        divergence[:, position] = (clean.exp() * (clean - replaced(position))).sum(-1).mean(0)
    found = lm.run(model, tokens, lm.methods.Occlusion(replacements=[3, 5], measure="absolute"))
    torch.testing.assert_close(found.scores[0], absolute, atol=1e-6, rtol=0)
    found = lm.run(model, tokens, lm.methods.Occlusion(replacements=[3, 5], measure="kl"))
    torch.testing.assert_close(found.scores[0], divergence, atol=1e-6, rtol=0)


# Not BLOOM: it counts positions by its mask.
@pytest.mark.parametrize("name", [name for name in NAMES if name != "bloom"])
def test_hidden_tokens_against_the_wrapped_models_mask(name):
    # Its rows that see nothing are NaN in float64.
    model = build_or_skip(bridge, name)
    tokens = prompt_of(model).flatten()
    positions = torch.arange(len(tokens))[None]
    parameters = inspect.signature(type(model.original_model).forward).parameters
    inputs = {"position_ids": positions} if "position_ids" in parameters else {}
    clean = log_probabilities(model, tokens)
    predicted = clean.argmax(-1)

    def target(key):
        mask = (positions != key).long() if key is not None else torch.ones_like(positions)
        return at_tokens(log_probabilities(model, tokens, attention_mask=mask, **inputs), predicted)[None]

    expected = lost_without_key(target, len(tokens))
    if name != "bert":
        expected[0, 0] = 0  # nothing else is left to see
    found = lm.run(model, tokens, lm.methods.Occlusion(by="mask")).scores[0]
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


def model_or_skip(factory, *names):
    if not available(factory, *names):
        pytest.skip(f"no {factory.__name__} in this TransformerLens")
    return factory(*names, dtype=torch.float64)


MODELS = [(hooked_encoder,), (hooked_transformer, "LN"), (hooked_transformer, "grouped"), (bridge, "gpt2")]


@pytest.mark.parametrize("build", MODELS, ids=lambda build: " ".join([build[0].__name__, *build[1:]]))
@pytest.mark.parametrize("by", ["values", "mask"])
def test_edits_on_a_run_of_ones_own_give_the_scores(build, by):
    model, method = model_or_skip(*build), lm.methods.Occlusion(by=by)
    tokens = prompt_of(model).flatten()
    clean = model(tokens[None])[0].log_softmax(-1)
    predicted = clean.argmax(-1)

    def target(key):
        layers = () if key is None else range(model.cfg.n_layers)
        hooks = [pair for layer in layers for pair in method.interventions(layer, key)]
        with torch.no_grad():
            logits = model.run_with_hooks(tokens[None], fwd_hooks=hooks)[0]
        return at_tokens(logits.log_softmax(-1), predicted)[None]

    expected = lost_without_key(target, len(tokens))
    found = lm.run(model, tokens, method).scores[0]
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)
    assert float(found.abs().max()) > 1e-3


# Two replacements for each of 24 tokens, or for each span. Each is a copy of the whole prompt.
@pytest.mark.parametrize(
    ("name", "options", "queries", "copies"),
    [
        ("gpt2", {}, None, 48),
        ("gpt2", {}, [5], 48),
        ("gpt2", {"spans": [(4, 2), (20,)]}, None, 4),
        ("gpt2", {"target": lm.targets.head(lambda resid: resid[:, -1, 0])}, [-1], 48),
        ("bert", {}, None, 48),
    ],
)
def test_the_estimate_of_passes_grows_with_the_copies_that_run(name, options, queries, copies):
    model = build_or_skip(bridge, name)
    prompt = torch.arange(3, 27)
    method = lm.methods.Occlusion(replacements=[3, 5], **options)
    blocks = run_prompt(model, prompt, method, queries=queries).blocks
    cost = method.scale_cost(Cost(1, per_token=lm.methods.Occlusion.n_samples), blocks)
    assert cost.passes(len(prompt), 1, len(blocks)) == 1 + copies
    shapes = []
    with model.blocks[0].register_forward_pre_hook(
        lambda _, args, kwargs: shapes.append((args or (kwargs["hidden_states"],))[0].shape[:2]),
        with_kwargs=True,
    ):
        lm.run(model, prompt, method, queries=queries, progress=None)
    # The passes of the verification and the clean pass have a single prompt.
    assert [tuple(shape) for shape in shapes if shape[0] > 1] == [(copies, len(prompt))]


SPANS = [(0, 2), (1,), (4, 5)]


@pytest.mark.parametrize("measure", ["difference", "absolute", "kl"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_replaced_groups_against_the_wrapped_model(name, measure):
    model = build_or_skip(bridge, name, torch.float64)
    tokens = prompt_of(model).flatten()
    tokens[2] = 3
    clean = log_probabilities(model, tokens)
    predicted = clean.argmax(-1)
    expected = torch.zeros(len(tokens), len(SPANS), dtype=torch.float64)
    for key, span in enumerate(SPANS):
        for token in (3, 5):
            other = tokens.clone()
            for position in span:
                other[position] = token + (tokens[position] == token)
            changed = log_probabilities(model, other)
            lost = at_tokens(clean - changed, predicted)
            lost = lost.abs() if measure == "absolute" else lost
            lost = (clean.exp() * (clean - changed)).sum(-1) if measure == "kl" else lost
            expected[:, key] += lost / 2
    found = lm.run(model, tokens, lm.methods.Occlusion(replacements=[3, 5], measure=measure, spans=SPANS))
    torch.testing.assert_close(found.scores[0], expected, atol=1e-6, rtol=0)
    assert float(expected.abs().max()) > 1e-3
    assert len(found.key_tokens) == len(SPANS)
    assert not found.causal
    assert found.parameters["spans"] == [list(span) for span in SPANS]


@pytest.mark.parametrize("build", MODELS, ids=lambda build: " ".join([build[0].__name__, *build[1:]]))
@pytest.mark.parametrize("by", ["values", "mask"])
def test_groups_without_values_and_hidden_groups_against_whole_passes(build, by):
    model, hook = model_or_skip(*build), zero_values if by == "values" else mask_keys
    tokens = prompt_of(model).flatten()
    predicted = model(tokens[None])[0].argmax(-1)

    def target(key):
        layers = () if key is None else range(model.cfg.n_layers)
        hooks = [hook(layer, SPANS[key]) for layer in layers]
        with torch.no_grad():
            logits = model.run_with_hooks(tokens[None], fwd_hooks=hooks)[0]
        return at_tokens(logits.log_softmax(-1), predicted)[None]

    expected = lost_without_key(target, len(SPANS))
    found = lm.run(model, tokens, lm.methods.Occlusion(by=by, spans=SPANS)).scores[0]
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)
    assert float(found.abs().max()) > 1e-3


@pytest.mark.parametrize("by", ["replace", "values", "mask"])
def test_groups_of_one_token_are_tokens(by):
    """In the decoder of an encoder-decoder too."""
    for model, part in (
        (build_or_skip(bridge, "gpt2", torch.float64), None),
        (build_or_skip(bridge, "bart", torch.float64), "decoder"),
    ):
        options = {"part": part, "queries": [-1]}
        whole = lm.run(model, prompt_of(model), lm.methods.Occlusion(by=by), **options).scores
        method = lm.methods.Occlusion(by=by, spans=[[3], [0]])
        groups = lm.run(model, prompt_of(model), method, **options).scores
        torch.testing.assert_close(groups, whole[..., [3, 0]], atol=1e-10, rtol=0)


def test_groups_that_a_row_can_not_see_have_no_score():
    model = build_or_skip(bridge, "gpt2", torch.float64)
    for by in ("replace", "values", "mask"):
        found = lm.run(model, prompt_of(model), lm.methods.Occlusion(by=by, spans=[(1, 3), (2, 5)])).scores[0]
        assert (found[:1, 0] == 0).all()
        assert (found[:2, 1] == 0).all()
        # Some of the group is enough.
        assert abs(float(found[2, 0])) > 1e-6
        assert abs(float(found[3, 1])) > 1e-6


@pytest.mark.parametrize("by", ["replace", "mask", "values"])
@pytest.mark.parametrize("kind", [lm.methods.Occlusion, lm.methods.ValueZeroing])
def test_texts_are_found_in_each_prompt_of_a_batch(kind, by):
    model = gpt2_like(torch.float64, tokenizer=toy_tokenizer())
    prompts = [torch.tensor([5, 9, 12, 7, 30]), torch.tensor([8, 12, 7, 6, 21, 9])]
    where = [{"pair": (2, 3), "nine": (1,)}, {"pair": (1, 2), "nine": (5,)}]
    options = (
        {"by": by} if kind is lm.methods.Occlusion else {"engine": "hooks" if by == "replace" else "algebra"}
    )
    engine = {"engine": options.pop("engine")} if "engine" in options else {}
    by_text = kind(spans={"pair": "w12 w7", "nine": ["w9"]}, **options)
    maps = list(lm.run_many(model, prompts, by_text, **engine))
    for prompt, positions, found in zip(prompts, where, maps, strict=True):
        assert found.key_tokens == ["pair", "nine"]
        assert not found.keys_are_tokens
        alone = lm.run(model, prompt, kind(spans=list(positions.values()), **options), **engine)
        torch.testing.assert_close(found.scores, alone.scores, atol=1e-10, rtol=0)
        assert alone.key_tokens == ["w12w7", "w9"]


def test_spans_with_names_are_recorded(tmp_path):
    model = gpt2_like(torch.float64, tokenizer=toy_tokenizer())
    spans = {"start": slice(0, 2), "pair": "w12 w7"}
    m = lm.run(model, torch.tensor([5, 9, 12, 7, 30]), lm.methods.Occlusion(by="mask", spans=spans))
    assert m.parameters["spans"] == {"start": [0, 1], "pair": "w12 w7"}
    assert m.top(2, query=-1)[0].token in spans
    m.save(tmp_path / "map")
    again = lm.run_again(model, lm.MixingMap.load(tmp_path / "map"))
    assert again.key_tokens == ["start", "pair"]
    assert torch.equal(again.scores, m.scores)


def test_nothing_is_edited_where_tokens_are_replaced():
    assert lm.methods.Occlusion().interventions(0, 2) == []


def test_drawn_replacements_are_seeded():
    model = build_or_skip(bridge, "gpt2", torch.float64)
    tokens = prompt_of(model)
    first, again = (lm.run(model, tokens, lm.methods.Occlusion(seed=1)).scores for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, lm.run(model, tokens, lm.methods.Occlusion(seed=2)).scores)


def test_a_target_of_the_users_explains_one_row():
    model = build_or_skip(bridge, "gpt2", torch.float64)
    tokens = prompt_of(model)

    def second_token(logits):
        return logits[:, -1, 2]

    with pytest.raises(ValueError, match="expected one row"):
        lm.run(model, tokens, lm.methods.Occlusion(target=second_token))
    found = lm.run(model, tokens, lm.methods.Occlusion(target=second_token, replacements=[4]), queries=[-1])
    named = lm.methods.Occlusion(target=lm.targets.logit(2), replacements=[4])
    torch.testing.assert_close(found.scores, lm.run(model, tokens, named, queries=[-1]).scores)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"by": "drop"}, r"by: expected one of \['replace'"),
        ({"measure": "squared"}, "measure: expected 'difference'"),
        ({"replacements": [1], "by": "mask"}, "for by='replace' only"),
        ({"replacements": []}, "replacements"),
        ({"n_samples": 0}, "n_samples"),
        ({"spans": []}, "spans: expected at least one"),
        ({"spans": [(0, 1), (1, 2)]}, "each position in one group"),
        ({"measure": "kl", "target": lm.targets.head(lambda resid: resid[:, 0, 0])}, "'kl' compares"),
    ],
)
def test_bad_options(options, error):
    with pytest.raises(ValueError, match=error):
        lm.methods.Occlusion(**options)


def test_replacements_that_the_model_does_not_know():
    model = build_or_skip(bridge, "gpt2", torch.float64)
    with pytest.raises(ValueError, match="replacements: expected"):
        lm.run(model, prompt_of(model), lm.methods.Occlusion(replacements=[10**6]))


@pytest.mark.parametrize("by", ["replace", "mask", "values"])
def test_positions_that_the_prompt_does_not_have(by):
    model = build_or_skip(bridge, "gpt2", torch.float64)
    with pytest.raises(ValueError, match=r"spans: expected positions 0\.\.6, got \[9\]"):
        lm.run(model, prompt_of(model), lm.methods.Occlusion(by=by, spans=[(0, 9)]))
    with pytest.raises(ValueError, match="spans: expected a text that the prompt contains, got 'Paris'"):
        lm.run(model, prompt_of(model), lm.methods.Occlusion(by=by, spans=["Paris"]))


def test_one_token():
    model = build_or_skip(bridge, "gpt2", torch.float64)
    tokens = prompt_of(model, 1)
    assert lm.run(model, tokens, lm.methods.Occlusion(by="mask")).scores.tolist() == [[[0.0]]]
    assert float(lm.run(model, tokens, lm.methods.Occlusion(measure="absolute")).scores) > 0
