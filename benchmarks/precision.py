"""Measure the digits of float32: Value Zeroing by algebra and by hooks, against hooks in float64.

    python -m benchmarks.precision        # SmolLM2-135M, and base-size random models of 3 layers

The float64 model has the float32 model's weights. There are three errors: that of the algebra engine in
float32, that of the float32 clean pass alone (algebra in float64 on what that pass recorded), and that of the
definition by hooks in float32. Only scores above 1e-7 count.
"""

from __future__ import annotations

import copy
import functools
from typing import Any
from unittest import mock

import torch

import lens_mix as lm
from benchmarks import common
from lens_mix._algebra import value_zeroing as value_zeroing_algebra

SMALLEST = 1e-7


def errors(model: Any, tokens: torch.Tensor) -> dict[str, float]:
    """Return the largest relative error of each variant, and its 99th percentile."""
    exact = lm.run(_copy_to_float64(model), tokens, "value_zeroing", engine="hooks").scores
    found = {"scores": float((exact > SMALLEST).sum())}
    ways = {"algebra": "algebra", "clean pass alone": "algebra", "hooks": "hooks"}
    wide = (torch.float64, torch.float64)
    patch = mock.patch.object(value_zeroing_algebra, "_dtypes", return_value=wide)
    for way, engine in ways.items():
        if way == "clean pass alone":
            with patch:
                scores = lm.run(model, tokens, "value_zeroing", engine=engine).scores
        else:
            scores = lm.run(model, tokens, "value_zeroing", engine=engine).scores
        relative = ((scores.double() - exact).abs() / exact)[exact > SMALLEST]
        found[f"{way}, largest"] = float(relative.max())
        found[f"{way}, 99 %"] = float(relative.quantile(0.99))
        found[f"{way}, above 1e-5"] = float((relative > 1e-5).float().mean())
    return found


def _copy_to_float64(model: Any) -> Any:
    """Return a copy in float64, norms included: transformers computes RMSNorm in float32 for any input."""
    exact = copy.deepcopy(model).to(torch.float64)
    for module in exact.modules():
        if type(module).__name__ == "LlamaRMSNorm":
            module.forward = functools.partial(_rms_norm, module)
    return exact


def _rms_norm(module: Any, x: torch.Tensor) -> torch.Tensor:
    return module.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + module.variance_epsilon)


def main() -> list[dict[str, Any]]:
    """Return a row per model."""
    torch.set_num_threads(1)
    rows = []
    for name, build in common.MODELS.items():
        model = build(layers=3)
        rows.append({"model": name, **errors(model, common.random_tokens(model, 32))})
    model = common.smollm2()
    text = "The Eiffel Tower is in the city of Paris, and the Colosseum is in the city of"
    rows.append({"model": "SmolLM2-135M", **errors(model, model.to_tokens(text)[0])})
    print(common.markdown_table(rows))
    return rows


if __name__ == "__main__":
    main()
