"""Test whether the highest-ranked cells of a map suffice: keep the top k % and remove the rest.

A removed cell gets weight 0 in all heads of its layer, so that its query reads nothing from its key. The kept
cells have their clean weights, so that keeping all of them changes nothing.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

import lens_mix as lm
from lens_mix.hooks import must_fire, record_all, replace_pattern
from tiny import PROMPT, divergence, tiny_model


def keep_top(model: Any, tokens: Tensor, scores: Tensor, percent: float) -> Tensor:
    """Return the logits with only the top cells of each layer of `scores` [layer query key].

    The percentage is of the cells that have weight in any head.
    """
    store: dict[str, Tensor] = {}
    names = [f"blocks.{layer}.attn.hook_pattern" for layer in range(len(scores))]
    with torch.no_grad(), must_fire(*record_all(store, names)) as hooks:
        model.run_with_hooks(tokens, fwd_hooks=hooks)
    interventions = []
    for layer, name in enumerate(names):
        seen = (store[name] != 0).any(dim=1)[0]
        ranked = scores[layer].masked_fill(~seen, -torch.inf).flatten().argsort(descending=True)
        kept = torch.zeros(seen.numel(), dtype=torch.bool)
        kept[ranked[: math.ceil(percent / 100 * int(seen.sum()))]] = True
        interventions.append(replace_pattern(layer, store[name] * kept.view_as(seen)))
    with torch.no_grad(), must_fire(*interventions) as hooks:
        return model.run_with_hooks(tokens, fwd_hooks=hooks)


def main() -> None:
    """Run the experiment on the tiny model and print the result."""
    model, tokens = tiny_model(), PROMPT
    maps = {name: m.scores for name, m in lm.run(model, tokens, ["value_zeroing", "attention"]).items()}
    maps["attention"] = maps["attention"].mean(dim=1)  # the mean over heads
    maps["random"] = torch.rand_like(maps["value_zeroing"])
    clean = keep_top(model, tokens, maps["random"], 100)
    for name, scores in maps.items():
        kept = {percent: keep_top(model, tokens, scores, percent) for percent in (25, 50, 75, 100)}
        row = [f"{percent} %: {divergence(clean, logits):.4f}" for percent, logits in kept.items()]
        print(f"KL, cells kept by {name}: ", "  ".join(row))


if __name__ == "__main__":
    main()
