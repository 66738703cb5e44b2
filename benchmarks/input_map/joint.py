"""Score joint input maps of flan-t5 against measured replacement, on short pairs of the Hansards.

    python -m benchmarks.input_map.joint choose 30        (or held_out): measures, stores, prints the table
    python -m benchmarks.input_map.joint choose 30 table  (prints what is stored)

Each pair has three decoder positions of the French reference. Maps are compared with the mean over four words
of abs(Δ log p) of the prediction there. The start token and the end of the sentence are not scored.
"""

from __future__ import annotations

import math
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lens_mix as lm
from benchmarks.alignment.hansards import Forced, forced, sentences
from benchmarks.common import markdown_table
from lens_mix.evaluation import bootstrap, partial_spearman, spearman

# These words are in both languages, and each is one token.
WORDS = (("table", "question"), ("minute", "public"))
SHORTEST, LONGEST, QUERIES = 6, 22, 3
ROLLED = {
    "attention": "attention",
    "value_norm": "value_norm",
    "value_zeroing": "value_zeroing",
    "attn_res": "attn_res",
    "attn_res_ln": "attn_res_ln",
    "alti": "alti",
    "information_flow_routes": "information_flow_routes",
}


def gradients() -> dict[str, lm.methods.Method]:
    """Return the methods whose maps are of the whole model, by name."""
    target = lm.targets.predicted(of="log_probability")
    mean = {"score": "integrated", "baseline": "mean", "n_steps": 16}
    return {
        "input_gradients, norm": lm.methods.InputGradients(target),
        "input_gradients, times input": lm.methods.InputGradients(target, "times_input"),
        "input_gradients, integrated from the mean": lm.methods.InputGradients(target, **mean),
        "frozen_gradients, ratio": lm.methods.FrozenGradients(target, activations="ratio"),
        "frozen_gradients, absolute": lm.methods.FrozenGradients(target, "absolute"),
        "frozen_gradients, absolute, ratio": lm.methods.FrozenGradients(
            target, "absolute", activations="ratio"
        ),
        "gim": lm.methods.Gim(target),
        "gim, absolute": lm.methods.Gim(target, "absolute"),
        "gim, absolute, ratio": lm.methods.Gim(target, "absolute", activations="ratio"),
        "gim, absolute, T = 1": lm.methods.Gim(target, "absolute", temperature=1, queries_keys=1, values=1),
        "gim, absolute, T = 2, whole gradients": lm.methods.Gim(
            target, "absolute", queries_keys=0.5, values=1
        ),
    }


def chosen(tokenizer: Any, half: str, count: int) -> Iterator[tuple[int, Forced, list[int]]]:
    """Yield pairs of one half with their positions. Every second short pair belongs to the other half."""
    pairs = sentences()
    order = random.Random(0).sample(range(len(pairs)), len(pairs))
    short = [n for n in order if all(SHORTEST <= len(side) <= LONGEST for side in pairs[n])]
    halves = {"choose": short[::2], "held_out": short[1::2]}
    for number in halves[half][:count]:
        pair = forced(tokenizer, *pairs[number], 0, tokenizer.eos_token_id)
        places = range(2, len(pair.target))
        yield number, pair, sorted(random.Random(number).sample(places, min(QUERIES, len(places))))


def measure(model: Any, pair: Forced, queries: list[int]) -> dict[str, Any]:
    """Return the importance by each half of the words, and the rows of every map [query, key]."""
    prompt = torch.tensor(pair.source), torch.tensor(pair.target)
    log_p = lm.targets.predicted(of="log_probability")
    importance = [
        lm.run(
            model,
            prompt,
            lm.methods.Occlusion(log_p, replacements=words, measure="absolute"),
            part="joint",
            queries=queries,
        ).scores[0]
        for words in WORDS
    ]
    rows = {}
    for name, method in gradients().items():
        rows[name] = lm.run(model, prompt, method, part="joint", queries=queries).scores[0].abs()
    maps = lm.run(model, prompt, list(ROLLED.values()), part="all")
    for name, label in ROLLED.items():
        parts = {part: of_part[label] for part, of_part in maps.items()}
        weights = {"residual": {"cross": 0.5}} if name == "value_zeroing" else {}
        below = len(pair.source)
        rolled = lm.rollout(lm.aggregation.joint(parts, **weights)).scores[-1, below:][queries]
        rows[f"joint rollout of {name}"] = rolled
        if name in ("attention", "alti"):
            source = parts["cross"].merge_heads().scores[..., :below].mean(0)[queries]
            rows[f"cross {name}, mean of layers"] = torch.cat([source, 0 * rolled[:, below:]], 1)
    return {"source": len(pair.source), "queries": queries, "importance": importance, "rows": rows}


def scored(record: dict[str, Any], place: int) -> Tensor:
    """Return the scored keys of one row: no start token, no end of the sentence, and nothing later."""
    source, query = record["source"], record["queries"][place]
    return torch.tensor([*range(source - 1), *range(source + 1, source + query + 1)])


def agreement(record: dict[str, Any], name: str) -> dict[str, float]:
    """Return the agreement of one map on one pair, the mean over its rows."""
    found: dict[str, list[float]] = {}
    for place in range(len(record["queries"])):
        keys, source = scored(record, place), record["source"]
        halves = [half[place, keys].double() for half in record["importance"]]
        important, side = sum(halves) / 2, keys < source
        if name == "measured with two of the words, against the other two":
            row, important = halves
        elif name == "position":
            row = torch.arange(len(keys), dtype=torch.float64)
        elif name == "random":
            row = torch.rand(len(keys), generator=torch.Generator().manual_seed(place)).double()
        else:
            row = record["rows"][name][place, keys].double()
        values = {"Spearman": spearman(row, important), "partial": partial_spearman(row, important)}
        values["source alone"] = partial_spearman(row[side], important[side])
        values["prefix alone"] = spearman(row[~side], important[~side])
        for key, value in values.items():
            # A constant row, or one that follows the position exactly, has an agreement of 0.
            found.setdefault(key, []).append(0.0 if math.isnan(value) else value)
    return {key: sum(values) / len(values) for key, values in found.items()}


def table(records: list[dict[str, Any]], reference: str = "input_gradients, norm") -> str:
    """Return a table of all maps, the best first, with 95 % intervals over pairs."""
    names = [*records[0]["rows"], "position", "random"]
    names += ["measured with two of the words, against the other two"]
    by_name = {name: [agreement(record, name) for record in records] for name in names}

    def column(name: str, key: str) -> list[float]:
        return [found[key] for found in by_name[name]]

    lines = []
    for name in sorted(names, key=lambda name: -bootstrap(column(name, "partial"), draws=100).mean):
        line = {"map": name}
        for key in ("partial", "Spearman", "source alone", "prefix alone"):
            found = bootstrap(column(name, key))
            line[key] = f"{found.mean:.2f} [{found.low:.2f}, {found.high:.2f}]"
        apart = bootstrap(column(name, "partial"), column(reference, "partial"))
        line[f"less {reference}"] = f"{apart.mean:+.2f} [{apart.low:+.2f}, {apart.high:+.2f}]"
        lines.append(line)
    return markdown_table(lines)


def main(half: str, count: str = "30", only: str = "") -> None:
    """Measure the pairs that are missing, and print the table."""
    from demos.models import flan_t5

    torch.set_num_threads(1)
    model = flan_t5()
    folder = Path("outputs") / "input_map" / "flan-t5"
    folder.mkdir(parents=True, exist_ok=True)
    records, start = [], time.time()
    for number, pair, queries in chosen(model.tokenizer, half, int(count)):
        path = folder / f"{number}.pt"
        if not path.exists():
            if only == "table":
                continue
            torch.save(measure(model, pair, queries), path)
            tokens = len(pair.source) + len(pair.target)
            print(f"pair {number}: {tokens} tokens, {time.time() - start:.0f} s", flush=True)
        records.append(torch.load(path))
    print(f"{len(records)} pairs\n\n{table(records)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
