"""Measure the errors of the verification on real models, and those of blocks with a known fault.

    PYTHONPATH=. python -m benchmarks.verification     writes results/verification.md, some minutes

`lm.check` rebuilds every block from its components. A prompt's error is the largest of any component, block
and position. A fault multiplies the output of one feed-forward, as a factor that no formula has would.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import lens_mix as lm
from benchmarks import common
from benchmarks.bfloat16 import choose_prompts

FILE = Path(__file__).resolve().parent / "results" / "verification.md"
FAULTS = (1.001, 1.01, 1.1)
PICTURES = 12
NOTE = (
    "The models of the demos, with the weights of their packages. A prompt's error is the largest relative "
    "error of any component, block and position, as `lm.check` returns it: the median over prompts, with "
    "the smallest and the largest of them in brackets. `accepted` is the largest error that is verified. A "
    "fault multiplies the output of the feed-forward of the middle block. `verified`: the number of prompts "
    "on which every component that the model's maps need is verified."
)


def measure(model: Any, prompts: Sequence[Any], part: str | None = None) -> dict[str, Any]:
    """Return the errors of a model over prompts, as cells of a row."""
    checks = [lm.check(model, prompt, part=part).verification for prompt in prompts]
    errors = [max(entry.error for entry in found.components if entry.error is not None) for found in checks]
    accepted = checks[0].components[0].tolerance
    unfit = {entry.component for found in checks for entry in found.components if entry.error is None}
    return {
        "error": summarize(errors, "{:.1e}".format),
        "accepted": f"{accepted:.0e}",
        "error, % of accepted": summarize([100 * error / accepted for error in errors], two_digits),
        "verified": sum(found.algebra_failure is None for found in checks),
        "n": len(errors),
        "not compared": ", ".join(sorted(unfit)),
    }


def summarize(values: Sequence[float], written: Callable[[float], str]) -> str:
    """Return the median with the smallest and the largest value."""
    return f"{written(statistics.median(values))} [{written(min(values))}, {written(max(values))}]"


def two_digits(value: float) -> str:
    """Return a number rounded to two significant digits, without an exponent."""
    return f"{float(f'{value:.1e}'):g}"


@contextlib.contextmanager
def fault(model: Any, factor: float) -> Iterator[None]:
    """Multiply the output of the feed-forward of the middle block."""
    block = model.blocks[len(model.blocks) // 2]
    module = getattr(block.mlp, "original_component", block.mlp)
    handle = module.register_forward_hook(lambda module, given, output: output * factor)
    try:
        yield
    finally:
        handle.remove()


def in_bfloat16(name: str) -> Any:
    """Return a model of the demos in bfloat16."""
    from transformer_lens.model_bridge import TransformerBridge

    from demos import models

    folder = getattr(models, f"{name}_folder")()
    return TransformerBridge.boot_transformers(str(folder), dtype=torch.bfloat16).eval()


def rows() -> Iterator[dict[str, Any]]:
    """Yield a row per model, dtype, part and fault."""
    from demos import models

    prompts = choose_prompts()
    generator = torch.Generator().manual_seed(0)
    pictures = [torch.randn(1, 3, 224, 224, generator=generator) for _ in range(PICTURES)]
    loaders: dict[tuple[str, str], Callable[[], Any]] = {
        ("SmolLM2-135M", "float32"): models.smollm2,
        ("Gemma 3 270M", "float32"): models.gemma3,
        ("all-MiniLM-L6-v2", "float32"): models.minilm,
        ("quire-grammar tagger", "float32"): models.quire_tagger,
        ("flan-t5-small", "float32"): models.flan_t5,
        ("DINOv2-small", "float32"): models.dinov2,
        ("SmolLM2-135M", "bfloat16"): functools.partial(in_bfloat16, "smollm2"),
        ("Gemma 3 270M", "bfloat16"): functools.partial(in_bfloat16, "gemma3"),
    }
    for (name, dtype), load in loaders.items():
        model = load()
        for part in ("encoder", "decoder", "cross") if name == "flan-t5-small" else (None,):
            given = pictures if name == "DINOv2-small" else prompts
            found = measure(model, given, part)
            yield {"model": name if part is None else f"{name} {part}", "dtype": dtype, "fault": "-", **found}
        for factor in FAULTS if name == "SmolLM2-135M" else ():
            with fault(model, factor):
                found = measure(model, prompts)
            yield {"model": name, "dtype": dtype, "fault": f"feed-forward × {factor}", **found}


def main() -> None:
    """Measure all rows and write them."""
    found = []
    for row in rows():
        print(row, flush=True)
        found.append(row)
    sections = (
        "# Errors of the verification",
        "Written by `python -m benchmarks.verification`; see [the page]"
        "(../../docs/evidence/verification.md).",
        f"Machine: {common.describe_machine()}.",
        "## Errors by model",
        NOTE,
        common.describe_measurement(),
        common.markdown_table(found),
    )
    FILE.write_text("\n\n".join(sections) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
