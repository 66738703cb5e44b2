"""Measure every cross-attention map of a small Marian model against a known alignment."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import lens_mix as lm
from benchmarks.alignment.cells import (
    FORWARD_METHODS,
    Table,
    by_layer,
    compared,
    count_cells,
    counts_of,
    errors_of,
    percent,
)
from benchmarks.alignment.language import PAD, Pair
from benchmarks.alignment.translator import (
    Recipe,
    accuracy,
    bridged,
    decoder_input,
    held_out,
    padded,
    translator,
    untrained,
)
from benchmarks.common import markdown_table
from lens_mix import MixingMap
from lens_mix.experiments import GoldAlignment, diagonal

METHODS: dict[str, Any] = {**FORWARD_METHODS, "attn_res_ln": lm.methods.AttnResLn()}


def reference(pair: Pair) -> Any:
    """Return a target of lens_mix: the log probability of the whole translation."""
    labels = torch.tensor(pair.target)

    def log_probability(logits: Tensor) -> Tensor:
        chosen = logits.log_softmax(-1).gather(-1, labels.expand(len(logits), -1)[..., None])
        return chosen.sum((1, 2))

    return log_probability


def maps_of(model: Any, pair: Pair) -> dict[str, MixingMap]:
    """Return every cross-attention map of one pair. Those with a target explain the whole translation."""
    target = reference(pair)
    methods = {
        **METHODS,
        "gradient_attention": lm.methods.GradientAttention(target=target),
        "attention_attribution": lm.methods.AttentionAttribution(target=target),
    }
    tensors = torch.tensor(pair.source), torch.tensor(decoder_input(pair))
    ran = lm.run(model, tensors, list(methods.values()), part="cross")
    maps = dict(zip(methods, ran.values(), strict=True))
    weights = maps["weights"].merge_heads()
    generator = torch.Generator().manual_seed(len(pair.source))
    return maps | {"random": weights.replace(scores=torch.rand(weights.scores.shape, generator=generator))}


def gold_of(pair: Pair) -> GoldAlignment:
    """Return the gold alignment, in which every link is sure."""
    return GoldAlignment(pair.links, pair.links)


def target_words(pair: Pair) -> list[list[int]]:
    """Return the positions of each word in the decoder's input, whose position 0 is the start token."""
    return [[place + 1 for place in word] for word in pair.target_words]


def measure(model: Any, examples: Sequence[Pair]) -> Table:
    """Score all maps of all pairs, with and without competition of the end of the sentence."""
    counts = []
    for pair in examples:
        words, end = (pair.source_words, target_words(pair)), len(pair.source) - 1
        counts.append(count_cells(maps_of(model, pair), *words, end, gold_of(pair), ends=(True, False)))
    return Table(counts)


@torch.no_grad()
def by_swapping(model: Any, pair: Pair) -> tuple[frozenset[tuple[int, int]], GoldAlignment]:
    """Return the links that the model uses: the source word on which each word of the translation depends.

    Each source word in turn is replaced by another one of its kind. A word of the translation is linked to
    the source word whose replacement loses the most log probability. Also return gold without the words that
    cannot be replaced.
    """
    swapped = [number for number, other in enumerate(pair.others) if other]
    rows = [pair.source]
    for number in swapped:
        first, last = pair.source_words[number][0], pair.source_words[number][-1]
        rows.append((*pair.source[:first], *pair.others[number], *pair.source[last + 1 :]))
    source, real = padded(rows, PAD)
    given = torch.tensor([decoder_input(pair)] * len(rows))
    logits = model(input_ids=source, attention_mask=real, decoder_input_ids=given).logits
    labels = torch.tensor(pair.target).expand(len(rows), -1)[..., None]
    log_probability = logits.log_softmax(-1).gather(-1, labels)[..., 0]
    words = torch.stack([log_probability[:, list(word)].sum(-1) for word in pair.target_words], -1)
    lost = (words[:1] - words[1:]).argmax(0).tolist()
    gold = frozenset(link for link in pair.links if link[0] in swapped)
    found = frozenset((swapped[lost[target]], target) for _, target in gold)
    return found, GoldAlignment(gold, gold)


def tables(count: int | None = None, recipe: Recipe | None = None, seeds: int = 3) -> Iterator[str]:
    """Yield the tables of the page."""
    recipe, examples = recipe or Recipe(), held_out(count or 200)
    floor = errors_of(
        counts_of(diagonal(len(p.source_words), len(p.target_words)), gold_of(p)) for p in examples
    )
    yield f"AER in percent, {len(examples)} held-out pairs. The diagonal: {percent(floor.interval())}."
    models = {f"seed {seed}": translator(dataclasses.replace(recipe, seed=seed)) for seed in range(seeds)}
    lines = []
    for name, model in models.items():
        swapped = errors_of(counts_of(*by_swapping(model, pair)) for pair in examples)
        rates = {"translations without a fault": f"{accuracy(model, held_out(1000)):.3f}"}
        lines.append({"model": name, **rates, "AER by swapping source words": percent(swapped.interval())})
    yield "## The models\n\n" + markdown_table(lines)
    models["seed 0, untrained"] = untrained(recipe)
    for name, model in models.items():
        table = measure(bridged(model), examples)
        yield f"## {name}: weights and norms\n\n" + markdown_table(compared(table))
        names = list(dict.fromkeys(cell.map for cell in table.errors))
        for end in (True, False):
            title = "competes" if end else "is left out"
            yield f"## {name}: every map, the end of the sentence {title}\n\n" + markdown_table(
                by_layer(table, names, end)
            )
