"""Compute the shards of a corpus on a Ray cluster, with Ray Data: the work and the files are the same."""

from __future__ import annotations

import dataclasses
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lens_mix.arguments import check_instance, check_whole_number
from lens_mix.corpus.entries import Shard
from lens_mix.corpus.work import Work

if TYPE_CHECKING:
    import pyarrow


_TAKEN = {"fn_constructor_args", "compute", "batch_size", "batch_format"}
# Without a limit, Ray tries a shard again for ever that kills its process each time.
_RETRIES = {"max_restarts": 3, "max_task_retries": 3}


def check_cluster(actors: int | None, resources: Mapping[str, Any] | None) -> None:
    """Raise an error if the arguments do not describe the processes of a cluster, or Ray is not installed."""
    if actors is None:
        if resources is not None:
            raise ValueError("resources: expected None without actors=, because only Ray's actors have them")
        return
    check_whole_number("actors", actors, 1)
    if resources is not None:
        check_instance("resources", resources, Mapping, 'options of map_batches, such as {"num_gpus": 1}')
        taken = _TAKEN & resources.keys()
        if taken:
            raise ValueError(f"resources: expected no {', '.join(sorted(taken))}, which lens_mix sets")
    try:
        import ray.data  # noqa: F401
    except ImportError as problem:
        raise ImportError("actors= needs Ray: pip install 'lens_mix[ray]'") from problem


def do_on_ray(
    work: Work,
    shards: Sequence[Shard],
    actors: int,
    resources: Mapping[str, Any] | None,
    report: Callable[[int], Any],
) -> None:
    """Compute shards on the cluster of `ray.init`; without one, Ray starts a cluster of this machine.

    Args:
        work: The work on a shard.
        shards: The shards.
        actors: The number of processes, each with a model.
        resources: What each process needs, as in `ray.data.Dataset.map_batches`.
        report: A function that is called with the number of prompts of each shard that is finished.

    Raises:
        OSError: As in `Work.do`.
        ValueError: As in `Work.do`.
    """
    import ray.data

    if not shards:
        return
    # Each process of a cluster has a working folder of its own.
    work = dataclasses.replace(work, out=os.path.abspath(work.out))
    # A block per shard: Ray Data would merge small ones into one, which a single process computes.
    rows = ray.data.from_items(
        [{"shard": pickle.dumps(shard)} for shard in shards], override_num_blocks=len(shards)
    )
    rows.context.enable_progress_bars = False
    done = rows.map_batches(
        _Actor,
        fn_constructor_args=(work,),
        compute=ray.data.ActorPoolStrategy(size=actors),
        batch_size=1,
        batch_format="pyarrow",
        **{**_RETRIES, **(resources or {})},
    )
    for row in done.iter_rows():
        if row["problem"]:
            raise pickle.loads(row["problem"])
        report(row["prompts"])


class _Actor:
    """One process of the cluster, which loads the model for its first shard."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def __call__(self, batch: pyarrow.Table) -> pyarrow.Table:
        """Compute a shard, and return its number of prompts, or the error."""
        import pyarrow as pa

        (shard,) = map(pickle.loads, batch["shard"].to_pylist())
        problem = b""
        try:
            self._work.do(shard)
        except Exception as error:
            # Ray would raise an error of another class.
            problem = _pickle_error(error)
        return pa.table({"prompts": [len(shard.entries)], "problem": [problem]})


def _pickle_error(error: Exception) -> bytes:
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
        return pickled
    except Exception:
        # An error of another library may hold what cannot be sent.
        return pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
