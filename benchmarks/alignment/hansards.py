"""Measure the cross-attention of flan-t5 as a word aligner, on 447 English–French pairs with gold."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

import lens_mix as lm
from benchmarks.alignment.cells import (
    FORWARD_METHODS,
    Cell,
    Counts,
    Table,
    by_head,
    by_layer,
    compared,
    count_cells,
    counts_of,
    errors_of,
    percent,
)
from benchmarks.common import markdown_table
from demos.models import cache_folder, flan_t5
from lens_mix.evaluation import bootstrap
from lens_mix.experiments import GoldAlignment, diagonal, read_gold

DATA = Path(__file__).parents[2] / "demos" / "data" / "alignment"
PROMPT = "translate English to French:".split()
# Published error rates on the same 447 pairs (Dou & Neubig, EACL 2021, and the data's README).
PUBLISHED = {
    "fast_align, one direction": 16.4,
    "fast_align, both directions": 10.5,
    "eflomal, both directions": 8.2,
    "multilingual BERT": 5.6,
}


@dataclasses.dataclass(frozen=True)
class Forced:
    """A pair as tokens, with the translation as the decoder's input.

    Attributes:
        source: The tokens of the prompt, of the sentence, and of the end of the sentence.
        target: The tokens that the decoder reads: the start token and the translation.
        source_words: The positions of each word's tokens in `source`.
        target_words: The positions of each word's tokens in `target`.
        prompt: The number of tokens of the prompt.
    """

    source: list[int]
    target: list[int]
    source_words: list[list[int]]
    target_words: list[list[int]]
    prompt: int


def sentences() -> list[tuple[list[str], list[str]]]:
    """Return the English and French words of each pair."""
    lines = (DATA / "enfr.src-tgt").read_text(encoding="utf-8").splitlines()
    return [tuple(side.split() for side in line.split("|||")) for line in lines]  # type: ignore[misc]


def forced(tokenizer: Any, english: list[str], french: list[str], start: int, end: int) -> Forced:
    """Return the tokens of a pair, word by word, so that every token belongs to a word of gold."""
    source, words = _tokenize_words(tokenizer, [*PROMPT, *english])
    target, target_words = _tokenize_words(tokenizer, french)
    source_words = words[len(PROMPT) :]
    shifted = [[place + 1 for place in word] for word in target_words]
    return Forced([*source, end], [start, *target], source_words, shifted, source_words[0][0])


def _tokenize_words(tokenizer: Any, words: list[str]) -> tuple[list[int], list[list[int]]]:
    ids: list[int] = []
    groups = []
    for word in words:
        pieces = tokenizer(word, add_special_tokens=False)["input_ids"]
        groups.append(list(range(len(ids), len(ids) + len(pieces))))
        ids += pieces
    return ids, groups


def measure(model: Any, number: int, gold: GoldAlignment) -> dict[str, Any]:
    """Return all measurements of one pair, ready for JSON."""
    config, pairs = model.original_model.config, sentences()
    special = config.decoder_start_token_id, config.eos_token_id
    pair = forced(model.tokenizer, *pairs[number], *special)
    other = forced(model.tokenizer, *pairs[(number + len(pairs) // 2) % len(pairs)], *special)
    tensors = torch.tensor(pair.source), torch.tensor(pair.target)
    ran = lm.run(model, tensors, list(FORWARD_METHODS.values()), part="cross")
    maps = dict(zip(FORWARD_METHODS, ran.values(), strict=True))
    end = len(pair.source) - 1
    counts = count_cells(maps, pair.source_words, pair.target_words, end, gold)
    weights = maps["weights"].scores.mean((1, 2))
    shares = [weights[:, : pair.prompt], weights[:, pair.prompt : end], weights[:, end:]]
    nothing = torch.tensor([*pair.source[: pair.prompt], pair.source[-1]])
    return {
        "pair": number,
        "counts": [[*cell, *values] for cell, values in counts.items()],
        "shares": torch.stack([share.sum(-1) for share in shares], -1).tolist(),
        "tokens": len(pair.target),
        "loss": _compute_loss(model, tensors[0], pair, special[1]),
        "loss of another source": _compute_loss(model, torch.tensor(other.source), pair, special[1]),
        "loss without a source": _compute_loss(model, nothing, pair, special[1]),
    }


@torch.no_grad()
def _compute_loss(model: Any, source: torch.Tensor, pair: Forced, end: int) -> float:
    """Return −log probability of the translation and its end, given a source."""
    target = torch.tensor([pair.target])
    logits = model.original_model(input_ids=source[None], decoder_input_ids=target).logits[0]
    return float(
        torch.nn.functional.cross_entropy(logits, torch.tensor([*pair.target[1:], end]), reduction="sum")
    )


def measured(count: int | None = None, file: Path | None = None) -> list[dict[str, Any]]:
    """Return the measurements of all pairs. Those of an earlier call are read from its file."""
    file = file or cache_folder() / "alignment" / "hansards.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    # A line that an interruption cut off has no end, and its pair is measured again.
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.exists() else []
    whole = [line for line in lines if line.endswith("\n")]
    file.write_text("".join(whole), encoding="utf-8")
    # Two runs at the same time may both have measured a pair, so each pair is stored by its number.
    found = {(one := json.loads(line))["pair"]: one for line in whole}
    gold = read_gold(DATA / "enfr.gold")
    wanted = range(len(gold) if count is None else count)
    model = None
    for number in sorted(set(wanted) - set(found)):
        model = model or flan_t5()
        found[number] = measure(model, number, gold[number])
        with open(file, "a", encoding="utf-8") as out:
            out.write(json.dumps(found[number]) + "\n")
    return [found[number] for number in wanted]


def tables(count: int | None = None) -> Iterator[str]:
    """Yield the tables of the page."""
    pairs = measured(count)
    gold = read_gold(DATA / "enfr.gold")[: len(pairs)]
    table = Table([_read_counts(pair) for pair in pairs])
    yield "## Does it translate?\n\n" + markdown_table(_compute_perplexities(pairs))
    yield "## Floors and published aligners\n\nAER in percent.\n\n" + markdown_table(
        _compute_floors(table, gold)
    )
    yield "## Weights and norms\n\n" + markdown_table(compared(table))
    names = [name for name in FORWARD_METHODS if not name.endswith("by head")]
    for end in (True, False):
        title = "competes" if end else "is left out"
        yield f"## By layer, the end of the sentence {title}\n\n" + markdown_table(
            by_layer(table, names, end)
        )
    for name in ("weights", "norms"):
        for rows in ("AWI", "AWO"):
            title = f"## By head: {name}, {rows}, the end of the sentence left out\n\n"
            yield title + markdown_table(by_head(table, name, rows, False))
    yield "## Attention by source token\n\nMean of heads and rows.\n\n" + markdown_table(
        _average_shares(pairs)
    )


def _read_counts(pair: Mapping[str, Any]) -> dict[Cell, Counts]:
    return {Cell(*line[:5]): tuple(line[5:]) for line in pair["counts"]}


def _compute_perplexities(pairs: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Return the perplexity per token of the references, with intervals over pairs of its logarithm."""
    lines, tokens = [], np.array([pair["tokens"] for pair in pairs])
    for source, key in (
        ("its own", "loss"),
        ("another pair's", "loss of another source"),
        ("none", "loss without a source"),
    ):
        losses = np.array([pair[key] for pair in pairs])
        mean = losses.sum() / tokens.sum()
        # These are the terms of a ratio of sums, as in AlignmentErrors.per_pair.
        interval = bootstrap(mean + (losses - mean * tokens) / tokens.mean())
        low, high = math.exp(interval.low), math.exp(interval.high)
        lines.append({"source": source, "perplexity": f"{math.exp(mean):.1f} [{low:.1f}, {high:.1f}]"})
    return lines


def _compute_floors(table: Table, gold: list[GoldAlignment]) -> list[dict[str, str]]:
    words = sentences()[: len(gold)]
    straight = [diagonal(len(english), len(french)) for english, french in words]
    errors = errors_of(counts_of(links, one) for links, one in zip(straight, gold, strict=True))
    lines = [{"aligner": "diagonal", "AER": percent(errors.interval())}]
    for name in ("weights", "norms"):
        cell, found = min(
            (
                table.best(name, rows, end, heads)
                for rows in ("AWI", "AWO")
                for end in (True, False)
                for heads in (True, False)
            ),
            key=lambda item: item[1].error_rate,
        )
        place = f"{cell.rows}, layer {cell.layer}, head {'all' if cell.head is None else cell.head}"
        lines.append({"aligner": f"best of all {name} ({place})", "AER": percent(found.interval())})
        lines.append({"aligner": f"best of all {name} − diagonal", "AER": percent(found.interval(errors))})
    return lines + [{"aligner": f"{name} (published)", "AER": str(rate)} for name, rate in PUBLISHED.items()]


def _average_shares(pairs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    shares = np.mean([pair["shares"] for pair in pairs], 0)
    names = ("prompt", "sentence", "its end")
    return [
        {"layer": layer} | {name: f"{share:.2f}" for name, share in zip(names, line, strict=True)}
        for layer, line in enumerate(shares)
    ]
