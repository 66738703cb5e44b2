"""Freeze the patterns and edit the residual stream: how much of an effect goes through the patterns?

With all patterns held at their clean values, an edit changes what later layers read, but not where they look.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lens_mix.hooks import HookPair, freeze_pattern, must_fire, record_all
from tiny import PROMPT, divergence, tiny_model


def freeze_patterns(model: Any, tokens: Tensor) -> list[HookPair]:
    """Hooks that hold the pattern of every layer at its value on these tokens."""
    store: dict[str, Tensor] = {}
    names = [f"blocks.{layer}.attn.hook_pattern" for layer in range(model.cfg.n_layers)]
    with torch.no_grad(), must_fire(*record_all(store, names)) as hooks:
        model.run_with_hooks(tokens, fwd_hooks=hooks)
    return [freeze_pattern(layer, store) for layer in range(model.cfg.n_layers)]


def steer(layer: int, position: int, direction: Tensor) -> tuple[str, Any]:
    """A hook of your own: adds a direction to the residual stream at one position."""

    def add(resid: Tensor, hook: Any) -> Tensor:
        resid[:, position] += direction
        return resid

    return f"blocks.{layer}.hook_resid_pre", add


def main() -> None:
    model, tokens = tiny_model(), PROMPT
    frozen = freeze_patterns(model, tokens)
    with torch.no_grad():
        clean = model(tokens)
        direction = model.W_E[42] - model.W_E[7]  # as if token 7 were token 42
        for scale in (0.0, 0.5, 1.0, 2.0):
            edit = steer(1, 2, scale * direction)
            free = divergence(clean, model.run_with_hooks(tokens, fwd_hooks=[edit]))
            held = divergence(clean, model.run_with_hooks(tokens, fwd_hooks=[edit, *frozen]))
            print(f"direction times {scale}: KL {free:.4f}, with frozen patterns {held:.4f}")


if __name__ == "__main__":
    main()
