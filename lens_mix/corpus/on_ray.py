"""Map a corpus on a Ray cluster: the same work and the same files as `lens_mix.corpus.run`."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from lens_mix.arguments import check_flags, check_whole_number
from lens_mix.corpus.entries import Shard
from lens_mix.corpus.job import Job, Summary, make_job
from lens_mix.corpus.reductions import Mean
from lens_mix.corpus.work import Work
from lens_mix.lens.model_classes import TransformerLensModel
from lens_mix.runner import MethodLike


class _Actor:
    """One process of the cluster, which loads the model once and computes shards."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[int]]:
        shards: list[Shard] = [pickle.loads(packed) for packed in batch["shard"]]
        return {"failed": [self._work.do(shard) for shard in shards]}


def run_on_ray(
    model_factory: Callable[[], TransformerLensModel],
    prompts: Any,
    methods: MethodLike | Sequence[MethodLike],
    reduce: Mapping[str, Mean] | None = None,
    out: str | os.PathLike[str] = "corpus",
    *,
    actors: int = 2,
    resources: Mapping[str, Any] | None = None,
    retry: bool = False,
    **options: Any,
) -> Summary:
    """Compute the maps of a corpus on a Ray cluster, and write them to a folder that all machines see.

    The files are those of `lens_mix.corpus.run`, which can also continue the run, and the other way round. A
    machine or a driver that fails loses only the shards that it was computing: start the run again.

    Args:
        model_factory: A function without arguments that loads the model, in each actor.
        prompts: As in `lens_mix.corpus.run`. The driver reads them, and each actor gets those of its shards.
        methods: As in `lens_mix.corpus.run`.
        reduce: As in `lens_mix.corpus.run`.
        out: The folder, on a file system that all machines share.
        actors: The number of processes, each with a model.
        resources: What each actor needs, as in `ray.data.Dataset.map_batches`: `{"num_gpus": 1}`.
        retry: As in `lens_mix.corpus.run`.
        options: The other options of `lens_mix.corpus.run`, without `rank` and `progress`.

    Returns:
        The number of prompts, and how many of them failed.

    Raises:
        ImportError: If Ray is not installed.
        TypeError: As in `lens_mix.corpus.run`.
        ValueError: As in `lens_mix.corpus.run`.
    """
    try:
        import ray
    except ImportError as problem:
        raise ImportError("run_on_ray needs Ray: pip install 'lens_mix[ray]'") from problem
    check_flags(retry=retry)
    check_whole_number("actors", actors, 1)
    # Each actor has its own folder, so the path must not depend on it.
    job = make_job(model_factory, prompts, methods, reduce, os.path.abspath(out), **options)
    job.start()
    packed = [{"shard": pickle.dumps(shard)} for shard in _unfinished(job, retry)]
    if packed:
        # By default Ray puts a small input into few blocks, and an actor computes a whole block. A later
        # `repartition` needs a processor, and waits without end if the actors have taken all of them.
        data = ray.data.from_items(packed, override_num_blocks=len(packed))
        sized = ray.data.ActorPoolStrategy(size=min(actors, len(packed)))
        mapped = data.map_batches(
            _Actor, fn_constructor_args=(job.work,), batch_size=1, compute=sized, **(resources or {})
        )
        for _ in mapped.iter_rows():
            pass
    is_finished = job.finish()
    failed = sum(map(job.count_failed, job.folder.shards()))
    return Summary(str(out), job.count_read(), failed, is_finished)


def _unfinished(job: Job, retry: bool) -> Iterator[Shard]:
    return (shard for shard in job.shards() if not job.work.is_finished(shard, retry))
