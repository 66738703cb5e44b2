"""What the first layer alone allows to flow, and a proof, without solving, that as much does flow.

No flow from i to j is larger than what enters j in the first layer, or leaves i in the last. In deep
stacks most flows are exactly that large (docs/flow.md). `proven` shows it for all pairs at once by
writing down such a flow in three parts:

    from i down to level b    each node passes on what it got in proportion to its capacities;
    from level b to level t   every source k serves every target l along random walks that are
                              conditioned to start at k and to end at l;
    from level t down to j    each node asks the level above for what it needs, in proportion to
                              capacity × g, g any positive weights of the nodes above.

With p the mass that reached a node from i, z^j what the nodes of level t must pass on to j, M the
product of the layers b to t, Q the product of the layers below r, and R_l = z^j_l / min_k M_kl, the edge
from node a to node c of layer r carries at most capacity · p_a · (Q R)_c. So the flow exists if
p_a · (Q R)_c ≤ 1 everywhere in the middle, and the requests of the last part stay below capacity.
"""

from __future__ import annotations

import itertools

import numpy as np
from jaxtyping import Bool, Float

# Weights g of the last part, as powers of the mass that the average query sends: the higher powers
# lead to targets that the middle reaches more easily, the lower ones ask less of any single edge.
_POWERS = (1.0, 0.75, 0.5, 0.25, 0.0)


def first_layer_bound(
    capacities: Float[np.ndarray, "layer query key"], level: int
) -> Float[np.ndarray, "query key"]:
    """min(what leaves i at `level`, what enters j in the first layer), for every pair.

    Where no layer has weight above its diagonal, only the positions from j to i count.
    """
    first, last = capacities[0], capacities[level - 1]
    if np.triu(capacities[:level].any(0), 1).any():
        return np.minimum(last.sum(1)[:, None], first.sum(0)[None, :])
    # Row i of the running sum: what enters j from the positions up to i (those before j add nothing).
    enters = np.cumsum(first, axis=0)
    leaves = np.cumsum(last[:, ::-1], axis=1)[:, ::-1]
    return np.tril(np.minimum(leaves, enters))


def proven(capacities: Float[np.ndarray, "layer query key"]) -> Bool[np.ndarray, "query key"]:
    """Pairs (i, j) whose flow through the whole stack is proven to be min(1, Σ_k capacities[0, k, j]).

    False says nothing. Only stacks of 3 or more layers with rows that sum to 1 have a proof.
    """
    layers, size, _ = capacities.shape
    shown = np.zeros((size, size), dtype=bool)
    # A causal position is reached by later ones only: no middle part serves every pair.
    causal = not np.triu(capacities.any(0), 1).any()
    if layers < 3 or causal or np.abs(capacities.sum(-1) - 1).max() > 1e-12:
        return shown
    # Per level what each query has sent there, from the queries down.
    masses = list(itertools.accumulate(capacities[::-1], np.matmul, initial=np.eye(size)))[::-1]
    enters = capacities[0].sum(0)
    demand = capacities[0] * np.minimum(1, enters) / np.where(enters > 0, enters, 1)
    possible = np.ones(size, dtype=bool)
    for bottom in range(1, layers - 1):
        shown = shown | (_served(capacities, masses, demand, bottom) & possible)
        if shown.all() or not possible.any():
            break
        demand, met = _requests(capacities[bottom], masses[bottom + 1].mean(0), demand)
        possible &= met
    return shown


def _served(
    capacities: Float[np.ndarray, "layer query key"],
    masses: list[Float[np.ndarray, "query node"]],
    demand: Float[np.ndarray, "node key"],
    bottom: int,
) -> Bool[np.ndarray, "query key"]:
    """Pairs for which some middle part that ends at level `bottom` carries the demand there."""
    size = len(demand)
    shown = np.zeros((size, size), dtype=bool)
    products = [np.eye(size)]
    for top in range(bottom + 1, len(capacities)):
        products.append(capacities[top - 1] @ products[-1])
        reached = products[-1].min(0)
        if (demand[reached <= 0] > 0).any():
            continue
        request = demand / np.where(reached > 0, reached, 1)[:, None]
        load = np.zeros((size, size))
        for layer in range(bottom + 1, top + 1):
            asked = (products[layer - 1 - bottom] @ request).max(0)
            load = np.maximum(load, masses[layer].max(1)[:, None] * asked)
        shown |= load <= 1
        if shown.all():
            break
    return shown


def _requests(
    matrix: Float[np.ndarray, "above node"],
    mass: Float[np.ndarray, " above"],
    demand: Float[np.ndarray, "node key"],
) -> tuple[Float[np.ndarray, "above key"], Bool[np.ndarray, " key"]]:
    """What the level above must pass on, and the keys for which its edges can carry it."""
    asked = np.zeros_like(demand)
    met = np.zeros(demand.shape[1], dtype=bool)
    for power in _POWERS:
        weights = mass**power
        total = weights @ matrix
        strongest = np.where(matrix > 0, weights[:, None], 0).max(0)
        carried = (demand * strongest[:, None] <= total[:, None]) & ((total > 0)[:, None] | (demand == 0))
        good = ~met & carried.all(0)
        if good.any():
            shares = weights[:, None] * matrix / np.where(total > 0, total, 1)
            asked[:, good] = shares @ demand[:, good]
            met |= good
        if met.all():
            break
    return asked, met
