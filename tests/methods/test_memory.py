"""Test the measured temporaries of Value Zeroing against the memory bound."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lens_mix as lm
from benchmarks.common import PeakMemory
from lens_mix._algebra import folded_weights
from lens_mix.methods.value_zeroing import ValueZeroing
from tests.matrix import build_or_skip, slow
from tests.tiny_models import available, bridge, gpt2_like, hooked_transformer, tokens

LENGTH = 16
# The model is so wide that most of the counted memory is copies of the weights. Its heads are so small that
# W_O and W_in are folded for WIDE_LENGTH positions, even if the product is not stored.
WIDE: dict[str, dict[str, int]] = {
    "gpt2": {"n_embd": 512, "n_head": 32, "n_layer": 1, "n_positions": 64},
    "llama": {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "num_hidden_layers": 1,
        "max_position_embeddings": 64,
    },
    "gemma2": {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 16,
        "num_hidden_layers": 1,
        "max_position_embeddings": 64,
        "sliding_window": 64,
    },
}
WIDE_CLASSIC = {"d_model": 512, "n_heads": 32, "d_head": 16, "d_mlp": 2048, "n_layers": 1, "n_ctx": 64}
WIDE_LENGTH = 50


def model_of(name: str) -> Any:
    """Return a tiny model. All except gpt2 need a TransformerBridge."""
    return gpt2_like() if name == "gpt2" else build_or_skip(bridge, name)


def wide_model_of(name: str) -> Any:
    """Return a model of `WIDE` in bfloat16, of which the computation copies every matrix."""
    if name == "gpt2" and not available(bridge, name):
        return hooked_transformer("LN", torch.bfloat16, **WIDE_CLASSIC)
    return build_or_skip(bridge, name, torch.bfloat16, **WIDE[name])


def peak_of(
    model: Any, prompts: Any, method: ValueZeroing, monkeypatch: Any, **options: Any
) -> tuple[int, Any]:
    """Return the largest number of bytes that one block's map needed besides itself, and the maps."""
    peaks = []
    computed = ValueZeroing.__call__

    def measured(self: ValueZeroing, block: Any) -> torch.Tensor:
        with PeakMemory() as counter:
            made = computed(self, block)
        peaks.append(counter.peak - made.nbytes)
        return made

    with monkeypatch.context() as patched:
        patched.setattr(ValueZeroing, "__call__", measured)
        found = list(lm.run_many(model, prompts, method, **options))
    assert ValueZeroing.__call__ is computed
    return max(peaks), found


def smallest(model: Any, prompts: Any, method: ValueZeroing, engine: str) -> int:
    """Return the bound that the error asks for."""
    with pytest.raises(ValueError, match="max_memory: expected at least") as refused:
        list(lm.run_many(model, prompts, method, engine=engine, max_memory=1000))
    return int(str(refused.value).split("at least ")[1].split()[0])


@pytest.mark.parametrize("engine", ["algebra", "hooks"])
@pytest.mark.parametrize("name", ["gpt2", *(slow(name) for name in ("bert", "llama", "gemma2", "phi"))])
@pytest.mark.parametrize(
    "options", [{}, slow({"per_head": True}), slow({"spans": [(0, 1, 2), (3,), (4, 5)]})], ids=str
)
def test_the_bound_holds(
    name: str, options: dict[str, Any], engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, method = model_of(name), ValueZeroing(**options)
    prompts = [tokens(model, 1, LENGTH, seed)[0] for seed in (1, 2)]
    least = smallest(model, prompts, method, engine)
    _, free = peak_of(model, prompts, method, monkeypatch, engine=engine)
    for factor in (1, 1.5, 4):
        bound = int(least * factor)
        peak, found = peak_of(model, prompts, method, monkeypatch, engine=engine, max_memory=bound)
        assert peak <= bound
        for one, other in zip(found, free, strict=True):
            torch.testing.assert_close(one.scores, other.scores, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", WIDE)
def test_the_bound_holds_where_weights_are_most(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One prompt's copies of the weights are freed before the next ones are made, and none is made twice."""
    model, method = wide_model_of(name), ValueZeroing()
    prompts = [tokens(model, 1, WIDE_LENGTH, seed)[0] for seed in (1, 2)]
    least = smallest(model, prompts, method, "algebra")
    # The arguments are not kept, because they are large.
    folds, fold = [], folded_weights._fold
    monkeypatch.setattr(folded_weights, "_fold", lambda *args: folds.append(1) or fold(*args))
    peak, _ = peak_of(model, prompts, method, monkeypatch, engine="algebra", max_memory=least)
    assert len(folds) == 2
    assert least / 2 < peak <= least


@pytest.mark.slow
def test_more_prompts_take_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each prompt has a mask of the keys that some heads see, a byte per pair. Nothing else remains."""
    model, method = model_of("gpt2"), ValueZeroing(heads=[1, 2])
    prompts = [tokens(model, 1, LENGTH, seed)[0] for seed in range(8)]
    least = smallest(model, prompts, method, "algebra")
    peaks = [
        peak_of(model, some, method, monkeypatch, engine="algebra", max_memory=least)[0]
        for some in (prompts[:2], prompts)
    ]
    assert abs(peaks[1] - peaks[0]) < LENGTH**2


def test_a_bound_is_used() -> None:
    """The smallest bound is less than ten times what is needed."""
    model = model_of("gpt2")
    prompt = tokens(model, 1, LENGTH, 1)
    with pytest.MonkeyPatch.context() as patch:
        least = smallest(model, prompt, ValueZeroing(), "algebra")
        peak, _ = peak_of(model, prompt, ValueZeroing(), patch, engine="algebra", max_memory=least)
    assert least / 10 < peak <= least
