"""Which heads agree nouns and verbs? Self-attention attribution on a task that SmolLM2 can do (BLiMP).

    python demos/attribution.py                 SmolLM2-135M, 4 sentences per task, some minutes on two cores
    python demos/attribution.py --pairs 16      finer, four times as long

Prints the attribution of one sentence and its tree, the most important heads, how the importance of three
tasks correlates, what is left of the accuracy as heads are pruned in four orders, and what trigger words do.
Pictures go to outputs/, their paths are printed.
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
from lens_mix import evaluation
from lens_mix.view import layer_maps
from lens_mix.view.attribution_figures import pruning_figure, tree_figure

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
    """A context, the right and the wrong next word."""

    prefix: str
    good: str
    bad: str

    @property
    def target(self) -> lm.targets.Target:
        """What is explained: how much the model prefers the right word."""
        return lm.targets.logit_difference(" " + self.good, " " + self.bad)


def read_pairs(task: str, count: int) -> list[Pair]:
    """The first `count` pairs of a task."""
    lines = (HERE / "data" / "blimp" / f"{TASKS[task]}.jsonl").read_text().splitlines()[:count]
    rows = [json.loads(line) for line in lines]
    return [
        Pair(row["one_prefix_prefix"], row["one_prefix_word_good"], row["one_prefix_word_bad"])
        for row in rows
    ]


# ------------------------------------------------------------------ metrics: functions of the model


def margins(model: Any, pairs: Sequence[Pair]) -> Tensor:
    """logit(good) - logit(bad) of every pair, in one padded batch: [pair]."""
    prompts = [model.to_tokens(pair.prefix)[0] for pair in pairs]
    longest = max(map(len, prompts))
    tokens = torch.zeros(len(prompts), longest, dtype=torch.long)
    mask = torch.zeros_like(tokens)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)], mask[row, : len(prompt)] = prompt, 1
    logits = model(tokens, attention_mask=mask)
    last = logits[torch.arange(len(prompts)), mask.sum(1) - 1]
    good, bad = ([word_id(model, getattr(pair, side)) for pair in pairs] for side in ("good", "bad"))
    rows = torch.arange(len(prompts))
    return last[rows, good] - last[rows, bad]


def word_id(model: Any, word: str) -> int:
    """The token of a word after a space."""
    return model.tokenizer(" " + word, add_special_tokens=False)["input_ids"][0]


def accuracy(pairs: Sequence[Pair]) -> Callable[[Any], float]:
    """The share of pairs where the right word is preferred, as a function of the model."""
    return lambda model: (margins(model, pairs) > 0).double().mean().item()


def mean_margin(pairs: Sequence[Pair]) -> Callable[[Any], float]:
    """The mean margin, which moves where the accuracy does not."""
    return lambda model: margins(model, pairs).mean().item()


# ------------------------------------------------------------------ the story


def one_sentence(model: Any, pair: Pair) -> None:
    """Attribution maps and the tree of one sentence."""
    method = lm.AttentionAttribution(target=pair.target)
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
    print(
        f"  above 10 % in layers {rough}, whose numbers would need more points; of the others the strongest:"
    )
    sure = found.select_layers([layer for layer in found.layer_labels if layer not in rough])
    for place, query, key in strongest(sure.scores, 6):
        score, layer = sure.scores[place, query, key].item(), sure.layer_labels[place]
        print(f"  {score:+.3f}  layer {layer:2d}  {found.tokens[query]!r} <- {found.tokens[key]!r}")
    # The first token takes nothing in, as [CLS] in the paper's code; an edge costs 0.05 logits.
    tree = lm.attribution_tree(found, root=-1, special=[0], cost=0.05)
    print("\n" + lm.tree_text(tree))
    title = f"Attribution of logit({pair.good}) - logit({pair.bad}), layers with a gap below 10 %"
    save(layer_maps(sure, normalize=False, title=title), "attribution_layers")
    save(tree_figure(tree, title=f"{pair.prefix} … {pair.good} / {pair.bad}"), "attribution_tree")


def importances(model: Any, pairs: Sequence[Pair]) -> dict[str, evaluation.HeadImportance]:
    """Four ways to say how important a head is."""
    prompts, targets = [pair.prefix for pair in pairs], [pair.target for pair in pairs]
    # The loss of the task: -log of the right word's share of the two.
    losses = [preference_loss(model, pair) for pair in pairs]
    return {
        "attribution": evaluation.head_importance(model, prompts, targets=targets, progress=True),
        "attention": evaluation.head_importance(model, prompts, "attention", progress=True),
        "taylor": evaluation.head_importance(model, prompts, "taylor", targets=losses, progress=True),
        "ablation": evaluation.ablation_importance(
            model, mean_margin(pairs), examples=len(pairs), progress=True
        ),
    }


def preference_loss(model: Any, pair: Pair) -> Callable[[Tensor], Tensor]:
    """-log P(good | good or bad), as a function of the logits."""
    good, bad = word_id(model, pair.good), word_id(model, pair.bad)
    return lambda logits: -torch.nn.functional.logsigmoid(logits[:, -1, good] - logits[:, -1, bad])


def tasks_correlate(model: Any, count: int, known: evaluation.HeadImportance) -> None:
    """Whether the three tasks need the same heads."""
    by_task = {MAIN_TASK: known}
    for task in TASKS:
        if task != MAIN_TASK:
            pairs = read_pairs(task, count)
            by_task[task] = evaluation.head_importance(
                model, [pair.prefix for pair in pairs], targets=[pair.target for pair in pairs], progress=True
            )
    print("\nCorrelation of head importance between tasks (Pearson)")
    print(evaluation.importance_correlations(by_task).round(2).to_string())


def prune(model: Any, pairs: Sequence[Pair], rankings: dict[str, evaluation.HeadImportance]) -> None:
    """The curves, on sentences that the rankings have not seen."""
    curves = evaluation.pruning_curves(
        model, accuracy(pairs), rankings, fractions=SHARES, random=2, progress=True
    )
    table = curves.to_dataframe().pivot(index="ranking", columns="fraction", values="value").round(2)
    print(f"\nAccuracy on {len(pairs)} other pairs, the least important heads pruned first")
    print(table.to_string())
    print("mean on the way: " + ", ".join(f"{name} {area:.2f}" for name, area in curves.area().items()))
    title = f"{MAIN_TASK} agreement, {len(pairs)} pairs"
    save(pruning_figure(curves, title=title, metric="accuracy"), "attribution_pruning")


def triggers(model: Any, count: int) -> None:
    """Words that carry a verdict in one sentence, put into others."""
    pairs = read_pairs("anaphor", max(count, 24))
    label_of = ["plural" if pair.good in PLURAL["anaphor"] else "singular" for pair in pairs]
    examples = [
        evaluation.Example.read(model, pair.prefix, label)
        for pair, label in zip(pairs, label_of, strict=True)
    ]
    choices = {
        "plural": word_id(model, "themselves"),
        "singular": [word_id(model, word) for word in ("himself", "herself", "itself")],
    }
    special = set(model.tokenizer.all_special_ids)
    found = evaluation.extract_triggers(
        model,
        examples[:count],
        targets=[pair.target for pair in pairs[:count]],
        special=special,
        progress=True,
    )
    predict = evaluation.predict_by_token(model, choices)
    report = evaluation.trigger_report(examples, found[:4], predict, special=special)
    print(f"\nTriggers of {count} sentences, in {len(examples)}: accuracy before and after (anaphor)")
    print(report.to_dataframe().round(2).to_string(index=False))


def strongest(scores: Tensor, count: int) -> list[list[int]]:
    """The places of the largest entries, largest first."""
    best = scores.flatten().topk(min(count, scores.numel())).indices
    return torch.stack(torch.unravel_index(best, scores.shape), dim=1).tolist()


def median(values: Sequence[float]) -> float:
    return float(torch.tensor(values).median())


def save(figure: Any, name: str) -> None:
    OUTPUTS.mkdir(exist_ok=True)
    path = OUTPUTS / f"{name}.png"
    figure.savefig(path)
    print(f"  picture: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=4, help="sentences per task that are explained")
    options = parser.parse_args()
    start = time.perf_counter()
    model = models.smollm2()
    pairs = read_pairs(MAIN_TASK, 48)
    with torch.no_grad():
        print(f"accuracy on {len(pairs)} pairs of {MAIN_TASK} agreement: {accuracy(pairs)(model):.2f}")
    seen, other = pairs[: options.pairs], pairs[max(options.pairs, 24) :] or pairs
    print(f"{len(seen)} pairs are explained, the curves are measured on {len(other)} others")
    one_sentence(model, seen[1])
    rankings = importances(model, seen)
    for name, importance in rankings.items():
        best = ", ".join(f"{layer}.{head}" for layer, head, _ in importance.top(8))
        print(f"  most important heads by {name:11s} {best}")
    for note in rankings["attribution"].notes:
        print(f"    {note}")
    save(rankings["attribution"].show(highest=0.5), "attribution_heads")
    tasks_correlate(model, options.pairs, rankings["attribution"])
    prune(model, other, rankings)
    triggers(model, max(options.pairs // 2, 1))
    print(f"\n{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
