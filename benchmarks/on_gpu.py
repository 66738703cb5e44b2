"""Measure the table of costs on a GPU, and whether the library waits for the GPU inside its chunks.

    python -m benchmarks.on_gpu                        at most eight minutes on a machine with a GPU
    python -m benchmarks.on_gpu --model random         random weights of the same size: no download
    python -m benchmarks.on_gpu --model large          costs on 8 billion parameters, in two dtypes
    python -m benchmarks.on_gpu --model long           prompts of 8,000 to 128,000 tokens, in bfloat16
    python -m benchmarks.on_gpu --device cpu --quick   runs the whole script on a small model, without a GPU

The calls are those of `benchmarks.costs`, in one process. Time is by the clock, after the GPU has finished,
and memory is what torch allocates.

A wait is a place where the processor waits for the GPU: it reads a number (`item()`), searches for indices
(`nonzero`), or copies between the two. `torch.profiler` counts waits, and a dispatch mode finds the lines of
the library that they come from. If a call has more waits with many small chunks than with few large ones,
they are inside the loop over the chunks.

Last, the scores of all methods are compared with those of the processor.

The results are on_gpu.json and on_gpu.md in the folder of --out, or on_gpu_large and on_gpu_long.
"""

from __future__ import annotations

import argparse
import collections
import copy
import functools
import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import lens_mix as lm
from benchmarks import common, costs, long_prompts

OUT = Path(__file__).resolve().parent / "results"
SECONDS = 480.0
# The seconds that are left for the waits after the costs.
FOR_WAITS = 110.0
# What a quick run reduces the lengths, the depth and the large model's width to.
QUICK_TOKENS, QUICK_LAYERS, QUICK_WIDTH = 9, 2, 64
LIMITS = ("÷ forward, limit", "memory MB, limit")

# Operations that wait for the GPU, by the names of torch's dispatcher.
_WAITING = {
    *("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "equal", "bincount"),
    "repeat_interleave.Tensor",
}
_COPIES = {"_to_copy", "copy_"}
_INDEXED = {"index", "index_put", "index_put_"}
# What the profiler counts: waits of CUDA, and the operations that cause them, which a CPU has too.
_PROFILED = re.compile(
    r"cuda(Stream|Device|Event)Synchronize|Memcpy DtoH.*|aten::(_local_scalar_dense|nonzero|masked_select)"
)
# Methods with loops over chunks: pairs, neurons, rows, replaced tokens, points of an integral.
_CHUNKED: dict[str, Any] = {
    "value_zeroing": "value_zeroing",
    "atb_ff_res_ln": "atb_ff_res_ln",
    "alti": "alti",
    "decompx": "decompx",
    "gim": "gim",
    "occlusion, one stand-in": lm.methods.Occlusion(by="replace", replacements=[5]),
    "attention_attribution, 8 points": lm.methods.AttentionAttribution(n_steps=8),
}

# The lengths of the prompts of the large model, as in the table of lengths.
_LARGE = ("20", "200", "1000", "2000")
# Calls on long prompts are compared with a forward pass of transformers with fused attention.
_LONG, _QUICK_LONG = long_prompts.PAPER_LENGTHS, (300, 400)
_LAST_ROW = ("attention", "attn_res_ln", "alti", "value_zeroing", "gim")
# Whose scores are compared with the processor's.
_COMPARED = tuple(lm.METHODS)


class Waits(TorchDispatchMode):
    """Count the operations that wait for the GPU, by the line of the library that they come from.

    Attributes:
        origins: The number of waits by place: "file:line function, operation".
        operations: The number of all operations.
    """

    def __init__(self) -> None:
        super().__init__()
        self.origins: collections.Counter[str] = collections.Counter()
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.operations += 1
        if _waits(func, args, out):
            self.origins[f"{_find_caller()}, {func}"] += 1
        return out


def _waits(func: Any, args: Any, out: Any) -> bool:
    """Return whether an operation waits for the GPU. On a CPU, whether it would."""
    name = func.overloadpacket.__name__
    if name in _WAITING or f"{name}.{func._overloadname}" in _WAITING:
        return True
    if name in _INDEXED:
        # The positions of True in a mask are searched.
        return any(
            torch.is_tensor(index) and index.dtype == torch.bool for index in args[1] if index is not None
        )
    if name in _COPIES:
        devices = {each.device.type for each in (*args, out) if torch.is_tensor(each)}
        return len(devices) > 1
    return False


def _find_caller() -> str:
    """Return the innermost line of lens_mix that is running."""
    frame = sys._getframe(2)
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if module.startswith("lens_mix"):
            return f"{module.replace('.', '/')}.py:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "the model"


def count_profiled(run: Callable[[], object], device: str) -> dict[str, int]:
    """Return how often the profiler saw each kind of wait."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with profile(activities=activities) as profiled:
        run()
        common.synchronize()
    found = {event.key: int(event.count) for event in profiled.key_averages()}
    return {name: count for name, count in found.items() if _PROFILED.fullmatch(name)}


def count_by_line(run: Callable[[], object]) -> Waits:
    """Return the waits of a run."""
    with Waits() as counted:
        run()
    return counted


def compare_chunks(model: Any, name: str, prompt: torch.Tensor) -> dict[str, Any]:
    """Return the waits of a method with large and with small chunks, and where there are more."""
    method = _CHUNKED[name]

    def run(bound: int) -> object:
        return lm.run(model, prompt, method, max_memory=bound, progress=None)

    # The least bound would make more chunks than anybody has.
    least = 2 * _find_least_bound(run)
    run(1 << 33)  # Nothing is verified or looked up for the first time in the runs that are compared.
    large, small = count_by_line(lambda: run(1 << 33)), count_by_line(lambda: run(least))
    profiled = [
        sum(count_profiled(lambda bound=bound: run(bound), prompt.device.type).values())
        for bound in (1 << 33, least)
    ]
    more = {place: count - large.origins[place] for place, count in small.origins.items()}
    is_tested = small.operations > large.operations
    inside = [f"{place} (+{count})" for place, count in more.items() if count > 0]
    return {
        "method": name,
        "waits, large chunks": large.origins.total(),
        "waits, small chunks": small.origins.total(),
        "operations, large chunks": large.operations,
        "operations, small chunks": small.operations,
        "profiled, large chunks": profiled[0],
        "profiled, small chunks": profiled[1],
        "inside the chunks": "; ".join(inside)
        or ("none" if is_tested else "not tested: one chunk fits in any bound"),
    }


def _find_least_bound(run: Callable[[int], object]) -> int:
    """Return the smallest bound of memory with which a run works, from the errors about smaller ones."""
    bound = 1
    while True:
        try:
            run(bound)
        except ValueError as problem:
            asked = re.search(r"max_memory: expected at least (\d+) bytes", str(problem))
            if asked is None or int(asked[1]) <= bound:
                raise
            bound = int(asked[1])
        else:
            return bound


def compare_scores(device: str) -> Iterator[dict[str, Any]]:
    """Yield, for each method, the largest difference from the processor's scores ÷ the largest score."""
    model = common.llama_like(layers=QUICK_LAYERS, context=64).double()
    moved, prompt = copy.deepcopy(model).to(device), common.random_tokens(model, 12)
    for name in _COMPARED:
        expected = lm.run(model, prompt, name, progress=None).scores
        found = lm.run(moved, prompt.to(device), name, progress=None).scores.cpu()
        yield {"method": name, "difference": float((found - expected).abs().max() / expected.abs().max())}


def measure_costs(
    model: Any,
    tables: Iterable[Sequence[costs.Call]],
    options: argparse.Namespace,
    deadline: float,
    patience: float = 4.0,
) -> Iterator[dict[str, Any]]:
    """Yield the rows of calls that take turns, as many as the time allows."""
    quick = {"most_tokens": QUICK_TOKENS, "turns": 1} if options.quick else {"turns": 5, "patience": patience}
    for calls in tables:
        if time.monotonic() > deadline:
            yield from ({"call": call.name, "tokens": call.tokens, "note": "no time left"} for call in calls)
            continue
        try:
            rows = list(costs.measure(model, calls, memory=True, device=options.device, **quick))
        except torch.OutOfMemoryError as problem:
            rows = [
                {"call": call.name, "tokens": call.tokens, "note": str(problem).splitlines()[0][:120]}
                for call in calls
            ]
        for row in rows:
            # The limits are for one thread of a CPU.
            yield {name: value for name, value in row.items() if name not in LIMITS}


def measure(model: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Return all figures: costs, waits of single runs, and waits inside chunks."""
    start = time.monotonic()
    found: dict[str, Any] = {
        "machine": common.machine(),
        "device": options.device,
        "model": options.model,
        "is quick": options.quick,
    }
    # A bound of the time of the costs leaves time for the rest.
    deadline = start + options.seconds - FOR_WAITS
    found["costs"] = list(measure_costs(model, costs.CALLS.values(), options, deadline))
    prompt = common.random_tokens(model, QUICK_TOKENS if options.quick else 64).to(options.device)
    found["waits"], found["places"] = [], {}
    for method in ("attention", "value_zeroing", "gim"):
        run = lambda method=method: lm.run(model, prompt, method, queries=[-1])  # noqa: E731
        run()
        counted = count_by_line(run)
        profiled = count_profiled(run, options.device)
        found["waits"].append({"method": method, "by line": counted.origins.total(), **profiled})
        found["places"][method] = dict(counted.origins.most_common())
    found["chunks"] = []
    # The loops over chunks are the same in each block, and two blocks leave time for all methods.
    small = load_model(options.model, options.device, quick=True)
    prompt = common.random_tokens(small, QUICK_TOKENS if options.quick else 64).to(options.device)
    for name in _CHUNKED:
        if time.monotonic() > start + options.seconds:
            found["chunks"].append({"method": name, "inside the chunks": "no time left"})
            continue
        found["chunks"].append(compare_chunks(small, name, prompt))
    found["scores"] = (
        [] if time.monotonic() > start + options.seconds else list(compare_scores(options.device))
    )
    found["seconds"] = time.monotonic() - start
    return found


def measure_large(options: argparse.Namespace) -> dict[str, Any]:
    """Return the costs of layer maps and input maps on a model of 8 billion parameters, in two dtypes."""
    start = time.monotonic()
    found: dict[str, Any] = {
        "machine": common.machine(),
        "device": options.device,
        "model": "8 billion parameters, random weights",
        "is quick": options.quick,
        "costs": [],
    }
    size = {"layers": QUICK_LAYERS, "width": QUICK_WIDTH} if options.quick else {}
    for number, dtype in enumerate((torch.float32, torch.bfloat16), start=1):
        model = load_large_model(dtype, options.device, **size)
        lengths = [costs.LENGTHS[length] for length in _LARGE]
        # Each dtype has half of the time, and the calls of a length have a sixteenth of it.
        deadline = start + number * options.seconds / 2
        rows = measure_costs(model, lengths, options, deadline, patience=options.seconds / 32)
        found["costs"] += [{"dtype": str(dtype).removeprefix("torch."), **row} for row in rows]
        del model
    found["seconds"] = time.monotonic() - start
    return found


def measure_long(options: argparse.Namespace) -> dict[str, Any]:
    """Return seconds and GB of maps of the last row of long prompts, and of a forward pass."""
    start = time.monotonic()
    size = {"layers": QUICK_LAYERS, "width": QUICK_WIDTH} if options.quick else {}
    found: dict[str, Any] = {
        "machine": common.machine(),
        "device": options.device,
        "model": "8 billion parameters, random weights, bfloat16",
        "is quick": options.quick,
        "costs": [],
    }
    lengths = _QUICK_LONG if options.quick else _LONG
    deadline = start + options.seconds
    # A TransformerBridge replaces the attention of the model that it wraps, so this one is not wrapped.
    plain = load_large_model(torch.bfloat16, options.device, wrapped=False, **size)
    plain.set_attn_implementation("sdpa")
    forward = torch.inference_mode()(
        lambda prompt: plain(prompt[None], use_cache=False, logits_to_keep=1).logits
    )
    found["costs"] += measure_lengths(long_prompts.FORWARD, forward, lengths, options.device, deadline)
    del plain, forward
    model = load_large_model(torch.bfloat16, options.device, **size)
    for method in _LAST_ROW:
        run = functools.partial(lm.run, model, methods=method, queries=[-1], progress=None)
        found["costs"] += measure_lengths(f"{method}, last row", run, lengths, options.device, deadline)
    found["seconds"] = time.monotonic() - start
    return found


def measure_lengths(
    name: str, run: Callable[[torch.Tensor], object], lengths: Sequence[int], device: str, deadline: float
) -> Iterator[dict[str, Any]]:
    """Yield the seconds and GB of a call by the length of its prompt, as long as it fits."""
    for tokens in lengths:
        row: dict[str, Any] = {"call": name, "tokens": tokens}
        if time.monotonic() > deadline:
            yield row | {"note": "no time left"}
            return
        draw = torch.Generator().manual_seed(0)
        prompt = torch.randint(5, 900, (tokens,), generator=draw).to(device)
        try:
            run(prompt[: long_prompts.WARM])  # The first call on a model verifies it.
            common.synchronize()
            began = time.monotonic()
            peak, _ = common.peak_over_model(lambda prompt=prompt: run(prompt), device)
            common.synchronize()
        except (torch.OutOfMemoryError, ValueError) as problem:
            # A longer prompt needs more memory.
            yield row | {"note": str(problem).splitlines()[0][:120]}
            return
        yield row | {"seconds": time.monotonic() - began, "GB": peak / 1e9}


def describe_long(found: dict[str, Any]) -> str:
    """Return the figures of long prompts as a Markdown page."""
    title = "# Long prompts on a GPU" if found["device"] == "cuda" else "# Long prompts, tried on a CPU"
    size = "small, for a trial of the script" if found["is quick"] else found["model"]
    about = f"Machine: {common.describe_machine(found['machine'])}. Model: {size}."
    rows: dict[str, dict[str, Any]] = {}
    for cost in found["costs"]:
        row = rows.setdefault(cost["call"], {"call": cost["call"]})
        figures = {name: cost.get(name) for name in ("seconds", "GB", "note")}
        row |= {f"{cost['tokens']} {name}": value for name, value in figures.items() if value is not None}
    return "\n\n".join([title, about, common.markdown_table(list(rows.values()))]) + "\n"


def load_large_model(dtype: torch.dtype, device: str, **size: Any) -> Any:
    """Return a model of 8 billion parameters, or of a smaller size, made in this dtype on the device."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return common.llama_8b_like(**size)
    finally:
        torch.set_default_dtype(before)


def describe_large(found: dict[str, Any]) -> str:
    """Return the figures of the large model as a Markdown page."""
    title = "# A large model on a GPU" if found["device"] == "cuda" else "# A large model, tried on a CPU"
    size = "small, for a trial of the script" if found["is quick"] else found["model"]
    about = f"Machine: {common.describe_machine(found['machine'])}. Model: {size}."
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for cost in found["costs"]:
        key = (cost["dtype"], cost["call"])
        row = rows.setdefault(key, {"dtype": cost["dtype"], "call": cost["call"]})
        # A cost that could not be measured has a note instead.
        figures = {"÷ forward": cost.get("÷ forward"), "MB": cost.get("memory MB"), "note": cost.get("note")}
        row |= {f"{cost['tokens']} {name}": value for name, value in figures.items() if value}
    forwards = [
        {"dtype": cost["dtype"], "tokens": cost["tokens"], "seconds": cost.get("forward s")}
        for cost in found["costs"]
        if cost["call"] == "forward pass"
    ]
    parts = ["## Forward passes", common.markdown_table(forwards)]
    parts += ["## What calls cost", common.markdown_table(list(rows.values()))]
    return "\n\n".join([title, about, *parts]) + "\n"


def describe(found: dict[str, Any]) -> str:
    """Return the figures as a Markdown page."""
    title = "# On a GPU" if found["device"] == "cuda" else "# The script for a GPU, tried on a CPU"
    size = "small, for a trial of the script" if found["is quick"] else found["model"]
    lines = [title, "", f"Machine: {common.describe_machine(found['machine'])}. Model: {size}."]
    lines += ["", "## What calls cost", "", common.markdown_table(found["costs"])]
    lines += ["", "## Waits of one run, last row", "", common.markdown_table(found["waits"])]
    for method, places in found["places"].items():
        lines += ["", f"{method}:", "", *(f"- {count} × {place}" for place, count in places.items())]
    lines += ["", "## Waits inside chunks, model of two blocks", "", common.markdown_table(found["chunks"])]
    lines += ["", "## Scores beside the processor's, float64", "", common.markdown_table(found["scores"])]
    return "\n".join(lines) + "\n"


def load_model(name: str, device: str, quick: bool) -> Any:
    """Return the trained model, or one of its size with random weights; for a quick run a small one."""
    if quick:
        return common.llama_like(layers=QUICK_LAYERS, context=64).to(device)
    return (common.smollm2() if name == "smollm2" else common.smollm2_like()).to(device)


def main(arguments: list[str] | None = None) -> None:
    """Measure, print the page and write it with its JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", choices=("smollm2", "random", "large", "long"), default="smollm2")
    parser.add_argument("--quick", action="store_true", help="a small model and short prompts")
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: expected a GPU that torch can use, found none; --device cpu tries the script")
    if options.model == "large":
        name, found = "on_gpu_large", measure_large(options)
        page = describe_large(found)
    elif options.model == "long":
        name, found = "on_gpu_long", measure_long(options)
        page = describe_long(found)
    else:
        name, found = "on_gpu", measure(load_model(options.model, options.device, options.quick), options)
        page = describe(found)
    print(page)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{name}.json").write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    (options.out / f"{name}.md").write_text(page)


if __name__ == "__main__":
    main()
