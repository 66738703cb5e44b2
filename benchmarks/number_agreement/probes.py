"""Measure agreement with probing: is the subject's number at [CLS] in the layers where a map shows it?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch
from tqdm.auto import tqdm

from benchmarks.number_agreement.encoder import Classifier
from benchmarks.number_agreement.rows import ids_and_answer, rows, supported
from benchmarks.number_agreement.sentences import Sentence, token_ids
from lens_mix.experiments.probing import Probing, probe_layers, probing_agreement, residuals_at


def probed(found: Classifier, examples: Sequence[Sentence]) -> dict[str, Probing]:
    """Probe [CLS] for the number of the subject and, as a contrast, of the noun next to the verb."""
    ids = [torch.tensor(token_ids(example)) for example in examples]
    states = residuals_at(found.model, ids, 0)
    places = {"subject": [example.subject for example in examples]}
    places["last noun"] = [example.nouns[-1] for example in examples]
    return {
        cue: probe_layers(
            states,
            [example.words[place].endswith("s") for example, place in zip(examples, at, strict=True)],
            [example.words[place] for example, place in zip(examples, at, strict=True)],
        )
        for cue, at in places.items()
    }


def agreement(found: Classifier, examples: Sequence[Sentence], probing: Probing) -> pd.DataFrame:
    """Return each map's share of the subject in [CLS], and its correlation with the probes over layers."""
    shares: dict[tuple[str, str], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    names = supported(found)
    for example in tqdm(examples, disable=None, desc="probing"):
        ids, answer = ids_and_answer(found, example)
        for row in rows(found, ids, answer, names):
            total = row.scores.sum()
            share = row.scores[example.subject] / total if total > 0 else 0.0
            shares[row.method, row.aggregation][row.layer].append(share)
    table = []
    for (method, aggregation), by_layer in shares.items():
        if len(by_layer) < len(probing.accuracy):
            # A map of the whole model has no scores for the layers between.
            continue
        mixed = torch.tensor([by_layer[layer] for layer in sorted(by_layer)], dtype=torch.float64)
        found_agreement = probing_agreement(probing, mixed)
        by_prompt = found_agreement.prompts.numpy()
        table.append(
            {
                "method": method,
                "aggregation": aggregation,
                "with accuracy": found_agreement.accuracy,
                "with selectivity": found_agreement.selectivity,
                "per sentence": np.nanmean(by_prompt),
                "error": np.nanstd(by_prompt) / np.sqrt(np.isfinite(by_prompt).sum()),
                **{f"layer {layer}": share for layer, share in enumerate(mixed.mean(1).tolist(), start=1)},
            }
        )
    return pd.DataFrame(table)
