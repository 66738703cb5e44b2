"""The recorded errors of the verification are those of `lm.check`, and a fault is found."""

from __future__ import annotations

import pytest
import torch

import lens_mix as lm
from benchmarks import verification
from tests.tiny_models import available, bridge, llama_like, tokens


@pytest.mark.skipif(not available(bridge, "llama"), reason="no TransformerBridge in this TransformerLens")
def test_the_errors_of_a_model_and_of_a_fault() -> None:
    model = llama_like(torch.float32)
    prompts = [tokens(model, 1, length) for length in (9, 12)]
    found = verification.measure(model, prompts)
    largest = [
        max(entry.error for entry in lm.check(model, prompt).verification.components) for prompt in prompts
    ]
    assert found["error"] == f"{sum(largest) / 2:.1e} [{min(largest):.1e}, {max(largest):.1e}]"
    share = found["error, % of accepted"].partition(" ")[0]
    assert float(share) == pytest.approx(100 * sum(largest) / 2e-4, rel=0.06)
    assert [verification.two_digits(value) for value in (0.0654, 13.4, 24219.0)] == ["0.065", "13", "24000"]
    assert (found["verified"], found["n"], found["accepted"], found["not compared"]) == (2, 2, "1e-04", "")
    with verification.fault(model, 1.01):
        assert verification.measure(model, prompts)["verified"] == 0
    assert verification.measure(model, prompts) == found
