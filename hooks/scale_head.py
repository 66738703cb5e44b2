"""Measure how the prediction depends on the strength of one head: scale its pattern.

A factor of 0 removes the head, 1 changes nothing, and 2 doubles the head's output.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lens_mix.hooks import must_fire, scale_pattern
from tiny import PROMPT, divergence, tiny_model


def scale_head(model: Any, tokens: Tensor, layer: int, head: int, factor: float) -> Tensor:
    """Return the logits with one head's attention weights multiplied by a factor."""
    factors = torch.ones(model.cfg.n_heads)
    factors[head] = factor
    with torch.no_grad(), must_fire(scale_pattern(layer, factors)) as hooks:
        return model.run_with_hooks(tokens, fwd_hooks=hooks)


def main() -> None:
    """Run the experiment on the tiny model and print the result."""
    model, tokens, layer = tiny_model(), PROMPT, 1
    with torch.no_grad():
        clean = model(tokens)
    print(f"KL at the last position when one head of layer {layer} is scaled")
    for factor in (0.0, 0.5, 1.0, 2.0):
        row = [
            f"head {head}: {divergence(clean, scale_head(model, tokens, layer, head, factor)):.4f}"
            for head in range(model.cfg.n_heads)
        ]
        print(f"times {factor}:", "  ".join(row))


if __name__ == "__main__":
    main()
