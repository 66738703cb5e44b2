"""Maximum flow through a stack of layers: a node per position and level, an edge per query and key.

Level 0 is the input, level l the output of the l-th layer. The edge from (l, query) down to (l − 1, key)
has the capacity `capacities[l − 1, query, key]`. scipy solves it on whole numbers, networkx on floats.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from jaxtyping import Bool, Float, Int

if TYPE_CHECKING:
    import networkx
    from scipy.sparse import csr_matrix

Solver = Literal["scipy", "networkx"]
# scipy's solver adds up flows in 32-bit whole numbers: the largest possible flow must stay below 2^31.
WHOLE = 2**30


def check_capacities(capacities: Any) -> Float[np.ndarray, "layer query key"]:
    """Capacities as float64.

    Raises:
        TypeError: not an array of numbers.
        ValueError: not [layer, position, position]; an empty graph; a capacity that is negative, NaN or
            infinite (the first is named).
    """
    try:
        array = np.asarray(capacities)
    except ValueError as error:
        raise TypeError(f"capacities: expected an array of numbers, got {error}") from error
    if array.dtype.kind not in "fiub":
        raise TypeError(f"capacities: expected an array of real numbers, got dtype {array.dtype}")
    array = array.astype(np.float64)
    if array.ndim != 3 or array.shape[1] != array.shape[2]:
        raise ValueError(
            f"capacities: expected shape [layer, position, position] with as many queries as keys, "
            f"got {array.shape}"
        )
    if array.size == 0:
        raise ValueError(
            f"capacities: expected a graph with at least one layer and one token, got {array.shape}"
        )
    wrong = ~np.isfinite(array) | (array < 0)
    if wrong.any():
        layer, query, key = (int(place) for place in np.argwhere(wrong)[0])
        raise ValueError(
            f"capacities: expected finite numbers, 0 or more, got {array[layer, query, key]} at layer "
            f"{layer}, query {query}, key {key} ({int(wrong.sum())} such entries)"
        )
    return array


@dataclasses.dataclass(frozen=True)
class Wiring:
    """The graph between one query and one key, without its capacities.

    Node 0 is the query, the last node the key; between them stand the levels from the top down, each
    with the positions of the window. `rows` and `columns` are the edges of each inner layer.
    """

    graph: csr_matrix
    rows: Int[np.ndarray, " edge"]
    columns: Int[np.ndarray, " edge"]

    @classmethod
    def of(cls, pattern: Bool[np.ndarray, "query key"], inner: int) -> Wiring:
        """`inner`: how many layers stand between the first and the last, 1 or more."""
        from scipy.sparse import csr_matrix

        size = len(pattern)
        rows, columns = np.nonzero(pattern)
        nodes = (inner + 1) * size + 2
        counts = np.concatenate([[size], np.tile(pattern.sum(1), inner), np.ones(size), [0]])
        pointers = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        below = 1 + size * np.arange(1, inner + 1)[:, None] + columns
        targets = np.concatenate([1 + np.arange(size), below.ravel(), np.full(size, nodes - 1)])
        data = np.zeros(len(targets), dtype=np.int32)
        graph = csr_matrix((data, targets.astype(np.int32), pointers), shape=(nodes, nodes))
        return cls(graph, rows, columns)


class LayeredFlow:
    """Maximum flows from positions of any level down to positions of the input.

    The result is exact but for the rounding to whole numbers: with rows that sum to 1 each capacity
    moves by at most 2^-31, a flow of 12 layers × 32 tokens by some 1e-9. One and two layers are computed
    in float64 (F = A, and F_ij = Σ_k min(A2_ik, A1_kj)). Where no layer has weight above its diagonal,
    flow from i to j runs through the positions j to i alone, and only these are handed to the solver.

    Args:
        capacities: [layer, query, key], 0 or more.
        solver: "scipy" (whole numbers) or "networkx" (floats, some 100 times slower: the oracle).

    Raises:
        TypeError, ValueError: as `check_capacities`; an unknown solver.
    """

    def __init__(self, capacities: Any, solver: Solver = "scipy") -> None:
        if solver not in ("scipy", "networkx"):
            raise ValueError(f"solver: expected 'scipy' or 'networkx', got {solver!r}")
        self.capacities = check_capacities(capacities)
        self.solver = solver
        self.largest = float(self.capacities.sum(-1).max())
        self.causal = not np.triu(self.capacities.any(0), 1).any()
        scaled = self.capacities * (WHOLE / self.largest) if self.largest > 0 else self.capacities
        self._whole = np.rint(scaled).astype(np.int32)
        self._pattern: np.ndarray = np.asarray((self._whole > 0).any(0))
        size = len(self._pattern)
        self._filled = bool(np.array_equal(self._pattern, np.tri(size, dtype=bool)))
        self._wirings: dict[tuple[int, int], Wiring] = {}
        self._prepared: tuple[int, Wiring] | None = None
        self._graph: networkx.DiGraph | None = None

    @property
    def layers(self) -> int:
        return len(self.capacities)

    def row(self, level: int, query: int, keys: Iterable[int] | None = None) -> Float[np.ndarray, " key"]:
        """The flow from one position of one level (1 to the number of layers) to each input.

        Args:
            keys: the inputs that are asked for, all others stay 0; None: all.
        """
        size = self.capacities.shape[1]
        wanted = range(size) if keys is None else keys
        if not 1 <= level <= self.layers:
            raise ValueError(f"level: expected 1 to {self.layers}, got {level}")
        if not 0 <= query < size:
            raise ValueError(f"query: expected a position from 0 to {size - 1}, got {query}")
        if self.solver == "networkx":
            return self._networkx_row(level, query, wanted)
        if level == 1:
            return self.capacities[0, query].copy()
        if level == 2:
            return np.minimum(self.capacities[1, query][:, None], self.capacities[0]).sum(0)
        flows = np.zeros(size)
        if not self.causal:
            wiring = self._whole_wiring(level)
            wiring.graph.data[:size] = self._whole[level - 1, query]
        for key in wanted:
            if not self.causal:
                wiring.graph.data[-size:] = self._whole[0, :, key]
                flows[key] = self._solve(wiring, level, query, key, slice(0, size))
            elif key == query:
                flows[key] = self.capacities[:level, key, key].min()
            elif key < query:
                flows[key] = self._through_window(level, query, key)
        return flows

    def _through_window(self, level: int, query: int, key: int) -> float:
        window = slice(key, query + 1)
        wiring = self._wiring(level - 2, key, query + 1)
        wiring.graph.data[:] = np.concatenate(
            [
                self._whole[level - 1, query, window],
                self._whole[level - 2 : 0 : -1, window, window][:, wiring.rows, wiring.columns].ravel(),
                self._whole[0, window, key],
            ]
        )
        return self._solve(wiring, level, query, key, window)

    def _whole_wiring(self, level: int) -> Wiring:
        """The graph of all positions; its inner capacities are the same for every query and key."""
        if self._prepared is None or self._prepared[0] != level:
            wiring = self._wiring(level - 2, 0, len(self._pattern))
            size = len(self._pattern)
            wiring.graph.data[size:-size] = self._whole[level - 2 : 0 : -1][
                :, wiring.rows, wiring.columns
            ].ravel()
            self._prepared = (level, wiring)
        return self._prepared[1]

    def _wiring(self, inner: int, start: int, stop: int) -> Wiring:
        shared = self._filled or stop - start == len(self._pattern)
        found = self._wirings.get((inner, stop - start)) if shared else None
        if found is None:
            found = Wiring.of(self._pattern[start:stop, start:stop], inner)
            if shared:
                # Levels are asked for one after the other: those of another depth are not needed again.
                self._wirings = {name: kept for name, kept in self._wirings.items() if name[0] == inner}
                self._wirings[inner, stop - start] = found
        return found

    def _solve(self, wiring: Wiring, level: int, query: int, key: int, window: slice) -> float:
        from scipy.sparse.csgraph import maximum_flow

        graph, size = wiring.graph, window.stop - window.start
        leaves, enters = int(graph.data[:size].sum()), int(graph.data[-size:].sum())
        if leaves == 0 or enters == 0:
            return 0.0
        value = int(maximum_flow(graph, 0, graph.shape[0] - 1, method="dinic").flow_value)
        if value < min(leaves, enters):
            return value * self.largest / WHOLE
        # The flow fills the edges of the query or of the key: their sum has no rounding in it.
        out = self.capacities[level - 1, query, window].sum()
        return float(min(out, self.capacities[0, window, key].sum()))

    def _networkx_row(self, level: int, query: int, keys: Iterable[int]) -> Float[np.ndarray, " key"]:
        import networkx as nx

        if self._graph is None:
            self._graph = nx.DiGraph()
            size = self.capacities.shape[1]
            self._graph.add_nodes_from((at, place) for at in range(self.layers + 1) for place in range(size))
            for layer, start, end in np.argwhere(self.capacities > 0).tolist():
                capacity = float(self.capacities[layer, start, end])
                self._graph.add_edge((layer + 1, start), (layer, end), capacity=capacity)
        flows = np.zeros(self.capacities.shape[1])
        for key in keys:
            flows[key] = nx.maximum_flow_value(self._graph, (level, query), (0, key))
        return flows
