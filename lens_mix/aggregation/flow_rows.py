"""Maximum flows of many pairs: proven where they can be, solved where they must be, on several cores."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from jaxtyping import Bool, Float
from tqdm.auto import tqdm

from lens_mix.aggregation.flow_bounds import first_layer_bound, proven
from lens_mix.aggregation.max_flow import LayeredFlow, Solver

# Pairs that are solved, or that a process takes, at a time: enough to fill a few calls of the solver.
_PAIRS = 64
_NEAR = 1e-9  # a flow that is known to be no further below its bound counts as equal to it
_Chunk = tuple[int, list[tuple[int, int]]]  # a level, and pairs (query, key) of it that have to be solved
_Solve = Callable[[list[_Chunk]], Iterator[Float[np.ndarray, " pair"]]]


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
        capacities, solver: as in `LayeredFlow`; "networkx" proves nothing beforehand.
        processes: how many; started anew (spawn), each with its own copy of the capacities.
        progress: a tqdm bar over the pairs to solve.
        keys: the inputs that are asked for, all others are 0; None: all.

    Raises:
        RuntimeError: a process ended unexpectedly.
    """
    network = LayeredFlow(capacities, solver)
    size = network.capacities.shape[1]
    asked = np.zeros((size, size), dtype=bool)
    asked[np.ix_(list(queries), range(size) if keys is None else list(keys))] = True
    flows: dict[int, Float[np.ndarray, "query key"]] = {}
    bar = tqdm(total=0, desc="flow", unit="pair", disable=not progress)
    with bar, _workers(network, processes) as solve:
        for level in sorted(set(levels)):
            flows[level], chunks = _known_flows(network, level, asked, flows.get(level - 1))
            bar.total += sum(len(pairs) for _, pairs in chunks)
            bar.refresh()
            for (_, pairs), values in zip(chunks, solve(chunks), strict=True):
                rows, columns = np.array(pairs).T
                flows[level][rows, columns] = values
                bar.update(len(values))
    return np.stack([flows[level][list(queries)] for level in levels])


def _known_flows(
    network: LayeredFlow,
    level: int,
    asked: Bool[np.ndarray, "query key"],
    below: Float[np.ndarray, "query key"] | None,
) -> tuple[Float[np.ndarray, "query key"], list[_Chunk]]:
    """The flows of one level that need no solving, 0 elsewhere, and the pairs that have to be solved.

    `below` holds the flows of the level below, where they are known.
    """
    flows = np.zeros(asked.shape)
    # Above the diagonal of a causal stack nothing flows.
    known = ~np.tri(len(asked), dtype=bool) if network.causal else np.zeros_like(asked)
    if network.solver == "scipy" and level > 2:
        bound = first_layer_bound(network.capacities, level)
        known |= proven(network.capacities[:level])
        if below is not None and asked.all() and network.rows_sum_to_1:
            # The flows of the level below, mixed by the weights of this one, are a flow.
            known |= network.capacities[level - 1] @ below >= bound - _NEAR
        flows = np.where(known & asked, bound, 0.0)
    pairs = [(query, key) for query, key in np.argwhere(asked & ~known).tolist()]
    # Windows of one width side by side make batches whose parts take equally long.
    pairs.sort(key=lambda pair: pair[0] - pair[1])
    return flows, [(level, pairs[at : at + _PAIRS]) for at in range(0, len(pairs), _PAIRS)]


@contextlib.contextmanager
def _workers(network: LayeredFlow, processes: int) -> Iterator[_Solve]:
    """What solves chunks, here or in other processes, which live as long as the `with` block."""
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
            "a process for flows ended unexpectedly; a script that asks for processes > 1 needs "
            "`if __name__ == '__main__':` around what it runs, or memory may have run out"
        ) from error
    finally:
        executor.shutdown(cancel_futures=True)


_network: LayeredFlow


def _start(network: LayeredFlow) -> None:
    global _network
    _network = network


def _solve(chunk: _Chunk) -> Float[np.ndarray, " pair"]:
    return _network.flows(*chunk)
