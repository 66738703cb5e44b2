"""Find the layers that read one token's values: zero the values in every range of layers.

Queries still attend to the token there, but read nothing from it. Queries, keys and patterns of these layers
are unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lens_mix.hooks import must_fire, zero_values
from tiny import PROMPT, divergence, tiny_model


def knock_out(model: Any, tokens: Tensor, position: int, layers: Iterable[int]) -> Tensor:
    """Return the logits with the values of `position` zeroed in these layers."""
    with torch.no_grad(), must_fire(*[zero_values(layer, position) for layer in layers]) as hooks:
        return model.run_with_hooks(tokens, fwd_hooks=hooks)


def main() -> None:
    """Run the experiment on the tiny model and print the result."""
    model, tokens, position = tiny_model(), PROMPT, 2
    n_layers = model.cfg.n_layers
    clean = knock_out(model, tokens, position, [])
    print(f"KL at the last position, with the values of position {position} zeroed in layers first..last")
    for first in range(n_layers):
        for last in range(first, n_layers):
            without = knock_out(model, tokens, position, range(first, last + 1))
            print(f"{first}..{last}: {divergence(clean, without):.4f}", end="  ")
        print()


if __name__ == "__main__":
    main()
