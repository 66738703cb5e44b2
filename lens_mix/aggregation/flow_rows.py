"""Maximum flows of many pairs: proven where they can be, solved where they must be, on several cores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from lens_mix.aggregation.flow_bounds import first_layer_bound, proven
from lens_mix.aggregation.max_flow import LayeredFlow, Solver

# Pairs that are solved, or that a process takes, at a time: enough to fill a few calls of the solver.
PIECE = 64
# A flow that is known to be no further below its bound counts as equal to it.
NEAR = 1e-9


class Piece(NamedTuple):
    """Pairs (query, key) of one level that have to be solved."""

    level: int
    pairs: list[tuple[int, int]]


def all_flows(
    capacities: Float[np.ndarray, "layer query key"],
    levels: Sequence[int],
    queries: Sequence[int],
    solver: Solver = "scipy",
    processes: int = 1,
    progress: bool = False,
    keys: Sequence[int] | None = None,
) -> Float[np.ndarray, "level asked key"]:
    """The flow from each of `queries` at each of `levels` (1 to the number of layers) to each input.

    Args:
        capacities: 0 or more, finite.
        keys: the inputs that are asked for, all others are 0; None: all.
        solver: "scipy", or "networkx", which proves nothing beforehand.
        processes: how many; started anew (spawn), each with its own copy of the capacities.
        progress: a tqdm bar over the pairs to solve.

    Raises:
        TypeError, ValueError: as `LayeredFlow`.
        RuntimeError: a process ended unexpectedly.
    """
    network = LayeredFlow(capacities, solver)
    size = network.capacities.shape[1]
    asked = np.zeros((size, size), dtype=bool)
    asked[np.ix_(list(queries), range(size) if keys is None else list(keys))] = True
    found: dict[int, Float[np.ndarray, "query key"]] = {}
    with _Work(network, processes, progress) as work:
        for level in sorted(set(levels)):
            found[level] = _level(work, level, asked, found.get(level - 1))
    return np.stack([found[level][list(queries)] for level in levels])


def _level(
    work: _Work,
    level: int,
    asked: Bool[np.ndarray, "query key"],
    below: Float[np.ndarray, "query key"] | None,
) -> Float[np.ndarray, "query key"]:
    """All flows that are asked for at one level; `below` holds the same of the level below, if known."""
    network = work.network
    flows = np.zeros(asked.shape)
    # Above the diagonal of a causal stack nothing flows.
    known = ~np.tri(len(asked), dtype=bool) if network.causal else np.zeros(asked.shape, dtype=bool)
    if network.solver == "scipy" and level > 2:
        bound = first_layer_bound(network.capacities, level)
        known |= proven(network.capacities[:level])
        if below is not None and asked.all() and network.rows_sum_to_1:
            # The flows of the level below, mixed by the weights of this one, are a flow.
            known |= network.capacities[level - 1] @ below >= bound - NEAR
        flows = np.where(known & asked, bound, 0.0)
    pairs = [(query, key) for query, key in np.argwhere(asked & ~known).tolist()]
    # Windows of one width side by side make batches whose parts take equally long.
    pairs.sort(key=lambda pair: pair[0] - pair[1])
    pieces = [Piece(level, pairs[at : at + PIECE]) for at in range(0, len(pairs), PIECE)]
    for piece, values in zip(pieces, work.solve(pieces), strict=True):
        places = np.array(piece.pairs)
        flows[places[:, 0], places[:, 1]] = values
    return flows


class _Work:
    """Solves pieces here or in other processes, which live as long as the `with` block."""

    def __init__(self, network: LayeredFlow, processes: int, progress: bool) -> None:
        self.network = network
        self.processes = processes
        self.progress = progress
        self._executor: Any = None
        self._bar: Any = None

    def __enter__(self) -> _Work:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)
        if self._bar is not None:
            self._bar.close()

    def solve(self, pieces: list[Piece]) -> Iterator[Float[np.ndarray, " pair"]]:
        found = self._elsewhere(pieces) if self.processes > 1 else self._here(pieces)
        if self.progress and self._bar is None:
            from tqdm.auto import tqdm

            self._bar = tqdm(total=0, desc="flow", unit="pair")
        if self._bar is not None:
            self._bar.total += sum(len(piece.pairs) for piece in pieces)
            self._bar.refresh()
        for piece, values in zip(pieces, found, strict=True):
            if self._bar is not None:
                self._bar.update(len(piece.pairs))
            yield values

    def _here(self, pieces: list[Piece]) -> Iterator[Float[np.ndarray, " pair"]]:
        return (self.network.flows(*piece) for piece in pieces)

    def _elsewhere(self, pieces: list[Piece]) -> Iterator[Float[np.ndarray, " pair"]]:
        from concurrent.futures.process import BrokenProcessPool

        if not pieces:
            return
        if self._executor is None:
            self._executor = _start_processes(self.network, self.processes)
        try:
            yield from self._executor.map(_solve, pieces)
        except BrokenProcessPool as error:
            raise RuntimeError(
                "a process for flows ended unexpectedly; a script that asks for processes > 1 needs "
                "`if __name__ == '__main__':` around what it runs, or memory may have run out"
            ) from error


def _start_processes(network: LayeredFlow, processes: int) -> Any:
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    return ProcessPoolExecutor(
        processes,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start,
        initargs=(network.capacities, network.solver),
    )


_network: LayeredFlow | None = None


def _start(capacities: Any, solver: Solver) -> None:
    global _network
    _network = LayeredFlow(capacities, solver)


def _solve(piece: Piece) -> Float[np.ndarray, " pair"]:
    if _network is None:
        raise RuntimeError("a process for flows was not started with its capacities")
    return _network.flows(*piece)
