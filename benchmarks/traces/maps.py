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
from benchmarks.input_map.importance import load
from benchmarks.traces.gold import Record, records
from lens_mix.evaluation.controls import control_rows, randomised
from lens_mix.targets import Target
from lens_mix.traces.paths import sum_paths

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


def span_target(record: Record) -> Target:
    """Return the log probability of the written tokens."""
    return lm.targets.span(record.n_prompt)


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


def _layer_rows(name: str, scores: Float[Tensor, "layer row key"], n_prompt: int) -> Rows:
    """Return mean and maximum over layers of raw rows, summed over the written tokens."""
    mean, largest = scores.double().mean(0), scores.double().amax(0)
    return {f"{name}, mean": mean.sum(0)[:n_prompt], f"{name}, maximum": largest.sum(0)[:n_prompt]}


def _through_rows(name: str, scores: Float[Tensor, "layer row key"], n_prompt: int) -> Rows:
    """Return the influence of the prompt through written tokens (`lm.Trace.through`)."""
    steps = scores.double().mean(0)
    hops = {"1 hop (FlashTrace)": 1, "all hops (CAGE)": None}
    return {
        f"{name}, mean, {each}": sum_paths(steps, n_prompt, count).sum(0)[:n_prompt]
        for each, count in hops.items()
    }


def sum_over_pieces(scores: Float[Tensor, "... key"], record: Record) -> Float[Tensor, "... piece"]:
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
        lm.methods.TokenPatching(replacements=WORDS),
        queries=record.rows[:FIRST_TOKENS],
    )
    rows = found.scores[0, :, : record.n_prompt].double()
    return {"lm.input_map, first 2 tokens": rows.sum(0), "lm.input_map, first token": rows[0]}


# The map that the half to choose on recommends.
RECOMMENDED = "gim, absolute"
# The map that paired differences are to. It was the recommended one when most maps were measured.
REFERENCE = "gim, ratio, absolute"
CHANGED: dict[str, Callable[[Target], lm.Method]] = {
    "gim": lm.methods.Gim,
    RECOMMENDED: lambda target: lm.methods.Gim(target, readout="absolute"),
    REFERENCE: lambda target: lm.methods.Gim(target, activations="ratio", readout="absolute"),
    "frozen_gradients": lm.methods.FrozenGradients,
}


def span_map(models: Models, record: Record, name: str) -> Float[Tensor, " prompt"]:
    """Return one of the maps of `CHANGED`."""
    found = lm.run(models.bridge, record.tokens, CHANGED[name](span_target(record)), queries=[-1])
    return found.scores[0, 0, : record.n_prompt].double()


def changed(models: Models, record: Record) -> Rows:
    """Return the maps of changed gradients."""
    return {name: span_map(models, record, name) for name in CHANGED}


def span_group(name: str) -> Callable[[Models, Record], Rows]:
    """Return a function that computes one of the maps of `CHANGED`."""
    return lambda models, record: {name: span_map(models, record, name)}


def mean_group(method: str) -> Callable[[Models, Record], Rows]:
    """Return a function that computes one layer map, mean over layers, summed over the written tokens."""

    def rows(models: Models, record: Record) -> Rows:
        found = lm.run(models.bridge, record.tokens, method, queries=record.rows)
        return {f"{method}, mean": found.scores.double().mean(0).sum(0)[: record.n_prompt]}

    return rows


def asked_rows(models: Models, record: Record) -> Rows:
    """Return layer maps of the positions before each written token, without those of other positions."""
    methods = [lm.methods.AttentionWeights(per_head=True), "attn_res_ln", "alti", "value_zeroing"]
    maps = lm.run(models.bridge, record.tokens, methods, queries=record.rows)
    rows: Rows = {}
    for name in maps:
        rows |= _layer_rows(name, maps[name].merge_heads().scores, record.n_prompt)
    heads = maps["attention"].scores.double()
    return rows | {"attention, strongest head": heads.amax((0, 1)).sum(0)[: record.n_prompt]}


def weighted_rows(models: Models, record: Record) -> Rows:
    """Return the layer maps of attention weighted by its gradient, of the same rows."""
    method = lm.methods.GradientAttention(span_target(record))
    found = lm.run(models.bridge, record.tokens, method, queries=record.rows)
    return _layer_rows("gradient_attention", found.scores, record.n_prompt)


def shuffled(models: Models, record: Record) -> Rows:
    """Return maps of the model with shuffled weights, which knows nothing about the text.

    Each record has another order of the weights.
    """
    count = record.n_prompt
    methods = {
        "gradient_attention": lm.methods.GradientAttention(span_target(record)),
        "alti": lm.methods.Alti(),
        "attention": lm.methods.AttentionWeights(),
    }
    with randomised(models.bridge, seed=record.number) as model:
        changed_models = dataclasses.replace(models, bridge=model)
        rows = {name: span_map(changed_models, record, name) for name in (RECOMMENDED, REFERENCE)}
        maps = lm.run(model, record.tokens, list(methods.values()))
    for method in methods:
        scores = maps[method].merge_heads().scores
        rows[f"{method}, mean"] = scores[:, record.rows].double().mean(0).sum(0)[:count]
        if method == "attention":
            rows["attention, rollout"] = lm.rollout(maps[method]).scores[-1, record.rows].sum(0)[:count]
    return {f"{each}, shuffled weights": row for each, row in rows.items()}


def gradients(models: Models, record: Record) -> Rows:
    """Return all maps of plain gradients, and rollouts of attention, from one pass of the plain model.

    The gradients of one layer's patterns are used as soon as they are there, because those of all layers take
    4 GB at 2,000 tokens. The maps equal those of the library (`input_gradients`, `gradient_attention`,
    `lm.gradient_rollout`, `lm.rollout` of `attention`), which needs a pass for each.
    """
    inputs = models.plain.get_input_embeddings()(record.tokens[None]).detach().requires_grad_()
    out = models.plain(inputs_embeds=inputs, output_attentions=True, logits_to_keep=record.n_written + 1)
    written = record.tokens[record.n_prompt :]
    target = out.logits[0, :-1].float().log_softmax(-1).gather(-1, written[:, None]).sum()
    weighted_by_layer: dict[int, Tensor] = {}

    def weigh(layer: int, pattern: Tensor, at_pattern: Float[Tensor, "1 head query key"]) -> None:
        weighted_by_layer[layer] = (pattern * at_pattern)[0].clamp_min_(0).mean(0)

    # A hook that holds the tensor it is on would keep the autograd graph alive, so it gets a detached one.
    for number, each in enumerate(out.attentions):
        each.register_hook(functools.partial(weigh, number, each.detach()))
    (at_inputs,) = torch.autograd.grad(target, [inputs])
    count, chosen = record.n_prompt, record.rows
    start = torch.zeros(1, len(record.tokens), dtype=torch.float64)
    start[0, chosen] = 1
    rows: Rows = {
        "input_gradients, times input": (at_inputs * inputs)[0].sum(-1).detach()[:count].double(),
        "input_gradients, norm": at_inputs[0].norm(dim=-1)[:count].double(),
    }
    with torch.no_grad():
        patterns = [each[0] for each in out.attentions]
        weighted = torch.stack([weighted_by_layer[number] for number in range(len(patterns))])
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
        rows["features: attention"] = sum_over_pieces(heads.sum(2), record)
    return rows


def layers(models: Models, record: Record) -> Rows:
    """Return layer maps of the positions before each written token, with mean and maximum over layers."""
    methods: Mapping[str, Any] = {
        "value_norm": lm.methods.ValueNorms(per_head=True),
        "information_flow_routes": lm.methods.InformationFlowRoutes(),
        "value_zeroing": lm.methods.ValueZeroing(),
    }
    maps = lm.run(models.bridge, record.tokens, list(methods.values()), queries=record.rows)
    rows: Rows = {}
    for name in methods:
        scores = maps[name].merge_heads().scores
        rows |= _layer_rows(name, scores, record.n_prompt)
        if name != "value_norm":
            rows |= _through_rows(name, scores, record.n_prompt)
    rows["features: value_norm"] = sum_over_pieces(maps["value_norm"].scores.sum(2), record)
    rows["features: value_zeroing"] = sum_over_pieces(maps["value_zeroing"].scores.sum(1), record)
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


GROUPS: dict[str, Callable[[Models, Record], Rows]] = {
    "controls": controls,
    "gradients": gradients,
    "changed": changed,
    "layers": layers,
    "asked_rows": asked_rows,
    "weighted_rows": weighted_rows,
    "rollouts": rollouts,
    "recommended": recommended,
    "shuffled": shuffled,
    "default": span_group(RECOMMENDED),
    "reference": span_group(REFERENCE),
    "gim": span_group("gim"),
    "alti": mean_group("alti"),
    "value_zeroing": mean_group("value_zeroing"),
}
# What is computed if no group is asked for. The recipe of `lm.input_map` takes a pass for each written token,
# and shuffled weights are a control. On long prompts, whole layer maps and more methods take too long, and
# `gim` and `value_zeroing` are computed only if they are asked for.
SHORT_GROUPS = ("controls", "gradients", "changed", "layers", "rollouts")
LONG_GROUPS = ("controls", "default", "reference", "gradients", "alti")
# With distractors of the same form, the maps that need only some rows of long prompts are compared.
SAME_FORM_GROUPS = ("controls", "asked_rows", "weighted_rows", "default")


def file_of(path: Path, group: str) -> Path:
    """Return the file of a group's rows beside a record's file."""
    return path.with_name(path.name.replace(".record.", f".{group}."))


def compute(
    models: Models, path: Path, record: Record, groups: Sequence[str] = SHORT_GROUPS
) -> dict[str, float]:
    """Store the rows of the groups that are missing, and return the processor seconds of each."""
    seconds = {}
    for name in groups:
        file = file_of(path, name)
        if file.exists():
            continue
        start = time.process_time()
        rows = {key: row.float() for key, row in GROUPS[name](models, record).items()}
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
