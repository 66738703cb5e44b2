"""Test maps of attention weights that a model of transformers returned."""

from __future__ import annotations

import dataclasses
import types

import pytest
import torch

import lens_mix as lm
from tests.matrix import build_or_skip, prompt_of
from tests.tiny_models import bridge, tokens, toy_tokenizer, wrapped_model

pytestmark = pytest.mark.filterwarnings("ignore")


def outputs_of(name, *inputs, **options):
    """Return what the model of transformers returns that `bridge(name)` wraps."""
    model = build_or_skip(wrapped_model, name, torch.float64)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return model(*inputs, output_attentions=True, **options)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
@pytest.mark.parametrize("per_head", [False, True])
def test_the_map_is_that_of_a_run(name, per_head):
    model = build_or_skip(bridge, name, torch.float64)
    prompt = tokens(model, 1, 7)
    expected = lm.run(model, prompt, lm.methods.AttentionWeights(per_head=per_head))
    m = lm.MixingMap.from_attentions(outputs_of(name, prompt), prompt, per_head=per_head)
    torch.testing.assert_close(m.scores, expected.scores, atol=1e-10, rtol=0)
    assert (m.tokens, m.causal, m.layers) == (expected.tokens, expected.causal, expected.layers)
    assert (m.method, m.parameters, m.residual) == ("attention", expected.parameters, expected.residual)
    assert m.predicts_next == expected.predicts_next
    if not per_head:
        torch.testing.assert_close(lm.rollout(m).scores, lm.rollout(expected).scores, atol=1e-10, rtol=0)


@pytest.mark.parametrize("part", ["encoder", "decoder", "cross"])
def test_the_parts_of_an_encoder_decoder(part):
    model = build_or_skip(bridge, "bart", torch.float64)
    source, target = prompt_of(model)
    expected = lm.run(model, (source, target), "attention", part=part)
    outputs = outputs_of("bart", source, decoder_input_ids=target)
    read = source if part == "encoder" else target
    keys = source if part == "cross" else None
    m = lm.MixingMap.from_attentions(outputs, read, key_tokens=keys, part=part)
    torch.testing.assert_close(m.scores, expected.scores, atol=1e-10, rtol=0)
    assert (m.tokens, m.key_tokens, m.causal) == (expected.tokens, expected.key_tokens, expected.causal)
    assert m.predicts_next == expected.predicts_next
    if part == "encoder":
        assert torch.equal(lm.MixingMap.from_attentions(outputs, read).scores, m.scores)
    with pytest.raises(TypeError, match="key_tokens: expected the tokens of the source"):
        lm.MixingMap.from_attentions(outputs, target, part="cross")
    with pytest.raises(ValueError, match=r"tokens: expected 5, one per query .* that the decoder read"):
        lm.MixingMap.from_attentions(outputs, source, part="decoder")


@dataclasses.dataclass
class Outputs:
    attentions: object = None


def weights(layers=2, batch=1, heads=3, size=4):
    drawn = torch.rand(layers, batch, heads, size, size, generator=torch.Generator().manual_seed(0)).tril()
    return tuple(drawn / drawn.sum(-1, keepdim=True))


def test_tokens_are_ids_or_strings():
    ids = torch.tensor([[1, 5, 6, 7]])
    given = weights()
    for outputs in (Outputs(given), {"attentions": given}, given, list(given), torch.stack(given)):
        assert lm.MixingMap.from_attentions(outputs, ids).tokens == ["1", "5", "6", "7"]
    words = ["<bos>", "w5", "w6", "w7"]
    m = lm.MixingMap.from_attentions(given, ids[0], tokenizer=toy_tokenizer())
    assert (m.tokens, m.causal) == (words, True)
    assert lm.MixingMap.from_attentions(given, words, notes=["mine"]).notes == ("mine",)
    assert lm.MixingMap.from_attentions(given, ids[0].tolist()).tokens == ["1", "5", "6", "7"]
    for wrong in ("four", None, [1, "w5", "w6", "w7"], ids.repeat(2, 1)):
        with pytest.raises(TypeError, match="tokens: expected"):
            lm.MixingMap.from_attentions(given, wrong)


def test_layers_without_attention_have_no_map():
    first, second = weights()
    m = lm.MixingMap.from_attentions((None, first, None, second), ["a", "b", "c", "d"])
    assert m.layers == [1, 3]
    torch.testing.assert_close(m.scores[1], second[0].mean(0))


def test_a_sink_is_recorded():
    given = tuple(layer * 0.75 for layer in weights())
    assert lm.MixingMap.from_attentions(given, list("abcd")).provenance["sink"]
    assert "sink" not in lm.MixingMap.from_attentions(weights(), list("abcd")).provenance


@pytest.mark.parametrize(
    ("outputs", "reason"),
    [
        (Outputs(), 'attn_implementation="eager"'),
        (Outputs(()), 'attn_implementation="eager"'),
        (Outputs((None, None)), "output_attentions=True"),
        (types.SimpleNamespace(logits=torch.ones(1)), "got none in SimpleNamespace"),
        ({"cross_attentions": weights()}, r"which has \['cross_attentions'\]"),
        (Outputs(weights(batch=3)), r"one prompt, got those of 3; .*for layer in outputs.attentions"),
        (Outputs((weights(), weights())), "those of each step of generate"),
        (Outputs([layer[0] for layer in weights()]), r"\[batch, head, query, key\] of each layer"),
        (Outputs((*weights(), *weights(size=5))), "one shape in all layers"),
        (Outputs([layer * 1.2 for layer in weights()]), r"a sum of 1.2; call model.eval\(\)"),
        (Outputs([-layer for layer in weights()]), "weights of 0 or more"),
        (Outputs(weights(size=5)), "tokens: expected 5, one per query of attentions, got 4"),
    ],
)
def test_outputs_that_are_no_weights_of_one_prompt(outputs, reason):
    with pytest.raises(ValueError, match=reason):
        lm.MixingMap.from_attentions(outputs, ["a", "b", "c", "d"])


def test_a_model_with_another_kernel_is_told_to_be_eager():
    model = build_or_skip(wrapped_model, "gpt2")
    prompt = torch.tensor([[3, 4, 5]])
    with pytest.raises(ValueError, match='attn_implementation="eager"'):
        lm.MixingMap.from_attentions(model(prompt), prompt)


def test_the_model_inside_of_a_bridge_returns_no_attentions():
    outputs = types.SimpleNamespace(attentions=())
    with pytest.raises(ValueError, match=r"a TransformerBridge, which keeps none, write lm\.run"):
        lm.MixingMap.from_attentions(outputs, ["a", "b"])
