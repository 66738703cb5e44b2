"""Which shards a process computes, from the environment of torchrun, accelerate or SLURM."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping

from lens_mix.arguments import check_pairs, check_whole_number


@dataclasses.dataclass(frozen=True)
class Rank:
    """One of several processes that share the shards of a corpus.

    Attributes:
        index: The number of the process, from 0.
        count: The number of processes.
    """

    index: int
    count: int

    def computes(self, shard: int) -> bool:
        """Return whether the process computes a shard."""
        return shard % self.count == self.index


def read_rank(rank: tuple[int, int] | None, environment: Mapping[str, str] | None = None) -> Rank:
    """Return the rank that is given, or that of the environment; the only process otherwise.

    `RANK` and `WORLD_SIZE` are those of torchrun and `accelerate launch`. `SLURM_ARRAY_TASK_ID`, `_COUNT`,
    `_MIN` and `_STEP` are those of a job array. If both are set, each task of the array has several ranks.

    Args:
        rank: The number of the process, from 0, and the number of processes.
        environment: The environment; None: that of this process.

    Raises:
        TypeError: If a value is not a whole number.
        ValueError: If a number is out of range.
    """
    if rank is not None:
        index, count = check_pairs("rank", [rank], "the number of the process and that of all")[0]
        count = check_whole_number("rank", count, 1)
        return Rank(check_whole_number("rank", index, 0, count - 1), count)
    given = os.environ if environment is None else environment
    world = _read(given, "WORLD_SIZE", 1)
    tasks = _read(given, "SLURM_ARRAY_TASK_COUNT", 1)
    first, step = _read(given, "SLURM_ARRAY_TASK_MIN", 0), _read(given, "SLURM_ARRAY_TASK_STEP", 1)
    task = (_read(given, "SLURM_ARRAY_TASK_ID", first) - first) // max(step, 1) if tasks > 1 else 0
    index = task * world + (_read(given, "RANK", 0) if world > 1 else 0)
    if not 0 <= index < world * tasks:
        raise ValueError(
            f"rank: expected a process from 0 to {world * tasks - 1} in RANK, WORLD_SIZE and "
            f"SLURM_ARRAY_TASK_*, got {index}; give rank=(index, count)"
        )
    return Rank(index, world * tasks)


def _read(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name)
    try:
        return default if text is None else int(text)
    except ValueError:
        raise ValueError(f"{name}: expected a whole number in the environment, got {text!r}") from None
