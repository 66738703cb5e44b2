"""Store the rows of all maps of the accepted prompts: one score per prompt token, for all that was written.

    python -m benchmarks.traces.maps smollm2 choose needle          (or gemma3, held_out, another family)

`GROUPS` has the functions that compute rows. A function gets the models and a record, and returns rows
[prompt] by the name of their map. Maps that share a pass are in one group. Each group has a file beside the
record, so a stopped run continues, and a new group is computed alone.

A map with a target explains the log probability of the whole span by one backward pass. The rows of other
maps are aggregated over layers, and those of the positions before each written token are summed.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

import lens_mix as lm
from benchmarks.input_map.decoder import Decoder, Rules, scaled, softmax
from benchmarks.input_map.importance import load
from benchmarks.traces.gold import Record, records
from lens_mix.evaluation.controls import control_rows, randomised

# The replacements of the recipe of `lm.input_map`, and how many written tokens it explains, each by a pass.
WORDS = (" thing", " green")
FIRST_TOKENS = 2
TOTAL_MIXING = 1.5
Rows = dict[str, Float[Tensor, " prompt"]]


@dataclasses.dataclass(frozen=True)
class Models:
    """One model in two forms, with the same weights.

    Attributes:
        plain: The model of transformers, with eager attention.
        bridge: The model of TransformerLens.
        tokenizer: Its tokenizer.
    """

    plain: Any
    bridge: Any
    tokenizer: Any


def span_target(record: Record) -> Callable[[Tensor], Tensor]:
    """Return the log probability of the written tokens, as a function of the logits [copy pos d_vocab]."""
    rows, written = record.rows, record.tokens[record.n_prompt :]

    def target(logits: Float[Tensor, "copy pos d_vocab"]) -> Float[Tensor, " copy"]:
        log_p = logits[:, rows].float().log_softmax(-1)
        return log_p.gather(-1, written.expand(len(log_p), -1)[..., None]).sum((1, 2))

    return target


def rollout_rows(
    scores: Float[Tensor, "layer query key"], start: Float[Tensor, "row key"], residual: float
) -> Float[Tensor, "row key"]:
    """Return some rows of the rollout, as `lm.rollout` has them, without the product of whole maps.

    Args:
        scores: The layer maps, 0 or more.
        start: The rows to begin with: 1 at a position for its row, or a sum of such rows.
        residual: The residual weight.
    """
    row = start.double()
    for layer in reversed(scores):
        shares = layer.double() / layer.double().sum(-1, keepdim=True).clamp_min(1e-300)
        row = (1 - residual) * (row @ shares) + residual * row
    return row


def through(
    steps: Float[Tensor, "written key"], n_prompt: int, hops: int | None = None
) -> Float[Tensor, " prompt"]:
    """Return the influence of the prompt on all written tokens, also through written tokens.

    Row r of A is that of written token r, without negative scores and scaled to sum 1. The result is the sum
    over written tokens of (I − A_gg)⁻¹ A_gp (CAGE, arXiv 2512.15663), or of the first terms of its series:
    Σ_{k ≤ hops} A_gg^k A_gp (FlashTrace's hops, arXiv 2602.01914).

    Args:
        steps: The rows of all written tokens over prompt and written tokens.
        n_prompt: The number of prompt tokens.
        hops: The number of hops. None: all.
    """
    shares = steps.double().clamp_min(0)
    shares = shares / shares.sum(-1, keepdim=True).clamp_min(1e-300)
    n_written = len(shares)
    prompt, between = shares[:, :n_prompt], shares[:, n_prompt : n_prompt + n_written].tril(-1)
    if hops is None:
        whole = torch.linalg.solve_triangular(
            torch.eye(n_written, dtype=shares.dtype) - between, prompt, upper=False
        )
        return whole.sum(0)
    total, term = prompt, prompt
    for _ in range(hops):
        term = between @ term
        total = total + term
    return total.sum(0)


def _layer_rows(name: str, scores: Float[Tensor, "layer row key"], n_prompt: int) -> Rows:
    """Return mean and maximum over layers of raw rows, summed over the written tokens."""
    mean, largest = scores.double().mean(0), scores.double().amax(0)
    return {f"{name}, mean": mean.sum(0)[:n_prompt], f"{name}, maximum": largest.sum(0)[:n_prompt]}


def _through_rows(name: str, scores: Float[Tensor, "layer row key"], n_prompt: int) -> Rows:
    steps = scores.double().mean(0)
    return {
        f"{name}, mean, 1 hop (FlashTrace)": through(steps, n_prompt, hops=1),
        f"{name}, mean, all hops (CAGE)": through(steps, n_prompt),
    }


def _sum_over_pieces(scores: Float[Tensor, "... key"], record: Record) -> Float[Tensor, "... piece"]:
    """Return the sum over the tokens of each piece, for maps that are learned from them."""
    owners = torch.nn.functional.one_hot(record.piece_of.clamp_min(0), len(record.document_of)).double()
    owners[record.piece_of < 0] = 0
    return scores[..., : record.n_prompt].double() @ owners


# ------------------------------------------------------------------ groups


def controls(models: Models, record: Record) -> Rows:
    """Return the controls that do not look at the model."""
    return control_rows(record.n_prompt, record.number)


def recommended(models: Models, record: Record) -> Rows:
    """Return the recipe of `lm.input_map` for the first written tokens."""
    found = lm.run(
        models.bridge,
        record.tokens,
        lm.AttributionPatching(replacements=WORDS),
        queries=record.rows[:FIRST_TOKENS],
    )
    rows = found.scores[0, :, : record.n_prompt].double()
    return {"lm.input_map, first 2 tokens": rows.sum(0), "lm.input_map, first token": rows[0]}


# The rules of the backward pass of each map. The product of a softmax's temperature and the factor 1/4 of
# queries and keys is 1/2, because the library's GIM leaves out the factor 1/temperature.
RULES = {
    "gim": Rules(temperature=2, pattern=0.5, values=0.5, norms=True),
    "gim, ratio, absolute": Rules(
        temperature=2, pattern=0.5, values=0.5, norms=True, ratio=True, product=0.5
    ),
    "frozen_gradients": Rules(temperature=None, norms=True),
}
LIBRARY: dict[str, Callable[[Any], Any]] = {
    "gim": lm.Gim,
    "gim, ratio, absolute": lambda target: lm.Gim(target, activations="ratio", readout="absolute"),
    "frozen_gradients": lm.FrozenGradients,
}


def span_map(models: Models, record: Record, name: str) -> Float[Tensor, " prompt"]:
    """Return one of the maps of `RULES`, as the library computes it."""
    found = lm.run(models.bridge, record.tokens, LIBRARY[name](span_target(record)), queries=[-1])
    return found.scores[0, 0, : record.n_prompt].double()


def changed_gradients(models: Models, record: Record, name: str) -> Float[Tensor, " prompt"]:
    """Return one of the maps of `RULES` from the plain model, for prompts within a sliding window.

    It equals `span_map` to rounding, in about half of the time, because it makes only the logits it needs.
    """
    rules, decoder = RULES[name], Decoder(models.plain)
    count = len(record.tokens)
    inputs = decoder.embed(record.tokens).detach().requires_grad_()
    hidden, x = torch.ones(count, count, dtype=torch.bool).triu(1), inputs
    for block, angle in zip(decoder.blocks, decoder.angles(torch.arange(count)), strict=True):
        query, key, value = decoder.projected(block, x, angle, rules)
        groups = block.self_attn.num_key_value_groups
        scores = query @ key.repeat_interleave(groups, 0).mT * block.self_attn.scaling
        pattern = softmax(scores.masked_fill(hidden, -torch.inf), rules)
        x = decoder.finish(
            block, x, pattern @ scaled(value, rules.values).repeat_interleave(groups, 0), rules
        )
    log_p = decoder.logits(x[record.rows], rules).log_softmax(-1)
    target = log_p.gather(-1, record.tokens[record.n_prompt :, None]).sum()
    (gradient,) = torch.autograd.grad(target, inputs)
    products = (gradient * inputs.detach())[: record.n_prompt].double()
    return products.abs().sum(-1) if "absolute" in name else products.sum(-1)


def changed(models: Models, record: Record) -> Rows:
    """Return the maps of changed gradients."""
    window = getattr(models.plain.config, "sliding_window", None)
    compute_one = span_map if window and len(record.tokens) > window else changed_gradients
    return {name: compute_one(models, record, name) for name in RULES}


def shuffled(models: Models, record: Record) -> Rows:
    """Return two maps of the model with shuffled weights, which knows nothing about the text."""
    with randomised(models.bridge) as model:
        target = LIBRARY["gim, ratio, absolute"](span_target(record))
        maps = lm.run(model, record.tokens, ["attention"], queries=record.rows)
        relevance = lm.run(model, record.tokens, target, queries=[-1])
    attention = maps["attention"].scores.double().mean(0).sum(0)
    return {
        "gim, ratio, absolute, shuffled weights": relevance.scores[0, 0, : record.n_prompt].double(),
        "attention, mean, shuffled weights": attention[: record.n_prompt],
    }


def gradients(models: Models, record: Record) -> Rows:
    """Return all maps of plain gradients, and rollouts of attention, from one pass of the plain model.

    They equal those of the library (`input_gradients`, `gradient_attention`, `lm.gradient_rollout`,
    `lm.rollout` of `attention`), which needs a pass for each.
    """
    inputs = models.plain.get_input_embeddings()(record.tokens[None]).detach().requires_grad_()
    out = models.plain(inputs_embeds=inputs, output_attentions=True, logits_to_keep=record.n_written + 1)
    written = record.tokens[record.n_prompt :]
    target = out.logits[0, :-1].float().log_softmax(-1).gather(-1, written[:, None]).sum()
    at_inputs, *at_patterns = torch.autograd.grad(target, [inputs, *out.attentions])
    count, chosen = record.n_prompt, record.rows
    start = torch.zeros(1, len(record.tokens), dtype=torch.float64)
    start[0, chosen] = 1
    rows: Rows = {
        "input_gradients, times input": (at_inputs * inputs)[0].sum(-1).detach()[:count].double(),
        "input_gradients, norm": at_inputs[0].norm(dim=-1)[:count].double(),
    }
    with torch.no_grad():
        patterns = [each[0] for each in out.attentions]
        weighted = torch.stack(
            [(p * g[0]).clamp_min(0).mean(0) for p, g in zip(patterns, at_patterns, strict=True)]
        )
        averaged = torch.stack([each.mean(0) for each in patterns])
        heads = torch.stack([each[:, chosen] for each in patterns])
        rows |= _layer_rows("gradient_attention", weighted[:, chosen], count)
        rows |= _through_rows("gradient_attention", weighted[:, chosen], count)
        rows |= _layer_rows("attention", averaged[:, chosen], count)
        rows |= _through_rows("attention", averaged[:, chosen], count)
        rows["attention, strongest head"] = heads.amax((0, 1)).sum(0)[:count].double()
        relevance = start[0]
        for layer in reversed(weighted):
            relevance = relevance + relevance @ layer.double()
        rows["gradient_attention, gradient_rollout"] = relevance[:count]
        rows["attention, rollout"] = rollout_rows(averaged, start, 0.5)[0, :count]
        rows["attention, rollout, total mixing 1.5"] = rollout_rows(
            averaged, start, max(0, 1 - TOTAL_MIXING / len(averaged))
        )[0, :count]
        rows["features: attention"] = _sum_over_pieces(heads.sum(2), record)
    return rows


def layers(models: Models, record: Record) -> Rows:
    """Return layer maps of the positions before each written token, with mean and maximum over layers."""
    methods: Mapping[str, Any] = {
        "value_norm": lm.ValueNorms(per_head=True),
        "information_flow_routes": lm.InformationFlowRoutes(),
        "value_zeroing": lm.ValueZeroing(),
    }
    maps = lm.run(models.bridge, record.tokens, list(methods.values()), queries=record.rows)
    rows: Rows = {}
    for name in methods:
        scores = maps[name].merge_heads().scores
        rows |= _layer_rows(name, scores, record.n_prompt)
        if name != "value_norm":
            rows |= _through_rows(name, scores, record.n_prompt)
    rows["features: value_norm"] = _sum_over_pieces(maps["value_norm"].scores.sum(2), record)
    rows["features: value_zeroing"] = _sum_over_pieces(maps["value_zeroing"].scores.sum(1), record)
    return rows


def rollouts(models: Models, record: Record) -> Rows:
    """Return rollouts, means and maxima of maps that contain the residual stream."""
    maps = lm.run(models.bridge, record.tokens, ["attn_res_ln", "alti"])
    count, rows = record.n_prompt, {}
    start = torch.zeros(1, len(record.tokens))
    start[0, record.rows] = 1
    for name, found in maps.items():
        scores = found.scores
        rows |= _layer_rows(name, scores[:, record.rows], count)
        rows |= _through_rows(name, scores[:, record.rows], count)
        rows[f"{name}, rollout"] = rollout_rows(scores, start, 0.0)[0, :count]
        rows[f"{name}, rollout, residual 0.5"] = rollout_rows(scores, start, 0.5)[0, :count]
        weight = max(0, 1 - TOTAL_MIXING / len(scores))
        rows[f"{name}, rollout, total mixing 1.5"] = rollout_rows(scores, start, weight)[0, :count]
    return rows


@dataclasses.dataclass(frozen=True)
class Group:
    """A function that computes rows, and the longest prompt for which there is time.

    Attributes:
        function: It gets the models and a record.
        longest: The largest number of tokens.
    """

    function: Callable[[Models, Record], Rows]
    longest: int = 5000


GROUPS: dict[str, Group] = {
    "controls": Group(controls),
    "gradients": Group(gradients, 1300),
    "changed": Group(changed),
    "layers": Group(layers),
    "rollouts": Group(rollouts, 1300),
    "recommended": Group(recommended),
    "shuffled": Group(shuffled),
}


def file_of(path: Path, group: str) -> Path:
    """Return the file of a group's rows beside a record's file."""
    return path.with_name(path.name.replace(".record.", f".{group}."))


def compute(
    models: Models, path: Path, record: Record, groups: Sequence[str] = tuple(GROUPS)
) -> dict[str, float]:
    """Store the rows of the groups that are missing, and return the processor seconds of each."""
    seconds = {}
    for name in groups:
        group = GROUPS[name]
        file = file_of(path, name)
        if file.exists() or len(record.tokens) > group.longest:
            continue
        start = time.process_time()
        rows = {key: row.float() for key, row in group.function(models, record).items()}
        seconds[name] = time.process_time() - start
        torch.save({"rows": rows, "seconds": seconds[name]}, file)
    return seconds


@functools.cache
def load_models(model_name: str) -> Models:
    """Return a model in both forms."""
    import models

    plain, tokenizer = load(model_name)
    return Models(plain.requires_grad_(False), getattr(models, model_name)(), tokenizer)


def main(model_name: str, half: str, family: str) -> None:
    """Store the rows of all records of a family."""
    torch.set_num_threads(1)
    found = load_models(model_name)
    for path, record in records(model_name, half, family):
        seconds = compute(found, path, record)
        if seconds:
            print(path.name, len(record.tokens), {k: round(v, 1) for k, v in seconds.items()}, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
