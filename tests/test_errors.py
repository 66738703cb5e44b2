"""Test that each kind of bad input raises an error that says what was expected and what was got."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lens_mix as lm
from lens_mix._classes.model_classes import transformer_lens_version
from tests.matrix import build_or_skip
from tests.tiny_models import (
    Unavailable,
    bridge,
    gpt2_like,
    hooked_encoder_decoder,
    hooked_transformer,
    tokens,
    toy_tokenizer,
    wrapped_model,
)

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def model():
    return gpt2_like()


@pytest.fixture(scope="module")
def encoder_decoder():
    try:
        return bridge("bart")
    except Unavailable:
        return hooked_encoder_decoder()


GOOD = torch.tensor([[3, 4, 5, 6]])


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        (torch.zeros(1, 0, dtype=torch.long), ValueError, "expected at least one token, got none"),
        ([], ValueError, "expected at least one token, got none"),
        (torch.zeros(2, 3, dtype=torch.long), ValueError, r"got shape \[2, 3\]; for a batch use run_many"),
        (torch.zeros(1, 1, 3, dtype=torch.long), ValueError, r"got shape \[1, 1, 3\]"),
        (torch.zeros(1, 3), TypeError, "expected integer tokens, got a tensor of torch.float32"),
        (
            torch.ones(1, 3, dtype=torch.bool),
            TypeError,
            "expected integer tokens, got a tensor of torch.bool",
        ),
        (torch.tensor([[3, 99]]), ValueError, r"expected tokens in 0\.\.49, got tokens in 3\.\.99"),
        (torch.tensor([[-1, 3]]), ValueError, r"expected tokens in 0\.\.49, got tokens in -1\.\.3"),
        (torch.full((1, 40), 3), ValueError, "expected at most n_ctx=32 tokens, got 40"),
        (3.5, TypeError, "expected a string or a tensor of tokens, got float"),
        (None, TypeError, "expected a string or a tensor of tokens, got NoneType"),
        (["one", "two", "three"], TypeError, "got a list of 3; for several prompts use run_many"),
        ("w3 w4", ValueError, "a string needs a tokenizer and this model has none"),
        ((GOOD, GOOD), ValueError, r"a pair \(source, target\) is for encoder-decoders"),
    ],
)
def test_bad_prompts(model, prompt, error, message):
    with pytest.raises(error, match=message):
        lm.run(model, prompt, "attention")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"methods": "atention"},
            ValueError,
            r"methods: did you mean 'attention'\? expected one of \[.*'attention'.*\], got 'atention'",
        ),
        (
            {"methods": "attribution_patching"},
            ValueError,
            r"methods: attribution_patching is called 'token_patching' now; expected one of",
        ),
        ({"methods": []}, ValueError, "expected at least one method, got none"),
        ({"methods": 3}, TypeError, "methods: expected a name, a method"),
        ({"methods": [3]}, TypeError, "methods: expected a name or a method, got 3"),
        ({"methods": int}, TypeError, "methods: expected a class derived from lens_mix.Method, got type"),
        ({"methods": lm.Method}, TypeError, "methods: expected a class derived from lens_mix.Method"),
        ({"methods": ["attention", "attention"]}, ValueError, "got one twice"),
        ({"engine": "gpu"}, ValueError, "engine: expected 'auto', 'hooks' or 'algebra', got 'gpu'"),
        ({"max_memory": 0}, ValueError, "max_memory: expected a number of bytes, 1 or more, got 0"),
        ({"max_memory": 100}, ValueError, r"max_memory: expected at least \d+ bytes"),
        ({"part": "decoder"}, ValueError, r"part: expected one of \['blocks'\]"),
        (
            {"layers": [7]},
            ValueError,
            "layers: layer 7 does not exist; expected 0 to 1, or -2 to -1 .*, got 7",
        ),
        ({"layers": [0, -3]}, ValueError, "layers: layer -3 does not exist; expected 0 to 1, or -2 to -1"),
        ({"prepend_bos": True}, ValueError, "prepend_bos: expected None for tokens"),
        (
            {"attention_mask": torch.ones(1, 3)},
            ValueError,
            r"attention_mask: expected the tokens' shape \[4\]",
        ),
        ({"attention_mask": torch.tensor([1, 0, 1, 1])}, ValueError, "got zeros inside the prompt"),
        ({"attention_mask": torch.tensor([2, 1, 1, 1])}, ValueError, "1 for the prompt's own tokens"),
        ({"attention_mask": torch.zeros(4)}, ValueError, "at least one token"),
        ({"attention_mask": [1, 1, 1, 1]}, TypeError, "attention_mask: expected a tensor"),
        ({"decoder_input_ids": GOOD}, ValueError, "decoder_input_ids: expected an encoder-decoder"),
        (
            {"token_type_ids": torch.zeros(1, 9, dtype=torch.long)},
            ValueError,
            r"token_type_ids: expected the tokens' shape \[4\]",
        ),
    ],
)
def test_bad_options(model, options, error, message):
    methods = options.pop("methods", "value_zeroing")
    engine = options.setdefault("engine", "hooks") if "max_memory" in options else None
    assert engine in (None, "hooks")
    with pytest.raises(error, match=message):
        lm.run(model, GOOD, methods, **options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"prompts": "one string"}, TypeError, "expected several prompts, got 'one string'"),
        ({"batch_size": 0}, ValueError, "batch_size: expected a whole number, 1 or more, got 0"),
        ({"padding_side": "both"}, ValueError, "padding_side: expected 'left' or 'right', got 'both'"),
        (
            {"prompts": [GOOD, torch.tensor([[99]])]},
            ValueError,
            r"prompt 1: prompt: expected tokens in 0\.\.49",
        ),
    ],
)
def test_bad_batches(model, options, error, message):
    prompts = options.pop("prompts", [GOOD])
    with pytest.raises(error, match=message):
        list(lm.run_many(model, prompts, "attention", **options))


@pytest.mark.parametrize("thing", [nn.Linear(2, 2), "gpt2", None])
def test_not_a_transformer_lens_model(thing):
    with pytest.raises(TypeError, match=r"model: expected a TransformerLens model .*, got "):
        lm.run(thing, GOOD, "attention")


def test_a_hugging_face_model_is_told_about_the_bridge():
    with pytest.raises(TypeError, match="boot_transformers"):
        lm.run(wrapped_model("gpt2"), GOOD, "attention")


def test_nan_weights_are_named(model):
    name, weight = next((n, p) for n, p in model.named_parameters() if "blocks.1" in n or ".h.1." in n)
    kept = weight.detach().clone()
    try:
        with torch.no_grad():
            weight.view(-1)[0] = float("nan")
        with pytest.raises(ValueError, match=f"expected finite outputs, got NaN.*{name}"):
            lm.run(model, GOOD, "attention")
    finally:
        with torch.no_grad():
            weight.copy_(kept)
    lm.run(model, GOOD, "attention")


def test_encoder_decoder_targets(encoder_decoder):
    pair = (GOOD, GOOD)
    with pytest.raises(ValueError, match="the target was given twice"):
        lm.run(encoder_decoder, pair, "attention", decoder_input_ids=GOOD)
    with pytest.raises(ValueError, match=r"target: expected tokens in 0\.\.49"):
        lm.run(encoder_decoder, (GOOD, torch.tensor([[77]])), "attention")
    with pytest.raises(
        ValueError, match=r"expected one of \['cross', 'decoder', 'encoder', 'joint', 'all'\]"
    ):
        lm.run(encoder_decoder, pair, "attention", part="blocks")
    with pytest.raises(ValueError, match="target: a string needs a tokenizer"):
        lm.run(encoder_decoder, (GOOD, "w3"), "attention")


def test_left_padding_of_an_encoder():
    model = build_or_skip(bridge, "bert")
    with pytest.raises(
        lm.UnsupportedModelError, match="padding_side: expected 'right', because an encoder counts positions"
    ):
        lm.run_many(model, [GOOD], "attention", padding_side="left")


@pytest.mark.parametrize(
    "problem",
    [torch.cuda.OutOfMemoryError("no room"), RuntimeError("DefaultCPUAllocator: can't allocate memory")],
)
@pytest.mark.parametrize(
    "place", ["_verification.support.verification_of", "_passes.replay.BlockReplay._error"]
)
def test_running_out_of_memory_is_not_called_unsupported(monkeypatch, problem, place):
    def fails(*_, **__):
        raise problem

    monkeypatch.setattr(f"lens_mix.{place}", fails)
    with pytest.raises(RuntimeError) as raised:
        lm.support(gpt2_like(seed=11))
    assert raised.value is problem


def test_unknown_citation():
    with pytest.raises(ValueError, match=r"expected one of .*, got 'rolout'"):
        lm.citation("rolout")


def test_unknown_attribute_of_the_package():
    with pytest.raises(AttributeError, match=r"no attribute 'rolout'; did you mean lens_mix.rollout\?"):
        lm.rolout  # noqa: B018


def test_layers_that_are_not_there(model):
    lens = lm.Lens(model)
    with pytest.raises(
        ValueError, match=r"layer: layer 2 does not exist; expected 0 to 1, or -2 to -1 .*, got 2"
    ):
        lens.layer_index(2)
    m = lm.run(model, GOOD, "attention")
    with pytest.raises(ValueError, match="layer: layer 5 does not exist; expected 0 to 1"):
        lm.rollout(m, from_layer=5)
    with pytest.raises(ValueError, match="layers: layer 4 does not exist; expected 0 to 1"):
        m.select_layers([0, 4])
    with pytest.raises(ValueError, match=r"layer -2 does not exist; expected 1, or -1, got -2$"):
        m.select_layers([1]).layer(-2)
    with pytest.raises(ValueError, match="heads: layer 3 does not exist; expected 0 to 1"):
        lm.run(model, GOOD, lm.methods.ValueZeroing(heads={3: [0]}))


def test_a_hook_point_that_is_not_there(model):
    lens = lm.Lens(model)
    message = r"hook name: expected one of the model's hook points, got 'blocks\.9"
    with pytest.raises(ValueError, match=message), lens.hooked([("blocks.9.attn.hook_v", print)]):
        pass


def test_bos_option_of_models_that_add_their_own_special_tokens():
    if transformer_lens_version()[0] > 3:
        pytest.skip("no HookedEncoderDecoder in this TransformerLens")
    model = hooked_encoder_decoder(tokenizer=toy_tokenizer())
    with pytest.raises(ValueError, match="prepend_bos: expected None for HookedEncoderDecoder"):
        lm.run(model, ("w3 w4", "w5"), "attention", prepend_bos=True)


def test_token_inputs_the_class_does_not_take():
    model = build_or_skip(hooked_transformer, "LN")
    with pytest.raises(
        ValueError, match=r"HookedTransformer takes \[\] besides tokens, got \['token_type_ids'\]"
    ):
        lm.run(model, GOOD, "attention", token_type_ids=torch.zeros_like(GOOD))
    assert tokens(model, 1, 4).shape == GOOD.shape
