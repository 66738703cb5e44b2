"""Measure how much of an effect depends on changed patterns: freeze them and steer the residual stream.

With all patterns frozen at their clean values, the intervention changes what later layers read, but not which
positions they attend to.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lens_mix.hooks import HookPair, freeze_pattern, must_fire, record_all
from tiny import PROMPT, divergence, tiny_model


def freeze_patterns(model: Any, tokens: Tensor) -> list[HookPair]:
    """Return hooks that replace the pattern of every layer by its pattern on these tokens."""
    store: dict[str, Tensor] = {}
    names = [f"blocks.{layer}.attn.hook_pattern" for layer in range(model.cfg.n_layers)]
    with torch.no_grad(), must_fire(*record_all(store, names)) as hooks:
        model.run_with_hooks(tokens, fwd_hooks=hooks)
    return [freeze_pattern(layer, store) for layer in range(model.cfg.n_layers)]


def steer(layer: int, position: int, direction: Tensor) -> tuple[str, Any]:
    """Return a hook of your own, which adds a direction to the residual stream at one position."""

    def add(resid: Tensor, hook: Any) -> Tensor:
        resid[:, position] += direction
        return resid

    return f"blocks.{layer}.hook_resid_pre", add


def main() -> None:
    """Run the experiment on the tiny model and print the result."""
    model, tokens = tiny_model(), PROMPT
    frozen = freeze_patterns(model, tokens)
    with torch.no_grad():
        clean = model(tokens)
        direction = model.W_E[42] - model.W_E[7]  # as if token 7 were token 42
        for scale in (0.0, 0.5, 1.0, 2.0):
            steering = steer(1, 2, scale * direction)
            free_effect = divergence(clean, model.run_with_hooks(tokens, fwd_hooks=[steering]))
            frozen_effect = divergence(clean, model.run_with_hooks(tokens, fwd_hooks=[steering, *frozen]))
            print(f"direction times {scale}: KL {free_effect:.4f}, with frozen patterns {frozen_effect:.4f}")


if __name__ == "__main__":
    main()
