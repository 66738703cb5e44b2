"""Compute attention flow (Abnar & Zuidema, "Quantifying Attention Flow in Transformers", ACL 2020).

`docs/evidence/aggregation.md` has the limits in deep stacks.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lens_mix.aggregation.collapse import collapse_notes
from lens_mix.aggregation.flow_bounds import first_layer_bound
from lens_mix.aggregation.flow_rows import compute_flows
from lens_mix.aggregation.max_flow import Solver
from lens_mix.aggregation.products import Residual
from lens_mix.aggregation.receptive_field import estimate_residual, null_maps
from lens_mix.aggregation.rollout import (
    includes_residual,
    later_start_note,
    layers_to_mix,
    looks_causal_note,
    mix_layers,
    reached_inputs,
    require_no_joint,
)
from lens_mix.arguments import check_choice, check_flags, check_whole_number
from lens_mix.maps import MixingMap
from lens_mix.maps.arithmetic import normalize_rows
from lens_mix.maps.spans import Span, find_positions

# Rounding to whole numbers changes a flow by less than this, so closer flows count as equal.
_TOLERANCE = 1e-7
# From this share of pairs on, a note says that the deeper layers have no effect.
_NOTED_SHARE = 0.5


def flow(
    mixing_map: MixingMap,
    *,
    normalize: bool = True,
    layer: int | None = None,
    queries: Span | None = None,
    residual: float | None = None,
    receptive_field: bool = False,
    drop_bos: bool = False,
    solver: Solver = "scipy",
    processes: int = 1,
    progress: bool = False,
) -> MixingMap:
    """Return input maps by maximum flow through layer maps (Abnar & Zuidema, ACL 2020, section 3.2).

        >>> m = lm.run(model, "The Eiffel Tower is in the city of", "attention")
        >>> lm.flow(m, layer=-1).top(3)

    Heads are averaged and the residual is mixed in, Â_l = ((1 − w) A_l + w I) / rowsum, as in `rollout`. Each
    Â_l[query, key] is the capacity of an edge from (l, query) down to (l − 1, key). The score is the largest
    flow from a query to an input. The layer maps may come from any method.

    `provenance["aggregation"]["first_layer_share"]` contains a number for each layer of the result (None for
    depths 1 and 2): the share of the pairs whose flow equals the bound that the first layer alone sets. A
    note says so if it is half or more. In deep bidirectional stacks it is nearly 1, and all queries have the
    same flows.

    Args:
        mixing_map: The layer maps, as in `rollout`.
        normalize: Whether to divide each row by its sum, as the paper's code does. False: flows from 0 to 1.
        layer: The label of the layer from whose positions to flow (negative: from the end). None: from every
            layer, as in `rollout`. The last layer alone takes a fraction of the time.
        queries: The positions from which to flow (negative: from the end), or a text of the prompt. None:
            all.
        residual: The residual weight, as in `rollout`.
        receptive_field: Whether to divide by the flow of uniform attention under the same mask, and to
            multiply by what that should be, as in `rollout`. The formula is ours.
        drop_bos: Whether to drop position 0 first, as in `rollout`.
        solver: "scipy" (exact to about 1e-8) or "networkx" (float64 throughout, far slower).
        processes: The number of processes. In a script, more than 1 needs `if __name__ == "__main__":`.
        progress: Whether to show a bar.

    Returns:
        A map of kind "input", float64, `[layer, query, key]`, with one layer or as many as `mixing_map` has.
        An input that a query cannot reach has the score 0. Rows sum to 1 if `normalize`. With `queries`, the
        map has only these rows (`MixingMap.queries`).

    Raises:
        TypeError: As in `rollout`.
        ValueError: As in `rollout`, or if the query or solver does not exist, or for fewer than 1 process.
    """
    check_flags(normalize=normalize, receptive_field=receptive_field, drop_bos=drop_bos, progress=progress)
    stack, visible, weight, row_weights = capacity_stack(
        mixing_map, residual, to_layer=layer, drop_bos=drop_bos
    )
    check_choice("solver", solver, ("scipy", "networkx"))
    if receptive_field:
        require_no_joint(stack, "receptive_field")
    processes = check_whole_number("processes", processes, 1)
    chosen = find_positions(stack.tokens, slice(None) if queries is None else queries, "queries")
    levels = list(range(1, len(stack.scores) + 1)) if layer is None else [len(stack.scores)]
    work: dict[str, Any] = {"solver": solver, "processes": processes, "progress": progress}
    capacities = stack.scores.cpu().numpy()
    flows = compute_flows(capacities, levels, chosen, **work)
    shares = [
        _compute_bound_share(capacities, level, chosen, row) for level, row in zip(levels, flows, strict=True)
    ]
    scores = torch.from_numpy(flows)
    if receptive_field:
        null = torch.full(stack.scores.shape[:-1], weight, dtype=torch.float64, device="cpu")
        if isinstance(row_weights, Tensor):
            null = row_weights.cpu().mean(-1, keepdim=True).expand(null.shape)
        if includes_residual(stack):
            null = estimate_residual(stack.scores.cpu(), visible.cpu(), weight)
        scores = _normalize_by_null(scores, visible.cpu(), null, levels, chosen, work)
    if normalize:
        scores, _ = normalize_rows(scores, "refuse")
    options = {"receptive_field": receptive_field, "drop_bos": drop_bos, "solver": solver}
    aggregation = {"name": "flow", "residual": weight, "normalize": normalize, "layer": layer, **options}
    depths = [level - 1 for level in levels]
    reached = reached_inputs(visible, weight)[depths][:, chosen]
    return stack.select_queries(chosen).replace(
        scores=scores.to(stack.scores.device),
        mask=None if stack.mask is None else reached,
        layers=[stack.layer_labels[depth] for depth in depths],
        residual=weight,
        kind="input",
        provenance={**stack.provenance, "aggregation": {**aggregation, "first_layer_share": shares}},
        notes=(
            *_make_notes(stack, levels, shares, receptive_field),
            *collapse_notes(scores[-1], reached[-1], chosen),
        ),
    )


class LayerCapacities(NamedTuple):
    """The capacities of a stack of layers.

    Attributes:
        capacities: Â_l, float64, `[layer, query, key]`.
        visible: The keys that attention could see.
        residual: The residual weight that was asked for.
        weights: The residual weight in Â_l: one weight per row if rows gave weight to an attention sink, else
            `residual`.
    """

    capacities: MixingMap
    visible: Bool[Tensor, "layer query key"]
    residual: float
    weights: Residual


def capacity_stack(
    mixing_map: MixingMap, residual: float | None, to_layer: int | None = None, drop_bos: bool = False
) -> LayerCapacities:
    """Return the Â_l of `rollout` for the layers up to `to_layer`.

    The arguments and errors are those of `flow`.
    """
    chosen, weight = layers_to_mix(mixing_map, "flow", residual, None, to_layer, drop_bos, "layer")
    maps, notes, weights = mix_layers(chosen, weight)
    visible = chosen.visible()
    identity = torch.eye(visible.shape[-1], dtype=torch.bool, device=visible.device)
    # A mask may hide the diagonal from attention, but the residual still connects a position with itself.
    mask = chosen.mask if weight == 0 or chosen.mask is None else visible | identity
    return LayerCapacities(chosen.replace(scores=maps, mask=mask, notes=notes), visible, weight, weights)


def _compute_bound_share(
    capacities: Float[np.ndarray, "layer query key"],
    level: int,
    queries: list[int],
    flows: Float[np.ndarray, "asked key"],
) -> float | None:
    """Return the share of pairs, among those with a flow, whose flow equals the first layer's bound."""
    if level < 3:
        return None
    bound = first_layer_bound(capacities, level)[queries]
    has_flow = bound > 0
    return float((np.abs(flows - bound) < _TOLERANCE)[has_flow].mean()) if has_flow.any() else None


def _normalize_by_null(
    flows: Float[Tensor, "level asked key"],
    visible: Bool[Tensor, "layer query key"],
    weights: Float[Tensor, "layer query"],
    levels: list[int],
    queries: list[int],
    work: dict[str, Any],
) -> Float[Tensor, "level asked key"]:
    """Return flows · B0 / F0, with each row scaled back to its sum.

    F0 is the flow of uniform attention with the same mask, depth and residual weight. B0 is the flow of
    uniform attention without a mask, over only as many tokens as the query can reach. Uniform attention then
    has a uniform result. Bidirectional maps do not change, nor does a row if later tokens are added.

    All rows of a layer must have the same residual weight.
    """
    null = torch.from_numpy(compute_flows(null_maps(visible, weights).numpy(), levels, queries, **work))
    reached = reached_inputs(visible, float(weights.max()))
    layer_weights = tuple(weights[:, 0].tolist())
    target = torch.zeros_like(flows)
    for index, level in enumerate(levels):
        for row, query in enumerate(queries):
            keys = reached[level - 1, query]
            to_itself, to_another = _compute_even_flow(layer_weights[:level], max(1, int(keys.sum())))
            target[index, row, keys] = to_another
            target[index, row, query] = to_itself if keys[query] else 0.0
    weighted = torch.where(null > 0, flows * target / null, 0.0)
    total = weighted.sum(-1, keepdim=True)
    return weighted * flows.sum(-1, keepdim=True) / total.masked_fill(total == 0, 1)


@functools.lru_cache(maxsize=4096)
def _compute_even_flow(weights: tuple[float, ...], size: int) -> tuple[float, float]:
    """Return the flow from a token to itself and to another, for uniform attention over all `size` tokens."""
    row_weights = torch.tensor(weights, dtype=torch.float64, device="cpu")[:, None].expand(-1, size)
    visible = torch.ones(len(weights), size, size, dtype=torch.bool, device="cpu")
    even = null_maps(visible, row_weights).numpy()
    row = compute_flows(even, [len(weights)], [0], keys=range(min(size, 2)))[0, 0]
    return float(row[0]), float(row[1]) if size > 1 else 0.0


def _make_notes(
    stack: MixingMap, levels: list[int], shares: list[float | None], receptive_field: bool
) -> tuple[str, ...]:
    notes = [*stack.notes, *later_start_note(stack, "flow")]
    first, last, share = stack.layer_labels[0], stack.layer_labels[levels[-1] - 1], shares[-1]
    if share is not None and share >= _NOTED_SHARE:
        notes.append(
            f"{100 * share:.4g} % of the flows from layer {last} equal the bound of layer {first} alone, "
            "min(1, column sum over the positions that the query reaches), so they do not depend on deeper "
            "layers or on what the query attends to; rollout does not have this limit"
        )
    return (*notes, *(looks_causal_note(stack) if receptive_field else ()))
