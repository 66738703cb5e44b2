"""Bound the flow of each pair by the first layer, and find pairs whose flow reaches the bound.

No flow from i to j is larger than the capacity that enters j in the first layer, or that leaves i in the
last. In deep stacks most flows are exactly that large (docs/evidence/aggregation.md). `find_pairs_at_bound`
shows this for many pairs at once, without solving, because it constructs such a flow in three stages:

    from i down to level b    each node sends down its mass in proportion to its capacities;
    from level b to level t   every node k of level b sends to every node l of level t along random
                              walks that are conditioned to start at k and to end at l;
    from level t down to j    each node requests what it needs from the level above, in proportion to
                              capacity × g, with any positive weights g of the nodes above.

p is the mass that reached a node from i, and z^j the mass that the nodes of level t must send to j. M is the
product of the layers b to t, Q the product of the layers below r, and R_l = z^j_l / min_k M_kl. The edge from
node a to node c of layer r then has at most the flow capacity · p_a · (Q R)_c. So the construction is a flow
if p_a · (Q R)_c ≤ 1 everywhere in the middle stage, and the requests of the last stage stay below the
capacities.
"""

from __future__ import annotations

import itertools

import numpy as np
from jaxtyping import Bool, Float

# The weights g of the last stage are powers of the mass that the average query sends. Higher powers request
# from nodes that the middle stage reaches more easily; lower powers request less of any single edge.
_POWERS = (1.0, 0.75, 0.5, 0.25, 0.0)


def first_layer_bound(
    capacities: Float[np.ndarray, "layer query key"], level: int
) -> Float[np.ndarray, "query key"]:
    """Return, for every pair, the capacity that leaves i at `level`, or that enters j if that is smaller.

    If no layer has weight above its diagonal, only the positions from j to i count.
    """
    first, last = capacities[0], capacities[level - 1]
    if np.triu(capacities[:level].any(0), 1).any():
        bound: np.ndarray = np.minimum(last.sum(1)[:, None], first.sum(0)[None, :])
        return bound
    # Row i of the running sum is the capacity that enters j from positions up to i; those before j add 0.
    enters = np.cumsum(first, axis=0)
    leaves = np.cumsum(last[:, ::-1], axis=1)[:, ::-1]
    return np.tril(np.minimum(leaves, enters))


def find_pairs_at_bound(
    capacities: Float[np.ndarray, "layer query key"],
) -> Bool[np.ndarray, "query key"]:
    """Return the pairs (i, j) whose flow through all layers is certainly min(1, Σ_k capacities[0, k, j]).

    The flow of the other pairs may have this size or not. All pairs are False for stacks of fewer than 3
    layers, for causal stacks, and if some row does not sum to 1.
    """
    layers, size, _ = capacities.shape
    at_bound = np.zeros((size, size), dtype=bool)
    # In a causal stack no level connects every node with every other, which the middle stage needs.
    is_causal = not np.triu(capacities.any(0), 1).any()
    if layers < 3 or is_causal or np.abs(capacities.sum(-1) - 1).max() > 1e-12:
        return at_bound
    # masses[level] is the mass that each query has sent to each node of that level.
    masses = list(itertools.accumulate(capacities[::-1], np.matmul, initial=np.eye(size)))[::-1]
    enters = capacities[0].sum(0)
    demand = capacities[0] * np.minimum(1, enters) / np.where(enters > 0, enters, 1)
    possible = np.ones(size, dtype=bool)
    for bottom in range(1, layers - 1):
        at_bound = at_bound | (_find_middle(capacities, masses, demand, bottom) & possible)
        if at_bound.all() or not possible.any():
            break
        demand, is_met = _request_from_above(capacities[bottom], masses[bottom + 1].mean(0), demand)
        possible &= is_met
    return at_bound


def _find_middle(
    capacities: Float[np.ndarray, "layer query key"],
    masses: list[Float[np.ndarray, "query node"]],
    demand: Float[np.ndarray, "node key"],
    bottom: int,
) -> Bool[np.ndarray, "query key"]:
    """Return the pairs for which some middle stage that ends at level `bottom` meets the demand there."""
    size = len(demand)
    found = np.zeros((size, size), dtype=bool)
    products = [np.eye(size)]
    for top in range(bottom + 1, len(capacities)):
        products.append(capacities[top - 1] @ products[-1])
        reached = products[-1].min(0)
        if (demand[reached <= 0] > 0).any():
            continue
        request = demand / np.where(reached > 0, reached, 1)[:, None]
        load = np.zeros((size, size))
        for layer in range(bottom + 1, top + 1):
            requested = (products[layer - 1 - bottom] @ request).max(0)
            load = np.maximum(load, masses[layer].max(1)[:, None] * requested)
        found |= load <= 1
        if found.all():
            break
    return found


def _request_from_above(
    matrix: Float[np.ndarray, "above node"],
    mass: Float[np.ndarray, " above"],
    demand: Float[np.ndarray, "node key"],
) -> tuple[Float[np.ndarray, "above key"], Bool[np.ndarray, " key"]]:
    """Return the demand on the level above, and the keys for which the edges have the capacity for it."""
    requested = np.zeros_like(demand)
    is_met = np.zeros(demand.shape[1], dtype=bool)
    for power in _POWERS:
        weights = mass**power
        total = weights @ matrix
        strongest = np.where(matrix > 0, weights[:, None], 0).max(0)
        fits = (demand * strongest[:, None] <= total[:, None]) & ((total > 0)[:, None] | (demand == 0))
        newly_met = ~is_met & fits.all(0)
        if newly_met.any():
            shares = weights[:, None] * matrix / np.where(total > 0, total, 1)
            requested[:, newly_met] = shares @ demand[:, newly_met]
            is_met |= newly_met
        if is_met.all():
            break
    return requested, is_met
