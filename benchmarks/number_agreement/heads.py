"""Repeat the experiments of self-attention attribution (Hao et al., AAAI 2021) on the trained classifier."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd
import torch

import lens_mix as lm
from benchmarks.number_agreement.encoder import TASKS, Classifier
from benchmarks.number_agreement.sentences import CLS, Sentence, token_ids, vocabulary
from lens_mix import experiments

# The shares of pruned heads. The paper uses steps of a tenth too.
SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
# With these options lens_mix makes the tree of the released code.
RELEASED_CODE: dict[str, Any] = {
    "special": [0],
    "top_layer": -2,
    "order": "position",
    "within_layer": True,
}


def answers(examples: Sequence[Sentence], task: str = "verb") -> list[int]:
    """Return the right answers."""
    return [int(TASKS[task](example)) for example in examples]


def prompts(examples: Sequence[Sentence]) -> list[torch.Tensor]:
    """Return the token numbers."""
    return [torch.tensor(token_ids(example)) for example in examples]


def accuracy_of(found: Classifier, examples: Sequence[Sentence]) -> Callable[[Any], float]:
    """Return a metric: the share of right answers."""
    return lambda model: found.accuracy(examples)


def likelihood_of(found: Classifier, examples: Sequence[Sentence]) -> Callable[[Any], float]:
    """Return a metric that changes even if accuracy does not: the right answer's mean log probability."""
    ids, right = [token_ids(example) for example in examples], torch.tensor(answers(examples))
    return lambda model: found.logits(ids).log_softmax(-1).gather(1, right[:, None]).mean().item()


# ------------------------------------------------------------------ section 4: heads


def by_attribution(found: Classifier, examples: Sequence[Sentence], task: str) -> experiments.HeadImportance:
    """Return E_x[max Attr_h] of the right answer's probability."""
    targets = [found.probability(answer) for answer in answers(examples, task)]
    return experiments.head_importance(found.model, prompts(examples), targets=targets)


def rankings(found: Classifier, examples: Sequence[Sentence]) -> dict[str, experiments.HeadImportance]:
    """Return importance by attribution and its baselines.

    If no head changes the accuracy, the likelihood still distinguishes them.
    """
    losses = [found.loss(answer) for answer in answers(examples)]
    count, given = len(examples), prompts(examples)
    ablation = experiments.ablation_importance
    return {
        "attribution": by_attribution(found, examples, "verb"),
        "attention": experiments.head_importance(found.model, given, "attention"),
        "Taylor": experiments.head_importance(found.model, given, "taylor", targets=losses),
        "accuracy difference": ablation(found.model, accuracy_of(found, examples), examples=count),
        "likelihood difference": ablation(found.model, likelihood_of(found, examples), examples=count),
    }


def pruning(
    found: Classifier, ranked: dict[str, experiments.HeadImportance], others: Sequence[Sentence]
) -> pd.DataFrame:
    """Return the accuracy on other sentences as the least important heads are pruned first."""
    curves = experiments.pruning_curves(
        found.model, accuracy_of(found, others), ranked, fractions=SHARES, random=5
    )
    table = curves.to_dataframe().pivot(index="ranking", columns="fraction", values="value")
    table = table.loc[[*ranked, "random"]]
    table.columns = [f"{share:.0%}" for share in SHARES]
    return table.assign(mean=pd.Series(curves.area()))


def between_tasks(
    found: Classifier,
    tuned: dict[str, Classifier],
    other_seed: Classifier,
    examples: Sequence[Sentence],
    count: int,
) -> pd.DataFrame:
    """Return correlations of head importance. A model of another seed shows the level of chance."""
    by_construction = {
        kind: [example for example in examples if example.construction == kind][:count]
        for kind in ("phrase", "clause")
    }
    importances = {
        f"verb after a {kind}": by_attribution(found, chosen, "verb")
        for kind, chosen in by_construction.items()
    }
    for task, model in tuned.items():
        importances[task] = by_attribution(model, examples[:count], task)
    importances["verb, another seed"] = by_attribution(other_seed, examples[:count], "verb")
    return experiments.importance_correlations(importances)


# ------------------------------------------------------------------ section 5: trees


def trees(
    found: Classifier, examples: Sequence[Sentence]
) -> tuple[pd.DataFrame, dict[str, str], pd.DataFrame]:
    """Return the edges of the trees, drawings of the first trees, and what the trees contain.

    The root of "from CLS" is the position at which the answer is read. The root of "released code" is the
    token with the strongest row.
    """
    kinds: dict[str, dict[str, Any]] = {"from CLS": {"root": 0}, "released code": RELEASED_CODE}
    edges, shown, held = [], {}, []
    for number, (example, ids, answer) in enumerate(
        zip(examples, prompts(examples), answers(examples), strict=True)
    ):
        method = lm.methods.AttentionAttribution(target=found.probability(answer))
        mixing = lm.run(found.model, ids, method)
        named = mixing.replace(tokens=[CLS, *example.words])
        for kind, options in kinds.items():
            tree = lm.attribution_tree(named, **options)
            if number == 0:
                shown[kind] = lm.aggregation.tree_text(tree)
            tokens = {position for _, position in tree.nodes}
            held.append(
                {
                    "tree": kind,
                    "tokens": len(tokens),
                    "holds the subject": example.subject + 1 in tokens,
                    "holds the last noun": example.nouns[-1] + 1 in tokens,
                    "root is the subject": tree.graph["root"][1] == example.subject + 1,
                }
            )
            for start, end, values in tree.edges(data=True):
                distance = abs(start[1] - end[1])
                edges.append({"tree": kind, "layer": values["layer"] + 1, "distance": distance})
    return pd.DataFrame(edges), shown, pd.DataFrame(held).groupby("tree", sort=False).mean()


def distances(edges: pd.DataFrame) -> pd.DataFrame:
    """Return the distances between the two tokens of an edge, by layer: the receptive field."""
    groups = edges.groupby(["tree", "layer"], sort=False)["distance"]
    table = groups.describe()[["count", "mean", "25%", "50%", "75%", "max"]]
    return table.sort_index(ascending=[False, True]).reset_index()


# ------------------------------------------------------------------ section 6: triggers


def triggers(
    found: Classifier, examples: Sequence[Sentence], others: Sequence[Sentence], keep: int = 5
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the effect of the strongest triggers of some sentences on the answers of others, and its mean.

    "own" are sentences with the same answer as the trigger's sentence, and "other" are the rest. The control
    inserts as many random words of the sentences at the same positions.
    """
    special = [vocabulary()[CLS]]
    found_in, into = _make_examples(examples), _make_examples(others)
    targets = [found.probability(answer) for answer in answers(examples)]
    strongest = experiments.extract_triggers(found.model, found_in, targets=targets, special=special)
    distinct = {tuple(piece.token for piece in one.pieces): one for one in reversed(strongest)}
    kept, draw = list(distinct.values())[::-1], random.Random(0)
    words = [token for example in into for token in example.tokens if token not in special]
    by_chance = [
        dataclasses.replace(
            one, pieces=tuple(dataclasses.replace(piece, token=draw.choice(words)) for piece in one.pieces)
        )
        for one in kept
    ]
    tables = {
        "triggers": _measure_drops(found, into, kept, special),
        "random words": _measure_drops(found, into, by_chance, special),
    }
    means = pd.DataFrame({name: table[["own", "other"]].mean() for name, table in tables.items()}).T
    counts = {"triggers": len(strongest), "random words": len(strongest)}
    return tables["triggers"].head(keep), means.assign(count=counts, distinct=len(kept))


def _measure_drops(
    found: Classifier,
    into: Sequence[experiments.Example],
    triggers: Sequence[experiments.Trigger],
    special: Sequence[int],
) -> pd.DataFrame:
    """Return the lost accuracy of each trigger."""

    def predict(examples: Sequence[experiments.Example]) -> list[bool]:
        return found.logits([example.tokens for example in examples]).argmax(-1).bool().tolist()

    names, lines = list(vocabulary()), []
    report = experiments.trigger_report(into, triggers, predict, special=special)
    for trigger, rows in itertools.groupby(report.rows, lambda row: row[0]):
        lost = {label: before - after for _, label, _, before, after in rows}
        words = " … ".join(names[piece.token] for piece in trigger.pieces)
        own = trigger.source.label
        place = f"{trigger.layer + 1}.{trigger.head}"
        lines.append({"trigger": words, "head": place, "own": lost[own], "other": lost[not own]})
    return pd.DataFrame(lines)


def _make_examples(examples: Sequence[Sentence]) -> list[experiments.Example]:
    return [experiments.Example(tuple(token_ids(example)), example.plural) for example in examples]
