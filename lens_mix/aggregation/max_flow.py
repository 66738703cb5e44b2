"""Compute maximum flows through a stack of layers.

The network has a node per position and level: level 0 is the input, and level l is the output of the l-th
layer. The edge from (l, query) down to (l − 1, key) has the capacity `capacities[l − 1, query, key]`. scipy
solves it with whole numbers, networkx with floats.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Int

if TYPE_CHECKING:
    import networkx

Solver = Literal["scipy", "networkx"]
# scipy's solver sums flows as 32-bit whole numbers, so the largest possible flow must be below 2^31.
_LARGEST_WHOLE = 2**30
# A call of the solver takes as long as a few thousand edges, so each call gets about so many edges.
_EDGES_PER_CALL = 20_000


class Wiring(NamedTuple):
    """The edges between one query and one key.

    Nodes are numbered from 0, level by level from the top down, without the query and the key. Each level has
    the positions of the window.

    Attributes:
        counts: The number of edges that leave each node. The edges of the query are not included.
        targets: The node at the end of each edge of the inner layers.
        rows: The position at the start of each edge of one inner layer.
        columns: The position at the end of each edge of one inner layer.
    """

    counts: Int[np.ndarray, " node"]
    targets: Int[np.ndarray, " edge"]
    rows: Int[np.ndarray, " edge_of_layer"]
    columns: Int[np.ndarray, " edge_of_layer"]


class _Pair(NamedTuple):
    """One of the pairs that are solved in one call.

    Attributes:
        query: The position of the query.
        key: The position of the key.
        window: The positions that the flow may use.
        wiring: The edges between query and key.
        leaves: The capacity from the query to each position of the window.
        enters: The capacity from each position of the window to the key.
    """

    query: int
    key: int
    window: slice
    wiring: Wiring
    leaves: Int[np.ndarray, " position"]
    enters: Int[np.ndarray, " position"]


class LayeredFlow:
    """Maximum flows from positions of any level down to positions of the input.

    The result is exact except for the rounding to whole numbers. If rows sum to 1, rounding changes a
    capacity by at most 2^-31, and a flow of 12 layers × 32 tokens by about 1e-9. One and two layers are
    computed in float64 (F = A, and F_ij = Σ_k min(A2_ik, A1_kj)). If no layer has weight above its diagonal,
    a flow from i to j uses only the positions j to i, so the solver gets only these.

    Args:
        capacities: The capacities, float64, finite, 0 or more, of at least one layer and one position.
        solver: "scipy" (whole numbers) or "networkx" (floats, far slower; tests compare with it).
    """

    def __init__(self, capacities: Float[np.ndarray, "layer query key"], solver: Solver = "scipy") -> None:
        self.capacities, self.solver = capacities, solver
        self.largest = float(self.capacities.sum(-1).max())
        self.rows_sum_to_1 = bool((np.abs(self.capacities.sum(-1) - 1) < 1e-12).all())
        self.causal = not np.triu(self.capacities.any(0), 1).any()
        scaled = self.capacities * (_LARGEST_WHOLE / self.largest) if self.largest > 0 else self.capacities
        # scipy truncates 64-bit capacities without an error.
        self._whole = np.rint(scaled).astype(np.int32)
        self._pattern: np.ndarray = np.asarray((self._whole > 0).any(0))
        size = len(self._pattern)
        self._is_triangle = bool(np.array_equal(self._pattern, np.tri(size, dtype=bool)))
        self._wirings: dict[tuple[int, int], Wiring] = {}
        self._last: tuple[tuple[int, int, int], np.ndarray] | None = None
        self._graph: networkx.DiGraph | None = None

    def flows(self, level: int, pairs: Sequence[tuple[int, int]]) -> Float[np.ndarray, " pair"]:
        """Return, for each pair (query, key), the flow from the query at `level` to the input `key`.

        Args:
            level: The level of the queries, from 1 to the number of layers.
            pairs: The positions of each query and key.
        """
        if self.solver == "networkx":
            return np.array([self._solve_by_networkx(level, *pair) for pair in pairs])
        values = np.zeros(len(pairs))
        unsolved: dict[int, _Pair] = {}
        edges = 0
        for index, (query, key) in enumerate(pairs):
            if level == 1:
                values[index] = self.capacities[0, query, key]
            elif level == 2:
                values[index] = np.minimum(self.capacities[1, query], self.capacities[0, :, key]).sum()
            elif self.causal and key == query:
                values[index] = self.capacities[:level, key, key].min()
            elif not self.causal or key < query:
                unsolved[index] = self._make_pair(level, query, key)
                edges += len(unsolved[index].wiring.targets)
            if unsolved and (edges > _EDGES_PER_CALL or index == len(pairs) - 1):
                values[list(unsolved)] = self._solve(level, list(unsolved.values()))
                unsolved, edges = {}, 0
        return values

    def _make_pair(self, level: int, query: int, key: int) -> _Pair:
        window = slice(key, query + 1) if self.causal else slice(0, self.capacities.shape[1])
        leaves, enters = self._whole[level - 1, query, window], self._whole[0, window, key]
        return _Pair(query, key, window, self._find_wiring(level - 2, window), leaves, enters)

    def _find_wiring(self, inner: int, window: slice) -> Wiring:
        """Return the edges for a window, with `inner` layers (1 or more) between the first and the last."""
        size = window.stop - window.start
        is_shared = self._is_triangle or size == len(self._pattern)
        wiring = self._wirings.get((inner, size)) if is_shared else None
        if wiring is None:
            pattern = self._pattern[window, window]
            rows, columns = np.nonzero(pattern)
            counts = np.concatenate([np.tile(pattern.sum(1), inner), np.ones(size, dtype=np.int64)])
            below = size * np.arange(1, inner + 1)[:, None] + columns
            wiring = Wiring(counts, below.ravel(), rows, columns)
            if is_shared:
                # Callers ask for one level after the other, so wirings of other depths are not needed again.
                self._wirings = {key: each for key, each in self._wirings.items() if key[0] == inner}
                self._wirings[inner, size] = wiring
        return wiring

    def _read_inner(self, level: int, window: slice, wiring: Wiring) -> Int[np.ndarray, " edge"]:
        """Return the capacities of the edges of the inner layers."""
        # All pairs of a bidirectional stack have the same window, and its capacities are slow to make.
        key = (level, window.start, window.stop)
        if self._last is None or self._last[0] != key:
            layers = self._whole[level - 2 : 0 : -1, window, window]
            self._last = (key, layers[:, wiring.rows, wiring.columns].ravel())
        return self._last[1]

    def _solve(self, level: int, pairs: list[_Pair]) -> Float[np.ndarray, " pair"]:
        """Return the flows of several pairs, which are solved as one graph.

        The graph contains the separate graph of each pair. A common source replaces all queries, and a common
        sink all keys.
        """
        from scipy.sparse import csr_matrix
        from scipy.sparse.csgraph import maximum_flow

        *starts, sink = (1 + np.cumsum([0, *(len(pair.wiring.counts) for pair in pairs)])).tolist()
        data = [pair.leaves for pair in pairs]
        targets = [start + np.arange(len(pair.enters)) for start, pair in zip(starts, pairs, strict=True)]
        counts = [np.array([0, sum(len(pair.enters) for pair in pairs)])]
        for start, pair in zip(starts, pairs, strict=True):
            data += [self._read_inner(level, pair.window, pair.wiring), pair.enters]
            targets += [start + pair.wiring.targets, np.full(len(pair.enters), sink)]
            counts.append(pair.wiring.counts)
        pointers = np.cumsum(np.concatenate([*counts, [0]])).astype(np.int32)
        ends = np.concatenate(targets).astype(np.int32)
        graph = csr_matrix((np.concatenate(data), ends, pointers), shape=(sink + 1, sink + 1))
        flow = maximum_flow(graph, 0, sink, method="dinic").flow
        # The total may exceed 32 bits, so each pair's flow is summed here from the edges of the source.
        from_source = np.zeros(sink + 1, dtype=np.int64)
        from_source[flow.indices[: flow.indptr[1]]] = flow.data[: flow.indptr[1]]
        return np.array(
            [
                self._convert_flow(from_source[start:], level, pair)
                for start, pair in zip(starts, pairs, strict=True)
            ]
        )

    def _convert_flow(self, from_source: Int[np.ndarray, " node"], level: int, pair: _Pair) -> float:
        """Return the flow of a pair as a capacity, from the whole numbers that leave the source."""
        whole = int(from_source[: len(pair.enters)].sum())
        if whole < min(int(pair.leaves.sum()), int(pair.enters.sum())):
            return whole * self.largest / _LARGEST_WHOLE
        # The flow fills all edges of the query or of the key, so the sum of their capacities is exact.
        leaves = self.capacities[level - 1, pair.query, pair.window].sum()
        return float(min(leaves, self.capacities[0, pair.window, pair.key].sum()))

    def _solve_by_networkx(self, level: int, query: int, key: int) -> float:
        import networkx as nx

        if self._graph is None:
            self._graph = nx.DiGraph()
            layers, size, _ = self.capacities.shape
            nodes = itertools.product(range(layers + 1), range(size))
            self._graph.add_nodes_from(nodes)
            for layer, start, end in np.argwhere(self.capacities > 0).tolist():
                capacity = float(self.capacities[layer, start, end])
                self._graph.add_edge((layer + 1, start), (layer, end), capacity=capacity)
        return float(nx.maximum_flow_value(self._graph, (level, query), (0, key)))
