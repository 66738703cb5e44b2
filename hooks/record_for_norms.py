"""Record what a norm-based map needs, and compute the map by hand.

The score is the norm of the vector that each key adds to each query, summed over heads:
‖Σ_h a_ijh v_jh W_O^h‖ (Kobayashi et al., EMNLP 2020, eq. 3). `lens_mix.run(model, tokens, "value_norm")`
returns the same number, faster.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import lens_mix as lm
from lens_mix.hooks import must_fire, record_all
from tiny import PROMPT, tiny_model


def value_norms(model: Any, tokens: Tensor, layer: int) -> Tensor:
    """Return the map of one layer and one prompt, [query key]."""
    store: dict[str, Tensor] = {}
    names = [f"blocks.{layer}.attn.hook_{role}" for role in ("pattern", "v")]
    with torch.no_grad(), must_fire(*record_all(store, names)) as hooks:
        model.run_with_hooks(tokens, fwd_hooks=hooks)
        pattern, values = (store[name][0] for name in names)  # [head query key], [key value_head d_head]
        W_O = model.blocks[layer].attn.W_O  # [head d_head d_model]
        # In grouped-query attention several query heads share one value head.
        values = values.repeat_interleave(len(pattern) // values.shape[1], dim=1)
        sent = torch.einsum("hqk, khd, hdm -> qkm", pattern, values, W_O)
        return sent.norm(dim=-1)


def main() -> None:
    """Run the experiment on the tiny model and print the result."""
    model, tokens = tiny_model(), PROMPT
    scores = lm.run(model, tokens, "value_norm").scores
    for layer in range(model.cfg.n_layers):
        norms = value_norms(model, tokens, layer)
        print(f"layer {layer}, last query:", " ".join(f"{norm:.2f}" for norm in norms[-1]))
        print(f"  largest difference to lens_mix.run: {float((norms - scores[layer]).abs().max()):.1e}")


if __name__ == "__main__":
    main()
