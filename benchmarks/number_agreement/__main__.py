"""Repeat experiments of three papers on encoders that are trained here, and write results/ beside this file.

python -m benchmarks.number_agreement                    about 40 minutes on a free core, 15 of them training
python -m benchmarks.number_agreement --only heads       one experiment of: table, heads, probing
python -m benchmarks.number_agreement --sentences 20     the same, with fewer sentences
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pandas as pd

from benchmarks.common import describe_machine
from benchmarks.number_agreement import heads, probes, table
from benchmarks.number_agreement.encoder import TASKS, Classifier, Recipe, classifier, held_out
from benchmarks.number_agreement.sentences import Sentence

# The published numbers for raw attention, roll-out and flow at the last layer (Abnar & Zuidema, table 1).
THEIRS = {"blank-out": (0.29, 0.71, 0.70), "gradients": (0.46, 0.54, 0.61)}
# The seed of sentences that the tables do not use.
OTHERS_SEED = 2_000_000


Part = Callable[["Sizes"], Iterator[str]]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of the experiments.

    Attributes:
        recipe: That of the first encoder. The others differ in their seed, and the last one in its blocks.
        seeds: The number of encoders with the blocks of the first one.
        sentences: The number of sentences of the first encoder's table. The other encoders use half of it,
            the heads a quarter, and the probes twice as many.
        others: The number of sentences on which accuracy is measured.
    """

    recipe: Recipe = dataclasses.field(default_factory=Recipe)
    seeds: int = 3
    sentences: int = 200
    others: int = 500

    def encoders(self) -> dict[str, Classifier]:
        """Return the encoders by name. All experiments use the first one."""
        recipes = [dataclasses.replace(self.recipe, seed=seed) for seed in range(self.seeds)]
        recipes.append(dataclasses.replace(self.recipe, blocks="bert"))
        return {f"{recipe.blocks}, seed {recipe.seed}": classifier("verb", recipe) for recipe in recipes}

    def examples(self, times: float = 1) -> list[Sentence]:
        """Return `times` as many sentences, on which nothing was trained."""
        return held_out(max(round(times * self.sentences), 2))


def main() -> None:
    """Write the pages that are asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=list(PARTS), help="one experiment; default: all")
    parser.add_argument(
        "--sentences", type=int, default=Sizes.sentences, help="number of sentences of the first table"
    )
    parser.add_argument(
        "--seeds", type=int, default=Sizes.seeds, help="number of encoders with GPT-2's blocks"
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder")
    options = parser.parse_args()
    options.out.mkdir(exist_ok=True)
    for name in [options.only] if options.only else PARTS:
        page = make(name, Sizes(seeds=options.seeds, sentences=options.sentences))
        (options.out / f"{name}.md").write_text(page, encoding="utf-8")


def make(name: str, sizes: Sizes) -> str:
    """Return a page of results, with its date and machine."""
    start = time.perf_counter()
    texts = []
    for text in PARTS[name](sizes):
        texts.append(text)
        print(f"{text}\n", flush=True)
    heading = (
        f"# Number agreement: {name}\n\nWritten by `python -m benchmarks.number_agreement`, discussed in "
        "[docs/evidence/number_agreement.md](../../../docs/evidence/number_agreement.md).\n\n"
        f"Machine: {describe_machine()}; {time.perf_counter() - start:.0f} s."
    )
    return "\n\n".join([heading, *texts]) + "\n"


# ------------------------------------------------------------------ Abnar & Zuidema


def _yield_tables(sizes: Sizes) -> Iterator[str]:
    encoders = sizes.encoders()
    yield "## The encoders\n\n" + _measure_accuracies(encoders)
    measured = {
        name: table.summary(table.measure(found, sizes.examples(0.5 if place else 1), randomised=place == 0))
        for place, (name, found) in enumerate(encoders.items())
    }
    yield from _yield_seed_paper(measured)
    yield from _yield_every_map(measured)


def _measure_accuracies(encoders: dict[str, Classifier]) -> str:
    examples, lines = held_out(2000), []
    for name, found in encoders.items():
        line = {"encoder": name, "all": f"{found.accuracy(examples):.4f}"}
        for attractors in (1, 2, 3):
            chosen = [one for one in examples if min(one.attractors, 3) == attractors]
            line[f"{attractors} attractors{' or more' * (attractors == 3)}"] = f"{found.accuracy(chosen):.4f}"
        lines.append(line)
    return f"Accuracy on {len(examples)} held-out sentences.\n\n" + _format_markdown(pd.DataFrame(lines))


def _yield_seed_paper(measured: dict[str, pd.DataFrame]) -> Iterator[str]:
    yield "## The paper's own table\n\nSpearman of [CLS]'s row, mean ± standard error; theirs at layer 6."
    wanted = [("attention", kind) for kind in ("row", "rollout", "flow")]
    for importance, theirs in THEIRS.items():
        lines = []
        for name, summary in measured.items():
            for place, (method, kind) in enumerate(wanted):
                rows = _select(summary, importance, method, kind)
                line = {"encoder": name, "attention": "raw" if kind == "row" else kind}
                line |= {
                    f"layer {row.layer}": f"{row.spearman:.2f} ± {row.error:.2f}" for row in rows.itertuples()
                }
                lines.append({**line, "theirs": f"{theirs[place]:.2f}"})
        yield f"### {importance}\n\n" + _format_markdown(pd.DataFrame(lines))


def _yield_every_map(measured: dict[str, pd.DataFrame]) -> Iterator[str]:
    """Yield all maps at the last layer, and those of the first encoder at every layer."""
    first, *others = measured.values()
    lines = []
    deepest = first[first.weights == "trained"].groupby(["method", "aggregation"], sort=False)["layer"].max()
    for (method, kind), layer in deepest.items():
        line: dict[str, object] = {"map": f"{method}, {kind}"}
        for importance in THEIRS:
            (row,) = _select(first, importance, method, kind, layer).itertuples()
            line[importance] = f"{row.spearman:.2f} ± {row.error:.2f}"
            line[f"{importance}, partial"] = "–" if pd.isna(row.partial) else f"{row.partial:.2f}"
            same = [_select(other, importance, method, kind, layer) for other in others]
            line[f"{importance}, others"] = ", ".join(
                f"{rows.spearman.iloc[0]:.2f}" if len(rows) else "–" for rows in same
            )
            untrained = _select(first, importance, method, kind, layer, weights="untrained")
            line[f"{importance}, untrained"] = f"{untrained.spearman.iloc[0]:.2f}" if len(untrained) else ""
            line["undefined"] = row.undefined
        lines.append((float(str(line["blank-out"]).split()[0]), line))
    ordered = [line for _, line in sorted(lines, key=lambda pair: -pair[0])]
    names = ", ".join(list(measured)[1:])
    yield (
        "## Every map\n\nAt the last layer. partial: controlled for position; others: the other "
        f"encoders ({names}); untrained: the first encoder's map before its training, against the same "
        "importance; undefined: sentences with a constant row.\n\n" + _format_markdown(pd.DataFrame(ordered))
    )
    for importance in THEIRS:
        rows = first[(first.weights == "trained") & (first.importance == importance) & (first.layer > 0)]
        by_layer = rows.pivot_table("spearman", ["method", "aggregation"], "layer", sort=False)
        yield f"### {importance}, by layer (first encoder)\n\n" + _format_markdown(by_layer.reset_index())


def _select(
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


def _yield_heads(sizes: Sizes) -> Iterator[str]:
    found, other_seed, *_ = sizes.encoders().values()
    examples, others = sizes.examples(0.25), held_out(sizes.others, seed=OTHERS_SEED)
    count = len(examples)
    ranked = heads.rankings(found, examples)
    top = [
        {
            "by": name,
            "heads (layer.head)": ", ".join(f"{la + 1}.{h}" for la, h, _ in one.top(8)),
            "notes": "; ".join(one.notes),
        }
        for name, one in ranked.items()
    ]
    yield f"## Heads\n\nThe most important by {count} sentences.\n\n" + _format_markdown(pd.DataFrame(top))
    pruned = heads.pruning(found, ranked, others).reset_index()
    yield (
        f"### Pruning\n\nAccuracy on {len(others)} other sentences. The least important heads are pruned "
        "first. random: the mean of five orders.\n\n" + _format_markdown(pruned)
    )
    tuned = {task: classifier(task, found.recipe) for task in TASKS if task != "verb"}
    right = ", ".join(f"{task} {one.accuracy(others, task):.3f}" for task, one in tuned.items())
    correlated = heads.between_tasks(found, tuned, other_seed, held_out(6 * count), count)
    yield (
        "### Between tasks\n\nPearson correlation of head importance by attribution. "
        f"Accuracies: {right}.\n\n" + _format_markdown(correlated.reset_index(names=""))
    )
    edges, shown, held = heads.trees(found, examples)
    text = "\n\n".join(f"{kind}:\n\n```\n{tree}\n```" for kind, tree in shown.items())
    yield f"### Trees\n\n{' '.join(examples[0].words)}\n\n{text}\n\n" + _format_markdown(held.reset_index())
    yield "Distance between the tokens of an edge, by layer.\n\n" + _format_markdown(heads.distances(edges))
    strongest, means = heads.triggers(found, examples, others)
    yield (
        "### Triggers\n\nAccuracy lost in sentences with the answer of the trigger's own sentence, and in "
        f"the others.\n\n{_format_markdown(strongest)}\n\n### Triggers, mean over all\n\n"
        + _format_markdown(means.reset_index(names="inserted"))
    )


# ------------------------------------------------------------------ probing


def _yield_probing(sizes: Sizes) -> Iterator[str]:
    found, *_ = sizes.encoders().values()
    examples = sizes.examples(2)
    probed = probes.probed(found, examples)
    tables = [
        f"{cue} (majority {probing.majority:.2f}):\n\n"
        + _format_markdown(probing.to_dataframe().assign(layer=lambda frame: frame.layer + 1))
        for cue, probing in probed.items()
    ]
    yield f"## Probing\n\nNumber of a noun, read at [CLS]; {len(examples)} sentences.\n\n" + "\n\n".join(
        tables
    )
    agreed = probes.agreement(found, examples, probed["subject"])
    yield (
        "### Agreement of maps with the probes\n\nSpearman over the layers of the subject's share of [CLS] "
        "with the probes' accuracy, selectivity, and, sentence by sentence, with the log probability of the "
        "right number; and the mean share.\n\n" + _format_markdown(agreed)
    )


def _format_markdown(frame: pd.DataFrame) -> str:
    """Return the table as Markdown, with numbers of two decimals."""

    def cell(value: object) -> str:
        if isinstance(value, float):
            return "" if pd.isna(value) else f"{value:.2f}"
        return str(value)

    def line(cells: Iterable[object]) -> str:
        return "| " + " | ".join(map(cell, cells)) + " |"

    rows = frame.itertuples(index=False, name=None)
    return "\n".join([line(frame.columns), "|" + " --- |" * len(frame.columns), *map(line, rows)])


PARTS: dict[str, Part] = {"table": _yield_tables, "heads": _yield_heads, "probing": _yield_probing}

if __name__ == "__main__":
    main()
