"""Attention flow (Abnar & Zuidema, "Quantifying Attention Flow in Transformers", ACL 2020).

`docs/flow.md` has the definition, the receptive-field normalisation, and what becomes of deep stacks.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lens_mix.aggregation.collapse import collapse_notes
from lens_mix.aggregation.flow_bounds import first_layer_bound
from lens_mix.aggregation.flow_rows import all_flows
from lens_mix.aggregation.max_flow import Solver
from lens_mix.aggregation.products import Residual
from lens_mix.aggregation.receptive_field import held_residual, null_maps
from lens_mix.aggregation.rollout import (
    holds_residual,
    later_start_note,
    layers_to_mix,
    looks_causal_note,
    mixed_layers,
    reached_inputs,
    require_not_joint,
)
from lens_mix.arguments import flags, one_of, whole_number
from lens_mix.maps import MixingMap
from lens_mix.maps.arithmetic import normalise_rows
from lens_mix.maps.positions import as_positions

# Two flows that differ by less are one: what rounding to whole numbers can do to a flow is below it.
_EQUAL = 1e-7
_NOTED_SHARE = 0.5  # from this share of pairs on, a note says that the deeper layers do not show


def flow(
    mixing_map: MixingMap,
    *,
    normalize: bool = True,
    layer: int | None = None,
    queries: Sequence[int] | int | None = None,
    residual: float | None = None,
    receptive_field: bool = False,
    drop_bos: bool = False,
    solver: Solver = "scipy",
    processes: int = 1,
    progress: bool = False,
) -> MixingMap:
    """Input maps from layer maps, by maximum flow (section 3.2 of the paper).

    Heads are averaged and the residual is mixed in, Â_l = ((1 − w) A_l + w I) / rowsum, as in `rollout`. Each
    Â_l[query, key] is the capacity of an edge from (l, query) down to (l − 1, key); the score is the largest
    flow from a query to an input. Works on the maps of any method.

    `provenance["aggregation"]["first_layer_share"]` says for each layer of the result which share of the
    pairs equals what the first layer alone allows (None for depths 1 and 2); a note says so where it is half
    or more. In deep bidirectional stacks it is practically all: flow then says the same of every query.

    Args:
        mixing_map, residual, drop_bos: as in `rollout`.
        normalize: divide each row by its sum, as the paper's code does; False: the flows, 0 to 1.
        layer: flow from the positions of this layer only, by label (negative: from the end); None: from
            every layer, as in rollout. The last layer alone costs a fraction of all.
        queries: flow from these positions only (negative: from the end).
        receptive_field: divide by the flow of even attention under the same mask (our formula: docs/flow.md).
        solver: "scipy" (exact to about 1e-8) or "networkx" (float64 throughout, far slower).
        processes: how many to use; in a script, more than 1 needs `if __name__ == "__main__":`.
        progress: show a bar.

    Returns:
        A map of kind "input", float64, `[layer, query, key]` with one layer or as many as the map has.
        Zero for inputs that a query cannot reach; rows sum to 1 if `normalize`. With `queries` it holds
        these rows only, by position (`MixingMap.queries`).

    Raises:
        TypeError, ValueError: as `rollout`; no such query; an unknown solver; fewer than 1 process.
    """
    flags(normalize=normalize, receptive_field=receptive_field, drop_bos=drop_bos, progress=progress)
    stack, visible, weight, row_weights = capacity_stack(
        mixing_map, residual, to_layer=layer, drop_bos=drop_bos
    )
    one_of("solver", solver, ("scipy", "networkx"))
    if receptive_field:
        require_not_joint(stack, "receptive_field")
    processes = whole_number("processes", processes, 1)
    chosen = as_positions(slice(None) if queries is None else queries, len(stack.tokens))
    levels = list(range(1, len(stack.scores) + 1)) if layer is None else [len(stack.scores)]
    work: dict[str, Any] = {"solver": solver, "processes": processes, "progress": progress}
    capacities = stack.scores.cpu().numpy()
    flows = all_flows(capacities, levels, chosen, **work)
    shares = [_bound_share(capacities, level, chosen, row) for level, row in zip(levels, flows, strict=True)]
    scores = torch.from_numpy(flows)
    if receptive_field:
        null = torch.full(stack.scores.shape[:-1], weight, dtype=torch.float64, device="cpu")
        if isinstance(row_weights, Tensor):
            null = row_weights.cpu().mean(-1, keepdim=True).expand(null.shape)
        if holds_residual(stack):
            null = held_residual(stack.scores.cpu(), visible.cpu(), weight)
        scores = _normalise_by_null(scores, visible.cpu(), null, levels, chosen, work)
    if normalize:
        scores, _ = normalise_rows(scores, "refuse")
    options = {"receptive_field": receptive_field, "drop_bos": drop_bos, "solver": solver}
    aggregation = {"name": "flow", "residual": weight, "normalize": normalize, "layer": layer, **options}
    places = [level - 1 for level in levels]
    reached = reached_inputs(visible, weight)[places][:, chosen]
    return stack.replace(
        scores=scores.to(stack.scores.device),
        queries=chosen,
        mask=None if stack.mask is None else reached,
        layers=[stack.layer_labels[place] for place in places],
        residual=weight,
        kind="input",
        provenance={**stack.provenance, "aggregation": {**aggregation, "first_layer_share": shares}},
        notes=(
            *_notes(stack, levels, shares, receptive_field),
            *collapse_notes(scores[-1], reached[-1], chosen),
        ),
    )


class Stack(NamedTuple):
    """The capacities Â_l (float64, `[layer, query, key]`), what attention could see, and the weight w.

    `weights` is the w of Â_l: one weight per row if rows gave weight to an attention sink, else `residual`.
    """

    capacities: MixingMap
    visible: Bool[Tensor, "layer query key"]
    residual: float
    weights: Residual


def capacity_stack(
    mixing_map: MixingMap, residual: float | None, to_layer: int | None = None, drop_bos: bool = False
) -> Stack:
    """Rollout's Â_l of the layers up to `to_layer`. Args and errors: as `flow`."""
    chosen, weight = layers_to_mix(mixing_map, "flow", residual, None, to_layer, drop_bos, "layer")
    maps, notes, weights = mixed_layers(chosen, weight)
    visible = chosen.visible()
    identity = torch.eye(visible.shape[-1], dtype=torch.bool, device=visible.device)
    # A mask that hides the diagonal says what attention could see; the residual passes all the same.
    mask = chosen.mask if weight == 0 or chosen.mask is None else visible | identity
    return Stack(chosen.replace(scores=maps, mask=mask, notes=notes), visible, weight, weights)


def _bound_share(
    capacities: Float[np.ndarray, "layer query key"],
    level: int,
    queries: list[int],
    flows: Float[np.ndarray, "asked key"],
) -> float | None:
    """The share of pairs, among those with a flow, that the first layer alone decides."""
    if level < 3:
        return None
    bound = first_layer_bound(capacities, level)[queries]
    flowing = bound > 0
    return float((np.abs(flows - bound) < _EQUAL)[flowing].mean()) if flowing.any() else None


def _normalise_by_null(
    flows: Float[Tensor, "level asked key"],
    visible: Bool[Tensor, "layer query key"],
    weights: Float[Tensor, "layer query"],
    levels: list[int],
    queries: list[int],
    work: dict[str, Any],
) -> Float[Tensor, "level asked key"]:
    """flows · B0 / F0, each row scaled back to its sum (docs/flow.md); a layer has one weight."""
    null = torch.from_numpy(all_flows(null_maps(visible, weights).numpy(), levels, queries, **work))
    reached = reached_inputs(visible, float(weights.max()))
    by_layer = tuple(weights[:, 0].tolist())
    target = torch.zeros_like(flows)
    for place, level in enumerate(levels):
        for number, query in enumerate(queries):
            keys = reached[level - 1, query]
            to_itself, to_another = _even_flow(by_layer[:level], max(1, int(keys.sum())))
            target[place, number, keys] = to_another
            target[place, number, query] = to_itself if keys[query] else 0.0
    weighted = torch.where(null > 0, flows * target / null, 0.0)
    total = weighted.sum(-1, keepdim=True)
    return weighted * flows.sum(-1, keepdim=True) / total.masked_fill(total == 0, 1)


@functools.lru_cache(maxsize=4096)
def _even_flow(weights: tuple[float, ...], size: int) -> tuple[float, float]:
    """Flow of even attention over `size` tokens that all see each other: to oneself, and to another."""
    by_row = torch.tensor(weights, dtype=torch.float64, device="cpu")[:, None].expand(-1, size)
    even = null_maps(torch.ones(len(weights), size, size, dtype=torch.bool, device="cpu"), by_row).numpy()
    row = all_flows(even, [len(weights)], [0], keys=range(min(size, 2)))[0, 0]
    return float(row[0]), float(row[1]) if size > 1 else 0.0


def _notes(
    stack: MixingMap, levels: list[int], shares: list[float | None], receptive_field: bool
) -> tuple[str, ...]:
    notes = [*stack.notes, *later_start_note(stack, "flow")]
    first, last, share = stack.layer_labels[0], stack.layer_labels[levels[-1] - 1], shares[-1]
    if share is not None and share >= _NOTED_SHARE:
        notes.append(
            f"{100 * share:.4g} % of the flows from layer {last} equal what layer {first} alone lets into "
            "the key, min(1, column sum over the positions that the query reaches): there the deeper layers, "
            "and what the query attends to, do not show; rollout does not have this limit"
        )
    return (*notes, *(looks_causal_note(stack) if receptive_field else ()))
