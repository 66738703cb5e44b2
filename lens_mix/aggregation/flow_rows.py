"""Maximum flows of many pairs: proven where they can be, solved where they must be, on several cores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from lens_mix.aggregation.flow_bounds import first_layer_bound, proven
from lens_mix.aggregation.max_flow import LayeredFlow, Solver


class Row(NamedTuple):
    """The pairs of one query at one level that have to be solved."""

    level: int
    query: int
    keys: list[int]


def all_flows(
    capacities: Float[np.ndarray, "layer query key"],
    levels: Sequence[int],
    queries: Sequence[int],
    solver: Solver = "scipy",
    processes: int = 1,
    progress: bool = False,
    keys: Sequence[int] | None = None,
) -> Float[np.ndarray, "level query key"]:
    """The flow from each of `queries` at each of `levels` (1 to the number of layers) to each input.

    Args:
        capacities: 0 or more, finite.
        keys: the inputs that are asked for, all others are 0; None: all.
        solver: "scipy", or "networkx", which proves nothing beforehand.
        processes: how many; started anew (spawn), each with its own copy of the capacities.
        progress: a tqdm bar over the rows to solve.

    Raises:
        TypeError, ValueError: as `LayeredFlow`.
        RuntimeError: a process ended unexpectedly.
    """
    network = LayeredFlow(capacities, solver)
    size = network.capacities.shape[1]
    wanted = list(range(size)) if keys is None else list(keys)
    flows = np.zeros((len(levels), len(queries), size))
    rows: list[Row] = []
    places: list[tuple[int, int]] = []
    for place, level in enumerate(levels):
        known = np.zeros((size, size), dtype=bool)
        if solver == "scipy" and level > 2:
            known = proven(network.capacities[:level])
            if known.any():
                asked = np.isin(np.arange(size), wanted)
                bound = first_layer_bound(network.capacities, level)
                flows[place] = np.where(known & asked, bound, 0)[queries]
        for number, query in enumerate(queries):
            unsolved = [key for key in wanted if not known[query, key]]
            if unsolved:
                rows.append(Row(level, query, unsolved))
                places.append((place, number))
    solved: Iterator[Any] = (network.row(*row) for row in rows)
    if processes > 1:
        solved = _in_processes(network, rows, processes)
    for (place, number), row, found in zip(
        places, rows, _with_progress(solved, len(rows), progress), strict=True
    ):
        flows[place, number, row.keys] = found[row.keys]
    return flows


def _with_progress(found: Iterator[Any], total: int, progress: bool) -> Iterator[Any]:
    if not progress:
        return found
    from tqdm.auto import tqdm

    return iter(tqdm(found, total=total, desc="flow", unit="query"))


_network: LayeredFlow | None = None


def _start(capacities: Any, solver: Solver) -> None:
    global _network
    _network = LayeredFlow(capacities, solver)


def _solve(row: Row) -> Float[np.ndarray, " key"]:
    if _network is None:
        raise RuntimeError("a process for flows was not started with its capacities")
    return _network.row(*row)


def _in_processes(network: LayeredFlow, rows: list[Row], processes: int) -> Iterator[Any]:
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool

    if not rows:
        return
    executor = ProcessPoolExecutor(
        min(processes, len(rows)),
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start,
        initargs=(network.capacities, network.solver),
    )
    try:
        # Small pieces: later queries of a causal map take longer than earlier ones.
        yield from executor.map(_solve, rows, chunksize=max(1, len(rows) // (8 * processes)))
    except BrokenProcessPool as error:
        raise RuntimeError(
            "a process for flows ended unexpectedly; a script that asks for processes > 1 needs "
            "`if __name__ == '__main__':` around what it runs, or memory may have run out"
        ) from error
    finally:
        executor.shutdown(cancel_futures=True)
