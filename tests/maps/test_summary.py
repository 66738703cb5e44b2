"""Test the table of means and intervals over prompts."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
import scipy.stats
import torch

import lens_mix as lm
from lens_mix.tables import Table
from tests.random_maps import random_attention

TOKENS = ["The", " cat", " sat", " on"]


def make(seed=0, heads=None, tokens=TOKENS, **fields):
    scores = random_attention(2, heads, len(tokens), causal=True, seed=seed).double()
    return lm.MixingMap(**{"scores": scores, "tokens": tokens, "causal": True, "layers": [3, 5], **fields})


def test_means_and_intervals():
    maps = [make(seed) for seed in range(6)]
    table = lm.table(iter(maps), 1)
    assert isinstance(table, Table)
    assert list(table.columns) == ["layer", "mean", "low", "high", "n"]
    assert table["layer"].tolist() == [3, 5]
    for layer, row in enumerate(table.itertuples()):
        values = [one.scores[layer, -1, 1].item() for one in maps]
        expected = scipy.stats.ttest_1samp(values, 0).confidence_interval(0.95)
        assert row.mean == pytest.approx(np.mean(values))
        assert (row.low, row.high) == pytest.approx((expected.low, expected.high))
        assert row.n == 6
    wider = lm.table(maps, 1, confidence=0.99)
    assert (wider["low"] < table["low"]).all()
    assert table.attrs == {"unit": "share", "confidence": 0.95, "interval": "Student's t, over prompts"}


def test_one_prompt_has_no_interval():
    table = lm.table(make(), "cat")
    assert table["n"].tolist() == [1, 1]
    assert table[["low", "high"]].isna().all(axis=None)
    assert table["mean"].tolist() == make().scores[:, 3, 1].tolist()


@pytest.mark.parametrize(
    ("keys", "positions"),
    [
        (0, [[0], [0]]),
        (" cat sat", [[1, 2], [1, 2]]),
        ([1, 2], [[1], [2]]),
        (["cat", "on"], [[1], [3]]),
        ([["cat", 0], "sat on"], [[0, 1], [2, 3]]),
        (np.array([2, 3]), [[2], [3]]),
        (torch.tensor([2, 3]), [[2], [3]]),
        ((key for key in (1, 3)), [[1], [3]]),
        (lambda one: one.tokens.index(" sat"), [[2], [2]]),
    ],
)
def test_ways_to_write_keys(keys, positions):
    maps = [make(0), make(1)]
    expected = [
        sum(one.scores[layer, 3, chosen].sum().item() for one, chosen in zip(maps, positions, strict=True))
        / 2
        for layer in range(2)
    ]
    assert lm.table(maps, keys)["mean"].tolist() == pytest.approx(expected)


def test_rows_and_units():
    maps = [make(0).replace(scores=make(0).scores * 8), make(1)]
    table = lm.table(maps, 0, query=[1, " sat"], unit="raw")
    expected = [(8 * make(0).scores[layer, 1, 0] + make(1).scores[layer, 2, 0]) / 2 for layer in range(2)]
    assert table["mean"].tolist() == pytest.approx(torch.stack(expected).tolist())
    shares = lm.table(maps, 0, query=lambda one: 2)
    expected = [(make(0).scores[layer, 2, 0] + make(1).scores[layer, 2, 0]) / 2 for layer in range(2)]
    assert shares["mean"].tolist() == pytest.approx(torch.stack(expected).tolist())


def test_shares_of_signed_rows_are_by_magnitude():
    one = lm.MixingMap([[[-1.0, 3.0]]], tokens=["a", "b"], queries=[1])
    assert lm.table(one, "a")["mean"].tolist() == [-0.25]


def test_heads_methods_and_names():
    maps = [{"a": make(seed, heads=2), "b": make(seed + 9)} for seed in range(3)]
    table = lm.table(maps, {"cue": [1, 2, 3], "first": 0})
    assert list(table.columns) == ["method", "layer", "head", "keys", "mean", "low", "high", "n"]
    assert len(table) == 2 * 2 * 2 + 2 * 2
    row = table.query("method == 'a' and layer == 5 and head == 1 and keys == 'cue'")
    expected = np.mean([maps[index]["a"].scores[1, 1, 3, index + 1].item() for index in range(3)])
    assert row["mean"].tolist() == [pytest.approx(expected)]
    assert pd.isna(table.loc[table["method"] == "b", "head"]).all()


def test_three_lines_on_a_model(model):
    sentences = [torch.tensor([5, 9, 12]), torch.tensor([7, 5, 3, 20]), torch.tensor([9, 8])]
    maps = lm.run_many(model, sentences, "value_zeroing", queries=[-1])
    table = lm.table(maps, keys=["w9", "w3", 0])
    singles = [lm.run(model, each, "value_zeroing").normalized() for each in sentences]
    values = [single.scores[1, -1, key].item() for single, key in zip(singles, (1, 2, 0), strict=True)]
    assert table["mean"][1] == pytest.approx(np.mean(values))


@pytest.mark.parametrize(
    ("maps", "keys", "options", "error", "message"),
    [
        ([], 0, {}, ValueError, "maps: expected at least one map"),
        (3, 0, {}, TypeError, r"maps: expected MixingMaps.*lm.run_many.*got 3"),
        ([{}], 0, {}, ValueError, "got an empty dict for prompt 0"),
        (["a"], 0, {}, TypeError, r"maps: expected MixingMaps.*got 'a' for prompt 0"),
        ([{"a": {}}], 0, {}, TypeError, "got a dict of {} for prompt 0"),
        (
            [make(), make()],
            [1],
            {},
            ValueError,
            "keys: expected one entry per prompt, got 1",
        ),
        ([make(), make()], [1, 2, 3], {}, ValueError, r"keys: expected one entry per prompt \(2\), got more"),
        (make(), [1, 2], {}, ValueError, r"got more; several keys of one prompt are \[\[...\]\]"),
        ([make(), make()], 0, {"query": [1]}, ValueError, "query: expected one entry per prompt"),
        ([make(), make()], ["cat", "dog"], {}, ValueError, "prompt 1: keys: expected a text .*got 'dog'"),
        ([make()], {"cue": ["dog"]}, {}, ValueError, r"prompt 0: keys\['cue'\]: expected a text"),
        ([make()], {}, {}, ValueError, "keys: expected at least one name"),
        (
            [make()],
            3,
            {"query": 1},
            ValueError,
            r"prompt 0: keys: .* query 1 can see, got \[3\]",
        ),
        ([make()], 0, {"query": 9}, ValueError, "prompt 0: query: expected a position"),
        ([make()], 1.5, {}, TypeError, "prompt 0: keys: expected a position"),
        ([make(), make(layers=[0, 1])], 0, {}, ValueError, r"maps: expected layers \[3, 5\].*prompt 1"),
        (
            [make(), make(heads=2)],
            0,
            {},
            ValueError,
            "maps: expected layers .* no heads .* 2 heads",
        ),
        ([{"a": make()}, {"b": make()}], 0, {}, ValueError, r"maps: expected the methods \['a'\].*prompt 1"),
        (make(), 0, {"unit": "percent"}, ValueError, "unit: expected 'share' or 'raw'"),
        (make(), 0, {"confidence": 95}, ValueError, "confidence: expected a number from 0 to 1"),
    ],
)
def test_wrong_arguments(maps, keys, options, error, message):
    with pytest.raises(error, match=message):
        lm.table(maps, keys, **options)


def test_a_table_prints():
    text = str(lm.table([make(0), make(1)], 0))
    assert text.splitlines()[0].split() == ["layer", "mean", "low", "high", "n"]
    assert not math.isnan(float(text.splitlines()[1].split()[2]))
