"""The temporaries of Value Zeroing, measured, against the bound that was asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lens_mix as lm
from benchmarks.common import PeakMemory
from lens_mix.methods.value_zeroing import ValueZeroing
from tests.tiny_models import available, bridge, hooked_transformer, tokens

LENGTH = 30


def model_of(name: str) -> Any:
    """A tiny model; llama and gemma2 only where there are bridges."""
    if available(bridge, name):
        return bridge(name)
    if name == "gpt2":
        return hooked_transformer("LN")
    pytest.skip("no such bridge")


def peak_of(
    model: Any, prompts: Any, method: ValueZeroing, monkeypatch: Any, **options: Any
) -> tuple[int, Any]:
    """Most bytes that one block's map took beside itself, and the maps."""
    peaks = []
    computed = ValueZeroing.of_stack

    def measured(self: ValueZeroing, blocks: Any) -> torch.Tensor:
        maps = []
        for block in blocks:
            with PeakMemory() as counter:
                maps.append(self(block))
            peaks.append(counter.peak - maps[-1].nbytes)
        return torch.stack(maps, dim=1)

    with monkeypatch.context() as patched:
        patched.setattr(ValueZeroing, "of_stack", measured)
        found = list(lm.run_many(model, prompts, method, **options))
    assert ValueZeroing.of_stack is computed
    return max(peaks), found


def smallest(model: Any, prompts: Any, method: ValueZeroing, engine: str) -> int:
    """The bound that the error asks for."""
    with pytest.raises(ValueError, match="max_memory: expected at least") as refused:
        list(lm.run_many(model, prompts, method, engine=engine, max_memory=1000))
    return int(str(refused.value).split("at least ")[1].split()[0])


@pytest.mark.parametrize("engine", ["algebra", "hooks"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "bert", "phi"])
@pytest.mark.parametrize("options", [{}, {"per_head": True}, {"spans": [(0, 1, 2), (3,), (4, 5)]}], ids=str)
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


def test_a_bound_is_used() -> None:
    """The smallest bound is not ten times what is needed."""
    model = model_of("gpt2")
    prompt = tokens(model, 1, LENGTH, 1)
    with pytest.MonkeyPatch.context() as patch:
        least = smallest(model, prompt, ValueZeroing(), "algebra")
        peak, _ = peak_of(model, prompt, ValueZeroing(), patch, engine="algebra", max_memory=least)
    assert least / 10 < peak <= least
