from __future__ import annotations

import pytest

from lens_mix.corpus.ranks import Rank, read_rank

SLURM = {"SLURM_ARRAY_TASK_ID": "7", "SLURM_ARRAY_TASK_COUNT": "3", "SLURM_ARRAY_TASK_MIN": "5"}


@pytest.mark.parametrize(
    ("environment", "rank"),
    [
        ({}, (0, 1)),
        ({"RANK": "3"}, (0, 1)),
        ({"RANK": "3", "WORLD_SIZE": "4"}, (3, 4)),
        (SLURM, (2, 3)),
        ({**SLURM, "SLURM_ARRAY_TASK_STEP": "2"}, (1, 3)),
        ({**SLURM, "RANK": "1", "WORLD_SIZE": "2"}, (5, 6)),
    ],
)
def test_the_environment_names_the_rank(environment, rank):
    assert read_rank(None, environment) == Rank(*rank)
    assert read_rank((1, 2), environment) == Rank(1, 2), "an argument comes before the environment"


def test_ranks_share_the_shards():
    shards = [[shard for shard in range(7) if Rank(index, 3).computes(shard)] for index in range(3)]
    assert shards == [[0, 3, 6], [1, 4], [2, 5]]


def test_wrong_ranks_are_errors():
    with pytest.raises(ValueError, match="RANK: expected a whole number in the environment, got 'x'"):
        read_rank(None, {"RANK": "x", "WORLD_SIZE": "2"})
    with pytest.raises(ValueError, match=r"rank: expected a process from 0 to 1 .* got 2"):
        read_rank(None, {"RANK": "2", "WORLD_SIZE": "2"})
    with pytest.raises(ValueError, match="rank: expected a whole number from 0 to 1, got 2"):
        read_rank((2, 2))
    with pytest.raises(TypeError, match="rank: expected the number of the process"):
        read_rank(3)
