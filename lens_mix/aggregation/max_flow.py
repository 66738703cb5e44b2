"""Maximum flow through a stack of layers: a node per position and level, an edge per query and key.

Level 0 is the input, level l the output of the l-th layer. The edge from (l, query) down to (l − 1, key)
has the capacity `capacities[l − 1, query, key]`. scipy solves it on whole numbers, networkx on floats.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Int

if TYPE_CHECKING:
    import networkx

Solver = Literal["scipy", "networkx"]
# scipy's solver adds up flows in 32-bit whole numbers: the largest possible flow must stay below 2^31.
_WHOLE = 2**30
# Edges that are handed to the solver in one call, which alone costs as much as a few thousand edges.
_BATCH = 20_000


class Wiring(NamedTuple):
    """The edges between one query and one key, the nodes counted from the query's first neighbour on.

    Between query and key stand the levels from the top down, each with the positions of the window.

    Attributes:
        counts: edges that leave each node; the query, the key and its edges left out.
        targets: where the edges of the inner layers lead.
        rows, columns: the edges of one inner layer.
    """

    counts: Int[np.ndarray, " node"]
    targets: Int[np.ndarray, " edge"]
    rows: Int[np.ndarray, " edge_of_layer"]
    columns: Int[np.ndarray, " edge_of_layer"]


class Part(NamedTuple):
    """One pair of those that are solved in one call."""

    query: int
    key: int
    window: slice
    wiring: Wiring
    leaves: Int[np.ndarray, " position"]
    enters: Int[np.ndarray, " position"]


class LayeredFlow:
    """Maximum flows from positions of any level down to positions of the input.

    The result is exact but for the rounding to whole numbers: with rows that sum to 1 each capacity moves by
    at most 2^-31, a flow of 12 layers × 32 tokens by some 1e-9. One and two layers are computed in float64
    (F = A, and F_ij = Σ_k min(A2_ik, A1_kj)). Where no layer has weight above its diagonal, flow from i to j
    runs through the positions j to i alone, and only these are handed to the solver.

    Args:
        capacities: 0 or more and finite, float64; at least one layer and one position.
        solver: "scipy" (whole numbers) or "networkx" (floats, far slower: the oracle).
    """

    def __init__(self, capacities: Float[np.ndarray, "layer query key"], solver: Solver = "scipy") -> None:
        self.capacities, self.solver = capacities, solver
        self.largest = float(self.capacities.sum(-1).max())
        self.rows_sum_to_1 = bool((np.abs(self.capacities.sum(-1) - 1) < 1e-12).all())  # but for rounding
        self.causal = not np.triu(self.capacities.any(0), 1).any()
        scaled = self.capacities * (_WHOLE / self.largest) if self.largest > 0 else self.capacities
        self._whole = np.rint(scaled).astype(np.int32)  # scipy cuts 64 bits off without a word
        self._pattern: np.ndarray = np.asarray((self._whole > 0).any(0))
        size = len(self._pattern)
        self._filled = bool(np.array_equal(self._pattern, np.tri(size, dtype=bool)))
        self._wirings: dict[tuple[int, int], Wiring] = {}
        self._last: tuple[tuple[int, int, int], np.ndarray] | None = None
        self._graph: networkx.DiGraph | None = None

    def flows(self, level: int, pairs: Sequence[tuple[int, int]]) -> Float[np.ndarray, " pair"]:
        """The flow from position `query` of a level (1 to the number of layers) to input `key`, per pair."""
        if self.solver == "networkx":
            return np.array([self._by_networkx(level, *pair) for pair in pairs])
        values = np.zeros(len(pairs))
        parts: dict[int, Part] = {}
        edges = 0
        for number, (query, key) in enumerate(pairs):
            if level == 1:
                values[number] = self.capacities[0, query, key]
            elif level == 2:
                values[number] = np.minimum(self.capacities[1, query], self.capacities[0, :, key]).sum()
            elif self.causal and key == query:
                values[number] = self.capacities[:level, key, key].min()
            elif not self.causal or key < query:
                parts[number] = self._part(level, query, key)
                edges += len(parts[number].wiring.targets)
            if parts and (edges > _BATCH or number == len(pairs) - 1):
                values[list(parts)] = self._solve(level, list(parts.values()))
                parts, edges = {}, 0
        return values

    def _part(self, level: int, query: int, key: int) -> Part:
        window = slice(key, query + 1) if self.causal else slice(0, self.capacities.shape[1])
        leaves, enters = self._whole[level - 1, query, window], self._whole[0, window, key]
        return Part(query, key, window, self._wiring(level - 2, window), leaves, enters)

    def _wiring(self, inner: int, window: slice) -> Wiring:
        """`inner`: how many layers stand between the first and the last, 1 or more."""
        size = window.stop - window.start
        shared = self._filled or size == len(self._pattern)
        wiring = self._wirings.get((inner, size)) if shared else None
        if wiring is None:
            pattern = self._pattern[window, window]
            rows, columns = np.nonzero(pattern)
            counts = np.concatenate([np.tile(pattern.sum(1), inner), np.ones(size, dtype=np.int64)])
            below = size * np.arange(1, inner + 1)[:, None] + columns
            wiring = Wiring(counts, below.ravel(), rows, columns)
            if shared:
                # Levels are asked for one after the other: those of another depth are not needed again.
                self._wirings = {name: each for name, each in self._wirings.items() if name[0] == inner}
                self._wirings[inner, size] = wiring
        return wiring

    def _inner(self, level: int, window: slice, wiring: Wiring) -> Int[np.ndarray, " edge"]:
        """The capacities of the layers between; without windows those of the last call serve the next."""
        # Without windows, neighbouring calls ask for the same capacities, which are slow to make.
        name = (level, window.start, window.stop)
        if self._last is None or self._last[0] != name:
            layers = self._whole[level - 2 : 0 : -1, window, window]
            self._last = (name, layers[:, wiring.rows, wiring.columns].ravel())
        return self._last[1]

    def _solve(self, level: int, parts: list[Part]) -> Float[np.ndarray, " part"]:
        """Several pairs at once: their graphs side by side, from a source that is every query to one sink."""
        from scipy.sparse import csr_matrix
        from scipy.sparse.csgraph import maximum_flow

        *starts, sink = (1 + np.cumsum([0, *(len(part.wiring.counts) for part in parts)])).tolist()
        data = [part.leaves for part in parts]
        targets = [start + np.arange(len(part.enters)) for start, part in zip(starts, parts, strict=True)]
        counts = [np.array([0, sum(len(part.enters) for part in parts)])]
        for start, part in zip(starts, parts, strict=True):
            data += [self._inner(level, part.window, part.wiring), part.enters]
            targets += [start + part.wiring.targets, np.full(len(part.enters), sink)]
            counts.append(part.wiring.counts)
        pointers = np.cumsum(np.concatenate([*counts, [0]])).astype(np.int32)
        ends = np.concatenate(targets).astype(np.int32)
        graph = csr_matrix((np.concatenate(data), ends, pointers), shape=(sink + 1, sink + 1))
        flow = maximum_flow(graph, 0, sink, method="dinic").flow
        # The source's row says how much of the flow is whose: no 32-bit number has to hold the sum.
        through = np.zeros(sink + 1, dtype=np.int64)
        through[flow.indices[: flow.indptr[1]]] = flow.data[: flow.indptr[1]]
        pairs = zip(starts, parts, strict=True)
        return np.array([self._value(through[start:], level, part) for start, part in pairs])

    def _value(self, through: Int[np.ndarray, " node"], level: int, part: Part) -> float:
        whole = int(through[: len(part.enters)].sum())
        if whole < min(int(part.leaves.sum()), int(part.enters.sum())):
            return whole * self.largest / _WHOLE
        # The flow fills the edges of the query or of the key: their sum has no rounding in it.
        leaves = self.capacities[level - 1, part.query, part.window].sum()
        return float(min(leaves, self.capacities[0, part.window, part.key].sum()))

    def _by_networkx(self, level: int, query: int, key: int) -> float:
        import networkx as nx

        if self._graph is None:
            self._graph = nx.DiGraph()
            layers, size, _ = self.capacities.shape
            self._graph.add_nodes_from((at, place) for at in range(layers + 1) for place in range(size))
            for layer, start, end in np.argwhere(self.capacities > 0).tolist():
                capacity = float(self.capacities[layer, start, end])
                self._graph.add_edge((layer + 1, start), (layer, end), capacity=capacity)
        return float(nx.maximum_flow_value(self._graph, (level, query), (0, key)))
