"""Measure what calls cost: time beside a forward pass with logits, and memory over that of the loaded model.

    python -m benchmarks.run --tables costs                       all rows, in about ten minutes
    python -m benchmarks.run --tables costs --rows memory routes  some rows anew; the others stay
    python -m benchmarks.run --tables lengths                     20 to 8000 tokens, in about half an hour
    python -m benchmarks.run --tables lengths --rows 20 64        some lengths anew
    python -m benchmarks.costs                                    the names for --rows

The calls of one name are measured in a process of their own, and of the name "memory" each call. In the
process, the calls and the forward pass take turns. Time is processor time, and memory is resident memory.
`benchmarks.on_gpu` measures the same calls on a GPU.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import lens_mix as lm
from benchmarks import common

ROOT = Path(__file__).resolve().parents[1]
# A turn is the forward pass and each call. After so many measured seconds, no further turn starts. With fewer
# seconds, some calls would have two turns. The median of two includes the first call, which takes longest.
MOST_TURNS, PATIENCE = 7, 60.0
MOST_RESIDENT = 14 << 30  # The bytes of a process: one that needs more fails, instead of the machine.
WARM_UP = 8  # The tokens of the prompt of the first run, which verifies the model and is not measured.
LAST, LAST_EIGHT = {"queries": [-1]}, {"queries": slice(-8, None)}
# The columns that name a row of each table.
KEYS = {"costs": ("call", "tokens"), "lengths": ("call",)}


@dataclasses.dataclass(frozen=True)
class Call:
    """One call that is measured.

    Attributes:
        name: What is called, for the table.
        run: The call, as a function of the model and the prompt.
        tokens: The number of tokens of the prompt.
        prompt: The function that makes the prompt of so many tokens. None: random tokens.
        forward: The forward pass beside it, as a function of the model and the prompt. None: a plain one.
        most_forwards: The limit of its time, in forward passes; None if it has none.
        most_memory: The limit of its memory without what it returns, in MB; None if it has none.
        is_first: Whether it is the first call on a model, which is a new copy in each turn.
    """

    name: str
    run: Callable[[Any, Any], Any]
    tokens: int
    prompt: Callable[[Any, int], Any] | None = None
    forward: Callable[[Any, Any], Any] | None = None
    most_forwards: float | None = None
    most_memory: float | None = None
    is_first: bool = False

    def make_prompt(self, model: Any, device: str, most_tokens: int | None = None) -> Any:
        """Return the prompt of the call, of at most so many tokens."""
        tokens = self.tokens if most_tokens is None else min(self.tokens, most_tokens)
        made = (self.prompt or common.random_tokens)(model, tokens)
        return made.to(device) if torch.is_tensor(made) else [each.to(device) for each in made]


def _run(method: Any, **options: Any) -> Callable[[Any, Any], Any]:
    return lambda model, prompt: lm.run(model, prompt, method, progress=None, **options)


def _input_map(model: Any, prompt: torch.Tensor, **options: Any) -> Any:
    return lm.input_map(model, prompt, **options)


def _trace(model: Any, prompt: torch.Tensor) -> None:
    """Trace the last eleventh of the prompt."""
    start = len(prompt) - max(1, len(prompt) // 11)
    lm.trace(model, prompt[:start], answer=prompt[start:], sources="token", progress=None)


def _draw_prompts(model: Any, tokens: int) -> list[torch.Tensor]:
    """Return 64 prompts of half as many to as many tokens."""
    draw = random.Random(0)
    lengths = [draw.randint((tokens + 1) // 2, tokens) for _ in range(64)]
    return [common.random_tokens(model, length, seed) for seed, length in enumerate(lengths)]


def _run_many(method: str, **options: Any) -> Callable[[Any, Any], None]:
    def run(model: Any, prompts: list[torch.Tensor]) -> None:
        for _ in lm.run_many(model, prompts, method, batch_size=16, progress=None, **options):
            pass

    return run


def _few_shot_prompts(model: Any, tokens: int) -> list[torch.Tensor]:
    """Return 16 prompts whose first five sixths are alike."""
    count = tokens * 5 // 6
    examples = common.random_tokens(model, count)
    questions = [common.random_tokens(model, tokens - count, seed) for seed in range(1, 17)]
    return [torch.cat([examples, question]) for question in questions]


@torch.no_grad()
def run_forward(model: Any, tokens: torch.Tensor) -> None:
    """Run a plain forward pass with logits."""
    model(tokens[None])


@torch.no_grad()
def _run_batches(model: Any, prompts: list[torch.Tensor]) -> None:
    """Run forward passes of 16 padded prompts, in the order of the prompts."""
    for start in range(0, len(prompts), 16):
        batch = prompts[start : start + 16]
        padded = torch.nn.utils.rnn.pad_sequence(batch, batch_first=True)
        lengths = torch.tensor([len(each) for each in batch], device=padded.device)
        mask = torch.arange(padded.shape[1], device=padded.device) < lengths[:, None]
        model(padded, attention_mask=mask.long())


_GRADIENTS = ("gim", "input_gradients", "gradient_attention", "frozen_gradients")
_INTEGRATED = lm.methods.InputGradients(score="integrated", n_steps=8)
_MANY_POINTS = lm.methods.InputGradients(score="integrated", n_steps=32)
_ONE_STAND_IN = lm.methods.Occlusion(by="replace", replacements=[5])
# The calls of the table of costs. The calls of one name share a process and take turns.
CALLS: dict[str, tuple[Call, ...]] = {
    "memory": (
        Call("forward pass", run_forward, 2000),
        *(
            Call(method, _run(method), 2000, most_memory=1300)
            for method in ("attention", "attn_res_ln", "alti")
        ),
        # All rows of 2,000 tokens would take half an hour.
        Call("value_zeroing, last 8 rows", _run("value_zeroing", **LAST_EIGHT), 2000, most_memory=1300),
        Call("value_zeroing", _run("value_zeroing"), 256, most_memory=1300),
        Call("integrated gradients, 32 points, last row", _run(_MANY_POINTS, **LAST), 64),
    ),
    "input_map": (
        Call("lm.input_map", _input_map, 20),
        Call("lm.input_map, exact=False", functools.partial(_input_map, exact=False), 20, most_forwards=4.5),
    ),
    "input_map_512": (Call("lm.input_map", _input_map, 512, most_forwards=4.5, most_memory=1000),),
    "input_map_1000": (Call("lm.input_map", _input_map, 1000, most_forwards=4.5, most_memory=1600),),
    "gradients": tuple(
        Call(f"{method}, last row", _run(method, **LAST), 64, most_forwards=2.3) for method in _GRADIENTS
    ),
    "all_rows_32": tuple(Call(f"{name}, all rows", _run(name), 32, most_forwards=18) for name in _GRADIENTS),
    "all_rows_64": tuple(Call(f"{name}, all rows", _run(name), 64, most_forwards=36) for name in _GRADIENTS),
    "passes": (
        Call("occlusion, one stand-in, last row", _run(_ONE_STAND_IN, **LAST), 64, most_forwards=22),
        Call("context_length, last row", _run("context_length", **LAST), 64, most_forwards=20),
        Call("integrated gradients, 8 points, last row", _run(_INTEGRATED, **LAST), 64, most_forwards=11),
    ),
    "attention_attribution": (
        Call("attention_attribution", _run("attention_attribution"), 64, most_forwards=110),
    ),
    "run_many": (
        Call(
            "run_many, 64 prompts in batches of 16, value_zeroing",
            *(_run_many("value_zeroing"), 30, _draw_prompts, _run_batches),
            most_forwards=4,
        ),
    ),
    "few_shot": (
        *(
            Call(
                f"run_many, 16 few-shot prompts, {method}",
                *(_run_many(method), 120, _few_shot_prompts, _run_batches),
            )
            for method in ("attention", "attn_res_ln", "alti")
        ),
        Call(
            "run_many, 16 few-shot prompts, attention, last row",
            *(_run_many("attention", **LAST), 120, _few_shot_prompts, _run_batches),
        ),
    ),
    "first": (
        Call("first call, attention", _run("attention"), 20, most_forwards=3.5, is_first=True),
        Call("first call, value_zeroing", _run("value_zeroing"), 20, most_forwards=7, is_first=True),
    ),
    "short": (
        Call("attention", _run("attention"), 20),
        Call("attn_res_ln", _run("attn_res_ln"), 20, most_forwards=1.3),
        Call("alti", _run("alti"), 20, most_forwards=1.4),
    ),
    "routes": (Call("information_flow_routes", _run("information_flow_routes"), 256, most_forwards=2.5),),
    "trace": (Call("lm.trace, the last eleventh", _trace, 1100),),
}

_LAYER_MAPS = ("attention", "attn_res_ln", "alti")


def _calls_of_length(tokens: int) -> tuple[Call, ...]:
    """Return the calls of the table of lengths: whole maps up to 2000 tokens, single rows of any length."""
    whole = _LAYER_MAPS if tokens <= 2000 else ()
    rows = (*_LAYER_MAPS, "value_zeroing", "gim") if tokens <= 2000 else _LAYER_MAPS
    calls = [Call("forward pass", run_forward, tokens)]
    calls += [Call(f"{method}, all rows", _run(method), tokens) for method in whole]
    calls += [Call(f"{method}, last row", _run(method, **LAST), tokens) for method in rows]
    return (*calls, Call("lm.input_map", _input_map, tokens)) if tokens <= 1000 else tuple(calls)


LENGTHS = {str(tokens): _calls_of_length(tokens) for tokens in (20, 64, 200, 500, 1000, 2000, 8000)}
TABLES = {"costs": CALLS, "lengths": LENGTHS}
# The names whose calls are measured with their memory.
_WITH_MEMORY = {"memory", "input_map_512", "input_map_1000", "trace", *LENGTHS}


def measure(
    model: Any,
    calls: Sequence[Call],
    *,
    memory: bool,
    turns: int = MOST_TURNS,
    patience: float = PATIENCE,
    device: str = "cpu",
    most_tokens: int | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield a row of the table per call, measured on a model that is loaded.

    Args:
        model: The model, on the device.
        calls: The calls, which take turns.
        memory: Whether to measure memory, in the first run.
        turns: The largest number of turns; 0 for memory alone. 1: the first run is timed, and the only one.
        patience: The measured seconds after which no further turn starts.
        device: The device.
        most_tokens: The largest length of a prompt, for a quick trial; None for the lengths of the calls.
    """
    clock = time.process_time if device == "cpu" else time.perf_counter
    prompts = [call.make_prompt(model, device, most_tokens) for call in calls]
    plain = [call.forward or run_forward for call in calls]
    for call in calls:
        call.run(model, call.make_prompt(model, device, WARM_UP))
    seconds: list[list[float]] = [[] for _ in calls]
    forwards: list[list[float]] = [[] for _ in calls]
    peaks: list[tuple[int, int] | None] = [None for _ in calls]
    for index, (call, prompt) in enumerate(zip(calls, prompts, strict=True)) if memory else ():
        run = functools.partial(_time, clock, call.run, model, prompt)
        peak, (taken, result) = common.peak_over_model(run, device)
        peaks[index] = (peak, _count_bytes(result))
        # A long prompt is run only once, so this run gives its time too.
        seconds[index] += [taken] if turns == 1 else []
        del result
    for turn in range(turns):
        if turn > 0 and sum(map(sum, seconds)) >= patience:
            break
        for index, (call, prompt) in enumerate(zip(calls, prompts, strict=True)):
            used = copy.deepcopy(model) if call.is_first else model
            alone = functools.partial(_time, clock, plain[index], model, prompt)
            if index > 0 and (call.tokens, plain[index]) == (calls[0].tokens, plain[0]):
                passed = forwards[0][-1]
            else:
                # Where memory was measured, the calls had to get theirs from the system, which takes time.
                passed = (common.peak_over_model(alone, device)[1] if memory and turns == 1 else alone())[0]
            forwards[index].append(passed)
            if len(seconds[index]) <= turn:
                seconds[index].append(_time(clock, call.run, used, prompt)[0])
            # The speed of the machine changes by the minute, so a long call is between forward passes.
            after = 0.0
            while turns > 1 and after + forwards[index][-1] < seconds[index][-1] / 4:
                forwards[index].append(alone()[0])
                after += forwards[index][-1]
            del used
    for call, found, taken_by_turn, passes in zip(calls, peaks, seconds, forwards, strict=True):
        yield _make_row(call, found, taken_by_turn, passes)


def _time(
    clock: Callable[[], float], run: Callable[[Any, Any], Any], model: Any, prompt: Any
) -> tuple[float, Any]:
    """Return the seconds of a run, and its result."""
    common.synchronize()
    start = clock()
    result = run(model, prompt)
    common.synchronize()
    return clock() - start, result


def _count_bytes(result: Any) -> int:
    """Return the bytes of the scores of a map; 0 for anything else."""
    scores = getattr(result, "scores", None)
    return scores.nbytes if torch.is_tensor(scores) else 0


def _make_row(
    call: Call, peak: tuple[int, int] | None, seconds: list[float], forwards: list[float]
) -> dict[str, Any]:
    taken = statistics.median(seconds) if seconds else None
    forward = statistics.median(forwards) if forwards else None
    megabytes = (None, None) if peak is None else (peak[0] / 1e6, peak[1] / 1e6)
    most = None if call.most_memory is None else call.most_memory + (megabytes[1] or 0)
    return {
        "call": call.name,
        "tokens": call.tokens,
        "forward s": forward,
        "÷ forward": taken / forward if taken and forward else None,
        "÷ forward, limit": call.most_forwards,
        "memory MB": megabytes[0],
        "returned MB": megabytes[1],
        "memory MB, limit": most,
        "turns": len(seconds) or None,
        "note": "",
    }


# ------------------------------------------------------------------ processes


def rows(table: str, names: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the rows of a table, or those of some names of it.

    Raises:
        ValueError: The table has no such name.
    """
    calls = TABLES[table]
    unknown = set(names or ()) - set(calls)
    if unknown:
        raise ValueError(f"rows: expected some of {', '.join(calls)}, got {', '.join(sorted(unknown))}")
    for name in names or calls:
        found = measure_in_process(table, name)
        yield from found if table == "costs" else map(_turn_to_columns, found)


def _turn_to_columns(row: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of one length as columns of a table that has all lengths."""
    columns: dict[str, Any] = {"call": row["call"]}
    columns |= {f"{length} {name}": None for name in ("÷ forward", "MB") for length in LENGTHS}
    figures = {
        f"{row['tokens']} ÷ forward": row.get("÷ forward"),
        f"{row['tokens']} MB": row.get("memory MB"),
    }
    return columns | figures


def measure_in_process(table: str, name: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of one name, measured in new processes on one thread."""
    # Memory that one call leaves behind would be counted as the model's in the next call.
    alone = name == "memory"
    indices = [[index] for index in range(len(TABLES[table][name]))] if alone else [[]]
    for chosen in indices:
        command = [sys.executable, "-m", "benchmarks.costs", "--worker", table, name, *map(str, chosen)]
        threads = {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, **threads}, capture_output=True, text=True, check=False
        )
        if done.returncode:
            # A call that does not fit in memory is a finding, and the other calls are still measured.
            problem = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
            failed = [TABLES[table][name][index] for index in map(int, chosen)] or TABLES[table][name]
            for call in failed:
                yield {"call": call.name, "tokens": call.tokens, "note": problem[:120]}
            continue
        yield from json.loads(done.stdout.splitlines()[-1])


def _work(table: str, name: str, *indices: str) -> None:
    """Measure calls in this process, and print their rows as JSON in the last line."""
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_RESIDENT, MOST_RESIDENT))
    chosen = [TABLES[table][name][int(index)] for index in indices] or TABLES[table][name]
    # The passes of long prompts take minutes, so one turn has to do.
    turns = 0 if name == "memory" else 1 if name in ("1000", "2000", "8000") else MOST_TURNS
    memory = name in _WITH_MEMORY
    print(json.dumps(list(measure(common.smollm2(), chosen, memory=memory, turns=turns))))


def main() -> None:
    """List the names, or work as a process of `measure_in_process`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--worker", nargs="+", help="a table, a name, and perhaps the numbers of its calls")
    options = parser.parse_args()
    if options.worker:
        _work(*options.worker)
        return
    for table, calls in TABLES.items():
        print(f"{table}: {' '.join(calls)}")


if __name__ == "__main__":
    main()
