"""Score roll-outs with other residual weights, with and without the receptive field, against importance.

    python -m benchmarks.input_map.rollouts smollm2 held_out [limit]       (or gemma3, choose)

It needs the files of `benchmarks.input_map.importance`, uses prompts of up to 48 tokens, and prints a
Markdown table.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

import lens_mix as lm
from benchmarks.input_map.importance import LONG, file_of, load, tokens_of
from benchmarks.input_map.prompts import make
from lens_mix.evaluation.agreement import bootstrap, partial_spearman, spearman

METHODS = ("attention", "value_norm", "gradient_attention", "value_zeroing", "attn_res_ln", "globenc", "alti")
WEIGHTS: dict[str, dict[str, Any]] = {
    "as the method says": {},
    "measured": {"residual": "measured"},
    "total mixing 1.5": {"total_mixing": 1.5},
    "total mixing 5": {"total_mixing": 5},
}


def rows(model: Any, tokens: Tensor) -> dict[tuple[str, str, bool], Tensor]:
    """Return the last position's row by method, weight, and whether the receptive field normalises it."""
    maps = lm.run(model, tokens, list(METHODS), residual_shares=True)
    found = {}
    for name, m in maps.items():
        for weight, options in WEIGHTS.items():
            if weight != "measured" or m.residual_shares is not None:
                for normalised in (False, True):
                    rolled = lm.rollout(m, receptive_field=normalised, **options)
                    found[name, weight, normalised] = rolled.scores[-1, -1]
    found["position", "", False] = torch.arange(len(tokens), dtype=torch.float64)
    return found


def cell(values: list[float]) -> str:
    """Return mean and interval. A row without an order (all tied, or all on one token) counts as 0."""
    whole = bootstrap(torch.tensor(values, dtype=torch.float64).nan_to_num(0.0))
    return f"{whole.mean:.2f} [{whole.low:.2f}, {whole.high:.2f}]"


def main(model_name: str, half: str, limit: str = "1000") -> None:
    """Print the table."""
    from transformer_lens.model_bridge import TransformerBridge

    torch.set_num_threads(1)
    plain, tokenizer = load(model_name)
    model = TransformerBridge.boot_transformers(str(plain.config._name_or_path), dtype=torch.float32).eval()
    scores: dict[Any, list[tuple[float, float]]] = defaultdict(list)
    files = [(prompt, file_of(model_name, prompt)) for prompt in make() if prompt.half == half]
    for prompt, path in [pair for pair in files if pair[1].exists()][: int(limit)]:
        tokens = tokens_of(tokenizer, prompt)
        if len(tokens) > LONG:
            continue
        measured = torch.load(path)
        importance, positions = measured["importance"].double(), measured["positions"]
        for key, row in rows(model, tokens).items():
            scored = row[positions].double()
            scores[key].append((partial_spearman(scored, importance), spearman(scored, importance)))
    print(f"{model_name}, {half}: {len(scores['position', '', False])} prompts\n")
    print("| map | residual weight | partial | Spearman | partial, receptive field | Spearman |")
    print("|---|---|---|---|---|---|")
    for name, weight, normalised in scores:
        if not normalised:
            found = [scores[key] for key in ((name, weight, False), (name, weight, True)) if key in scores]
            cells = [cell([pair[which] for pair in pairs]) for pairs in found for which in (0, 1)]
            cells += [""] * (4 - len(cells))
            print(f"| {name} | {weight} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main(*sys.argv[1:])
