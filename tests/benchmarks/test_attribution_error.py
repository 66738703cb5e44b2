"""The benchmark of the error of attention attribution measures layers of both kinds of models."""

from __future__ import annotations

import pytest

from benchmarks.attribution_error.__main__ import measure_layers
from tests.tiny_models import available, bridge


@pytest.mark.parametrize("kind", ["gpt2", "opt"])
def test_the_layers_of_one_model(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not available(bridge, kind):
        pytest.skip(f"no {kind} in this TransformerLens")
    monkeypatch.setattr("benchmarks.attribution_error.__main__.REFERENCE_POINTS", {"gpt2": 100, "opt": 100})
    layers = list(measure_layers(kind, 0))
    assert len(layers) == 2
    assert all(0 <= layer["error"] < 0.5 for layer in layers)
    if kind == "gpt2":
        assert all(layer["error"] < 0.02 for layer in layers if layer["accepted"])
