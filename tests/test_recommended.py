"""Test `lm.input_map`: it computes the best map that a model allows, and notes why no better one."""

import pytest
import torch

import lens_mix as lm
from lens_mix.measured import sentence
from lens_mix.recommended import EVIDENCE
from tests.matrix import build_or_skip
from tests.tiny_models import (
    bridge,
    hooked_encoder,
    hooked_encoder_decoder,
    hooked_transformer,
    tokens,
    toy_tokenizer,
)


def test_causal_bridges_get_patching_with_its_record():
    model = build_or_skip(bridge, "gpt2", torch.float64)
    prompt = tokens(model, 1, 6, 1)[0]
    found = lm.input_map(model, prompt)
    assert (found.method, found.queries, found.kind, found.notes) == (
        "token_patching",
        [5],
        "input",
        (),
    )
    expected = lm.run(model, prompt, lm.methods.TokenPatching(n_measured="auto"), queries=[-1])
    assert torch.equal(found.scores, expected.scores)
    assert found.provenance["input_map"] == {
        "recipe": "token_patching",
        "figures": sentence(*EVIDENCE["token_patching, measured"]),
        "measured": [[0, 1, 2, 3, 4, 5]],
        "measured_passes": [12],
    }


def test_measured_scores_are_asked_for_and_recorded():
    model = build_or_skip(bridge, "gpt2", torch.float64)
    prompt = tokens(model, 1, 8, 1)[0]
    none = lm.input_map(model, prompt, exact=False)
    assert torch.equal(none.scores, lm.run(model, prompt, lm.methods.TokenPatching(), queries=[-1]).scores)
    assert none.provenance["input_map"] == {
        "recipe": "token_patching",
        "figures": sentence(*EVIDENCE["token_patching"]),
    }
    some = lm.input_map(model, prompt, queries=[1, -1], exact=3)
    assert [len(measured) for measured in some.provenance["input_map"]["measured"]] == [2, 4]
    assert some.parameters["n_measured"] == 3
    assert some.provenance["input_map"]["figures"] == "not measured separately"
    # Everything in the first row is measured.
    (note,) = [note for note in some.notes if note.startswith("input_map")]
    assert "in the row of position 7, 4 of 8 scores are measured" in note
    again = lm.run_again(model, some)
    assert torch.equal(again.scores, some.scores)


def test_nothing_is_measured_in_long_rows():
    model = build_or_skip(bridge, "gpt2", torch.float64, n_positions=64)
    prompt = tokens(model, 1, 33, 1)[0]
    found, estimated = lm.input_map(model, prompt), lm.input_map(model, prompt, exact=False)
    assert torch.equal(found.scores, estimated.scores)
    assert found.provenance["input_map"] == {
        **estimated.provenance["input_map"],
        "measured": [[]],
        "measured_passes": [0],
    }
    assert "all scores of rows of more than 32 tokens are estimated" in found.notes[-1]
    both = lm.input_map(model, prompt, queries=[3, -1])
    assert both.provenance["input_map"]["measured"] == [[0, 1, 2, 3], []]
    assert both.provenance["input_map"]["figures"] == sentence(*EVIDENCE["token_patching, measured"])


def test_exact_on_a_model_without_such_copies():
    model = build_or_skip(bridge, "mistral", torch.float64)
    prompt = tokens(model, 1, 18, 1)[0]
    assert "exact=2 has no effect, because gim" in lm.input_map(model, prompt, exact=2).notes[-1]
    assert "exact" not in lm.input_map(model, prompt).notes[-1]


@pytest.mark.parametrize(("exact", "error"), [(True, TypeError), ("all", TypeError), (-1, ValueError)])
def test_bad_numbers_of_measured_scores(exact, error):
    model = build_or_skip(bridge, "gpt2", torch.float64)
    with pytest.raises(error, match="exact: expected"):
        lm.input_map(model, torch.arange(3, 9), exact=exact)


@pytest.mark.parametrize(
    ("build", "why"),
    [
        (lambda: build_or_skip(hooked_transformer, "LN", torch.float64), "decoder-only TransformerBridge"),
        (lambda: build_or_skip(bridge, "mistral", torch.float64), "a sliding window"),
    ],
    ids=["HookedTransformer", "mistral"],
)
def test_other_models_get_gradients_and_the_reason(build, why):
    model = build()
    prompt = tokens(model, 1, 18, 1)[0]
    found = lm.input_map(model, prompt, queries=[2, -1])
    assert (found.method, found.parameters["activations"], found.queries) == ("gim", "ratio", [2, 17])
    assert why in found.notes[-1]
    method = lm.methods.Gim(lm.targets.predicted(of="log_probability"), "absolute", activations="ratio")
    assert torch.equal(found.scores, lm.run(model, prompt, method, queries=[2, -1]).scores)


@pytest.mark.parametrize("name", ["bert", "HookedEncoder"])
def test_encoders_get_decompx_and_gradients_where_a_target_is_asked(name):
    factory = (hooked_encoder, torch.float64) if name == "HookedEncoder" else (bridge, name, torch.float64)
    model = build_or_skip(*factory)
    prompt = tokens(model, 1, 7, 1)[0]
    found = lm.input_map(model, prompt, queries=[2, -1])
    assert (found.method, found.queries, len(found)) == ("decompx", [2, 6], 1)
    expected = lm.run(model, prompt, "decompx", queries=[2, -1], layers=[-1])
    assert torch.equal(found.scores, expected.scores)
    assert found.provenance["input_map"]["figures"] == sentence(*EVIDENCE["decompx"])
    asked = lm.input_map(model, prompt, target=lm.targets.logit(3))
    assert (asked.method, asked.parameters["activations"]) == ("gim", "ratio")


def test_layers_are_those_of_decompx():
    model = build_or_skip(bridge, "bert", torch.float64)
    prompt = tokens(model, 1, 7, 1)[0]
    # A bidirectional model's default row is that of [CLS].
    expected = lm.run(model, prompt, "decompx", queries=[0])
    for layers, labels in ((None, [1]), (-1, [1]), ([0, -1], [0, 1])):
        found = lm.input_map(model, prompt, layers=layers)
        assert (found.method, found.layer_labels) == ("decompx", labels)
        torch.testing.assert_close(found.scores, expected.scores[labels])
    with pytest.raises(ValueError, match="the one map of token_patching describes the whole model"):
        lm.input_map(model, prompt, layers=[0])


def test_the_default_row_of_a_bidirectional_model():
    tokenizer = toy_tokenizer()
    tokenizer.mask_token = "w30"
    model = build_or_skip(bridge, "bert", torch.float64, tokenizer=tokenizer)
    prompt = torch.tensor([5, 9, tokenizer.mask_token_id, 7, 31])
    assert lm.input_map(model, prompt).query_positions == [2]
    target = lm.targets.masked_token(4)
    assert lm.input_map(model, prompt, target=target).query_positions == [2]
    assert lm.input_map(model, prompt, target=lm.targets.token(4, position=3)).query_positions == [3]
    assert lm.input_map(model, prompt, queries=[-1]).query_positions == [4]
    with pytest.raises(ValueError, match="queries: expected"):
        lm.input_map(model, prompt, queries="last")


def test_feed_forwards_that_are_not_written_down():
    model = build_or_skip(bridge, "gpt_oss", torch.float64)
    found = lm.input_map(model, tokens(model, 1, 7, 1)[0], exact=False)
    assert (found.method, found.parameters["activations"]) == ("gim", "gradient")
    assert found.provenance["input_map"]["figures"] == "not measured separately"
    assert "needs a feed-forward that is written down" in found.notes[-1]


def test_encoders_of_encoder_decoders_have_none():
    model = build_or_skip(bridge, "bart", torch.float64)
    with pytest.raises(
        lm.UnsupportedModelError, match=r"input_map: .*the logits are at the decoder's tokens"
    ):
        lm.input_map(model, (torch.arange(3, 9), torch.arange(3, 8)), part="encoder")


@pytest.mark.parametrize("name", ["t5", "bart", "marian", "HookedEncoderDecoder"])
def test_encoder_decoders_get_gradients_over_source_and_prefix(name):
    hooked = name == "HookedEncoderDecoder"
    model = build_or_skip(*((hooked_encoder_decoder,) if hooked else (bridge, name)), torch.float64)
    pair = (torch.arange(3, 9), torch.arange(3, 8))
    try:
        found = lm.input_map(model, pair)
    except lm.UnsupportedModelError as reason:
        pytest.skip(str(reason))
    assert (found.method, found.parameters["score"], found.queries) == ("input_gradients", "norm", [4])
    assert (len(found.key_labels), found.provenance["joint"]["source"], found.notes) == (11, 6, ())
    assert found.provenance["input_map"]["figures"] == sentence(*EVIDENCE["joint input_gradients"])
    method = lm.methods.InputGradients(lm.targets.predicted(of="log_probability"))
    assert torch.equal(found.scores, lm.run(model, pair, method, part="joint", queries=[-1]).scores)
    asked = lm.input_map(model, pair, queries=[1, -1], target=lm.targets.logit(4))
    expected = lm.run(
        model, pair, lm.methods.InputGradients(lm.targets.logit(4)), part="joint", queries=[1, -1]
    )
    assert torch.equal(asked.scores, expected.scores)
    # The map of the decoder alone has no column of the source.
    alone = lm.input_map(model, pair, part="decoder")
    assert alone.keys_are_tokens
    with pytest.raises(ValueError, match="part: expected 'joint', or 'decoder' without the source"):
        lm.input_map(model, pair, part="all")
    with pytest.raises(ValueError, match=r"expected a pair \(source, target\) for part='joint'"):
        lm.input_map(model, pair[0])


def test_targets_are_handed_on():
    model = build_or_skip(bridge, "gpt2", torch.float64)
    found = lm.input_map(model, torch.arange(3, 9), target=lm.targets.logit(4))
    assert "logit" in str(found.parameters["target"])


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"target": lambda logits: logits[:, -2:].sum((1, 2))}, "one that reads a single position"),
        ({"position_ids": torch.arange(6)}, "expected tokens alone"),
    ],
    ids=["target", "inputs"],
)
def test_what_patching_can_not_take_goes_to_gradients(options, why):
    model = build_or_skip(bridge, "gpt2", torch.float64)
    found = lm.input_map(model, torch.arange(3, 9), **options)
    assert found.method == "gim"
    assert why in found.notes[-1]
