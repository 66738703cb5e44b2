from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch

import lens_mix as lm
from lens_mix import corpus
from lens_mix.corpus.reductions import finish_moments, merge_moments
from lens_mix.experiments import head_importance
from lens_mix.maps.token_kinds import token_kind
from tests.corpus.conftest import build, draw_texts

TOKENS = ["<s>", "The", " cat", ",", " sat"]


def make_map(seed=0, heads=2, tokens=TOKENS):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(3, heads, len(tokens), len(tokens), generator=generator, dtype=torch.float64).tril()
    return lm.MixingMap(scores=scores, tokens=tokens, method="attention", causal=True, layers=[2, 5, 7])


def cells(mixing):
    """Return each visible cell of a map as a row of a table, with its share of its row."""
    table = mixing.to_dataframe().dropna(subset="score")
    groups = ["layer", "head", "query"]
    table["share"] = table["score"] / table.groupby(groups)["score"].transform("sum")
    table["offset"] = table["query"] - table["key"]
    table["query_kind"], table["key_kind"] = (
        table["query_token"].map(token_kind),
        table["key_token"].map(token_kind),
    )
    return table


@pytest.mark.parametrize("of", ["share", "score"])
@pytest.mark.parametrize(
    "by",
    [
        *((), ("layer",), ("layer", "head"), ("key_kind",), ("head", "query_kind", "key_kind")),
        *(("layer", "offset"), ("query", "key"), ("key_token", "layer")),
    ],
)
def test_means_of_cells_are_those_of_a_table_of_all_cells(by, of):
    maps = [make_map(0), make_map(1, tokens=TOKENS[:3]), make_map(2, tokens=["<s>", ",", ","])]
    reduction = corpus.Mean(by=by, of=of)
    parts = [reduction.observe("attention", mixing, {}) for mixing in maps]
    for tables in (parts, [merge_moments(parts[:2], ["method", *by]), parts[2]]):
        found = finish_moments(merge_moments(tables, ["method", *by])).set_index(["method", *by])
        table = pd.concat(map(cells, maps)).assign(method="attention")
        expected = table.groupby(["method", *by])[of].agg(["count", "mean", "std"])
        assert found["count"].to_numpy().tolist() == expected["count"].to_numpy().tolist()
        np.testing.assert_allclose(found["mean"], expected["mean"], atol=1e-12)
        np.testing.assert_allclose(found["spread"], expected["std"], atol=1e-12)
        assert found.index.tolist() == expected.index.tolist()


def test_a_row_has_one_value_per_group():
    mixing = make_map()
    found = corpus.Mean(by=("layer", "key_kind"), per="row").observe("attention", mixing, {})
    table = cells(mixing)
    rows = table.groupby(["layer", "key_kind", "head", "query"])["share"].sum()
    expected = rows.groupby(["layer", "key_kind"]).agg(["count", "mean"])
    np.testing.assert_allclose(found["mean"], expected["mean"], atol=1e-12)
    assert found["count"].tolist() == expected["count"].tolist()
    assert found["count"].sum() < 3 * 2 * 5 * 3, "rows that see no comma have no value for it"


def test_cues_words_and_fields():
    mixing = make_map()
    reduction = corpus.Mean(by=("layer", "cue", "language"), per="row")
    found = reduction.observe("attention", mixing, {"cue": "The cat", "language": "en"})
    table = cells(mixing)
    on_cue = table[table["key"].isin([1, 2])].groupby(["layer", "head", "query"])["share"].sum()
    values = found[found["cue"]]
    np.testing.assert_allclose(values["mean"], on_cue.groupby("layer").mean(), atol=1e-12)
    assert set(found["language"]) == {"en"}
    with pytest.raises(ValueError, match="cue: expected"):
        reduction.observe("attention", mixing, {"cue": "dog", "language": "en"})
    scores = torch.full((1, 3, 3), 1 / 3, dtype=torch.float64)
    pieces = lm.MixingMap(scores=scores, tokens=["Gr", "and", " mother"], method="attention")
    words = corpus.Mean(by=("key_word",)).observe("attention", pieces, {})
    assert words["key_word"].tolist() == ["Grand", "mother"]
    np.testing.assert_allclose(words["mean"], [2 / 3, 1 / 3])


def test_functions_of_a_map():
    mixing = make_map()
    for function, by, count in (
        (lambda m, fields: m.scores.sum(), (), 1),
        (lambda m, fields: 3.0, ("language",), 1),
        (lambda m, fields: m.scores.sum((1, 2, 3)), ("layer",), 3),
        (corpus.largest_per_head, ("layer", "head"), 6),
        (lambda m, fields: m.scores.square(), ("offset",), 5),
    ):
        found = corpus.Mean(by=by, of=function).observe("attention", mixing, {"language": "en"})
        assert len(found) == count
    with pytest.raises(ValueError, match=r"of: expected a function that returns a number.* got \[7\]"):
        corpus.Mean(of=lambda m, fields: torch.zeros(7)).observe("attention", mixing, {})
    with pytest.raises(ValueError, match=r"by: expected groups that .* has values for, got 'offset'"):
        corpus.Mean(by=("offset",), of=lambda m, fields: 1.0).observe("attention", mixing, {})


def test_head_importance_is_that_of_the_evaluation(tmp_path, tiny):
    prompts = draw_texts(6)
    method = lm.methods.AttentionAttribution(per_head=True, target=lm.targets.predicted(of="probability"))
    reduce = {"heads": corpus.Mean(by=("layer", "head"), of=corpus.largest_per_head)}
    corpus.run(build, prompts, method, reduce, tmp_path, shard_size=4, keep_maps=False)
    found = corpus.load(tmp_path, "heads")
    expected = head_importance(tiny, prompts, "attribution").to_dataframe()
    assert found["count"].tolist() == [6] * 8
    np.testing.assert_allclose(found["mean"], expected["importance"], rtol=1e-4)


def test_wrong_reductions_are_errors(tmp_path):
    def run(reduce, **options):
        corpus.run(build, ["w3 w4"], "attention", reduce, tmp_path, **options)

    for wrong, message in (
        ({"by": ("layr",)}, r"reduce\['a'\]\.by: expected some of .* got 'layr'"),
        ({"by": ("cue",)}, r"expected 'cue' among the fields"),
        ({"by": ("cue", "kind")}, "got 'kind'"),
    ):
        with pytest.raises(ValueError, match=message):
            run({"a": corpus.Mean(**wrong)}, fields=("cue",) if len(wrong["by"]) > 1 else ())
    with pytest.raises(ValueError, match="reduce: expected names of letters"):
        run({"../a": corpus.Mean()})
    with pytest.raises(TypeError, match=r"reduce\['a'\]: expected lm.corpus.Mean"):
        run({"a": "layer"})
    with pytest.raises(TypeError, match="reduce: expected reductions by name"):
        run([corpus.Mean()])
    with pytest.raises(ValueError, match="per: expected 'cell' or 'row'"):
        corpus.Mean(per="map")
