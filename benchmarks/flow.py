"""Compare attention flow with networkx on the same pairs, and measure how the time grows with the tokens.

    python benchmarks/flow.py            the ratios, about two minutes
    python benchmarks/flow.py --full     128 tokens too, about five

Maps are random: the softmax of normal numbers, averaged over four heads. The residual weight is 0.5. networkx
runs its default `maximum_flow_value` on the float capacities. It solves a random sample of the pairs, spread
over the run, and its time for all pairs is the sample's mean times their number. Pairs that a causal map
cannot connect are left out on both sides.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import networkx as nx
import numpy as np
import torch

import lens_mix as lm
from benchmarks import common
from lens_mix.aggregation.max_flow import LayeredFlow


def random_map(layers: int, tokens: int, causal: bool, seed: int = 0) -> lm.MixingMap:
    """Return a random map whose rows sum to 1."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(layers, 4, tokens, tokens, generator=generator, dtype=torch.float64)
    if causal:
        logits = logits.masked_fill(~torch.ones(tokens, tokens, dtype=torch.bool).tril(), -torch.inf)
    names = [f"t{position}" for position in range(tokens)]
    return lm.MixingMap(logits.softmax(-1).mean(1), names, "attention", causal=causal)


def against_networkx(layers: int, tokens: int, causal: bool, rounds: int, sample: int) -> dict[str, Any]:
    """Solve all pairs from the last layer, and `sample` pairs per round by networkx, in turns."""
    mixing_map = random_map(layers, tokens, causal)
    capacities = 0.5 * mixing_map.scores.numpy() + 0.5 * np.eye(tokens)
    graph = nx.DiGraph()
    for layer, query, key in np.argwhere(capacities > 0).tolist():
        graph.add_edge((layer + 1, query), (layer, key), capacity=float(capacities[layer, query, key]))
    pairs = [(i, j) for i in range(tokens) for j in range(i + 1 if causal else tokens)]
    chosen = np.random.default_rng(0).permutation(len(pairs))
    ours, theirs, scipy_alone, error = [], [], [], 0.0
    raw = lm.flow(mixing_map, layer=-1, normalize=False).scores[0]
    network = LayeredFlow(capacities)
    for number in range(rounds):
        start = time.perf_counter()
        lm.flow(mixing_map, layer=-1)
        ours.append(time.perf_counter() - start)
        part = [pairs[index] for index in chosen[number * sample : (number + 1) * sample]]
        start = time.perf_counter()
        values = [nx.maximum_flow_value(graph, (layers, i), (0, j)) for i, j in part]
        theirs.append((time.perf_counter() - start) / len(part))
        start = time.perf_counter()
        network.flows(layers, part)
        scipy_alone.append((time.perf_counter() - start) / len(part))
        error = max(
            error, *(abs(raw[i, j].item() - value) for (i, j), value in zip(part, values, strict=True))
        )
    seconds, expected = statistics.median(ours), statistics.mean(theirs) * len(pairs)
    solved = statistics.median(scipy_alone) * len(pairs)
    return {
        "layers": layers,
        "tokens": tokens,
        "mask": "causal" if causal else "all",
        "pairs": len(pairs),
        "ours, s": seconds,
        "solved one and all, s": solved,
        "networkx, s": expected,
        "networkx / ours": expected / seconds,
        "networkx / solved": expected / solved,
        "largest difference": error,
    }


def growth(layers: int, sizes: list[int], rounds: int) -> dict[str, Any]:
    """Measure the seconds for all pairs of causal maps of several lengths, in turns."""
    maps = {size: random_map(layers, size, causal=True) for size in sizes}
    seconds = common.interleaved(
        {str(size): (lambda size=size: lm.flow(maps[size], layer=-1)) for size in sizes},
        rounds,
        warm_up=(),
    )
    row: dict[str, Any] = {f"{size} tokens, s": seconds[str(size)] for size in sizes}
    row[f"{sizes[-1]} / {sizes[0]}"] = seconds[str(sizes[-1])] / seconds[str(sizes[0])]
    return row


def main() -> None:
    """Print all tables, and write them to a file if it is asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--full", action="store_true", help="more rounds, and three lengths")
    parser.add_argument("--json", help="a file to write the figures to")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rounds = 7 if options.full else 3
    rows = [
        against_networkx(12, 32, causal=False, rounds=rounds, sample=6),
        against_networkx(12, 32, causal=True, rounds=rounds, sample=6),
        against_networkx(6, 32, causal=False, rounds=rounds, sample=6),
    ]
    print("All pairs from the last layer\n")
    print(common.markdown_table(rows))
    lengths = growth(12, [64, 96, 128] if options.full else [64, 128], rounds=3 if options.full else 1)
    print("\nCausal, 12 layers, all pairs from the last layer\n")
    print(common.markdown_table([lengths]))
    machine = common.machine()
    print("\n" + ", ".join(f"{name} {value}" for name, value in machine.items()))
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"machine": machine, "against networkx": rows, "growth": lengths}, file, indent=1)


if __name__ == "__main__":
    main()
