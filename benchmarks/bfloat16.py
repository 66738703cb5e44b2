"""Measure what a model in bfloat16 changes: how far its maps agree with those in float32, and their time.

    python -m benchmarks.run --tables bfloat16     SmolLM2-135M and Gemma 3 270M, held-out prompts

Both models have the same weights. The last row of each method is compared: by Spearman over all its keys, and
by its strongest key. A layer map is compared in each layer, and a prompt has the mean over the layers. The
gradients explain each model's own prediction.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

import lens_mix as lm
from benchmarks import common
from benchmarks.input_map.prompts import make
from benchmarks.traces.table import wilson
from lens_mix.evaluation import bootstrap, spearman

METHODS = (
    *("attention", "value_norm", "attn_res_ln", "globenc", "alti", "atb_ff_res_ln", "value_zeroing"),
    *(
        "information_flow_routes",
        "decompx",
        "gradient_attention",
        "input_gradients",
        "frozen_gradients",
        "gim",
    ),
)
INPUT_MAP, FORWARD = "lm.input_map", "forward pass, predicted token"
# Every ninth held-out prompt: prompts of all kinds.
EVERY = 9
TIMED_TOKENS, TURNS = 128, 3


def choose_prompts() -> list[str]:
    """Return some held-out prompts of all kinds."""
    return [prompt.text for prompt in make() if prompt.half == "held_out"][::EVERY]


def load_models(name: str) -> tuple[Any, Any]:
    """Return a model in float32 and in bfloat16."""
    from transformer_lens.model_bridge import TransformerBridge

    from demos import models

    wide = getattr(models, name)()
    folder = getattr(models, f"{name}_folder")()
    # `model.to(torch.bfloat16)` would round the rotary frequencies too.
    return wide, TransformerBridge.boot_transformers(str(folder), dtype=torch.bfloat16).eval()


def compare_rows(row: torch.Tensor, other: torch.Tensor) -> tuple[float, float]:
    """Return Spearman of two maps [layer, 1, key], and the share of layers with the same strongest key."""
    pairs = list(zip(row[:, -1].float(), other[:, -1].float(), strict=True))
    ranks = [spearman(a, b) for a, b in pairs]
    defined = [rank for rank in ranks if not math.isnan(rank)]
    tops = [float(a.argmax() == b.argmax()) for a, b in pairs]
    return statistics.fmean(defined) if defined else math.nan, statistics.fmean(tops)


def agreement(wide: Any, half: Any, prompts: Sequence[str]) -> dict[str, list[tuple[float, float]]]:
    """Return the agreement of each method for each prompt."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in (*METHODS, INPUT_MAP, FORWARD)}
    for prompt in prompts:
        tokens = wide.to_tokens(prompt)[0]
        maps = [_compute_maps(model, tokens) for model in (wide, half)]
        for name in maps[0]:
            found[name].append(compare_rows(maps[0][name], maps[1][name]))
    return found


def _compute_maps(model: Any, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the last row of each method, and the logits of the next token as one more row."""
    maps = lm.run(model, tokens, list(METHODS), queries=[-1], progress=None)
    with torch.no_grad():
        logits = model(tokens[None])[0, -1:]
    scores = {name: mixing_map.scores for name, mixing_map in maps.items()}
    return {**scores, INPUT_MAP: lm.input_map(model, tokens).scores, FORWARD: logits[None]}


def times(wide: Any, half: Any, tokens: int = TIMED_TOKENS, turns: int = TURNS) -> dict[str, float]:
    """Return the time of each method in bfloat16 divided by its time in float32."""
    prompt = common.random_tokens(wide, tokens)
    found = {}
    for name in (*METHODS, INPUT_MAP, FORWARD):
        ways = {"wide": _call(wide, prompt, name), "half": _call(half, prompt, name)}
        seconds = common.interleaved(ways, turns, clock=time.process_time)
        found[name] = seconds["half"] / seconds["wide"]
    return found


def _call(model: Any, prompt: torch.Tensor, name: str) -> Callable[[], object]:
    if name == INPUT_MAP:
        return lambda: lm.input_map(model, prompt)
    if name == FORWARD:
        return torch.no_grad()(lambda: model(prompt[None]))
    return lambda: lm.run(model, prompt, name, queries=[-1], progress=None)


def rows(names: Sequence[str] = ("smollm2", "gemma3")) -> Iterator[dict[str, Any]]:
    """Yield a row per model and method."""
    torch.set_num_threads(1)
    titles = {"smollm2": "SmolLM2-135M", "gemma3": "Gemma 3 270M"}
    for model_name in names:
        wide, half = load_models(model_name)
        agreed, ratios = agreement(wide, half, choose_prompts()), times(wide, half)
        for name, values in agreed.items():
            ranks, tops = zip(*values, strict=True)
            yield {
                "model": titles[model_name],
                "method": name,
                "Spearman": _format_interval(ranks),
                "same strongest key": _format_interval(tops),
                "time ÷ float32": ratios[name],
                "n": len(values),
            }


def _format_interval(values: Sequence[float]) -> str:
    """Return the mean with its 95 % interval: Wilson's for shares of prompts, else of the bootstrap."""
    found = bootstrap(values)
    low, high = wilson(np.array(values)) if set(values) <= {0.0, 1.0} else (found.low, found.high)
    return f"{found.mean:.3f} [{low:.3f}, {high:.3f}]"
