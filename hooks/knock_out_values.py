"""Knock out one token's values in a span of layers: which layers take something from it?

The token is still attended to there, but passes on nothing; queries, keys and patterns of these layers stay.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lens_mix.hooks import must_fire, zero_values
from tiny import PROMPT, divergence, tiny_model


def knock_out(model: Any, tokens: Tensor, position: int, layers: Iterable[int]) -> Tensor:
    """The logits when `position` passes on nothing in these layers."""
    with torch.no_grad(), must_fire(*[zero_values(layer, position) for layer in layers]) as hooks:
        return model.run_with_hooks(tokens, fwd_hooks=hooks)


def main() -> None:
    model, tokens, position = tiny_model(), PROMPT, 2
    n_layers = model.cfg.n_layers
    clean = knock_out(model, tokens, position, [])
    print(f"KL at the last position when position {position} passes on nothing in layers first..last")
    for first in range(n_layers):
        for last in range(first, n_layers):
            without = knock_out(model, tokens, position, range(first, last + 1))
            print(f"{first}..{last}: {divergence(clean, without):.4f}", end="  ")
        print()


if __name__ == "__main__":
    main()
