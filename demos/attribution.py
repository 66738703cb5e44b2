"""Find the heads that make words agree in number, by self-attention attribution on tasks of BLiMP.

    python demos/attribution.py                 SmolLM2-135M, 4 sentences per task, some minutes on two cores
    python demos/attribution.py --pairs 16      more sentences, which takes four times as long

The program prints the attribution of one sentence and its tree, the most important heads, the correlation of
head importance between three tasks, the accuracy with heads pruned in four orders, and the effect of trigger
words. It writes pictures to outputs/ and prints their paths.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import models
import torch
from torch import Tensor

import lens_mix as lm
from lens_mix import experiments
from lens_mix.experiments.head_figures import pruning_figure
from lens_mix.view import layer_maps
from lens_mix.view.tree_figure import tree_figure

HERE = Path(__file__).resolve().parent
OUTPUTS = HERE.parent / "outputs"
TASKS = {
    "determiner-noun": "determiner_noun_agreement_1",
    "subject-verb": "regular_plural_subject_verb_agreement_1",
    "anaphor": "anaphor_number_agreement",
}
MAIN_TASK = "determiner-noun"
SHARES = (0.0, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 1.0)
PLURAL = {"determiner-noun": ("these", "those"), "anaphor": ("themselves",)}


@dataclasses.dataclass(frozen=True)
class Pair:
    """Contain a context with its right and its wrong next word."""

    prefix: str
    good: str
    bad: str

    @property
    def target(self) -> lm.targets.Target:
        """Return the explained number: how much the model prefers the right word."""
        return lm.targets.logit_difference(" " + self.good, " " + self.bad)


def read_pairs(task: str, count: int) -> list[Pair]:
    """Return the first `count` pairs of a task."""
    lines = (HERE / "data" / "blimp" / f"{TASKS[task]}.jsonl").read_text().splitlines()[:count]
    rows = [json.loads(line) for line in lines]
    return [
        Pair(row["one_prefix_prefix"], row["one_prefix_word_good"], row["one_prefix_word_bad"])
        for row in rows
    ]


# ------------------------------------------------------------------ metrics: functions of the model


def margins(model: Any, pairs: Sequence[Pair]) -> Tensor:
    """Return logit(good) - logit(bad) of every pair, computed in one padded batch: [pair]."""
    prompts = [model.to_tokens(pair.prefix)[0] for pair in pairs]
    longest = max(map(len, prompts))
    tokens = torch.zeros(len(prompts), longest, dtype=torch.long)
    mask = torch.zeros_like(tokens)
    for index, prompt in enumerate(prompts):
        tokens[index, : len(prompt)], mask[index, : len(prompt)] = prompt, 1
    logits = model(tokens, attention_mask=mask)
    last = logits[torch.arange(len(prompts)), mask.sum(1) - 1]
    good, bad = ([word_id(model, getattr(pair, side)) for pair in pairs] for side in ("good", "bad"))
    examples = torch.arange(len(prompts))
    return last[examples, good] - last[examples, bad]


def word_id(model: Any, word: str) -> int:
    """Return the token of a word after a space."""
    return model.tokenizer(" " + word, add_special_tokens=False)["input_ids"][0]


def accuracy(pairs: Sequence[Pair]) -> Callable[[Any], float]:
    """Return a function of the model: the share of pairs in which it prefers the right word."""
    return lambda model: (margins(model, pairs) > 0).double().mean().item()


def mean_margin(pairs: Sequence[Pair]) -> Callable[[Any], float]:
    """Return a function of the model: the mean margin, which is finer than the accuracy."""
    return lambda model: margins(model, pairs).mean().item()


# ------------------------------------------------------------------ the experiments


def explain_sentence(model: Any, pair: Pair) -> None:
    """Print and draw the attribution maps and the tree of one sentence."""
    method = lm.methods.AttentionAttribution(target=pair.target)
    found = lm.run(model, pair.prefix, method)
    details = found.provenance["details"]
    print(f"\n{pair.prefix!r}: logit({pair.good}) - logit({pair.bad}) = {details['target_value'][0]:.2f}")
    gaps = [
        abs(gap) / max(abs(whole - base), 1e-6)
        for gap, whole, base in zip(
            details["completeness_gap"], details["target_value"], details["baseline_value"], strict=True
        )
    ]
    rough = [layer for layer, gap in enumerate(gaps) if gap > 0.1]
    print(f"  completeness gap per layer, relative: median {median(gaps):.1e}")
    print(f"  above 10 % in layers {rough}, which need more points; the largest scores of the other layers:")
    exact = found.select_layers([layer for layer in found.layer_labels if layer not in rough])
    for layer_index, query, key in find_largest(exact.scores, 6):
        score, layer = exact.scores[layer_index, query, key].item(), exact.layer_labels[layer_index]
        print(f"  {score:+.3f}  layer {layer:2d}  {found.tokens[query]!r} <- {found.tokens[key]!r}")
    # The first token has no sources, as [CLS] in the paper's code; an edge costs 0.05 logits.
    tree = lm.attribution_tree(found, root=-1, special=[0], cost=0.05)
    print("\n" + lm.aggregation.tree_text(tree))
    title = f"Attribution of logit({pair.good}) - logit({pair.bad}), layers with a gap below 10 %"
    save(layer_maps(exact, normalize=False, title=title), "attribution_layers")
    save(tree_figure(tree, title=f"{pair.prefix} … {pair.good} / {pair.bad}"), "attribution_tree")


def measure_importance(model: Any, pairs: Sequence[Pair]) -> dict[str, experiments.HeadImportance]:
    """Measure the importance of every head in four ways."""
    prompts, targets = [pair.prefix for pair in pairs], [pair.target for pair in pairs]
    losses = [preference_loss(model, pair) for pair in pairs]
    return {
        "attribution": experiments.head_importance(model, prompts, targets=targets, progress=True),
        "attention": experiments.head_importance(model, prompts, "attention", progress=True),
        "taylor": experiments.head_importance(model, prompts, "taylor", targets=losses, progress=True),
        "ablation": experiments.ablation_importance(
            model, mean_margin(pairs), examples=len(pairs), progress=True
        ),
    }


def preference_loss(model: Any, pair: Pair) -> Callable[[Tensor], Tensor]:
    """Return the loss of the task as a function of the logits: -log P(good | good or bad)."""
    good, bad = word_id(model, pair.good), word_id(model, pair.bad)
    return lambda logits: -torch.nn.functional.logsigmoid(logits[:, -1, good] - logits[:, -1, bad])


def correlate_tasks(model: Any, count: int, main_importance: experiments.HeadImportance) -> None:
    """Print whether the three tasks need the same heads."""
    by_task = {MAIN_TASK: main_importance}
    for task in TASKS:
        if task != MAIN_TASK:
            pairs = read_pairs(task, count)
            by_task[task] = experiments.head_importance(
                model, [pair.prefix for pair in pairs], targets=[pair.target for pair in pairs], progress=True
            )
    print("\nCorrelation of head importance between tasks (Pearson)")
    print(experiments.importance_correlations(by_task).round(2).to_string())


def prune(model: Any, pairs: Sequence[Pair], rankings: dict[str, experiments.HeadImportance]) -> None:
    """Print and draw the pruning curves, on sentences that were not used for the rankings."""
    curves = experiments.pruning_curves(
        model, accuracy(pairs), rankings, fractions=SHARES, random=2, progress=True
    )
    table = curves.to_dataframe().pivot(index="ranking", columns="fraction", values="value").round(2)
    print(f"\nAccuracy on {len(pairs)} other pairs, the least important heads pruned first")
    print(table.to_string())
    print(
        "mean over the fractions: " + ", ".join(f"{name} {area:.2f}" for name, area in curves.area().items())
    )
    title = f"{MAIN_TASK} agreement, {len(pairs)} pairs"
    save(pruning_figure(curves, title=title, metric="accuracy"), "attribution_pruning")


def insert_triggers(model: Any, count: int) -> None:
    """Insert the words that decide the prediction in one sentence into other sentences."""
    pairs = read_pairs("anaphor", max(count, 24))
    labels = ["plural" if pair.good in PLURAL["anaphor"] else "singular" for pair in pairs]
    examples = [
        experiments.Example.read(model, pair.prefix, label) for pair, label in zip(pairs, labels, strict=True)
    ]
    choices = {
        "plural": word_id(model, "themselves"),
        "singular": [word_id(model, word) for word in ("himself", "herself", "itself")],
    }
    special = set(model.tokenizer.all_special_ids)
    found = experiments.extract_triggers(
        model,
        examples[:count],
        targets=[pair.target for pair in pairs[:count]],
        special=special,
        progress=True,
    )
    predict = experiments.predict_by_token(model, choices)
    report = experiments.trigger_report(examples, found[:4], predict, special=special)
    print(f"\nTriggers of {count} sentences, in {len(examples)}: accuracy before and after (anaphor)")
    print(report.to_dataframe().round(2).to_string(index=False))


def find_largest(scores: Tensor, count: int) -> list[list[int]]:
    """Return the indices of the largest entries, the largest first."""
    best = scores.flatten().topk(min(count, scores.numel())).indices
    return torch.stack(torch.unravel_index(best, scores.shape), dim=1).tolist()


def median(values: Sequence[float]) -> float:
    """Return the median."""
    return float(torch.tensor(values).median())


def save(figure: Any, name: str) -> None:
    """Write a figure to the folder of outputs, and print its path."""
    OUTPUTS.mkdir(exist_ok=True)
    path = OUTPUTS / f"{name}.png"
    figure.savefig(path)
    print(f"  picture: {path}")


def main() -> None:
    """Run all experiments on SmolLM2-135M, and print the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=4, help="sentences per task that are explained")
    options = parser.parse_args()
    start = time.perf_counter()
    model = models.smollm2()
    pairs = read_pairs(MAIN_TASK, 48)
    with torch.no_grad():
        print(f"accuracy on {len(pairs)} pairs of {MAIN_TASK} agreement: {accuracy(pairs)(model):.2f}")
    explained, other = pairs[: options.pairs], pairs[max(options.pairs, 24) :] or pairs
    print(f"{len(explained)} pairs are explained, the curves are measured on {len(other)} others")
    explain_sentence(model, explained[1])
    rankings = measure_importance(model, explained)
    for name, importance in rankings.items():
        best = ", ".join(f"{layer}.{head}" for layer, head, _ in importance.top(8))
        print(f"  most important heads by {name:11s} {best}")
    for note in rankings["attribution"].notes:
        print(f"    {note}")
    save(rankings["attribution"].show(vmax=0.5), "attribution_heads")
    correlate_tasks(model, options.pairs, rankings["attribution"])
    prune(model, other, rankings)
    insert_triggers(model, max(options.pairs // 2, 1))
    print(f"\n{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
