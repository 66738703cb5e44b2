from __future__ import annotations

import torch

import lens_mix as lm
from lens_mix.aggregation.collapse import collapse_notes
from tests.random_maps import map_of, random_attention


def test_rows_on_one_token_and_rows_in_order():
    rows = torch.full((3, 9), 0.01)
    rows[0, 4] = 10
    rows[1] = torch.arange(9.0)
    rows[2] = torch.tensor([3.0, 1, 4, 1, 5, 9, 2, 6, 5])
    one, order = collapse_notes(rows, torch.ones(3, 9, dtype=torch.bool), [7, 8, 9])
    assert one.startswith("1 of 3 rows of the last layer (7) have 99% or more of their sum on one token")
    assert order.startswith("1 of 3 rows of the last layer (8) rise or fall with the position")


def test_short_rows_and_hidden_keys_do_not_count():
    assert collapse_notes(torch.arange(7.0)[None], torch.ones(1, 7, dtype=torch.bool), [6]) == ()
    row = torch.tensor([[9.0, 1, 2, 3, 4, 5, 6, 7, 8]])
    hidden = torch.tensor([[False] + [True] * 8])
    assert "rise or fall" in collapse_notes(row, hidden, [8])[0]
    assert collapse_notes(row, torch.ones(1, 9, dtype=torch.bool), [8]) == ()


def test_deep_rollouts_say_so():
    deep = lm.rollout(map_of(random_attention(40, size=12)), residual=0)
    assert any("on one token" in note for note in deep.notes)
    shallow = lm.rollout(map_of(random_attention(2, size=12)), residual=0.5)
    assert not any("on one token" in note for note in shallow.notes)
    even = torch.tril(torch.ones(12, 12)) / torch.arange(1, 13)[:, None]
    alike = map_of(even.expand(3, 12, 12).clone())
    assert any("rise or fall" in note for note in lm.rollout(alike, residual=0).notes)
