from __future__ import annotations

import itertools

import networkx as nx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lens_mix as lm
from lens_mix.aggregation.tree import _make_rich_tree
from tests.reference_models import REFERENCE

RELEASED = {"special": [0], "top_layer": -2, "order": "position", "within_layer": True}


def released_trees():
    with np.load(REFERENCE / "attattr_trees.npz") as arrays:
        return {key: torch.from_numpy(arrays[key]) for key in arrays.files}


def as_map(scores) -> lm.MixingMap:
    scores = torch.as_tensor(scores)
    tokens = [f"t{position}" for position in range(scores.shape[-1])]
    return lm.MixingMap(scores=scores, tokens=tokens, method="attention_attribution")


def edges_of(tree) -> list[tuple[int, int, int]]:
    """Return the edges as (layer, query, key), the form of the released code."""
    nodes = tree.nodes
    return [
        (values["layer"], nodes[end]["position"], nodes[start]["position"])
        for start, end, values in tree.edges(data=True)
    ]


@pytest.mark.parametrize("case", ["a", "b", "c", "d"])
def test_the_released_code(case):
    trees = released_trees()
    tree = lm.attribution_tree(as_map(trees[f"{case}_scores"]), **RELEASED)
    assert tree.graph["root"] == (11, int(trees[f"{case}_root"]))
    assert sorted(edges_of(tree)) == sorted(map(tuple, trees[f"{case}_edges"].tolist()))


def random_scores(seed: int, layers: int = 4, positions: int = 6) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(layers, positions, positions, generator=generator, dtype=torch.float64)


def options():
    return st.fixed_dictionaries(
        {
            "threshold": st.sampled_from([0.0, 0.2, 0.5, 0.9]),
            "cost": st.sampled_from([0.0, 0.3, 2.0]),
            "order": st.sampled_from(["score", "position"]),
            "within_layer": st.booleans(),
            "special": st.sampled_from([(), (0,), (2, 5)]),
        }
    )


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 5), st.integers(3, 7), options())
def test_every_tree(seed, layers, positions, chosen):
    if max(chosen["special"], default=0) >= positions:
        chosen = {**chosen, "special": (0,)}
    scores = random_scores(seed, layers, positions)
    try:
        tree = lm.attribution_tree(as_map(scores), **chosen)
    except ValueError as reason:
        assert "positive score between two different tokens" in str(reason)
        return
    root = tree.graph["root"]
    assert nx.is_arborescence(tree.reverse())
    assert all(tree.out_degree(node) == (node != root) for node in tree)
    positions_of = [values["position"] for _, values in tree.nodes(data=True)]
    assert len(set(positions_of)) == len(positions_of)
    ordinary = [p for p in range(positions) if p not in chosen["special"]]
    assert root[1] in ordinary
    total = 0.0
    for start, end, values in tree.edges(data=True):
        layer, key, query = values["layer"], start[1], end[1]
        assert query in ordinary
        assert start[0] == layer
        assert end[0] >= layer if chosen["within_layer"] else end[0] > layer
        assert values["weight"] == scores[layer, query, key].item()
        largest = scores[layer, ordinary].max().item()
        assert values["share"] == pytest.approx(values["weight"] / largest)
        assert values["share"] > chosen["threshold"]
        total += values["weight"] - chosen["cost"]
    assert tree.graph["objective"] == pytest.approx(total, abs=1e-9)
    assert total >= 0


@pytest.mark.parametrize("seed", range(6))
def test_the_cost_leaves_the_best_part_of_the_tree(seed):
    scores = random_scores(seed, 3, 6).abs()
    whole = lm.attribution_tree(as_map(scores), threshold=0.3)
    edges = list(whole.edges(data="weight"))
    for cost in (0.5, 1.0, 1.5):
        best = 0.0
        for kept in itertools.product([False, True], repeat=len(edges)):
            chosen = [edge for edge, keep in zip(edges, kept, strict=True) if keep]
            part = nx.DiGraph([(start, end) for start, end, _ in chosen])
            part.add_node(whole.graph["root"])
            if all(node == whole.graph["root"] or part.out_degree(node) for node in part):
                best = max(best, sum(weight - cost for _, _, weight in chosen))
        found = lm.attribution_tree(as_map(scores), threshold=0.3, cost=cost)
        assert found.graph["objective"] == pytest.approx(best)
        assert set(found.edges) <= set(whole.edges)


def test_a_hand_made_tree():
    scores = torch.zeros(3, 4, 4)
    scores[2, 3, 1] = 1.0
    scores[1, 1, 0] = 0.8
    scores[1, 3, 0] = 0.5  # position 1 has more of it
    scores[0, 0, 2] = 0.6
    scores[0, 3, 2] = 0.2  # below the threshold
    tree = lm.attribution_tree(as_map(scores))
    assert dict(tree.nodes(data="position")) == {(3, 3): 3, (2, 1): 1, (1, 0): 0, (0, 2): 2}
    assert edges_of(tree) == [(2, 3, 1), (1, 1, 0), (0, 0, 2)]
    assert tree.nodes[(0, 2)] == {"level": 0, "layer": -1, "position": 2, "token": "t2"}
    first = lm.attribution_tree(as_map(scores), root=1)
    assert edges_of(first) == [(1, 1, 0), (0, 0, 2)]
    lowest = lm.attribution_tree(as_map(scores), top_layer=0, root="t0")
    assert edges_of(lowest) == [(0, 0, 2)]
    assert lowest.graph["root"] == (1, 0)


def test_no_chain_through_one_layer():
    scores = torch.zeros(2, 3, 3)
    scores[0, 0, 1], scores[0, 1, 2] = 0.9, 1.0
    assert edges_of(lm.attribution_tree(as_map(scores[:1]), root=0)) == [(0, 0, 1)]
    chained = lm.attribution_tree(as_map(scores[[0, 0]]), root=0, within_layer=True)
    assert edges_of(chained) == [(1, 0, 1), (0, 1, 2)]


def test_heads_are_summed():
    scores = random_scores(3).abs()
    heads = torch.stack([scores / 2, scores / 2], dim=1)
    one, two = lm.attribution_tree(as_map(scores)), lm.attribution_tree(as_map(heads))
    assert edges_of(one) == edges_of(two)
    assert one.graph["objective"] == pytest.approx(two.graph["objective"])


def test_text():
    scores = torch.zeros(2, 3, 3)
    scores[1, 2, 1], scores[0, 1, 0] = 2.0, 0.5
    mixing_map = as_map(scores).replace(tokens=["[bold]", "cat", "Ġsat"])
    text = lm.aggregation.tree_text(lm.attribution_tree(mixing_map))
    assert text.splitlines() == [
        "'Ġsat' @2",
        "└── 'cat' @1  layer 1, 2",
        "    └── '[bold]' @0  layer 0, 0.5",
    ]
    with pytest.raises(ValueError, match="expected a graph of attribution_tree"):
        _make_rich_tree(nx.DiGraph())


def test_the_text_is_not_displayed_in_a_notebook(monkeypatch):
    shown = []
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr("rich.jupyter.display", lambda *output: shown.append(output))
    scores = torch.zeros(1, 2, 2)
    scores[0, 1, 0] = 1.0
    assert "'t1' @1" in lm.aggregation.tree_text(lm.attribution_tree(as_map(scores)))
    assert shown == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threshold": 1.5}, "threshold: expected a number from 0 to 1"),
        ({"cost": -1.0}, "cost: expected a finite number, 0 or more"),
        ({"order": "random"}, "order: expected 'score' or 'position'"),
        ({"root": 9}, "root: expected a position"),
        ({"special": [9]}, "9"),
        ({"top_layer": 7}, "layer: layer 7 does not exist"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        lm.attribution_tree(as_map(random_scores(0)), **options)


def test_bad_maps():
    with pytest.raises(TypeError, match="expected a MixingMap"):
        lm.attribution_tree(random_scores(0))
    with pytest.raises(ValueError, match="positive score between two different tokens"):
        lm.attribution_tree(as_map(-random_scores(0).abs()))
    with pytest.raises(ValueError, match="layer maps for attribution_tree"):
        lm.attribution_tree(lm.rollout(as_map(random_scores(0).abs()), residual=0.5))
