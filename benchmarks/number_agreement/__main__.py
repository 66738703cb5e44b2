"""Two papers' own tables on an encoder that is trained here; writes benchmarks/NUMBER_AGREEMENT.md.

python -m benchmarks.number_agreement                      about 45 minutes on one core, 15 of them training
python -m benchmarks.number_agreement --sentences 20       the same, roughly, in a few minutes
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pandas as pd

from benchmarks.common import machine
from benchmarks.number_agreement import heads, probes, table
from benchmarks.number_agreement.encoder import TASKS, Classifier, Recipe, classifier, held_out
from benchmarks.number_agreement.sentences import Sentence

# At the last layer: raw attention, rollout, flow (Abnar & Zuidema, table 1).
THEIRS = {"blank-out": (0.29, 0.71, 0.70), "gradients": (0.46, 0.54, 0.61)}
# Other sentences than those of the tables.
OTHERS_SEED = 2_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sentences", type=int, default=400, help="of the first encoder's tables")
    parser.add_argument("--seeds", type=int, default=3, help="how many encoders with GPT-2's blocks")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "NUMBER_AGREEMENT.md")
    options = parser.parse_args()
    start, parts = time.perf_counter(), []
    for part in sections(Recipe(), options.seeds, options.sentences):
        parts.append(part)
        print(part, flush=True)
    facts = ", ".join(f"{name} {value}" for name, value in machine().items())
    seconds = time.perf_counter() - start
    heading = (
        "# Number agreement\n\nWritten by `python -m benchmarks.number_agreement`, discussed in "
        f"[docs/number_agreement.md](../docs/number_agreement.md).\n\nMachine: {facts}; {seconds:.0f} s."
    )
    options.out.write_text("\n\n".join([heading, *parts]) + "\n", encoding="utf-8")


def sections(recipe: Recipe, seeds: int, count: int, others: int = 500) -> Iterator[str]:
    """The parts of the page, as they are done.

    Args:
        recipe: of the first encoder; the others differ in their seed, the last one in its blocks.
        seeds: how many with its blocks.
        count: sentences of the first encoder's tables; half as many elsewhere.
        others: sentences that accuracy is measured on.
    """
    fewer = max(count // 2, 2)
    recipes = [dataclasses.replace(recipe, seed=seed) for seed in range(seeds)]
    recipes.append(dataclasses.replace(recipe, blocks="bert"))
    encoders = {f"{recipe.blocks}, seed {recipe.seed}": classifier("verb", recipe) for recipe in recipes}
    yield "## The encoders\n\n" + _accuracies(encoders)
    first = next(iter(encoders.values()))
    measured = {
        name: table.summary(table.measure(found, held_out(count if found is first else fewer)))
        for name, found in encoders.items()
    }
    yield from _seeds_own(measured)
    yield from _every_map(measured)
    other_seed = classifier("verb", recipes[min(1, seeds - 1)])
    yield from _heads(first, other_seed, fewer, held_out(others, seed=OTHERS_SEED))
    yield from _probing(first, count)


# ------------------------------------------------------------------ Abnar & Zuidema


def _accuracies(encoders: dict[str, Classifier]) -> str:
    examples, lines = held_out(2000), []
    for name, found in encoders.items():
        line = {"encoder": name, "all": f"{found.accuracy(examples):.4f}"}
        for attractors in (1, 2, 3):
            chosen = [one for one in examples if min(one.attractors, 3) == attractors]
            line[f"{attractors} attractors{' or more' * (attractors == 3)}"] = f"{found.accuracy(chosen):.4f}"
        lines.append(line)
    return f"Accuracy on {len(examples)} held-out sentences.\n\n" + _markdown(pd.DataFrame(lines))


def _seeds_own(measured: dict[str, pd.DataFrame]) -> Iterator[str]:
    yield "## The seed's own table\n\nSpearman of [CLS]'s row, mean ± standard error; theirs at layer 6."
    wanted = [("attention", kind) for kind in ("row", "rollout", "flow")]
    for importance, theirs in THEIRS.items():
        lines = []
        for name, summary in measured.items():
            for place, (method, kind) in enumerate(wanted):
                rows = _chosen(summary, importance, method, kind)
                line = {"encoder": name, "attention": "raw" if kind == "row" else kind}
                line |= {
                    f"layer {row.layer}": f"{row.spearman:.2f} ± {row.error:.2f}" for row in rows.itertuples()
                }
                lines.append({**line, "theirs": f"{theirs[place]:.2f}"})
        yield f"### {importance}\n\n" + _markdown(pd.DataFrame(lines))


def _every_map(measured: dict[str, pd.DataFrame]) -> Iterator[str]:
    """At the last layer, and, of the first encoder, at every layer."""
    first, *others = measured.values()
    lines = []
    deepest = first[first.weights == "trained"].groupby(["method", "aggregation"], sort=False)["layer"].max()
    for (method, kind), layer in deepest.items():
        line: dict[str, object] = {"map": f"{method}, {kind}"}
        for importance in THEIRS:
            (row,) = _chosen(first, importance, method, kind, layer).itertuples()
            line[importance] = f"{row.spearman:.2f} ± {row.error:.2f}"
            line[f"{importance}, partial"] = "–" if pd.isna(row.partial) else f"{row.partial:.2f}"
            same = [_chosen(other, importance, method, kind, layer) for other in others]
            line[f"{importance}, others"] = ", ".join(
                f"{rows.spearman.iloc[0]:.2f}" if len(rows) else "–" for rows in same
            )
            untrained = _chosen(first, importance, method, kind, layer, weights="untrained")
            line[f"{importance}, untrained"] = f"{untrained.spearman.iloc[0]:.2f}" if len(untrained) else ""
            line["undefined"] = row.undefined
        lines.append((float(str(line["blank-out"]).split()[0]), line))
    ordered = [line for _, line in sorted(lines, key=lambda pair: -pair[0])]
    names = ", ".join(list(measured)[1:])
    yield (
        "## Every map\n\nAt the last layer. partial: with the position partialled out; others: the other "
        f"encoders ({names}); untrained: the first encoder's map before its training, against the same "
        "importance; undefined: sentences with a constant row.\n\n" + _markdown(pd.DataFrame(ordered))
    )
    for importance in THEIRS:
        rows = first[(first.weights == "trained") & (first.importance == importance) & (first.layer > 0)]
        by_layer = rows.pivot_table("spearman", ["method", "aggregation"], "layer", sort=False)
        yield f"### {importance}, by layer (first encoder)\n\n" + _markdown(by_layer.reset_index())


def _chosen(
    summary: pd.DataFrame,
    importance: str,
    method: str,
    aggregation: str,
    layer: int | None = None,
    weights: str = "trained",
) -> pd.DataFrame:
    rows = summary[(summary.importance == importance) & (summary.weights == weights)]
    rows = rows[(rows.method == method) & (rows.aggregation == aggregation)]
    return rows if layer is None else rows[rows.layer == layer]


# ------------------------------------------------------------------ Hao et al.


def _heads(
    found: Classifier, other_seed: Classifier, count: int, others: Sequence[Sentence]
) -> Iterator[str]:
    examples = held_out(count)
    ranked = heads.rankings(found, examples)
    top = [
        {
            "by": name,
            "heads (layer.head)": ", ".join(f"{la + 1}.{h}" for la, h, _ in one.top(8)),
            "notes": "; ".join(one.notes),
        }
        for name, one in ranked.items()
    ]
    yield f"## Heads\n\nThe most important by {count} sentences.\n\n" + _markdown(pd.DataFrame(top))
    pruned = heads.pruning(found, ranked, others).reset_index()
    yield (
        f"### Pruning\n\nAccuracy on {len(others)} other sentences, the least important heads pruned first; "
        "random: mean of ten orders.\n\n" + _markdown(pruned)
    )
    tuned = {task: classifier(task, found.recipe) for task in TASKS if task != "verb"}
    right = ", ".join(f"{task} {one.accuracy(others, task):.3f}" for task, one in tuned.items())
    correlated = heads.between_tasks(found, tuned, other_seed, held_out(6 * count), count)
    yield (
        "### Between tasks\n\nPearson correlation of head importance by attribution. "
        f"Accuracies: {right}.\n\n" + _markdown(correlated.reset_index(names=""))
    )
    edges, shown, held = heads.trees(found, examples)
    text = "\n\n".join(f"{kind}:\n\n```\n{tree}\n```" for kind, tree in shown.items())
    yield f"### Trees\n\n{' '.join(examples[0].words)}\n\n{text}\n\n" + _markdown(held.reset_index())
    yield "Distance between the tokens of an edge, by layer.\n\n" + _markdown(heads.distances(edges))
    strongest, means = heads.triggers(found, examples, others)
    yield (
        "### Triggers\n\nAccuracy lost in sentences with the answer of the trigger's own sentence, and in "
        f"the others.\n\n{_markdown(strongest)}\n\nMean over all.\n\n"
        + _markdown(means.reset_index(names="inserted"))
    )


# ------------------------------------------------------------------ probing


def _probing(found: Classifier, count: int) -> Iterator[str]:
    examples = held_out(max(count, 20))
    probed = probes.probed(found, examples)
    tables = [
        f"{cue} (majority {probing.majority:.2f}):\n\n"
        + _markdown(probing.to_dataframe().assign(layer=lambda frame: frame.layer + 1))
        for cue, probing in probed.items()
    ]
    yield f"## Probing\n\nNumber of a noun, read at [CLS]; {len(examples)} sentences.\n\n" + "\n\n".join(
        tables
    )
    agreed = probes.agreement(found, examples, probed["subject"])
    yield (
        "### Agreement of maps with the probes\n\nSpearman over the layers of the subject's share of [CLS] "
        "with the probes' accuracy, selectivity, and, sentence by sentence, with the log probability of the "
        "right number; and the mean share.\n\n" + _markdown(agreed)
    )


def _markdown(frame: pd.DataFrame) -> str:
    """A table; numbers with two decimals."""

    def cell(value: object) -> str:
        if isinstance(value, float):
            return "" if pd.isna(value) else f"{value:.2f}"
        return str(value)

    def line(cells: Iterable[object]) -> str:
        return "| " + " | ".join(map(cell, cells)) + " |"

    rows = frame.itertuples(index=False, name=None)
    return "\n".join([line(frame.columns), "|" + " --- |" * len(frame.columns), *map(line, rows)])


if __name__ == "__main__":
    main()
