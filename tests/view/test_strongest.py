import torch

from lens_mix.view.strongest import Strongest, find_strongest

SCORES = torch.tensor([[9.0, 0.1, 0.2, 0.3], [9.0, 0.5, 0.4, 8.0], [9.0, 0.5, 0.0, 8.0]])
VISIBLE = torch.ones(3, 4, dtype=torch.bool)


def test_keys_that_are_left_out_do_not_count() -> None:
    assert find_strongest(SCORES, VISIBLE) == Strongest(0, 0, 9.0)
    assert find_strongest(SCORES, VISIBLE, {0}) == Strongest(1, 3, 8.0)


def test_of_equal_scores_the_lowest_layer_is_the_strongest() -> None:
    assert find_strongest(SCORES, VISIBLE, {0, 3}) == Strongest(1, 1, 0.5)


def test_hidden_keys_do_not_count() -> None:
    visible = VISIBLE.clone()
    visible[1:, 1] = False
    layer, key, score = find_strongest(SCORES, visible, [0, 3]) or (0, 0, 0.0)
    assert (layer, key, round(score, 6)) == (1, 2, 0.4)


def test_scores_are_compared_by_magnitude_and_keep_their_signs() -> None:
    assert find_strongest(torch.tensor([[1.0, -2.0]]), VISIBLE[:1, :2]) == Strongest(0, 1, -2.0)


def test_without_a_score_there_is_none() -> None:
    assert find_strongest(SCORES, VISIBLE, range(4)) is None
    assert find_strongest(0 * SCORES, VISIBLE) is None


def test_the_scores_that_were_given_do_not_change() -> None:
    before = SCORES.clone()
    find_strongest(SCORES, VISIBLE, {0})
    assert SCORES.tolist() == before.tolist()
