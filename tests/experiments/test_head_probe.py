"""Test heads as classifiers on maps with known answers."""

import pytest
import torch

import lens_mix as lm
from lens_mix.experiments.head_probe import probe_heads


def sentence(targets, size=6, causal=False, noise=0.1, seed=0):
    """Return a map in which layer 1 head 2 attends to the right keys, and all other heads are random."""
    generator = torch.Generator().manual_seed(seed)
    scores = noise * torch.rand(2, 3, size, size, generator=generator, dtype=torch.float64)
    for query, key in targets.items():
        scores[1, 2, query, key] = 1
    if causal:
        scores = scores.tril()
    scores = scores / scores.sum(-1, keepdim=True)
    return lm.MixingMap(scores, [f"t{i}" for i in range(size)], "attention", causal=causal)


def test_it_finds_the_head_of_a_relation():
    relations = [[(1, 4), (2, 0), (5, 3)], [(0, 3), (4, 1)]]
    maps = [sentence(dict(pairs), seed=number) for number, pairs in enumerate(relations)]
    found = probe_heads(maps, relations)
    assert found.best == (1, 2, 1.0)
    assert found.pairs == 5
    assert found.visible == 1
    assert found.accuracy.shape == (2, 3)
    assert found.baselines[-2] == pytest.approx(2 / 5)
    assert found.baselines[3] == pytest.approx(2 / 5)
    assert found.best_offset == -2
    assert found.gain == pytest.approx(0.6)
    assert "layer 1 head 2 finds 100.0 %, offset -2 finds 40.0 %" in repr(found)
    assert found.to_dataframe()["accuracy"].max() == 1


def test_accuracy_against_a_loop():
    mixing_map = sentence({}, noise=1.0, seed=3)
    pairs = [(query, key) for query in range(6) for key in range(6) if query != key]
    found = probe_heads(mixing_map, pairs)
    for layer in range(2):
        for head in range(3):
            right = 0
            for query, key in pairs:
                row = mixing_map.scores[layer, head, query].clone()
                row[query] = -1
                right += int(row.argmax()) == key
            assert found.accuracy[layer, head].item() == pytest.approx(right / len(pairs))
    assert torch.allclose(found.accuracy, torch.full((2, 3), 6 / 30, dtype=torch.float64))


def test_direction():
    mixing_map = sentence({4: 1, 3: 0})
    assert probe_heads(mixing_map, [(1, 4), (0, 3)], direction="backward").best == (1, 2, 1.0)
    forward = probe_heads(mixing_map, [(1, 4), (0, 3)])
    assert forward.accuracy[1, 2] < 1
    assert forward.best_offset == 3
    assert probe_heads(mixing_map, [(1, 4), (0, 3)], direction="backward").best_offset == -3


def test_the_token_itself_and_ignored_tokens_are_no_answer():
    scores = torch.tensor([[[[0.6, 0.3, 0.1], [0.7, 0.2, 0.1], [0.5, 0.4, 0.1]]]])
    mixing_map = lm.MixingMap(scores, ["[CLS]", "a", "b"])
    assert probe_heads(mixing_map, [(0, 1)]).best.value == 1
    assert probe_heads(mixing_map, [(2, 1)]).best.value == 0
    for ignore in (0, "[CLS]", ["[CLS]"], lambda token: token.startswith("[")):
        assert probe_heads(mixing_map, [(2, 1)], ignore=ignore).best.value == 1


def test_no_weight_elsewhere_is_no_answer():
    scores = torch.eye(3)[None, None]
    assert probe_heads(lm.MixingMap(scores, list("abc")), [(1, 0), (2, 0)]).best.value == 0


def test_of_equal_weights_the_first_is_the_answer():
    scores = torch.full((1, 1, 4, 4), 0.25)
    assert probe_heads(lm.MixingMap(scores, list("abcd")), [(2, 0)]).best.value == 1
    assert probe_heads(lm.MixingMap(scores, list("abcd")), [(2, 1)]).best.value == 0


def test_causal_heads_cannot_see_later_tokens():
    found = probe_heads(sentence({4: 1}, causal=True), [(4, 1), (1, 4)])
    assert found.visible == 0.5
    assert found.best.value == 0.5


def test_layers_keep_their_labels_and_sentences_may_have_no_pair():
    relation = {4: 1, 5: 0, 3: 1, 2: 5}
    maps = [sentence(relation).replace(layers=[3, 5]), sentence({}).replace(layers=[3, 5])]
    assert probe_heads(maps, [list(relation.items()), []]).best[:2] == (5, 2)


def test_wrong_questions_are_refused():
    mixing_map = sentence({4: 1})
    with pytest.raises(ValueError, match="relations: expected at least one pair, got none"):
        probe_heads(mixing_map, [])
    with pytest.raises(ValueError, match="relations: expected 2 lists of pairs, one per map, got 1"):
        probe_heads([mixing_map, mixing_map], [[(1, 2)]])
    with pytest.raises(ValueError, match=r"relations of map 0: expected positions from 0 to 5, got 6"):
        probe_heads(mixing_map, [(1, 6)])
    for wrong in ((1,), 3, (1.0, 2), (True, 2), "ab"):
        with pytest.raises(TypeError, match=r"relations.*: expected"):
            probe_heads(mixing_map, [wrong])
    with pytest.raises(ValueError, match="direction: expected 'forward' or 'backward', got 'up'"):
        probe_heads(mixing_map, [(1, 2)], direction="up")
    with pytest.raises(ValueError, match="offsets: expected at least one"):
        probe_heads(mixing_map, [(1, 2)], offsets=[])
    with pytest.raises(ValueError, match="same layers and heads in all"):
        probe_heads([mixing_map, mixing_map.merge_heads()], [[(1, 2)], [(1, 2)]])
    with pytest.raises(TypeError, match="maps: expected MixingMaps"):
        probe_heads([mixing_map.scores], [[(1, 2)]])
