"""Test extreme inputs and models: one token, much padding, long prompts, adapters, quantised weights."""

from typing import ClassVar

import pytest
import torch
from torch import nn

import lens_mix as lm
from lens_mix._passes.continuation import prompt_logits
from lens_mix.evaluation import removal_curves
from tests.matrix import slow
from tests.tiny_models import available, bridge, tokens, transformers_version

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not available(bridge, "llama"), reason="no TransformerBridge in this TransformerLens"),
]


@pytest.mark.parametrize("stack", ["encoder", "decoder"])
@pytest.mark.parametrize("sizes", [(1, 3), slow((1, 1)), slow((3, 1))])
def test_a_source_of_one_token_is_mapped(sizes, stack):
    """Map a source of one token, on several copies of which TransformerBridge fails."""
    model = bridge("t5")
    prompt = tuple(tokens(model, 1, size, size) for size in sizes)
    methods = ["attention", "attention_attribution", "value_zeroing"]
    try:
        alone = lm.run(model, prompt, methods, part=stack)
    except lm.UnsupportedModelError as reason:
        pytest.skip(str(reason))
    size = sizes[stack == "decoder"]
    assert all(mixing_map.scores.shape[-2:] == (size, size) for mixing_map in alone.values())
    for maps in lm.run_many(model, [prompt, prompt], methods, part=stack):
        for name in methods:
            torch.testing.assert_close(maps[name].scores, alone[name].scores, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["llama", "qwen2", "bloom", "opt", "olmo2", "gemma2"])
def test_left_padding_in_float64_gives_what_each_prompt_gives_alone(name):
    """Map prompts with left padding. In float64, transformers makes NaN of rows that are all padding."""
    model = bridge(name, torch.float64)
    prompts = [tokens(model, 1, size, size) for size in (7, 4, 6)]
    padded = lm.run_many(model, prompts, "attention", padding_side="left")
    for mixing_map, prompt in zip(padded, prompts, strict=True):
        torch.testing.assert_close(mixing_map.scores, lm.run(model, prompt, "attention").scores)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neo", "bert"])
def test_a_row_that_sees_nothing_is_no_nan_in_float64(name):
    """Map in float64, whose lowest number is the value of masks, and -inf in the float32 softmax."""
    wide, narrow = bridge(name, torch.float64), bridge(name)
    prompt = tokens(wide, 1, 7)
    by_mask = lm.methods.Occlusion(by="mask")
    expected = lm.run(narrow, prompt, by_mask, queries=[-1]).scores
    found = lm.run(wide, prompt, by_mask, queries=[-1]).scores
    torch.testing.assert_close(found, expected.double(), atol=1e-4, rtol=1e-3)
    curves = [
        removal_curves(model, prompt, torch.arange(7.0, 0.0, -1.0), removal="drop")
        for model in (wide, narrow)
    ]
    assert curves[0].deletion == pytest.approx(curves[1].deletion, abs=1e-4)


def test_a_target_says_that_the_model_gave_nan():
    """Let a user hook cause NaN, so that the target is not the cause."""

    def spoil(logits, hook):
        logits[:, 2] = float("nan")
        return logits

    model = bridge("llama")
    model.add_hook("unembed.hook_out", spoil)
    with pytest.raises(ValueError, match="the output of the model, which it reads, has NaN"):
        lm.run(model, tokens(model, 1, 7), "input_gradients", queries=[2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["olmo", "olmo2", "olmo3", "flex_olmo"])
def test_olmo_in_half_precision_is_mapped_as_it_runs(name, dtype):
    """Map OLMo, whose queries and keys are rotated in float32, while only a cache makes values float32."""
    if not available(bridge, name, dtype):
        pytest.skip("no bridge for it here")
    model, wide = bridge(name, dtype), bridge(name)
    prompt = tokens(model, 1, 7)
    if transformers_version() >= (5, 24):
        # TransformerLens no longer sees the cache, so the model's own pass fails.
        with pytest.raises(RuntimeError, match="expected scalar type"):
            model(prompt)
    else:
        assert torch.equal(prompt_logits(model, prompt[0]), model(prompt)[0])
    for method, accepted in (("attention", 5e-3), ("value_zeroing", 5e-2), ("input_gradients", 5e-2)):
        found = lm.run(model, prompt, method, queries=[-1]).scores.float()
        expected = lm.run(wide, prompt, method, queries=[-1]).scores
        assert float((found - expected).abs().max() / expected.abs().max()) < accepted, method
    assert not any("_update_kv_cache" in vars(module) for module in model.modules())


@pytest.mark.parametrize("name", ["llama", "gpt_neox"])
def test_rotary_models_run_beyond_their_configured_length(name):
    model = bridge(name)
    assert lm.run(model, tokens(model, 1, 45), "attention").scores.shape[-1] == 45


@pytest.mark.parametrize("name", ["gptj", "gpt2"])
def test_tables_of_positions_end(name):
    with pytest.raises(ValueError, match="expected at most n_ctx=32 tokens, got 45"):
        lm.run(bridge(name), torch.full((1, 45), 3), "attention")


class Adapted(nn.Module):
    """A linear layer with an adapter, as in peft."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base_layer = base
        self.weight = base.weight
        self.lora_A, self.lora_B = nn.Linear(24, 2, bias=False), nn.Linear(2, len(base.weight), bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


@pytest.mark.parametrize("size", [1, 30])
def test_an_adapter_over_values_is_mapped_and_one_over_the_output_named(size):
    """Use a large adapter: the anatomy must be found although values are not a product with the weights."""
    model = bridge("llama")
    projection = model.blocks[0].attn.v
    plain = lm.run(model, tokens(model, 1, 7), "value_norm")
    adapted = Adapted(projection.original_component)
    with torch.no_grad():
        adapted.lora_B.weight *= size
    projection.set_original_component(adapted)
    found = lm.run(model, tokens(model, 1, 7), "value_norm")
    assert "layer 0: a hook or an adapter changes its values" in found.notes[0]
    with torch.no_grad():
        adapted.base_layer.weight += adapted.lora_B.weight @ adapted.lora_A.weight
    projection.set_original_component(adapted.base_layer)
    merged = lm.run(model, tokens(model, 1, 7), "value_norm")
    torch.testing.assert_close(found.scores, merged.scores, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(found.scores, plain.scores)

    projection = model.blocks[0].attn.o
    projection.set_original_component(Adapted(projection.original_component))
    with pytest.raises(lm.UnsupportedModelError, match=r"a LoRA adapter is on .*merge it into the weights"):
        lm.run(model, tokens(model, 1, 7), "value_norm")
    assert lm.support(model)["value_zeroing"] == "ok (hooks)"


class Switched(Adapted):
    """An adapter that can be switched off, as in peft."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__(base)
        self.disabled = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) if self.disabled else super().forward(x)


class SwitchedElsewhere(Adapted):
    """An adapter whose switch is an attribute of another object."""

    settings: ClassVar[dict[str, bool]] = {"disabled": False}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) if self.settings["disabled"] else super().forward(x)


def switch(adapter, disabled):
    if isinstance(adapter, SwitchedElsewhere):
        SwitchedElsewhere.settings["disabled"] = disabled
    else:
        adapter.disabled = disabled


@pytest.mark.parametrize("kind", [Switched, SwitchedElsewhere])
@pytest.mark.parametrize("place", ["attn.o", "mlp.out", "attn.v"])
def test_an_adapter_that_is_switched_off_is_gone(place, kind):
    """Check that switching the adapter on or off makes a new verification in both directions."""
    methods = ["value_norm", "value_zeroing", "decompx", "token_patching"]
    plain, model = bridge("llama"), bridge("llama")
    prompt = tokens(model, 1, 7)
    expected = lm.run(plain, prompt, methods, queries=[-1])
    module = model.blocks[0].get_submodule(place)
    base = module.original_component
    adapter = kind(base)
    adapter.lora_A = nn.Linear(base.weight.shape[1], 2, bias=False)
    module.set_original_component(adapter)

    def all_maps():
        found = {}
        for name in methods:
            try:
                found[name] = lm.run(model, prompt, name, queries=[-1])
            except lm.UnsupportedModelError as reason:
                found[name] = str(reason)
        return found

    switch(adapter, False)
    first = all_maps()
    assert any(isinstance(each, str) for each in first.values())
    switch(adapter, True)
    off = all_maps()
    for name in methods:
        assert off[name].provenance["engine"] == expected[name].provenance["engine"]
        torch.testing.assert_close(off[name].scores, expected[name].scores)
    switch(adapter, False)
    for name, again in all_maps().items():
        if isinstance(again, str):
            assert again == first[name]
        else:
            torch.testing.assert_close(again.scores, first[name].scores)


def test_an_unknown_activation_refuses_only_what_needs_the_feed_forward():
    if not available(bridge, "apertus"):
        pytest.skip("no bridge for it here")
    model = bridge("apertus")
    assert lm.run(model, tokens(model, 1, 7), "value_norm").provenance["engine"] == "algebra"
    with pytest.raises(lm.UnsupportedModelError, match="the activation XIELUActivation is unknown"):
        lm.run(model, tokens(model, 1, 7), "atb_ff")


class Quantised(nn.Module):
    """A linear layer with weights of eight bits and a scale, as in bitsandbytes."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.scale = base.weight.detach().abs().max() / 127
        stored = (base.weight.detach() / self.scale).round().to(torch.int8)
        self.weight = nn.Parameter(stored, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.weight.to(x.dtype) * self.scale).T


class Packed(nn.Module):
    """The same layer with its weight behind a method, as in torch's quantised layers."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.inner = [Quantised(base)]

    def weight(self) -> torch.Tensor:
        return self.inner[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner[0](x)


@pytest.mark.parametrize("kind", [Quantised, Packed])
def test_quantised_weights_are_named_and_maps_that_read_none_are_made(kind):
    model = bridge("llama")
    for block in model.blocks:
        block.attn.o.set_original_component(kind(block.attn.o.original_component))
    x = tokens(model, 1, 7)
    words = rf"has quantised weights \({kind.__name__}\), which are not read"
    with pytest.raises(lm.UnsupportedModelError, match=words):
        lm.run(model, x, "value_norm")
    # The plain matrix has the same numbers.
    expected = lm.run(plain_copy(model), x, ["attention", "value_zeroing"])
    found = lm.run(model, x, ["attention", "value_zeroing"])
    assert found["value_zeroing"].provenance["engine"] == "hooks"
    for name, mixing_map in found.items():
        torch.testing.assert_close(mixing_map.scores, expected[name].scores, atol=1e-5, rtol=0)


def plain_copy(model):
    plain = bridge("llama")
    for block, other in zip(plain.blocks, model.blocks, strict=True):
        inner = other.attn.o.original_component
        with torch.no_grad():
            block.attn.o.original_component.weight.copy_(
                inner.forward(torch.eye(block.attn.o.original_component.weight.shape[1])).T
            )
    return plain


@pytest.mark.parametrize(("name", "dtype"), [("xglm", torch.float64)])
def test_a_dtype_that_the_model_itself_cannot_run_in_is_said(name, dtype):
    if not available(bridge, name):
        pytest.skip("no bridge for it here")
    model = bridge(name, dtype)
    words = rf"own forward pass fails in {dtype} .* cast the model \(model.to\(torch.float32\)\)"
    with pytest.raises(lm.UnsupportedModelError, match=words):
        lm.run(model, tokens(model, 1, 7), "attention")
    assert "cast the model" in lm.support(model)["attention"]
    model.to(torch.float32)
    assert bool(lm.run(model, tokens(model, 1, 7), "attention").scores.isfinite().all())


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("bert", {"token_type_ids": torch.zeros(7)}),
        ("bert", {"token_type_ids": torch.zeros(7, dtype=torch.bool)}),
        ("llama", {"position_ids": torch.arange(7.0)}),
        ("llama", {"labels": torch.zeros(7)}),
    ],
)
def test_numbers_of_rows_are_whole(name, given):
    model = bridge(name)
    with pytest.raises(TypeError, match=r"\w+: expected whole numbers, got torch\.\w+"):
        lm.run(model, tokens(model, 1, 7), "attention", **given)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("bert", {"token_type_ids": torch.full((7,), 9)}),
        ("gpt2", {"position_ids": torch.arange(7) + 1000}),
        ("gpt2", {"position_ids": torch.arange(7) - 3}),
    ],
)
def test_numbers_of_rows_that_the_model_does_not_have_are_said(name, given):
    model = bridge(name)
    with pytest.raises(ValueError, match="model inputs: expected numbers that the model has rows for, got"):
        lm.run(model, tokens(model, 1, 7), "attention", **given)
