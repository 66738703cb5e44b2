"""Test the agreement of maps per layer against scipy and against counts by hand."""

import math

import pytest
import torch
from scipy.stats import spearmanr

import lens_mix as lm
from tests.random_maps import random_map


def two_rows(first, second, **changes):
    fields = {"tokens": list("abcdef")[: len(first)], "queries": [len(first) - 1], **changes}
    return [
        lm.MixingMap(scores=torch.tensor([[row]], dtype=torch.float64), **{**fields, "method": name})
        for name, row in (("one", first), ("other", second))
    ]


def test_against_scipy_and_by_hand():
    maps = {"a": random_map(layers=3, seed=0), "b": random_map(layers=3, seed=1)}
    found = lm.compare(maps, queries=[-1], k=2)
    assert list(found["layer"]) == [0, 1, 2]
    assert set(found["first"]) == {"a"}
    for row in found.itertuples():
        x, y = (each.scores[row.layer, -1] for each in maps.values())
        assert row.spearman == pytest.approx(spearmanr(x, y).statistic)
        shared = set(x.topk(2).indices.tolist()) & set(y.topk(2).indices.tolist())
        assert row.top_k_overlap == len(shared) / 2
        assert row.rows == 1


def test_every_row_that_tells_something():
    maps = [random_map(layers=1, seed=0), random_map(layers=1, seed=1)]
    size = len(maps[0].tokens)
    (row,) = lm.compare(maps, k=2).itertuples()
    # Causal rows with at most two visible keys always have the same top two.
    assert row.rows == size - 2
    by_row = [lm.compare(maps, queries=[q], k=2).spearman[0] for q in range(2, size)]
    assert row.spearman == pytest.approx(sum(by_row) / len(by_row))


def test_signs_units_and_the_first_token():
    (row,) = lm.compare(two_rows([3.0, 1, 2, 4], [-30.0, 10, -20, 40])).itertuples()
    assert (row.spearman, row.first, row.second) == (1, "one", "other")
    assert math.isnan(row.top_k_overlap)
    rows = two_rows([9.0, 1, 2, 4], [-9.0, 4, 2, 1])
    assert lm.compare(rows, drop_first=True, k=1).top_k_overlap[0] == 0
    assert lm.compare(rows, drop_first=True).spearman[0] == -1
    assert lm.compare(rows).spearman[0] == pytest.approx(spearmanr([9, 1, 2, 4], [9, 4, 2, 1]).statistic)


def test_what_can_be_compared():
    whole = random_map(layers=3)
    pairs = lm.compare({"a": whole, "b": whole, "c": whole.select_layers([2])})
    assert [tuple(row) for row in pairs[["first", "second", "layer"]].to_numpy()] == [
        *[("a", "b", layer) for layer in range(3)],
        ("a", "c", 2),
        ("b", "c", 2),
    ]
    assert (pairs["spearman"] == 1).all()
    # These are two input maps, computed from different numbers of layers.
    inputs = [lm.rollout(whole).layer(-1), lm.rollout(whole.select_layers([0, 1])).layer(-1)]
    assert len(lm.compare(inputs)) == 1
    # A layer map and an input map are not compared.
    mixed = lm.compare({"a": whole, "input": inputs[0], "b": whole, "other": inputs[1]})
    assert set(zip(mixed["first"], mixed["second"], strict=True)) == {("a", "b"), ("input", "other")}


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (lambda m: None, "expected a MixingMap"),
        (lambda m: m.drop_bos(), r"same tokens .*drop_bos"),
        (lambda m: m.replace(layers=[7, 8, 9]), "a layer in common, got .* 'b' with .7, 8, 9."),
        (lm.rollout, "'b' of kind 'input'; lm.rollout"),
        (lambda m: m.select_queries([1]), "a row that both have"),
    ],
)
def test_refused(second, message):
    whole = random_map(layers=3)
    with pytest.raises((TypeError, ValueError), match=message):
        lm.compare({"a": whole.select_queries([0]) if "row" in message else whole, "b": second(whole)})


def test_one_map_is_no_comparison():
    for maps in (random_map(), [random_map()], {"a": random_map()}):
        with pytest.raises(ValueError, match="two or more to compare"):
            lm.compare(maps)
