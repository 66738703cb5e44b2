"""Learn a weight for each attention head from removals, in the manner of AT2 (arXiv:2504.13752), as a peer.

    PYTHONPATH=.:demos python -m benchmarks.traces.learned collect smollm2 8      (or gemma3)
    PYTHONPATH=.:demos python -m benchmarks.traces.learned table smollm2

The score of a sentence is Σ_h w_h f_h, where f_h is the sum of one head's map over the sentence's tokens and
over the rows that explain the written tokens. The maps are attention, value-weighted attention, and Value
Zeroing of each head or of each layer. The weights are learned on the half "choose", so that the scores of the
removed sentences add up to what the log probability loses. They are evaluated on the half "held_out".

AT2 maximises the correlation with the logit over random ablations, by gradient descent. Here the drops of
each prompt are centred and scaled to the same variance, so least squares also measures the correlation within
a prompt, and a ridge penalty is chosen by cross-validation over prompts.

"collect" stores the prompts of both halves with their removals and features, eight of each family (or of the
families that are named after the number), as far as they do not exist. Value Zeroing of each head is a group
of its own beside those of `benchmarks.traces.maps`.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

import lens_mix as lm
from benchmarks.traces.gold import REMOVED_BY_FAMILY, Record, find, records
from benchmarks.traces.maps import Models, Rows, compute, file_of, load_models, sum_over_pieces
from benchmarks.traces.scores import sentence_scores
from lens_mix.evaluation import bootstrap, spearman

# The group of Value Zeroing of each head.
HEADS = "heads"
# The features, and the groups that store them.
FEATURES = {
    "attention": "gradients",
    "value_norm": "layers",
    "value_zeroing": "layers",
    "value_zeroing of heads": HEADS,
}
# Maps that are not learned, from the same files, for comparison.
OTHERS = {
    "gim, ratio, absolute": "changed",
    "gradient_attention, mean": "gradients",
    "attention, mean": "gradients",
    "value_norm, mean": "layers",
    "value_zeroing, mean": "layers",
    "position": "controls",
    "random": "controls",
}
# Models have no name in a group, but their numbers of layers differ.
MODEL_OF_LAYERS = {30: "smollm2", 18: "gemma3"}
# The map that the others are compared with, and the one by measured removals.
BASE = "gim, ratio, absolute"
CEILING = "removal of each sentence"
STRENGTHS = tuple(10.0**power for power in range(-2, 5))
FOLDS = 5
LEAST_SENTENCES = 3


@dataclasses.dataclass(frozen=True)
class Example:
    """One prompt with its removals.

    Attributes:
        record: The prompt.
        features: By name, [sentence, feature].
        scores: By name, the scores of maps that are not learned, [sentence].
        removed: For each removal, which sentences are removed.
        drops: What the log probability loses in each removal, in nats.
    """

    record: Record
    features: dict[str, np.ndarray]
    scores: dict[str, np.ndarray]
    removed: np.ndarray
    drops: np.ndarray


def heads(models: Models, record: Record) -> Rows:
    """Return Value Zeroing of each head, as features."""
    method = lm.methods.ValueZeroing(per_head=True)
    found = lm.run(models.bridge, record.tokens, method, queries=record.rows)
    return {"features: value_zeroing of heads": sum_over_pieces(found.scores.sum(2), record)}


def collect(model_name: str, count: int, families: Sequence[str] = REMOVED_BY_FAMILY) -> None:
    """Store the records and their features, in turns, so that the families are balanced at any time."""
    models, start = load_models(model_name), time.process_time()
    for number in range(1, count + 1):
        for half, family in itertools.product(("choose", "held_out"), families):
            find(models.plain, models.tokenizer, model_name, half, family, number)
            for path, record in list(records(model_name, half, family))[:number]:
                compute(models, path, record, sorted({*FEATURES.values(), *OTHERS.values()} - {HEADS}))
                place = file_of(path, HEADS)
                if not place.exists():
                    torch.save({"rows": heads(models, record)}, place)
        print(f"{number} of each family: {time.process_time() - start:.0f} s of processor time", flush=True)


def read_examples(model_name: str, half: str) -> Iterator[Example]:
    """Yield the prompts of a half whose removals and features are stored."""
    groups = sorted({*FEATURES.values(), *OTHERS.values()})
    for family in REMOVED_BY_FAMILY:
        for path, record in records(model_name, half, family):
            files = {group: file_of(path, group) for group in groups}
            if len(record.sentences) < LEAST_SENTENCES or not all(each.exists() for each in files.values()):
                continue
            stored = {group: torch.load(file, weights_only=False)["rows"] for group, file in files.items()}
            features = {}
            for name, group in FEATURES.items():
                of_pieces = stored[group][f"features: {name}"].double()
                features[name] = of_pieces[..., record.sentences].flatten(0, -2).T.numpy()
            rows = {name: stored[group][name] for name, group in OTHERS.items()}
            scores = {name: sentence_scores(record, row).numpy() for name, row in rows.items()}
            yield Example(record, features, scores, *list_removals(record))


def list_removals(record: Record) -> tuple[np.ndarray, np.ndarray]:
    """Return the removals of single sentences and the random ones, and what each of them loses."""
    single = np.eye(len(record.sentences), dtype=bool)
    drops = list(record.effects)
    if not record.masks:
        return single, np.array(drops)
    drops += [record.log_p - value for value in record.mask_log_p]
    return np.concatenate([single, ~np.array(record.masks)]), np.array(drops)


# ------------------------------------------------------------------ learning


def make_equations(example: Example, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the features that each removal removes and its drop, without the prompt's means and scale."""
    removed = example.removed.astype(float) @ example.features[name]
    drops = example.drops - example.drops.mean()
    # Each prompt counts the same, whatever its number of removals.
    weight = 1 / np.sqrt(len(drops))
    return weight * (removed - removed.mean(0)), weight * drops / max(drops.std(), 1e-9)


def fit(examples: Sequence[Example], name: str, strength: float) -> np.ndarray:
    """Return the weights of one kind of feature by ridge regression.

    Args:
        examples: The prompts.
        name: The kind of feature.
        strength: The penalty on the weights of features that are scaled to the same size.
    """
    pairs = [make_equations(example, name) for example in examples]
    features, drops = (np.concatenate(each) for each in zip(*pairs, strict=True))
    scale = np.sqrt((features**2).sum(0) / len(examples)) + 1e-12
    scaled = features / scale
    gram = scaled.T @ scaled / len(examples)
    solved = np.linalg.solve(gram + strength * np.eye(len(scale)), scaled.T @ drops / len(examples))
    return solved / scale


def correlate(examples: Sequence[Example], name: str, weights: np.ndarray) -> float:
    """Return the mean over prompts of the correlation between predicted and measured drops."""
    found = []
    for example in examples:
        features, drops = make_equations(example, name)
        predicted = features @ weights
        size = np.linalg.norm(predicted) * np.linalg.norm(drops)
        found.append(float(predicted @ drops / size) if size > 0 else 0.0)
    return float(np.mean(found))


def choose_strength(examples: Sequence[Example], name: str) -> float:
    """Return the strength with the best correlation on prompts that were left out."""
    means = {}
    for strength in STRENGTHS:
        found = []
        for fold in range(FOLDS):
            left_out = list(examples[fold::FOLDS])
            others = [each for index, each in enumerate(examples) if index % FOLDS != fold]
            found.append(correlate(left_out, name, fit(others, name, strength)))
        means[strength] = float(np.mean(found))
    return max(means, key=lambda strength: means[strength])


# ------------------------------------------------------------------ evaluation


def score_lds(example: Example, scores: np.ndarray) -> float:
    """Return the linear datamodelling score over a statement's random removals; NaN for other families."""
    count = len(example.record.masks)
    if not count or example.record.family != "statement":
        return float("nan")
    removed, drops = example.removed[-count:], example.drops[-count:]
    return spearman(torch.from_numpy(removed @ scores), torch.from_numpy(drops))


def score_source(example: Example, scores: np.ndarray) -> float:
    """Return whether a gold sentence has the highest score."""
    return float(example.record.sentences[int(scores.argmax())] in example.record.gold)


def learn(examples: Sequence[Example]) -> dict[str, tuple[float, np.ndarray]]:
    """Return the strength and the weights for each kind of feature."""
    strengths = {name: choose_strength(examples, name) for name in FEATURES}
    return {name: (strength, fit(examples, name, strength)) for name, strength in strengths.items()}


def make_rows(model_name: str) -> Iterator[str]:
    """Yield the lines of the table of one model: LDS and source accuracy on the held-out half."""
    choose, held_out = (list(read_examples(model_name, half)) for half in ("choose", "held_out"))
    found = learn(choose)
    rows = {
        f"learned weights, {name}": [each.features[name] @ weights for each in held_out]
        for name, (_, weights) in found.items()
    }
    rows |= {name: [each.scores[name] for each in held_out] for name in OTHERS}
    rows[CEILING] = [np.array(each.record.effects) for each in held_out]
    linear = {name: list(map(score_lds, held_out, of_map)) for name, of_map in rows.items()}
    for half, examples in (("choose", choose), ("held_out", held_out)):
        families = collections.Counter(each.record.family for each in examples)
        yield f"Half {half}: {', '.join(f'{count} {name}' for name, count in sorted(families.items()))}."
    yield ""
    yield f"| map | penalty | LDS | n | LDS above {BASE} | right source | n |"
    yield "|---" * 7 + "|"
    for name, of_map in rows.items():
        kind = name.removeprefix("learned weights, ")
        mean = bootstrap(linear[name])
        gain = "–" if name == BASE else format_interval(bootstrap(linear[name], linear[BASE]))
        sources = np.array(list(map(score_source, held_out, of_map)))
        share = f"{sources.mean():.2f} [{', '.join(f'{end:.2f}' for end in wilson(sources))}]"
        penalty = f"{found[kind][0]:g}" if kind in found else "–"
        cells = [name, penalty, format_interval(mean), str(mean.count), gain, share, str(len(sources))]
        yield f"| {' | '.join(cells)} |"
    first, *others = (name for name in rows if name.startswith("learned weights, "))
    differences = [f"{name} {format_interval(bootstrap(linear[name], linear[first]))}" for name in others]
    yield ""
    yield f"LDS above that of {first}: {'; '.join(differences)}."


def wilson(values: np.ndarray) -> tuple[float, float]:
    """Return the 95 % interval of a share (Wilson), which is not empty if all values are equal."""
    count, share, z = len(values), values.mean(), 1.959964
    middle = share + z * z / (2 * count)
    half = z * np.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return (middle - half) / (1 + z * z / count), (middle + half) / (1 + z * z / count)


def format_interval(interval: Any) -> str:
    """Return the mean with the ends of its interval."""
    mean, low, high = (round(each, 2) + 0.0 for each in (interval.mean, interval.low, interval.high))
    return f"{mean:.2f} [{low:.2f}, {high:.2f}]"


# ------------------------------------------------------------------ as a group of benchmarks.traces.maps


def learned(models: Models, record: Record) -> Rows:
    """Return the learned maps of one record, per token of the prompt, with the weights of "choose"."""
    weights = read_weights(MODEL_OF_LAYERS[models.bridge.cfg.n_layers])
    methods = {
        "attention": lm.methods.AttentionWeights(per_head=True),
        "value_norm": lm.methods.ValueNorms(per_head=True),
    }
    maps = lm.run(models.bridge, record.tokens, list(methods.values()), queries=record.rows)
    rows: Rows = {}
    for name in methods:
        scores = maps[name].scores.sum(2).flatten(0, 1)[:, : record.n_prompt].double()
        rows[f"learned weights, {name}"] = torch.from_numpy(weights[name]) @ scores
    return rows


@functools.cache
def read_weights(model_name: str) -> dict[str, np.ndarray]:
    """Return the weights for each kind of feature, learned from all that is stored."""
    examples = list(read_examples(model_name, "choose"))
    return {name: weights for name, (_, weights) in learn(examples).items()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    command, model = sys.argv[1:3]
    if command == "collect":
        collect(model, int(sys.argv[3]), sys.argv[4:] or REMOVED_BY_FAMILY)
    else:
        print("\n".join(make_rows(model)))
