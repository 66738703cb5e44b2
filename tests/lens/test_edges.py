"""Edges of what a model takes: one token, much padding, long prompts, adapters, other weights."""

import pytest
import torch
from torch import nn

import lens_mix as lm
from tests.tiny_models import available, bridge, tokens

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not available(bridge, "llama"), reason="no TransformerBridge in this TransformerLens"),
]


@pytest.mark.parametrize("stack", ["encoder", "decoder"])
@pytest.mark.parametrize("sizes", [(1, 3), (1, 1), (3, 1)])
def test_a_source_of_one_token_is_mapped(sizes, stack):
    """TransformerBridge fails on several copies of one."""
    model = bridge("t5")
    prompt = tuple(tokens(model, 1, size, size) for size in sizes)
    methods = ["attention", "attention_attribution", "value_zeroing"]
    try:
        alone = lm.run(model, prompt, methods, stack=stack)
    except lm.UnsupportedModelError as reason:
        pytest.skip(str(reason))
    size = sizes[stack == "decoder"]
    assert all(mixing_map.scores.shape[-2:] == (size, size) for mixing_map in alone.values())
    for maps in lm.run_many(model, [prompt, prompt], methods, stack=stack):
        for name in methods:
            torch.testing.assert_close(maps[name].scores, alone[name].scores, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["llama", "qwen2", "bloom", "opt", "olmo2", "gemma2"])
def test_left_padding_in_float64_gives_what_each_prompt_gives_alone(name):
    """transformers makes NaN of rows that are all padding, there."""
    model = bridge(name, torch.float64)
    prompts = [tokens(model, 1, size, size) for size in (7, 4, 6)]
    padded = lm.run_many(model, prompts, "attention", padding_side="left")
    for mixing_map, prompt in zip(padded, prompts, strict=True):
        torch.testing.assert_close(mixing_map.scores, lm.run(model, prompt, "attention").scores)


@pytest.mark.parametrize("name", ["llama", "gpt_neox"])
def test_rotary_models_run_beyond_their_configured_length(name):
    model = bridge(name)
    assert lm.run(model, tokens(model, 1, 45), "attention").scores.shape[-1] == 45


@pytest.mark.parametrize("name", ["gptj", "gpt2"])
def test_tables_of_positions_end(name):
    with pytest.raises(ValueError, match="expected at most n_ctx=32 tokens, got 45"):
        lm.run(bridge(name), torch.full((1, 45), 3), "attention")


class Adapted(nn.Module):
    """A linear layer with an adapter over it, as peft's."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base_layer = base
        self.weight = base.weight
        self.lora_A, self.lora_B = nn.Linear(24, 2, bias=False), nn.Linear(2, len(base.weight), bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


def test_an_adapter_over_values_is_mapped_and_one_over_the_output_named():
    model = bridge("llama")
    projection = model.blocks[0].attn.v
    plain = lm.run(model, tokens(model, 1, 7), "value_norm")
    adapted = Adapted(projection.original_component)
    projection.set_original_component(adapted)
    found = lm.run(model, tokens(model, 1, 7), "value_norm")
    assert "layer 0: a hook or an adapter edits its values" in found.notes[0]
    with torch.no_grad():
        adapted.base_layer.weight += adapted.lora_B.weight @ adapted.lora_A.weight
    projection.set_original_component(adapted.base_layer)
    merged = lm.run(model, tokens(model, 1, 7), "value_norm")
    torch.testing.assert_close(found.scores, merged.scores)
    assert not torch.allclose(found.scores, plain.scores)

    projection = model.blocks[0].attn.o
    projection.set_original_component(Adapted(projection.original_component))
    with pytest.raises(
        lm.UnsupportedModelError, match=r"a LoRA adapter lies over .*merge it into the weights"
    ):
        lm.run(model, tokens(model, 1, 7), "value_norm")
    assert lm.support(model)["value_zeroing"] == "ok (hooks)"


def test_an_unknown_activation_refuses_only_what_needs_the_feed_forward():
    if not available(bridge, "apertus"):
        pytest.skip("no bridge for it here")
    model = bridge("apertus")
    assert lm.run(model, tokens(model, 1, 7), "value_norm").provenance["engine"] == "algebra"
    with pytest.raises(
        lm.UnsupportedModelError, match="the activation XIELUActivation is not among those known"
    ):
        lm.run(model, tokens(model, 1, 7), "atb_ff")
