"""Measure maps of long prompts beside a forward pass with fused attention, the least that one can pay.

    PYTHONPATH=.:demos python -m benchmarks.long_prompts smollm2 500 1000 2000 4000 8000
    PYTHONPATH=.:demos python -m benchmarks.long_prompts gemma3 500 1000 2000
    PYTHONPATH=.:demos python -m benchmarks.long_prompts paper          counts bytes and operations
    PYTHONPATH=.:demos python -m benchmarks.long_prompts table          writes results/long_prompts.md

Each call runs in a process of its own, once on 600 tokens, which verifies the model (beyond Gemma 3's
windows of 512, too), and then once on the prompt. Time is processor time of one thread. Memory is resident
memory over that before the call, when the weights have been read. Random tokens are the prompt, because time
does not depend on them. Measurements are appended to `outputs/long_prompts/MODEL.jsonl`; the last one of a
call and a length is in the table.

The arithmetic for prompts that this machine cannot run is that of `Paper`: the bytes of all tensors are
counted on a model of an eighth of the width, which has an eighth of the bytes.
"""

from __future__ import annotations

import dataclasses
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
from lens_mix._passes import autograd_graph

FILE = Path(__file__).resolve().parent / "results" / "long_prompts.md"
FORWARD, EAGER = "fused forward pass of transformers", "eager forward pass of TransformerLens"
NAMES = {"smollm2": "SmolLM2", "gemma3": "Gemma 3"}
WRITTEN = 60
WARM = 600
LAST_ROW = ("attention", "attn_res_ln", "alti", "value_zeroing", "gim")
# An eager pass over more tokens needs several GB for each pattern.
LONGEST_EAGER = 4000
NOTE = (
    "Written by `PYTHONPATH=.:demos python -m benchmarks.long_prompts table`. Processor time of one thread, "
    "divided by that of a forward pass of transformers with its fused attention (`sdpa`) and the logits of "
    f"the last token. Memory is resident memory over the loaded model. `lm.trace` explains {WRITTEN} written "
    "tokens as one span. TransformerLens's own pass has the logits of all tokens. Each was measured once, in "
    "a process of its own, with other work on the two cores. Gemma 3 was measured before gradients left out "
    "the keys beyond a window, which made `gim` take 0.6 times as long at 4,000 tokens."
)


# The shape of Llama 3.1 8B, and prompts of more tokens than this machine can map.
LARGE = {"layers": 32, "width": 4096, "heads": 32, "key_heads": 8, "feed_forward": 14336}
PAPER_LENGTHS = (8_000, 32_000, 128_000)
NARROWER, COUNTED_TOKENS, COUNTED_LAYERS = 8, (512, 1024), (4, 8)
PAPER_NOTE = (
    "The shape is that of Llama 3.1 8B: 32 layers, width 4,096, 32 heads, 8 heads of keys, feed-forwards of "
    "14,336; the weights have 16 GB in bfloat16. GB come on top of these. Those of rows and gradients are "
    "counted: the bytes of all tensors at the same time, of models with an eighth of the width and of the "
    "heads, with 4 and 8 layers and 512 and 1,024 tokens. They are linear in the layers and, times 8, in the "
    "width. The other two are layers · tokens² · 4 bytes, and heads · tokens² · 2 bytes. Passes are "
    "operations of matrix products, divided by those of a forward pass with fused attention: a gradient by "
    "rows takes 3 times the products with weights, and 4.5 times those of attention."
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
    run(prompt[:WARM])
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


def count_bytes(call: str, layers: int, tokens: int) -> int:
    """Return the bytes of all tensors that a call needs at the same time, on a narrow model in bfloat16."""
    narrow = {name: LARGE[name] // NARROWER for name in ("width", "heads", "key_heads", "feed_forward")}
    model = common.llama_of(layers=layers, context=2048, vocabulary=1000, **narrow).to(torch.bfloat16)
    prompt = torch.randint(5, 900, (tokens,), generator=torch.Generator().manual_seed(0))
    run = lambda some: lm.run(model, some, call, queries=[-1], progress=None)  # noqa: E731
    run(prompt[:300])
    kept = autograd_graph._MOST_KEPT
    # The graph of so short a prompt would be kept as a whole.
    autograd_graph._MOST_KEPT = 0
    try:
        return common.peak_bytes(lambda: run(prompt))
    finally:
        autograd_graph._MOST_KEPT = kept


@dataclasses.dataclass(frozen=True)
class Paper:
    """The bytes of a call on a model of the large shape, as a polynomial of the number of tokens.

    Attributes:
        linear: The bytes of each token.
        square: The bytes of each pair of tokens, which do not depend on the width: one mask.
    """

    linear: float
    square: float

    @classmethod
    def of(cls, call: str, count: Callable[[str, int, int], int] = count_bytes) -> Paper:
        """Return the polynomial of a call from counts on four small models."""
        short, long = COUNTED_TOKENS
        few, more = COUNTED_LAYERS
        found = {}
        for layers in COUNTED_LAYERS:
            counts = [count(call, layers, tokens) for tokens in COUNTED_TOKENS]
            square = (counts[1] / long - counts[0] / short) / (long - short)
            found[layers] = counts[0] / short - square * short, square
        per_layer = (found[more][0] - found[few][0]) / (more - few)
        linear = found[few][0] + (LARGE["layers"] - few) * per_layer
        return cls(NARROWER * linear, found[few][1])

    def gigabytes(self, tokens: int) -> float:
        """Return the GB of a prompt."""
        return (self.linear * tokens + self.square * tokens**2) / 1e9


def count_passes(tokens: int, weights: float = 3.0, attention: float = 4.5) -> float:
    """Return the operations of a gradient by rows, in forward passes of the large shape.

    Args:
        tokens: The number of tokens.
        weights: How often the products with weights are made.
        attention: How often those of attention are: twice forward, and 5 instead of 2 products backward.
    """
    width, layers = LARGE["width"], LARGE["layers"]
    keys = 2 * LARGE["key_heads"] * width // LARGE["heads"]
    per_token = 2 * layers * width * (2 * width + keys + 3 * LARGE["feed_forward"])
    of_weights, of_attention = per_token * tokens, 2 * layers * width * tokens**2
    return (weights * of_weights + attention * of_attention) / (of_weights + of_attention)


def paper_rows() -> list[dict[str, Any]]:
    """Return the table on paper."""
    names = {"attention": "attention, last row", "alti": "alti, last row", "gim": "gim or lm.trace, one span"}
    rows = []
    for call, name in names.items():
        paper = Paper.of(call)
        row: dict[str, Any] = {"call": name}
        row |= {f"{tokens} GB": paper.gigabytes(tokens) for tokens in PAPER_LENGTHS}
        has_gradient = call == "gim"
        row |= {
            f"{tokens} passes": count_passes(tokens) if has_gradient else None for tokens in PAPER_LENGTHS
        }
        row["grows with"] = f"tokens · {paper.linear / 1e3:.0f} kB" + " + tokens²" * has_gradient
        rows.append(row)
    squares = {
        "map of all rows and layers": 4 * LARGE["layers"],
        "attention weights of one block": 2 * LARGE["heads"],
    }
    for name, size in squares.items():
        row = {"call": name} | {f"{tokens} GB": size * tokens**2 / 1e9 for tokens in PAPER_LENGTHS}
        rows.append(row | {"grows with": f"tokens² · {size} bytes"})
    return rows


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
    paper = Path("outputs/long_prompts/paper.json")
    if paper.exists():
        rows = json.loads(paper.read_text())
        lines += ["", "## On paper", "", PAPER_NOTE, "", common.markdown_table(rows)]
    FILE.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main(command: str, *arguments: str) -> None:
    """Run a command: "table", "paper", "measure", or the name of a model."""
    if command == "table":
        write_table()
    elif command == "paper":
        torch.set_num_threads(1)
        path = Path("outputs/long_prompts/paper.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(paper_rows()))
    elif command == "measure":
        name, call, tokens = arguments
        print(json.dumps(measure(name, call, int(tokens))))
    else:
        collect(command, list(map(int, arguments)))


if __name__ == "__main__":
    main(*sys.argv[1:])
