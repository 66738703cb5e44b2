"""Freeze the patterns and edit the residual stream: how much of an effect goes through WHERE the model looks?

An edit of the residual stream changes what later layers read, and also where they look. With all patterns held at
their clean values only the first is left.
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
    layers = range(model.cfg.n_layers)
    names = [f"blocks.{layer}.attn.hook_pattern" for layer in layers]
    with torch.no_grad(), must_fire(*record_all(store, names)) as hooks:
        model.run_with_hooks(tokens, fwd_hooks=hooks)
    return [freeze_pattern(layer, store) for layer in layers]


def steer(layer: int, position: int, direction: Tensor) -> tuple[str, Any]:
    """A hook of your own beside the others: adds a direction to the residual stream at one position."""

    def add(resid: Tensor, hook: Any) -> Tensor:
        edited = resid.clone()
        edited[:, position] += direction
        return edited

    return f"blocks.{layer}.hook_resid_pre", add


def main() -> None:
    model, tokens, frozen = tiny_model(), PROMPT, freeze_patterns(tiny_model(), PROMPT)
    with torch.no_grad():
        clean = model(tokens)
        for scale in (0.0, 0.5, 1.0, 2.0):
            edit = steer(1, 2, scale * torch.ones(model.cfg.d_model).cos())
            free = divergence(clean, model.run_with_hooks(tokens, fwd_hooks=[edit]))
            held = divergence(clean, model.run_with_hooks(tokens, fwd_hooks=[edit, *frozen]))
            print(f"direction times {scale}: KL {free:.4f}, with frozen patterns {held:.4f}")


if __name__ == "__main__":
    main()
