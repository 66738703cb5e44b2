"""Measure maps of long prompts beside a forward pass with fused attention, the least that one can pay.

    PYTHONPATH=.:demos python -m benchmarks.long_prompts smollm2 500 1000 2000 4000 8000
    PYTHONPATH=.:demos python -m benchmarks.long_prompts gemma3 500 1000 2000
    PYTHONPATH=.:demos python -m benchmarks.long_prompts table          writes results/long_prompts.md

Each call runs in a process of its own, once on 300 tokens, which verifies the model, and then once on the
prompt. Time is processor time of one thread. Memory is resident memory over that before the call, when the
weights have been read. Random tokens are the prompt, because time does not depend on them. Measurements are
appended to `outputs/long_prompts/MODEL.jsonl`; the last one of a call and a length is in the table.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import demos.models as models
import lens_mix as lm
from benchmarks import common

FILE = Path(__file__).resolve().parent / "results" / "long_prompts.md"
FORWARD, EAGER = "fused forward pass of transformers", "eager forward pass of TransformerLens"
NAMES = {"smollm2": "SmolLM2", "gemma3": "Gemma 3"}
WRITTEN = 60
LAST_ROW = ("attention", "attn_res_ln", "alti", "value_zeroing", "gim")
# An eager pass over more tokens needs several GB for each pattern.
LONGEST_EAGER = 4000
NOTE = (
    "Written by `PYTHONPATH=.:demos python -m benchmarks.long_prompts table`. Processor time of one thread, "
    "divided by that of a forward pass of transformers with its fused attention (`sdpa`) and the logits of "
    f"the last token. Memory is resident memory over the loaded model. `lm.trace` explains {WRITTEN} written "
    "tokens as one span. TransformerLens's own pass has the logits of all tokens. Each was measured once, in "
    "a process of its own, with other work on the second core."
)


def load_forward(name: str) -> Callable[[torch.Tensor], object]:
    """Return the forward pass of transformers, with fused attention and the last token's logits."""
    from transformers import AutoModelForCausalLM

    folder = getattr(models, f"{name}_folder")()
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()

    @torch.inference_mode()
    def run(tokens: torch.Tensor) -> object:
        return model(tokens[None], use_cache=False, logits_to_keep=1)

    return run


def load_call(name: str, call: str) -> Callable[[torch.Tensor], object]:
    """Return a call as a function of the prompt."""
    if call == FORWARD:
        return load_forward(name)
    model: Any = getattr(models, name)()
    if call == EAGER:
        return torch.inference_mode()(lambda tokens: model(tokens[None], use_cache=False))
    if call == "lm.trace":
        return lambda tokens: (
            lm.trace(model, tokens[:-WRITTEN], answer=tokens[-WRITTEN:], sources="token")[:].scores
        )
    return lambda tokens: lm.run(model, tokens, call.partition(",")[0], queries=[-1], progress=None)


def list_calls(tokens: int) -> list[str]:
    """Return the calls that are measured at a length."""
    eager = [EAGER] if tokens <= LONGEST_EAGER else []
    return [FORWARD, *eager, *(f"{method}, last row" for method in LAST_ROW), "lm.trace"]


def measure(name: str, call: str, tokens: int) -> dict[str, Any]:
    """Return the seconds and the MB of one call."""
    torch.set_num_threads(1)
    run = load_call(name, call)
    prompt = torch.randint(5, 4000, (tokens,), generator=torch.Generator().manual_seed(0))
    run(prompt[:300])
    began = time.process_time()
    peak, _ = common.peak_over_model(lambda: run(prompt))
    seconds = time.process_time() - began
    return {"call": call, "tokens": tokens, "seconds": round(seconds, 2), "MB": round(peak / 2**20)}


def collect(name: str, lengths: list[int]) -> None:
    """Measure all calls of some lengths, each in a process of its own."""
    path = Path(f"outputs/long_prompts/{name}.jsonl")
    path.parent.mkdir(parents=True, exist_ok=True)
    for tokens in lengths:
        for call in list_calls(tokens):
            command = [sys.executable, "-m", "benchmarks.long_prompts", "measure", name, call, str(tokens)]
            made = subprocess.run(command, capture_output=True, text=True, check=True)
            with path.open("a") as file:
                file.write(made.stdout.splitlines()[-1] + "\n")


def make_rows(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each call: time in fused forward passes and memory, by length."""
    found = {(each["call"], each["tokens"]): each for each in entries}
    lengths = sorted({tokens for _, tokens in found})
    rows = []
    for call in dict.fromkeys(call for call, _ in found):
        row: dict[str, Any] = {"call": call}
        for tokens in lengths:
            own, forward = found.get((call, tokens)), found[FORWARD, tokens]
            row[f"{tokens} ÷ forward"] = None if own is None else own["seconds"] / forward["seconds"]
        for tokens in lengths:
            own = found.get((call, tokens))
            row[f"{tokens} MB"] = None if own is None else own["MB"]
        rows.append(row)
    return rows


def write_table() -> None:
    """Write the record."""
    torch.set_num_threads(1)
    lines = ["# Maps of long prompts", "", NOTE]
    for name, title in NAMES.items():
        path = Path(f"outputs/long_prompts/{name}.jsonl")
        if path.exists():
            entries = [json.loads(line) for line in path.read_text().splitlines()]
            lines += ["", f"## {title}", "", common.describe_measurement(), ""]
            lines += [f"Machine: {common.describe_machine()}.", "", common.markdown_table(make_rows(entries))]
    FILE.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main(command: str, *arguments: str) -> None:
    """Run a command: "table", "measure", or the name of a model."""
    if command == "table":
        write_table()
    elif command == "measure":
        name, call, tokens = arguments
        print(json.dumps(measure(name, call, int(tokens))))
    else:
        collect(command, list(map(int, arguments)))


if __name__ == "__main__":
    main(*sys.argv[1:])
