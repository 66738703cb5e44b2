"""Rows of every candidate for every prompt, kept on disk.

python -m benchmarks.input_map.candidates smollm2 choose        (or gemma3, held_out)
"""

from __future__ import annotations

import random
import sys
import time

import torch
from torch import Tensor

import lens_mix as lm
from benchmarks.input_map.changed_rules import Rules, gradients
from benchmarks.input_map.direct import direct_occlusion
from benchmarks.input_map.importance import file_of, folder, load
from benchmarks.input_map.prompts import make

RULES = {
    "gradient": Rules(),
    "gim": Rules(temperature=2, pattern=0.25, values=0.5, norms=True),
    "gim ratio half": Rules(temperature=2, pattern=0.25, values=0.5, norms=True, ratio=True, product=0.5),
    "t2 half": Rules(temperature=2, pattern=0.5, values=1, norms=True, ratio=True, product=0.5),
}
LAYER_MAPS = ("attention", "value_zeroing", "attn_res_ln", "alti", "value_norm", "gradient_attention")
LONGEST_DECOMPX = 40


def gradient_rows(model, tokens: Tensor) -> dict[str, Tensor]:
    """One backward pass per set of rules."""
    rows = {}
    for name, rules in RULES.items():
        streams, slopes = gradients(model, tokens, rules)
        shares = (streams * slopes).abs().sum(-1)
        rows[f"{name} |sum|"] = (streams[0] * slopes[0]).sum(-1).abs()
        rows[f"{name} abs"] = shares[0]
        rows[f"{name} norm"] = slopes[0].norm(dim=-1)
        scaled = shares[:, 1:] / shares[:, 1:].sum(-1, keepdim=True)
        for blocks in (2, 5, 10, 15):
            rows[f"{name} abs 0..{blocks}"] = torch.cat([torch.zeros(1), scaled[: blocks + 1].mean(0)])
    return rows


def direct_rows(model, tokens: Tensor) -> dict[str, Tensor]:
    """Occlusion along direct paths."""
    embed = model.get_input_embeddings()
    mean = embed(torch.arange(0, embed.num_embeddings, 7)).mean(0)
    return {
        f"direct {window}": direct_occlusion(model, tokens, mean, window)[0]
        for window in ((0, 4) if len(tokens) <= 64 else (0,))
    }


def map_rows(bridge, tokens: Tensor) -> dict[str, Tensor]:
    """Published layer maps, aggregated in several ways."""
    maps = lm.run(bridge, tokens, list(LAYER_MAPS))
    if len(tokens) <= LONGEST_DECOMPX:
        maps["decompx"] = lm.run(bridge, tokens, "decompx", queries=[-1], layers=[-1])
    maps["alti_logit"] = lm.run(bridge, tokens, "alti_logit", queries=[-1])
    rows = {}
    for name, m in maps.items():
        if m.kind == "input":
            rows[name] = m.scores.sum(0)[0] if name == "alti_logit" else m.scores[-1, 0]
            continue
        count = len(m.layer_labels)
        rows[f"{name} rollout"] = lm.rollout(m).scores[-1, -1]
        rows[f"{name} receptive field"] = lm.rollout(m, receptive_field=True).scores[-1, -1]
        for mixing in (1.5, 5):
            rows[f"{name} mixing {mixing}"] = lm.rollout(m, residual=1 - mixing / count).scores[-1, -1]
        rows[f"{name} residual 0.5"] = lm.rollout(m, residual=0.5).scores[-1, -1]
        rows[f"{name} residual 0.95"] = lm.rollout(m, residual=0.95).scores[-1, -1]
        rows[f"{name} mean"] = m.scores[:, -1].mean(0)
        normalized = m.normalized().scores[:, -1]
        rows[f"{name} mean of shares"] = normalized.mean(0)
        if name == "gradient_attention":
            rows["gradient_rollout"] = lm.gradient_rollout(m).scores[-1, -1]
    return rows


def main(model_name: str, half: str) -> None:
    from transformer_lens.model_bridge import TransformerBridge

    model, _ = load(model_name)
    model.requires_grad_(False)
    bridge = TransformerBridge.boot_transformers(str(model.config._name_or_path), dtype=torch.float32).eval()
    kept = folder(f"{model_name} rows")
    prompts = [prompt for prompt in make() if prompt.half == half]
    # In an order that makes whatever is done fair to all kinds.
    random.Random(0).shuffle(prompts)
    start = time.time()
    for number, prompt in enumerate(prompts):
        source = file_of(model_name, prompt)
        if not source.exists() or (kept / source.name).exists():
            continue
        tokens = torch.load(source)["tokens"]
        rows = gradient_rows(model, tokens) | direct_rows(model, tokens) | map_rows(bridge, tokens)
        torch.save({name: row.to(torch.float64) for name, row in rows.items()}, kept / source.name)
        if number % 10 == 0:
            print(
                f"{number + 1}/{len(prompts)} {len(tokens)} tokens, {time.time() - start:.0f} s", flush=True
            )


if __name__ == "__main__":
    main(*sys.argv[1:3])
