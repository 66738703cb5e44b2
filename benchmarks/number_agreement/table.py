"""Compute the table of Abnar & Zuidema (ACL 2020): rank correlation of [CLS]'s row with importance."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
import pandas as pd
from scipy.stats import rankdata
from tqdm.auto import tqdm

from benchmarks.number_agreement.encoder import Classifier, untrained
from benchmarks.number_agreement.rows import Row, controls, ids_and_answer, importance, rows, supported
from benchmarks.number_agreement.sentences import Sentence


def measure(found: Classifier, examples: Sequence[Sentence], randomised: bool = True) -> pd.DataFrame:
    """Return one row per sentence, map and importance: `spearman`, and `partial` (controlled for position).

    With `randomised`, the maps of the encoder before its training are compared with the same importance, as
    `weights` "untrained".
    """
    draw, blank, names = np.random.default_rng(0), untrained(found.recipe), supported(found)
    frames = []
    for number, sentence in enumerate(tqdm(examples, disable=None, desc="table")):
        ids, answer = ids_and_answer(found, sentence)
        important = importance(found, ids, answer)
        # The agreement of one importance with the other shows what agreement can be expected of a good map.
        others = [Row(name, "importance", 0, scores) for name, scores in important.items()]
        given = {"trained": [*rows(found, ids, answer, names), *controls(sentence, draw), *others]}
        if randomised:
            before = rows(blank, ids, answer, names)
            given["untrained"] = [row for row in before if row.layer == found.recipe.layers]
        for weights, found_rows in given.items():
            for name, scores in important.items():
                frame = _correlate(found_rows, scores)
                frames.append(frame.assign(weights=weights, importance=name, sentence=number))
    return pd.concat(frames, ignore_index=True)


def summary(measured: pd.DataFrame) -> pd.DataFrame:
    """Return means over the sentences, standard errors, and the number of `undefined` ones.

    A correlation is undefined if the row is constant.
    """
    keys = ["weights", "importance", "method", "aggregation", "layer"]
    groups = measured.groupby(keys, sort=False)
    table = groups[["spearman", "partial"]].mean()
    table["error"] = groups["spearman"].sem()
    table["undefined"] = groups["spearman"].apply(lambda values: int(values.isna().sum()))
    return table.reset_index()


def _correlate(given: Sequence[Row], importance: np.ndarray) -> pd.DataFrame:
    """Return the correlation of every row with the importance of the words, or NaN if one is constant."""
    ranks = rankdata(np.stack([row.scores for row in given]), axis=1)
    important, position = rankdata(importance), np.arange(len(importance), dtype=float)
    spearman, by_position = _compute_pearson(ranks, important), _compute_pearson(ranks, position)
    known = _compute_pearson(important[None], position)[0]
    with warnings.catch_warnings(), np.errstate(invalid="ignore", divide="ignore"):
        rest = (1 - by_position**2) * (1 - known**2)
        partial = np.where(rest > 1e-9, (spearman - by_position * known) / np.sqrt(rest), np.nan)
    names = {field: [getattr(row, field) for row in given] for field in ("method", "aggregation", "layer")}
    return pd.DataFrame({**names, "spearman": spearman, "partial": partial})


def _compute_pearson(ranks: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return the correlation of each row with one other row."""
    left, right = ranks - ranks.mean(1, keepdims=True), other - other.mean()
    with np.errstate(invalid="ignore", divide="ignore"):
        return left @ right / np.sqrt((left**2).sum(1) * (right**2).sum())
