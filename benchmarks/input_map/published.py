"""Store the rows of published maps for every prompt.

python -m benchmarks.input_map.published smollm2 choose [limit]       (or gemma3, held_out)
"""

from __future__ import annotations

import random
import sys
import time
from typing import Any

import torch
from torch import Tensor

import lens_mix as lm
from benchmarks.input_map.importance import file_of, folder, load, tokens_of
from benchmarks.input_map.prompts import make

LAYER_MAPS = (
    "attention",
    "value_norm",
    "value_zeroing",
    "attn_res_ln",
    "globenc",
    "alti",
    "gradient_attention",
)
LONGEST_DECOMPX = 48


def rows(bridge: Any, tokens: Tensor) -> dict[str, Tensor]:
    """Return rows of the last position: layer maps with several aggregations, and input maps."""
    maps = lm.run(bridge, tokens, list(LAYER_MAPS))
    found = {}
    for name, m in maps.items():
        count = len(m.layer_labels)
        found[f"{name} rollout"] = lm.rollout(m).scores[-1, -1]
        found[f"{name} rollout, receptive field"] = lm.rollout(m, receptive_field=True).scores[-1, -1]
        # alti and the norms contain the residual stream, and get a weight of 1 - mixing / layers in addition.
        for mixing in (1.5, 5):
            row = lm.rollout(m, residual=max(0, 1 - mixing / count)).scores[-1, -1]
            found[f"{name} rollout, total mixing {mixing}"] = row
        found[f"{name} mean"] = m.scores[:, -1].mean(0)
        found[f"{name} mean of shares"] = m.normalized().scores[:, -1].mean(0)
        if name == "gradient_attention":
            found["gradient_rollout"] = lm.gradient_rollout(m).scores[-1, -1]
    found["alti_logit"] = lm.run(bridge, tokens, "alti_logit", queries=[-1]).scores.sum(0)[0]
    if len(tokens) <= LONGEST_DECOMPX:
        found["decompx"] = lm.run(bridge, tokens, "decompx", queries=[-1], layers=[-1]).scores[-1, 0]
    return found


def main(model_name: str, half: str, limit: str = "1000") -> None:
    """Store the rows of all prompts of one half."""
    from transformer_lens.model_bridge import TransformerBridge

    torch.set_num_threads(1)
    model, tokenizer = load(model_name)
    bridge = TransformerBridge.boot_transformers(str(model.config._name_or_path), dtype=torch.float32).eval()
    kept = folder(f"{model_name} published")
    prompts = [prompt for prompt in make() if prompt.half == half]
    # A random order, so that a run that stops early has prompts of all kinds.
    random.Random(0).shuffle(prompts)
    prompts = prompts[: int(limit)]
    start = time.time()
    for number, prompt in enumerate(prompts):
        measured = file_of(model_name, prompt)
        path = kept / measured.name
        if path.exists() or not measured.exists():
            continue
        tokens = tokens_of(tokenizer, prompt)
        torch.save({name: row.to(torch.float64) for name, row in rows(bridge, tokens).items()}, path)
        if number % 10 == 0:
            print(
                f"{number + 1}/{len(prompts)} {len(tokens)} tokens, {time.time() - start:.0f} s", flush=True
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
