"""Test long RoPE and dynamic NTK, whose angles depend on the longest position and on earlier passes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import lens_mix as lm
from lens_mix._care.angles import angles_differ, forget_longer_passes, restore_angles, rotary_modules
from lens_mix._care.changes import Changes
from lens_mix.evaluation import Drop
from lens_mix.evaluation.intervention_passes import intervention_passes
from lens_mix.session import Session
from tests.tiny_models import CONTEXT, available, bridge, wrapped_model

# In a pass with more positions than this, the angles change.
SWITCH = 8
LOG_PROBABILITY = lm.targets.token(5, of="log_probability")


def long_rope(half: int) -> dict[str, Any]:
    return {
        "original_max_position_embeddings": SWITCH,
        "rope_parameters": {
            "rope_type": "longrope",
            "short_factor": [1.0] * half,
            "long_factor": [4.0, 2.0, 3.0, 2.5][:half],
            "rope_theta": 10000.0,
            "original_max_position_embeddings": SWITCH,
            "factor": 4.0,
        },
    }


DYNAMIC = {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 10000.0}
_BY_KIND = {"rope_type": "default", "rope_theta": 10000.0}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3 longrope": ("phi3", long_rope(3)),
    "llama longrope": ("llama", long_rope(3)),
    "llama dynamic": ("llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": SWITCH}),
    "qwen2 dynamic": ("qwen2", {"rope_parameters": DYNAMIC, "max_position_embeddings": SWITCH}),
    "gpt_neox dynamic": (
        "gpt_neox",
        {"rope_parameters": {**DYNAMIC, "partial_rotary_factor": 0.5}, "max_position_embeddings": SWITCH},
    ),
    "gemma3 dynamic in some layers": (
        "gemma3",
        {
            "rope_parameters": {"sliding_attention": _BY_KIND, "full_attention": DYNAMIC},
            "max_position_embeddings": SWITCH,
        },
    ),
    "gemma3 dynamic in sliding layers": (
        "gemma3",
        {
            "rope_parameters": {"sliding_attention": DYNAMIC, "full_attention": _BY_KIND},
            "max_position_embeddings": SWITCH,
        },
    ),
}
METHODS = ["attention", "value_zeroing", "attn_res_ln", "gim", lm.methods.Occlusion(by="mask")]


def prompt(length: int, seed: int = 1) -> Tensor:
    return torch.randint(4, 50, (length,), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=KINDS)
def kind(request: Any) -> str:
    if not available(bridge, KINDS[request.param][0]):
        pytest.skip("no TransformerBridge in this TransformerLens")
    return request.param


def build(kind: str) -> tuple[Any, Any]:
    """Return a model, and a function with the log probabilities of a new copy of the wrapped model."""
    name, config = KINDS[kind]
    model, wrapped = bridge(name, torch.float64, **config), wrapped_model(name, torch.float64, **config)
    wrapped.set_attn_implementation("eager")

    def fresh(tokens: Tensor) -> Any:
        with torch.no_grad():
            return copy.deepcopy(wrapped)(tokens[None], use_cache=False, output_attentions=True)

    return model, fresh


def test_a_batch_gives_what_prompts_give_alone(kind):
    model, fresh = build(kind)
    prompts = [prompt(6), prompt(SWITCH, 4), prompt(14, 2), prompt(11, 3)]
    together = list(lm.run_many(model, prompts, METHODS))
    for tokens, maps in zip(prompts, together, strict=True):
        patterns = torch.stack([each[0].mean(0) for each in fresh(tokens).attentions])
        torch.testing.assert_close(maps["attention"].scores, patterns, atol=1e-6, rtol=0)
        for name, m in lm.run(model, tokens, METHODS).items():
            torch.testing.assert_close(maps[name].scores, m.scores, atol=1e-9, rtol=0)
    # The test would be empty if the angles of a longer prompt did not change the result.
    rotary = rotary_modules(list(model.original_model.modules()))
    assert any(angles_differ(module, 6, 14) for module in rotary)
    assert not any(angles_differ(module, 5, 6) for module in rotary)


def test_contexts_of_other_lengths(kind):
    model, fresh = build(kind)
    tokens = prompt(14)
    found = lm.run(model, tokens, lm.methods.ContextLength(target=LOG_PROBABILITY), queries=[-1]).scores[
        0, -1
    ]
    own = torch.stack([fresh(tokens[start:]).logits[0, -1].log_softmax(-1)[5] for start in range(14)])
    torch.testing.assert_close(found[:-1], own[:-1] - own[1:], atol=1e-5, rtol=0)


def test_tokens_that_are_dropped_shorten_the_prompt(kind):
    model, fresh = build(kind)
    tokens = prompt(12)
    removed = torch.zeros(3, 12, dtype=torch.bool)
    removed[1, 2], removed[2, 1:7] = True, True
    with intervention_passes(model, tokens, LOG_PROBABILITY) as passes:
        found = passes.values_without(Drop(), removed)
    for value, gone in zip(found, removed, strict=True):
        left = fresh(tokens[~gone]).logits[0, -1].log_softmax(-1)[5]
        assert float(value) == pytest.approx(float(left), abs=1e-5)


def state(model: Any) -> list[dict[str, Any]]:
    modules = rotary_modules(list(model.original_model.modules()))
    tensors = [{name: buffer.clone() for name, buffer in module._buffers.items()} for module in modules]
    numbers = [
        {name: value for name, value in vars(module).items() if isinstance(value, (int, float, Tensor))}
        for module in modules
    ]
    return [{**each, **others} for each, others in zip(tensors, numbers, strict=True)]


def test_what_a_longer_pass_leaves_behind(kind):
    """Check that it does not affect a map, and that the user finds it unchanged after a run."""
    model, fresh = build(kind)
    # This prompt has the angles of a long prompt too.
    short = prompt(SWITCH + 1, 5)
    with torch.no_grad():
        model(prompt(14)[None])
    before = state(model)
    m = lm.run(model, short, ["attention", "context_length"])
    list(lm.run_many(model, [short, prompt(5)], "attention"))
    patterns = torch.stack([each[0].mean(0) for each in fresh(short).attentions])
    torch.testing.assert_close(m["attention"].scores, patterns, atol=1e-6, rtol=0)
    after = state(model)
    assert [each.keys() for each in after] == [each.keys() for each in before]
    for each, other in zip(before, after, strict=True):
        for name, value in each.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(other[name])), name


@pytest.mark.parametrize("name", ["phi3 longrope", "llama dynamic"])
def test_prompts_of_one_regime_run_together(name):
    if not available(bridge, KINDS[name][0]):
        pytest.skip("no TransformerBridge in this TransformerLens")
    model, _ = build(name)
    session = Session(model, {"value_zeroing": lm.methods.ValueZeroing()})
    short, shorter, long = (session.read(prompt(length)) for length in (SWITCH, 5, 9))
    assert list(map(len, session.batches([short, shorter]))) == [2]
    assert list(map(len, session.batches([short, long]))) == [1, 1]
    far = session.read(prompt(5), inputs={"position_ids": torch.arange(9, 14)})
    near = session.read(prompt(5), inputs={"position_ids": torch.arange(5)})
    assert list(map(len, session.batches([near, far]))) == [1, 1]


def test_rows_before_the_last_token_keep_the_angles_of_the_prompt():
    if not available(bridge, "phi3"):
        pytest.skip("no TransformerBridge in this TransformerLens")
    model, _ = build("phi3 longrope")
    tokens, method = prompt(12), lm.methods.TokenPatching(target=LOG_PROBABILITY, replacements=[9])
    found = lm.run(model, tokens, method, queries=[5]).scores[0, 0]
    replaced = lm.methods.Occlusion(target=LOG_PROBABILITY, replacements=[9])
    expected = lm.run(model, tokens, replaced, queries=[5]).scores[0, 0]
    # For its last token, a row has the full replacement.
    torch.testing.assert_close(found[5], expected[5].abs(), atol=1e-6, rtol=0)


def test_other_models_keep_their_batches():
    """Run models whose angles, biases and tables do not depend on the longest prompt."""
    for name in ("llama", "mpt", "bloom", "gptj", "gpt_neox", "llama4", "gpt_oss"):
        if not available(bridge, name):
            pytest.skip("no TransformerBridge in this TransformerLens")
        model = bridge(name, torch.float64)
        prompts = [prompt(4), prompt(CONTEXT - 4, 2)]
        for tokens, m in zip(prompts, lm.run_many(model, prompts, "attn_res_ln"), strict=True):
            alone = lm.run(model, tokens, "attn_res_ln")
            torch.testing.assert_close(m.scores, alone.scores, atol=1e-6, rtol=1e-5)
        rotary = rotary_modules(list(model.original_model.modules()))
        assert not any(angles_differ(module, 2, CONTEXT) for module in rotary)


class _Refuses(torch.nn.Module):
    """A module that does not take the arguments of rotary modules."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.ones(2))
        self.rope_type = kind

    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize(
    ("kind", "differ"),
    [("dynamic", True), ("longrope", True), ("yarn", False), (None, False), ({"full": "dynamic"}, True)],
)
def test_a_module_that_can_not_be_asked_is_taken_by_its_name(kind, differ):
    module = _Refuses(kind)
    forget_longer_passes([module])
    assert angles_differ(module, 2, 9) == differ


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_the_modules_of_every_transformers(name):
    """Compare with the frequencies of a new module, also if this release has no Bridge."""
    scaling = {
        "dynamic": {"rope_type": "dynamic", "factor": 3.0},
        "longrope": {"rope_type": "longrope", "short_factor": [1.0] * 3, "long_factor": [4.0, 2.0, 3.0]},
    }[name]
    scaling |= {"factor": 4.0, "original_max_position_embeddings": SWITCH}
    config = transformers.LlamaConfig(
        hidden_size=24,
        num_attention_heads=4,
        max_position_embeddings=SWITCH if name == "dynamic" else CONTEXT,
        original_max_position_embeddings=SWITCH,
        rope_scaling=scaling,
    )
    rotary = LlamaRotaryEmbedding(config)
    (module,) = rotary_modules([torch.nn.Linear(2, 2), rotary])
    fresh = module.inv_freq.clone()
    assert angles_differ(module, SWITCH, SWITCH + 1)
    assert not angles_differ(module, 2, SWITCH)
    with Changes([restore_angles([module])]):
        module(torch.zeros(1, 1, 1), torch.arange(CONTEXT)[None])
        assert not torch.equal(module.inv_freq, fresh)
        forget_longer_passes([module])
        assert torch.equal(module.inv_freq, fresh) == (name == "dynamic")
        module(torch.zeros(1, 1, 1), torch.arange(SWITCH)[None])
        assert torch.equal(module.inv_freq, fresh)
