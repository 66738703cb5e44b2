"""Measure whether it matters which positions a layer attends to: use its pattern of another prompt.

The pattern of one layer is taken from a pass over another prompt of the same length. The values are still
those of the first prompt, so a changed prediction is due to the pattern.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lens_mix.hooks import freeze_pattern, must_fire, record
from tiny import OTHER_PROMPT, PROMPT, divergence, tiny_model


def patch_pattern(model: Any, tokens: Tensor, source: Tensor, layer: int) -> Tensor:
    """Return the logits of `tokens` with one layer's pattern replaced by its pattern on `source`."""
    store: dict[str, Tensor] = {}
    with torch.no_grad():
        with must_fire(record(store, f"blocks.{layer}.attn.hook_pattern")) as hooks:
            model.run_with_hooks(source, fwd_hooks=hooks)
        with must_fire(freeze_pattern(layer, store)) as hooks:
            return model.run_with_hooks(tokens, fwd_hooks=hooks)


def main() -> None:
    """Run the experiment on the tiny model and print the result."""
    model = tiny_model()
    with torch.no_grad():
        clean, other = model(PROMPT), model(OTHER_PROMPT)
    print(f"KL between the two prompts: {divergence(clean, other):.4f}")
    for layer in range(model.cfg.n_layers):
        patched = patch_pattern(model, PROMPT, OTHER_PROMPT, layer)
        print(f"with the other prompt's pattern in layer {layer}: {divergence(clean, patched):.4f}")


if __name__ == "__main__":
    main()
