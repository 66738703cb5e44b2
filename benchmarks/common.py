"""Provide what the benchmarks share: base-size models, interleaved timing, peak memory, matrix products.

Ratios are made only of times from one run, in which the compared variants take turns, and each has its
median. A single time depends on the machine's other work as much as on the code.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib.metadata as metadata
import json
import math
import os
import platform
import statistics
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Result = TypeVar("Result")

# ------------------------------------------------------------------ models


def gpt2_like(layers: int = 12, context: int = 1024, seed: int = 0, wrapped: bool = True) -> Any:
    """Return GPT-2 base: d_model 768, 12 heads, d_mlp 3072, pre-norm LayerNorm, tanh GELU, random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=layers, n_positions=context, vocab_size=1000, bos_token_id=1, eos_token_id=2)
    return _build(GPT2LMHeadModel, config, seed, wrapped)


def llama_like(layers: int = 12, context: int = 1024, seed: int = 0, wrapped: bool = True) -> Any:
    """Return a base-size Llama: 12 heads, 4 value heads, gated feed-forward of 2048, random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=layers,
        num_attention_heads=12,
        num_key_value_heads=4,
        max_position_embeddings=context,
        vocab_size=1000,
    )
    return _build(LlamaForCausalLM, config, seed, wrapped)


def bert_like(layers: int = 12, context: int = 1024, seed: int = 0, wrapped: bool = True) -> Any:
    """Return BERT base: bidirectional, post-norm LayerNorm, exact GELU, random weights."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(num_hidden_layers=layers, max_position_embeddings=context, vocab_size=1000)
    return _build(BertForMaskedLM, config, seed, wrapped)


MODELS: dict[str, Callable[..., Any]] = {
    "gpt2-like": gpt2_like,
    "llama-like": llama_like,
    "bert-like": bert_like,
}


def smollm2() -> Any:
    """Return SmolLM2-135M, the trained model of the demos."""
    from demos.models import smollm2 as load

    return load()


def smollm2_like(layers: int = 30, context: int = 8192, seed: int = 0, wrapped: bool = True) -> Any:
    """Return a Llama of the size of SmolLM2-135M, random weights, for machines without the trained one."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=context,
        vocab_size=49152,
        tie_word_embeddings=True,
    )
    return _build(LlamaForCausalLM, config, seed, wrapped)


def llama_of(
    layers: int,
    width: int,
    heads: int,
    key_heads: int,
    feed_forward: int,
    vocabulary: int = 128256,
    context: int = 131072,
    wrapped: bool = True,
) -> Any:
    """Return a Llama of any size, random weights, on torch's default device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=feed_forward,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        max_position_embeddings=context,
        vocab_size=vocabulary,
    )
    return _build(LlamaForCausalLM, config, seed=0, wrapped=wrapped)


def llama_8b_like(layers: int = 32, width: int = 4096, wrapped: bool = True) -> Any:
    """Return a Llama of the size of Llama 3.1 8B, random weights, on torch's default device."""
    return llama_of(layers, width, heads=32, key_heads=8, feed_forward=width * 7 // 2, wrapped=wrapped)


def _build(model_class: Any, config: Any, seed: int, wrapped: bool) -> Any:
    """Return a transformers model with random weights, in a TransformerBridge if `wrapped`."""
    config.architectures = [model_class.__name__]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config).eval()
        for name, parameter in model.named_parameters():
            # Biases and norm weights differ from 0 and 1, so that no term vanishes by accident.
            if parameter.ndim == 1:
                parameter.data.add_(0.05 * torch.randn_like(parameter))
            elif "wte" not in name and "embed" not in name:
                parameter.data.normal_(0, 1.2 / math.sqrt(parameter.shape[-1]))
    model.set_attn_implementation("eager")
    if not wrapped:
        return model
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    return build_bridge_from_module(model, architecture=model_class.__name__, hf_config=config).eval()


def random_tokens(model: Any, positions: int, seed: int = 1) -> torch.Tensor:
    """Return random token numbers [positions]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, min(int(model.cfg.d_vocab), 1000), (positions,), generator=generator)


# ------------------------------------------------------------------ time


def interleaved(
    variants: Mapping[str, Callable[[], object]],
    repeats: int = 5,
    warm_up: Collection[str] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Return the median seconds of each variant. They take turns, so that other load falls on all.

    Args:
        variants: The functions to time, by name.
        repeats: The number of rounds.
        warm_up: The variants that run once before the clock starts. None: all.
        clock: The clock: `time.process_time` on a machine that serves others.
    """
    for name in variants if warm_up is None else warm_up:
        variants[name]()
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(repeats):
        for name, run in variants.items():
            synchronize()
            start = clock()
            run()
            synchronize()
            seconds[name].append(clock() - start)
    return {name: statistics.median(times) for name, times in seconds.items()}


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def gemm(rows: int, inner: int, outer: int, repeats: int = 1, device: str = "cpu") -> Callable[[], object]:
    """Return a function that makes a matrix product [rows, inner] @ [inner, outer] `repeats` times.

    Its time is a lower bound for other computations.
    """
    left, right = torch.randn(rows, inner, device=device), torch.randn(inner, outer, device=device)
    out = torch.empty(rows, outer, device=device)

    @torch.inference_mode()
    def run() -> None:
        for _ in range(repeats):
            torch.mm(left, right, out=out)

    return run


def gemm_rates(rows: int = 1536, inner: int = 3072, outer: int = 768, repeats: int = 7) -> dict[str, float]:
    """Return the measured 10^9 floating point operations per second of a large matrix product."""
    name = "GEMM GFLOP/s"
    return {name: 2e-9 * rows * inner * outer / interleaved({name: gemm(rows, inner, outer)}, repeats)[name]}


def growth_exponent(sizes: Sequence[int], values: Sequence[float]) -> float:
    """Return the slope of log value over log size, by least squares."""
    x, y = [math.log(size) for size in sizes], [math.log(value) for value in values]
    mean_x, mean_y = statistics.fmean(x), statistics.fmean(y)
    above = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return above / sum((a - mean_x) ** 2 for a in x)


# ------------------------------------------------------------------ memory


class PeakMemory(TorchDispatchMode):
    """Count the bytes of tensors that are made inside the context and exist at the same time.

    The count is exact and repeatable. The resident memory of a process depends on the allocator. Memory that
    a matrix library allocates for itself is not counted.

    Attributes:
        live: The bytes that exist now.
        peak: The largest value of `live`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {_storage_key(t) for t in _iterate_tensors((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for tensor in _iterate_tensors(out):
            storage = tensor.untyped_storage()
            if _storage_key(tensor) in before or storage in self._known:
                continue
            self._known.add(storage)
            size = storage.nbytes()
            self.live += size
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._release, size)
        return out

    def _release(self, size: int) -> None:
        self.live -= size


def _iterate_tensors(values: Any) -> Iterator[torch.Tensor]:
    if torch.is_tensor(values):
        yield values
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from _iterate_tensors(value)
    elif isinstance(values, dict):
        yield from _iterate_tensors(tuple(values.values()))


def _storage_key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def peak_bytes(run: Callable[[], object]) -> int:
    """Return the largest number of bytes of new tensors while `run` runs, its result included."""
    gc.collect()
    counter = PeakMemory()
    with counter:
        run()
    return counter.peak


def peak_over_model(run: Callable[[], Result], device: str = "cpu") -> tuple[int, Result]:
    """Return the bytes that a run needs at most besides those in use before it, and its result.

    On a CPU this is the resident memory of the process, on Linux only. On a GPU it is what torch allocates.
    """
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = run()
        return torch.cuda.max_memory_allocated() - before, result
    # Memory that was freed still counts as resident until it is given back to the system.
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    result = run()
    return _resident("VmHWM") - before, result


def _resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


# ------------------------------------------------------------------ machine and tables


def machine() -> dict[str, Any]:
    """Return what the figures depend on: the machine and the versions of the libraries."""
    names = ("torch", "transformer-lens", "transformers")
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as lines:
        cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), cpu)
    return {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in names},
    }


def describe_machine(facts: Mapping[str, Any] | None = None) -> str:
    """Return the facts of `machine()` in one line, without those that the machine does not have."""
    return ", ".join(f"{name} {value}" for name, value in (facts or machine()).items() if value is not None)


def describe_measurement(date: str | None = None) -> str:
    """Return the sentence with the date (None: today) and the releases that `benchmarks.facts` reads."""
    date = date or time.strftime("%Y-%m-%d", time.gmtime())
    lens, plain_torch = metadata.version("transformer-lens"), metadata.version("torch").partition("+")[0]
    return f"Measured {date} with TransformerLens {lens}, torch {plain_torch}."


def markdown_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as a Markdown table. Numbers have three digits, and None is an empty cell."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    lines += ["| " + " | ".join(_format_cell(row.get(name)) for name in columns) + " |" for row in rows]
    return "\n".join(lines)


def _format_cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return str(value)


def write_table(
    out: Path,
    title: str,
    rows: Iterable[Mapping[str, Any]],
    note: str = "",
    keys: Sequence[str] = (),
    is_part: bool = False,
) -> None:
    """Write one table of results.json and RESULTS.md in `out`, row by row. Other tables stay unchanged.

    Args:
        out: The folder.
        title: The title of the table.
        rows: The rows.
        note: A sentence about the measurement.
        keys: The columns that name a row. A row with the name of an earlier one adds its cells to it. ():
            every row is a new one.
        is_part: Whether only some rows are measured, so that the recorded ones stay.

    Raises:
        ValueError: Some rows are measured on another processor than the recorded ones.
    """
    out.mkdir(parents=True, exist_ok=True)
    file = out / "results.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    table: dict[str, Any] = {"machine": machine(), **gemm_rates(), "note": note, "rows": []}
    if is_part and title in found:
        recorded_on = found[title]["machine"]["cpu"]
        if recorded_on != table["machine"]["cpu"]:
            raise ValueError(
                f"expected the processor of the recorded rows of {title!r}, {recorded_on}, got "
                f"{table['machine']['cpu']}; measure all rows"
            )
        table["rows"] = found[title]["rows"]
    for row in rows:
        print(title, row, flush=True)
        _put_row(table["rows"], dict(row), keys)
        found[title] = table
        (out / "RESULTS.md").write_text(_format_report(found))
        file.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")


def _put_row(rows: list[dict[str, Any]], row: dict[str, Any], keys: Sequence[str]) -> None:
    """Add the cells of a row to the row of the same name; a row of a new name is put at the end."""
    for other in rows if keys else ():
        if all(other.get(key) == row.get(key) for key in keys):
            other.update({name: value for name, value in row.items() if value is not None})
            return
    rows.append(row)


_INTRODUCTION = (
    "Written by `make bench` or `make bench BENCH=--full`. Times are medians unless a table says "
    'otherwise, and are best read as ratios: they depend on the machine. Models with "-like" have base '
    'size per layer and random weights. "÷ forward" is a time divided by the time of a plain forward pass '
    'of the same model on the same tokens. "peak MB" is the largest size of all new tensors that exist at '
    "one time."
)
# By the beginning of a table's title: what the table compares, and what its columns are.
_EXPLANATIONS = {
    "Value Zeroing compared": (
        "The engine `algebra` and its alternatives. Times of the alternatives are divided by that of "
        "`algebra`: a forward pass, the engine `hooks`, a plain loop in transformers and in "
        "TransformerLens, the same with many copies per call, and the matrix products that an exact "
        "method needs at least."
    ),
    "Attention attribution, captum": (
        "Integrated gradients of every layer's pattern, with the same points in both."
    ),
    "Attention attribution, eight points": (
        "The points that each layer needs, beside eight points in every layer. A gap is what a layer's "
        "scores miss of the change of the target."
    ),
    "Attention flow, networkx": (
        "The flows of all pairs of positions from the last layer. networkx solves a sample of the pairs, "
        'from which its time for all is estimated. "solved one and all" solves every pair by itself.'
    ),
    "Every method": (
        'A whole map by the defaults of each method: all rows of all layers. "growth exponent" is the '
        "exponent n with which the time grew from the length above."
    ),
    "What calls cost": (
        "SmolLM2-135M: processor time beside that of a forward pass with logits, in turns, medians of the "
        'given number of turns. "memory MB" is the largest resident memory over that of the loaded model '
        'after a short run; its limit includes what is returned. No call may exceed a "limit".'
    ),
    "Time and memory by length": (
        'SmolLM2-135M, processor time and resident memory as in "What calls cost", for prompts of the given '
        "numbers of tokens. All calls of one length are measured in one process."
    ),
    "A corpus": (
        "`lm.corpus.run` with maps of all layers. Throughput: llama-like with 2 layers, "
        "`attn_res_ln`, all rows; processor times of the loop over `run_many` in batches of 16 "
        "divided by those of the corpus with its files, medians of three turns. Memory: the growth of the "
        "resident memory between the first tenth of the prompts and the last one, two methods and "
        "a reduction of a tiny model. Kills: SIGKILL of a process at random moments; it then starts again. "
        "Bytes are compared with those of a run that was not killed."
    ),
    "Digits of float32": (
        "Scores of Value Zeroing above 1e-7 against hooks in float64 with the same weights: the largest "
        'relative error, the 99th percentile, and the share of scores with an error above 1e-5. "clean '
        'pass alone" is the algebra in float64 on what the float32 pass recorded.'
    ),
    "bfloat16 beside float32": (
        "The last row of each method, of the same model in bfloat16 and in float32: Spearman over all keys, "
        "and the share of rows with the same strongest key. For layer maps, a prompt has the mean over "
        "layers. Means over prompts with 95 % intervals. The forward pass compares the logits of the next "
        "token. Times are processor times of a prompt of 128 random tokens."
    ),
    "Value Zeroing, this release": ("The engine `algebra` at an earlier commit of this repository and now."),
    "Rollout, a plain loop": ("`lm.rollout` beside a loop of three lines, in float64."),
}


def _format_report(found: dict[str, Any]) -> str:
    """Return the tables as Markdown."""
    lines = ["# Benchmark results", "", _INTRODUCTION]
    for title, table in found.items():
        lines += ["", f"## {title}", ""]
        explanations = [text for beginning, text in _EXPLANATIONS.items() if title.startswith(beginning)]
        lines += [*explanations, "", f"Machine: {describe_machine(table['machine'])}."]
        lines += [f"A large float32 matrix product reached {table['GEMM GFLOP/s']:.0f} GFLOP/s."]
        if table["machine"]["gpu"] is None:
            lines += ["No GPU was available."]
        if table["note"]:
            lines += [table["note"]]
        lines += ["", markdown_table(table["rows"])]
    return "\n".join(lines) + "\n"
