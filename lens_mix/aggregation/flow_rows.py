"""Compute the maximum flows of many pairs, from a bound if it is certain, else with the solver."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from jaxtyping import Bool, Float
from tqdm.auto import tqdm

from lens_mix.aggregation.flow_bounds import find_pairs_at_bound, first_layer_bound
from lens_mix.aggregation.max_flow import LayeredFlow, Solver

# A chunk of so many pairs is enough work for a few calls of the solver.
_CHUNK_SIZE = 64
# A flow counts as equal to its bound if it is at most this far below.
_TOLERANCE = 1e-9
# A chunk is a level, and the pairs (query, key) of this level that the solver must solve.
_Chunk = tuple[int, list[tuple[int, int]]]
_Solve = Callable[[list[_Chunk]], Iterator[Float[np.ndarray, " pair"]]]


def compute_flows(
    capacities: Float[np.ndarray, "layer query key"],
    levels: Sequence[int],
    queries: Sequence[int],
    solver: Solver = "scipy",
    processes: int = 1,
    progress: bool = False,
    keys: Sequence[int] | None = None,
) -> Float[np.ndarray, "level asked key"]:
    """Return the flow from each query at each level to each input.

    Args:
        capacities: The capacities, as in `LayeredFlow`.
        levels: The levels, each from 1 to the number of layers.
        queries: The positions from which to flow.
        solver: The solver, as in `LayeredFlow`. With "networkx", it solves every pair.
        processes: The number of processes. Each is spawned, with its own copy of the capacities.
        progress: Whether to show a tqdm bar over the pairs to solve.
        keys: The inputs to flow to; the result for others is 0. None: all.

    Raises:
        RuntimeError: If a process ended unexpectedly.
    """
    network = LayeredFlow(capacities, solver)
    size = network.capacities.shape[1]
    wanted = np.zeros((size, size), dtype=bool)
    wanted[np.ix_(list(queries), range(size) if keys is None else list(keys))] = True
    flows: dict[int, Float[np.ndarray, "query key"]] = {}
    bar = tqdm(total=0, desc="flow", unit="pair", disable=not progress)
    with bar, _start_workers(network, processes) as solve:
        for level in sorted(set(levels)):
            flows[level], chunks = _find_known_flows(network, level, wanted, flows.get(level - 1))
            bar.total += sum(len(pairs) for _, pairs in chunks)
            bar.refresh()
            for (_, pairs), values in zip(chunks, solve(chunks), strict=True):
                rows, columns = np.array(pairs).T
                flows[level][rows, columns] = values
                bar.update(len(values))
    return np.stack([flows[level][list(queries)] for level in levels])


def _find_known_flows(
    network: LayeredFlow,
    level: int,
    wanted: Bool[np.ndarray, "query key"],
    below: Float[np.ndarray, "query key"] | None,
) -> tuple[Float[np.ndarray, "query key"], list[_Chunk]]:
    """Return the flows of one level that are known without the solver, and chunks of the other pairs.

    Args:
        network: The capacities and the solver.
        level: The level.
        wanted: The pairs whose flows are wanted. The flow of any other pair, or of a pair to solve, is 0.
        below: The flows of the level below; None: not computed.
    """
    flows = np.zeros(wanted.shape)
    # In a causal stack the flow above the diagonal is 0.
    known = ~np.tri(len(wanted), dtype=bool) if network.causal else np.zeros_like(wanted)
    if network.solver == "scipy" and level > 2:
        bound = first_layer_bound(network.capacities, level)
        known |= find_pairs_at_bound(network.capacities[:level])
        if below is not None and wanted.all() and network.rows_sum_to_1:
            # A mixture of the flows of the level below, with the weights of this level, is a flow as well.
            known |= network.capacities[level - 1] @ below >= bound - _TOLERANCE
        flows = np.where(known & wanted, bound, 0.0)
    pairs = [(query, key) for query, key in np.argwhere(wanted & ~known).tolist()]
    # Pairs whose windows have one width are solved in about the same time, so they belong in one chunk.
    pairs.sort(key=lambda pair: pair[0] - pair[1])
    starts = range(0, len(pairs), _CHUNK_SIZE)
    return flows, [(level, pairs[start : start + _CHUNK_SIZE]) for start in starts]


@contextlib.contextmanager
def _start_workers(network: LayeredFlow, processes: int) -> Iterator[_Solve]:
    """Yield a function that solves chunks, in this process or in others that end with the block."""
    if processes == 1:
        yield lambda chunks: (network.flows(*chunk) for chunk in chunks)
        return
    import multiprocessing
    from concurrent.futures.process import BrokenProcessPool, ProcessPoolExecutor

    spawn = multiprocessing.get_context("spawn")
    executor = ProcessPoolExecutor(processes, mp_context=spawn, initializer=_start, initargs=(network,))
    try:
        yield lambda chunks: executor.map(_solve, chunks)
    except BrokenProcessPool as error:
        raise RuntimeError(
            "processes: expected each process to finish its flows, got one that ended unexpectedly; in a "
            "script, write `if __name__ == '__main__':` around the call; if memory ran out, use fewer "
            "processes"
        ) from error
    finally:
        executor.shutdown(cancel_futures=True)


_network: LayeredFlow


def _start(network: LayeredFlow) -> None:
    global _network
    _network = network


def _solve(chunk: _Chunk) -> Float[np.ndarray, " pair"]:
    return _network.flows(*chunk)
