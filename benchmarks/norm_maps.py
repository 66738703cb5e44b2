"""Measure how much positions mix in an encoder and a decoder, and what folding a bias does to the maps.

    PYTHONPATH=.:demos python -m benchmarks.norm_maps

It takes about a minute, needs all-MiniLM-L6-v2 and SmolLM2-135M, and writes results/norm_maps.md. The
sentences are those of demos/norms.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import models
import norms as demo
import torch

from benchmarks.common import describe_machine, markdown_table
from lens_mix.experiments import cancel_effect, mixing_ratio

OUT = Path(__file__).parent / "results" / "norm_maps.md"
STAGES = {
    "attn_w": "attention weights",
    "attn_n": "vectors",
    "attn_res": "with the residual stream",
    "attn_res_ln": "after the norm",
    "atb_ff_res_ln": "after the feed-forward",
}
Row = dict[str, Any]


def ratios(model: Any) -> dict[str, float]:
    """Return the mean mixing ratio over tokens and layers, by stage."""
    means = mixing_ratio.by_layer(mixing_ratio.mixing_ratios(model, list(demo.SENTENCES))).loc["mean"]
    return {title: float(means[stage]) for stage, title in STAGES.items()}


def strongest_cancel_effect(model: Any) -> Row:
    """Return the token and layer with the largest cancel effect."""
    lengths = cancel_effect.weights_and_norms(model, list(demo.SENTENCES))
    found = cancel_effect.cancelled_tokens(lengths, count=1).iloc[0]
    return {
        # A vertical bar would end the cell.
        "token": f"`{found['token']}`".replace("|", ""),
        "layer": f"layer {found['layer']}",
        "attention, %": f"{100 * found['weight']:.0f}",
        "length": f"{found['norm']:.2f}",
        "length of the others": f"{found['others_norm']:.2f}",
    }


def folding(model: Any) -> tuple[list[Row], list[Row]]:
    """Return the mean mixing ratios and the largest changes of entries, before and after b_V is folded."""
    before = ratios(model)
    _, maps = demo.measure(model)
    model.enable_compatibility_mode(
        disable_warnings=True, fold_ln=False, center_writing_weights=False, center_unembed=False
    )
    after = ratios(model)
    _, folded = demo.measure(model)
    means = [
        {"weights": name, **{stage: f"{value:.3f}" for stage, value in found.items()}}
        for name, found in (("b_V in the values", before), ("b_V folded into b_O", after))
    ]
    entries = []
    for name in demo.LAYER_MAPS:
        changes = [_change(*pair) for pair in zip(maps[name], folded[name], strict=True)]
        entries.append({"map": f"`{name}`", "largest change": f"{max(changes):.3f}"})
    return means, entries


def _change(before: Any, after: Any) -> float:
    return float((after.scores - before.scores).abs().max())


def sections() -> Iterator[str]:
    """Yield the sections of the results."""
    loaded = {"all-MiniLM-L6-v2": models.minilm(), "SmolLM2-135M-Instruct": models.smollm2()}
    rows = [
        {"model": name, **{stage: f"{value:.2f}" for stage, value in ratios(model).items()}}
        for name, model in loaded.items()
    ]
    yield f"## Mean mixing ratio\n\nMean over layers and tokens.\n\n{markdown_table(rows)}\n"
    rows = [{"model": name, **strongest_cancel_effect(model)} for name, model in loaded.items()]
    yield f"## Strongest cancel effect\n\nMean over heads and queries.\n\n{markdown_table(rows)}\n"
    means, entries = folding(loaded["all-MiniLM-L6-v2"])
    note = (
        "all-MiniLM-L6-v2, TransformerBridge with unprocessed weights, then with b_V folded and nothing else."
    )
    yield f"## b_V folded, mean mixing ratio\n\n{note}\n\n{markdown_table(means)}\n"
    yield f"## b_V folded, map entries\n\nRows that sum to 1.\n\n{markdown_table(entries)}\n"


def main() -> None:
    """Write all sections."""
    torch.set_num_threads(1)
    start = time.perf_counter()
    texts = list(sections())
    intro = (
        f"Written by `python -m benchmarks.norm_maps`; {len(demo.SENTENCES)} sentences.\n\n"
        "The mixing ratio of position i is ‖Σ_{j≠i} F_ij‖ / (‖Σ_{j≠i} F_ij‖ + ‖F_ii‖), where F_ij is the "
        "contribution of key j at one stage, and for attention weights the weight. 0: nothing comes from "
        "other positions. The first token of a decoder has 0. The first two columns leave out the residual "
        "stream; (A + I) / 2 already has half of the first one. The cancel effect is attention · (1 − length "
        "/ length of the others), where a length is that of a key's vector before it is weighted.\n"
    )
    facts = f"Machine: {describe_machine()}; {time.perf_counter() - start:.0f} s.\n"
    text = "\n".join(["# Norm-based maps\n", intro, facts, *texts])
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
