"""Compare the estimated error of attention attribution with the true one, and write results/errors.md.

    python -m benchmarks.attribution_error

Each layer of small random models is attributed with as many points as the method chooses, and with many more
as the reference. GPT-2 and Llama are smooth; OPT and T5 have ReLU, so that the gradient jumps along the path.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import lens_mix as lm
from benchmarks.common import describe_machine, markdown_table
from tests import tiny_models

SMOOTH, WITH_JUMPS = ("gpt2", "llama"), ("opt", "t5")
SEEDS = 10
# The error of a smooth integrand falls fast, that of one with jumps only like 1 / points.
REFERENCE_POINTS = {**dict.fromkeys(SMOOTH, 200), **dict.fromkeys(WITH_JUMPS, 1500)}


def measure_layers(kind: str, seed: int) -> Iterator[dict[str, Any]]:
    """Yield what is measured of each layer: points, accepted, and the true and estimated share of error."""
    model = tiny_models.bridge(kind, seed=seed)
    (tokens,), others = tiny_models.inputs(model, batch=1, seq=8)
    is_pair = tiny_models.is_encoder_decoder(model)
    prompt = (tokens, others["decoder_input"]) if is_pair else tokens
    options = {"part": "decoder" if is_pair else None, "progress": None}
    found = lm.run(model, prompt, lm.methods.AttentionAttribution(target=logit_of_a_token), **options)
    many = lm.methods.AttentionAttribution(target=logit_of_a_token, n_steps=REFERENCE_POINTS[kind])
    reference = lm.run(model, prompt, many, **options)
    details = found.provenance["details"]
    for layer, truth in enumerate(reference.scores.double()):
        size = truth.abs().sum().item()
        unmet = any(note.startswith(f"layer {layer}:") for note in found.notes)
        yield {
            "points": details["steps"][layer],
            "accepted": not unmet,
            "error": (found.scores[layer].double() - truth).abs().sum().item() / size,
            "estimate": details["estimated_error"][layer] / size,
        }


def logit_of_a_token(logits: torch.Tensor) -> torch.Tensor:
    """Return the logit of token 7 at the last position, as a target of lens_mix."""
    return logits[:, -1, 7]


def main() -> None:
    """Measure all models, and write the table."""
    start, rows = time.perf_counter(), []
    for kind in (*SMOOTH, *WITH_JUMPS):
        layers = [layer for seed in range(SEEDS) for layer in measure_layers(kind, seed)]
        accepted = [layer for layer in layers if layer["accepted"]]
        rows.append(
            {
                "model": kind,
                "gradient": "smooth" if kind in SMOOTH else "with jumps",
                "layers": len(layers),
                "points, median": statistics.median(layer["points"] for layer in layers),
                "accepted": len(accepted),
                "largest error of an accepted layer": max(layer["error"] for layer in accepted),
                "error at most the estimate": sum(layer["error"] <= layer["estimate"] for layer in layers),
            }
        )
        print(rows[-1], flush=True)
    text = (
        "# Attention attribution: estimated and true error\n\n"
        "Written by `python -m benchmarks.attribution_error`; see "
        "[the page on layers](../../../docs/evidence/layers.md). "
        "Errors are shares of the sum of a layer's absolute scores. The truth has many more points "
        f"({', '.join(f'{kind}: {count}' for kind, count in REFERENCE_POINTS.items())}); {SEEDS} random "
        "models of two layers of each kind; the target is a logit. Layers are accepted by default if the "
        "estimate is at most 1 %. It is an estimate, and not a bound.\n\n"
        f"Machine: {describe_machine()}; {time.perf_counter() - start:.0f} s.\n\n## Errors\n\n"
        f"{markdown_table(rows)}\n"
    )
    (Path(__file__).parent / "results" / "errors.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
