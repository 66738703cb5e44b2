"""Score a row of a map against the gold sentences, and against measured removals.

A row has one score per prompt token. The score of a sentence is the sum over its tokens. Sources are the
sentences of documents; in a conflict they are the passages. Instructions, examples, questions and the model's
first token are not sources, but they compete in the measures of single tokens (the first token does not).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from benchmarks.traces.gold import Record
from lens_mix.evaluation.agreement import reciprocal_rank, spearman

TOP_SHARE = 0.1
TOP_SENTENCES = 5


def sentence_scores(record: Record, row: Float[Tensor, " prompt"]) -> Float[Tensor, " sentence"]:
    """Return the sum of a row over the tokens of each sentence, in the order of `record.sentences`."""
    sums = row.new_zeros(len(record.document_of)).double()
    inside = record.piece_of >= 0
    sums.index_add_(0, record.piece_of[inside], row.double()[inside])
    return sums[record.sentences]


def strongest(record: Record, row: Float[Tensor, " prompt"], count: int) -> tuple[int, ...]:
    """Return the numbers of the strongest sentences, sorted."""
    order = sentence_scores(record, row).argsort(descending=True, stable=True)[:count]
    return tuple(sorted(record.sentences[int(i)] for i in order))


def sources(record: Record, row: Float[Tensor, " prompt"]) -> tuple[Float[Tensor, " source"], list[bool]]:
    """Return the score of each source and whether it is gold: passages in a conflict, else sentences."""
    scores = sentence_scores(record, row)
    gold = [piece in record.gold for piece in record.sentences]
    if record.family == "conflict":
        documents = [record.document_of[piece] for piece in record.sentences]
        numbers = sorted(set(documents))
        scores = torch.stack([sum_of(scores, [each == number for each in documents]) for number in numbers])
        gold = [number in {record.document_of[piece] for piece in record.gold} for number in numbers]
    return scores, gold


def is_right(record: Record, row: Float[Tensor, " prompt"]) -> float:
    """Return 1 if the strongest source is a gold one, else 0."""
    scores, gold = sources(record, row)
    return float(gold[int(scores.argsort(descending=True, stable=True)[0])])


def source_accuracy(record: Record, row: Float[Tensor, " prompt"]) -> float:
    """Return the share of gold sources among as many strongest sources as there are gold ones.

    With one gold source it is that of `is_right`.
    """
    scores, gold = sources(record, row)
    top = scores.argsort(descending=True, stable=True)[: sum(gold)]
    return sum(gold[int(i)] for i in top) / sum(gold)


def sum_of(scores: Float[Tensor, " source"], chosen: Sequence[bool]) -> Float[Tensor, ""]:
    """Return the sum of the chosen scores."""
    return scores[torch.tensor(chosen)].sum()


def recovery(record: Record, row: Float[Tensor, " prompt"]) -> float:
    """Return the share of the gold sentences' tokens among the top tenth of prompt tokens (FlashTrace's).

    Ties are broken against the map. If there are more gold tokens than the tenth has places, the best value
    is the number of places over that of gold tokens.
    """
    inside = record.piece_of >= 0
    gold = torch.tensor([piece in record.gold for piece in record.piece_of.tolist()])[inside]
    scores = row.double()[inside]
    places = max(1, math.floor(TOP_SHARE * len(scores)))
    order = sorted(range(len(scores)), key=lambda i: (-float(scores[i]), bool(gold[i])))[:places]
    return float(gold[order].sum() / gold.sum())


def deciding_rank(record: Record, row: Float[Tensor, " prompt"]) -> float:
    """Return the reciprocal rank of the best deciding token; NaN if none is known."""
    if not record.deciding:
        return math.nan
    inside = record.piece_of >= 0
    marks = torch.zeros(record.n_prompt, dtype=torch.bool)
    marks[record.deciding] = True
    return reciprocal_rank(row.double()[inside], marks[inside])


def data_modelling(record: Record, row: Float[Tensor, " prompt"]) -> float:
    """Return LDS: Spearman of the kept sentences' summed scores with the real log probability (ContextCite).

    It is 0 for a constant prediction, and NaN if there are no random removals.
    """
    if not record.masks:
        return math.nan
    predicted = torch.tensor(record.masks, dtype=torch.float64) @ sentence_scores(record, row)
    found = spearman(predicted, torch.tensor(record.mask_log_p, dtype=torch.float64))
    return 0.0 if math.isnan(found) else found


def best_sentences(record: Record, count: int) -> tuple[int, ...]:
    """Return the sentences whose single removals have the largest effects, sorted."""
    order = torch.tensor(record.effects).argsort(descending=True, stable=True)[:count]
    return tuple(sorted(record.sentences[int(i)] for i in order))


def explained(record: Record, row: Float[Tensor, " prompt"], count: int = TOP_SENTENCES) -> float:
    """Return the drop without the map's strongest sentences, over the drop without the best ones.

    The best ones are those with the largest single effects, so a value above 1 is possible. It is NaN if a
    drop was not measured.
    """
    drops = record.drops
    own, best = drops.get(strongest(record, row, count)), drops.get(best_sentences(record, count))
    return math.nan if own is None or best is None else own / best


def explained_of_best(record: Record, row: Float[Tensor, " prompt"], count: int = TOP_SENTENCES) -> float:
    """Return the drop without the map's strongest sentences, over the largest drop without as many sentences.

    It is at most 1, and NaN unless all sets of so many sentences were removed.
    """
    measured = [lost for chosen, lost in record.drops.items() if len(chosen) == count]
    own = record.drops.get(strongest(record, row, count))
    if own is None or len(measured) < math.comb(len(record.sentences), count):
        return math.nan
    return own / max(measured)


def drop(record: Record, row: Float[Tensor, " prompt"], count: int) -> float:
    """Return the drop of the log probability, in nats, without the map's strongest sentences."""
    if not record.effects:
        return math.nan
    chosen = strongest(record, row, count)
    if count == 1:
        return record.effects[record.sentences.index(chosen[0])]
    return record.drops.get(chosen, math.nan)


METRICS = {
    "right": is_right,
    "source": source_accuracy,
    "recovery": recovery,
    "rank": deciding_rank,
    "LDS": data_modelling,
    "explained": explained,
    "of the best": explained_of_best,
}


def score(record: Record, row: Float[Tensor, " prompt"]) -> dict[str, float]:
    """Return all scores of one row by name. Scores that are not defined for the family are NaN."""
    found = {name: metric(record, row) for name, metric in METRICS.items()}
    return found | {f"drop of {count}": drop(record, row, count) for count in (1, TOP_SENTENCES)}
