"""Measure `lens_mix.corpus.run`: throughput beside `run_many`, memory, and runs that are killed.

    python -m benchmarks.run --tables corpus       all rows but Ray's, in about twenty minutes
    python -m benchmarks.run --tables corpus --rows ray    in the environment of `make test-ray`
    python -m benchmarks.corpus kills KILLS RANKS  one run of 2,000 prompts that is killed so many times

Throughput is of a Llama of two layers of base size; memory and kills are of a tiny model. A run is
killed by SIGKILL at a random moment. It is a fork of a process that has imported everything, so a start takes
little time.
"""

from __future__ import annotations

import argparse
import functools
import gc
import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import lens_mix as lm
from benchmarks import common

PROMPTS, SHARD = 2000, 50
METHODS = ["attention", "value_norm"]
REDUCE = {"offsets": lm.corpus.Mean(by=("layer", "offset"))}
KEYS = ("measure",)
_LONGEST_WAIT = 3.0  # seconds between two kills: a start takes one or two of them


@functools.cache
def tiny() -> Any:
    """Return a Llama-like model of two small layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        vocab_size=1000,
    )
    return common._build(LlamaForCausalLM, config, 0, True)


def draw_tokens(count: int, shortest: int, longest: int, seed: int = 0) -> list[list[int]]:
    """Return prompts of random tokens with lengths of a uniform distribution."""
    draw = random.Random(seed)
    return [draw.choices(range(3, 900), k=draw.randint(shortest, longest)) for _ in range(count)]


def _run(out: Path, prompts: Sequence[list[int]], **options: Any) -> lm.corpus.Summary:
    return lm.corpus.run(tiny, prompts, METHODS, REDUCE, out, shard_size=SHARD, **options)


def _digest(out: Path) -> dict[str, str]:
    return {
        str(path.relative_to(out)): hashlib.blake2b(path.read_bytes()).hexdigest()
        for path in sorted(out.rglob("[!.]*"))
        if path.is_file()
    }


def _fork(out: Path, prompts: Sequence[list[int]], rank: tuple[int, int]) -> int:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if _run(out, prompts, rank=rank) else 1
        finally:
            os._exit(code)
    return child


def count_lost(kills: int, ranks: int = 1, prompts: int = PROMPTS, seed: int = 0) -> dict[str, Any]:
    """Kill a run at random moments until it was killed so often, let it finish, and compare its files.

    The moments are chosen so that the kills are spread over the whole run: once it has finished, its later
    half is deleted.

    Args:
        kills: The number of kills.
        ranks: The number of processes that share the run. Each kill is of one of them.
        prompts: The number of prompts.
        seed: The seed of the moments.
    """
    draw, tokens = random.Random(seed), _draw_short(prompts)
    folder = Path(tempfile.mkdtemp(prefix="corpus-"))
    whole, killed = folder / "whole", folder / "killed"
    tiny()
    # Threads do not survive a fork, so this process only starts others until all have ended.
    started = time.perf_counter()
    os.waitpid(_fork(whole, tokens, (0, 1)), 0)
    seconds = time.perf_counter() - started
    expected = _digest(whole)
    done = 0
    running: dict[int, int] = {}
    shards: list[int] = []
    while done < kills:
        for rank in range(ranks):
            if rank not in running:
                running[rank] = _fork(killed, tokens, (rank, ranks))
        time.sleep(draw.uniform(0, min(seconds, _LONGEST_WAIT)))
        victim = draw.choice(list(running))
        child = running.pop(victim)
        if os.waitpid(child, os.WNOHANG)[0] == 0:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            done += 1
            shards.append(_count_shards(killed))
            print(f"\rkill {done} of {kills}, {shards[-1]} shards", end="", file=sys.stderr)
        if (killed / "finished.json").exists():
            (killed / "finished.json").unlink()
            for path in sorted((killed / "maps").glob("*.parquet"))[::2]:
                path.unlink()
    for child in running.values():
        os.waitpid(child, 0)
    for rank in range(ranks):
        os.waitpid(_fork(killed, tokens, (rank, ranks)), 0)
    result = _compare(expected, killed, prompts, shards)
    shutil.rmtree(folder)
    return result


def count_lost_on_ray(kills: int, actors: int = 2, prompts: int = PROMPTS, seed: int = 0) -> dict[str, Any]:
    """Kill the driver of a run on a local Ray cluster several times, let it finish, and compare its files.

    Each kill is a random time after a random number of new shards.

    Args:
        kills: The number of kills.
        actors: The number of processes of the cluster.
        prompts: The number of prompts.
        seed: The seed of the moments.
    """
    draw = random.Random(seed)
    folder = Path(tempfile.mkdtemp(prefix="corpus-"))
    whole, killed = folder / "whole", folder / "killed"
    _run(whole, _draw_short(prompts))
    shards = [0]
    for _ in range(kills):
        wanted = shards[-1] + draw.randint(1, max(1, prompts // SHARD // (kills + 1)))
        driver = _start_on_ray(killed, actors, prompts)
        while driver.poll() is None and _count_shards(killed) < wanted:
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 0.5))
        driver.kill()
        if driver.wait() != -signal.SIGKILL:
            raise RuntimeError("expected a driver that was killed, got one that had ended; give more prompts")
        shards.append(_count_shards(killed))
        print(f"\rkill of {kills}, {shards[-1]} shards", end="", file=sys.stderr)
    if _start_on_ray(killed, actors, prompts).wait():
        raise RuntimeError("the last driver failed")
    result = _compare(_digest(whole), killed, prompts, shards[1:])
    shutil.rmtree(folder)
    return result


def run_on_ray(out: str, actors: int, prompts: int) -> None:
    """Run the corpus on a local Ray cluster."""
    import ray

    ray.init(address="local", num_cpus=actors, object_store_memory=10**8, include_dashboard=False)
    _run(Path(out), _draw_short(prompts), actors=actors)


def _start_on_ray(out: Path, actors: int, prompts: int) -> subprocess.Popen[bytes]:
    program = f"from benchmarks import corpus; corpus.run_on_ray({str(out)!r}, {actors}, {prompts})"
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    # Ray's workers give way to all other processes by default, and so may need minutes to import torch.
    environment = {"PYTHONPATH": path, "RAY_worker_niceness": "0"}
    return subprocess.Popen([sys.executable, "-c", program], env={**os.environ, **environment})


def _draw_short(prompts: int) -> list[list[int]]:
    return draw_tokens(prompts, 5, 30)


def _count_shards(out: Path) -> int:
    return len(list((out / "maps").glob("[0-9]*")))


def _compare(expected: dict[str, str], killed: Path, prompts: int, shards: Sequence[int]) -> dict[str, Any]:
    """Return what a run that was killed has lost or doubled, given the digests of one that was not."""
    table = lm.corpus.load(killed)
    rows = list(zip(table["prompt"], table["method"], strict=True))
    wanted = {(prompt, method) for prompt in range(prompts) for method in METHODS}
    return {
        "prompts": prompts,
        "kills": len(shards),
        "finished shards at the kills": f"{min(shards)} to {max(shards)} of {-(-prompts // SHARD)}",
        "rows lost": len(wanted - set(rows)),
        "rows doubled": len(rows) - len(set(rows)),
        "files with other bytes": sum(expected.get(name) != found for name, found in _digest(killed).items()),
    }


def throughput(shortest: int, longest: int, count: int = 96, turns: int = 3) -> dict[str, Any]:
    """Compare the prompts per second with those of the bare loop over `run_many`, in turns."""
    model, method = common.llama_like(layers=2), "attn_res_ln"
    prompts = [torch.tensor(tokens) for tokens in draw_tokens(count, shortest, longest)]
    lists = [tokens.tolist() for tokens in prompts]

    def loop() -> None:
        # A generator is run in the given order, and a list in groups of similar length.
        for _ in lm.run_many(model, iter(prompts), method, batch_size=16, progress=None):
            pass

    def grouped() -> None:
        for _ in lm.run_many(model, prompts, method, batch_size=16, progress=None):
            pass

    def corpus() -> None:
        with tempfile.TemporaryDirectory() as out:
            lm.corpus.run(lambda: model, lists, method, out=out, shard_size=96)

    variants = {"loop": loop, "grouped": grouped, "corpus": corpus}
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(turns + 1):
        for name, variant in variants.items():
            started = time.process_time()
            variant()
            # The first turn verifies the model and fills caches.
            if turn:
                seconds[name].append(time.process_time() - started)
    medians = {name: sorted(taken)[len(taken) // 2] for name, taken in seconds.items()}
    return {
        "prompts": count,
        "loop in the given order ÷ corpus": medians["loop"] / medians["corpus"],
        "run_many of a list ÷ corpus": medians["grouped"] / medians["corpus"],
    }


def memory(count: int = 10_000) -> dict[str, Any]:
    """Return the growth of resident memory from a tenth of the prompts to the end."""
    sizes: list[int] = []

    def prompts() -> Iterator[list[int]]:
        for number, tokens in enumerate(draw_tokens(count, 5, 30)):
            if number in (count // 10, count - 1):
                gc.collect()
                sizes.append(
                    int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
                )
            yield tokens

    with tempfile.TemporaryDirectory() as out:
        lm.corpus.run(tiny, prompts(), METHODS, REDUCE, out, shard_size=250)
    return {"prompts": count, "memory growth MB": (sizes[1] - sizes[0]) / 1e6}


def rows(names: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
    """Yield a row per measure; all, or those of some names."""
    measures: dict[str, Any] = {
        "equal": ("throughput, 64 tokens each", lambda: throughput(64, 64)),
        "mixed": ("throughput, 15 to 200 tokens", lambda: throughput(15, 200)),
        "memory": ("memory", memory),
        "kills": ("200 kills, one process", lambda: count_lost(200)),
        "ranks": ("20 kills, two processes", lambda: count_lost(20, 2)),
        "ray": ("3 kills of the driver, two Ray actors", lambda: count_lost_on_ray(3)),
    }
    for name, (title, measure) in measures.items():
        # Ray is in an environment of its own.
        if name in names if names else name != "ray":
            yield {"measure": title, **measure()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["kills"])
    parser.add_argument("kills", type=int)
    parser.add_argument("ranks", type=int, nargs="?", default=1)
    options = parser.parse_args()
    print(count_lost(options.kills, options.ranks))
