"""Test how prompts are grouped by length."""

import pytest
import torch

from lens_mix._inputs.batches import Prompt, group_by_length


def prompts_of(lengths):
    return [Prompt(torch.zeros(length, dtype=torch.long)) for length in lengths]


def padding(lengths, groups):
    """Return the share of padding among the tokens of all groups."""
    padded = sum(len(group) * max(lengths[index] for index in group) for group in groups)
    return 1 - sum(lengths) / padded


def test_groups_by_hand():
    assert group_by_length(prompts_of([20, 90, 20, 88, 21, 90]), 2) == [[0, 4], [1, 5], [2], [3]]
    assert group_by_length(prompts_of([20, 90, 20, 88, 21, 90]), 16) == [[0, 2, 4], [1, 3, 5]]
    assert group_by_length(prompts_of([7]), 16) == [[0]]
    source = torch.zeros(5, dtype=torch.long)
    pairs = [Prompt(source, torch.zeros(length, dtype=torch.long)) for length in (60, 5, 60)]
    assert group_by_length(pairs, 16) == [[0, 2], [1]]


@pytest.mark.parametrize("count", [16, 32, 64, 128])
def test_little_padding_in_few_groups(count):
    generator = torch.Generator().manual_seed(count)
    lengths = torch.randint(15, 31, (count,), generator=generator).tolist()
    groups = group_by_length(prompts_of(lengths), 16)
    assert sorted(index for group in groups for index in group) == list(range(count))
    assert max(map(len, groups)) <= 16
    assert padding(lengths, groups) <= 0.1
    assert len(groups) <= count / 16 + 3
    assert [group[0] for group in groups] == sorted(group[0] for group in groups)
