"""Test `Maps`: what it accepts, that it is a mapping, and that its methods are calls of the functions."""

from __future__ import annotations

import copy
import pickle

import matplotlib.pyplot as plt
import pandas as pd
import pytest
import torch
from matplotlib.text import Text

import lens_mix as lm
from lens_mix.maps import Maps, MixingMap
from tests.matrix import cases, model_of, prompt_of
from tests.random_maps import random_attention

TOKENS = ["<s>", "The", " Eif", "fel", " Tower"]


def make(layers=2, heads=None, tokens=TOKENS, seed=0, **fields):
    scores = random_attention(layers, heads, len(tokens), causal=True, seed=seed)
    return MixingMap(scores=scores, tokens=tokens, causal=True, **fields)


def two(**fields):
    return Maps(
        {"attention": make(method="attention", **fields), "alti": make(method="alti", seed=1, **fields)}
    )


def test_it_is_a_mapping_in_the_order_of_its_names():
    maps = two()
    assert list(maps) == ["attention", "alti"]
    assert len(maps) == 2
    assert "alti" in maps
    assert dict(maps) == dict(maps.items())
    assert maps.get("rollout") is None


def test_a_name_that_it_does_not_have_lists_its_names():
    with pytest.raises(KeyError, match=r"expected one of \['attention', 'alti'\], got 'atention'"):
        two()["atention"]
    with pytest.raises(KeyError, match="got 0"):
        two()[0]


def test_maps_can_be_added_and_removed():
    maps = two()
    maps["mean"] = lm.layer_mean(maps["attention"])
    assert list(maps) == ["attention", "alti", "mean"]
    assert maps.pop("alti").method == "alti"
    del maps["mean"]
    assert list(maps) == ["attention"]
    for name, value in ((1, make()), ("scores", torch.eye(2))):
        with pytest.raises(TypeError, match="expected"):
            maps[name] = value


def test_maps_are_joined_with_others():
    maps = two()
    mean = {"mean": lm.layer_mean(maps["attention"])}
    for joined, names in ((maps | mean, ["attention", "alti", "mean"]), (mean | maps, ["mean", *maps])):
        assert isinstance(joined, Maps)
        assert list(joined) == names
    assert list(maps) == ["attention", "alti"]
    with pytest.raises(TypeError):
        maps | ["mean"]


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({}, ValueError, "expected a mapping of MixingMaps by name, got none"),
        ([1], TypeError, "expected a mapping of MixingMaps by name"),
        ({"a": 1}, TypeError, r"maps\['a'\]: expected a MixingMap, got"),
        ({1: make()}, TypeError, "expected names that are strings"),
    ],
)
def test_errors(given, error, message):
    with pytest.raises(error, match=message):
        Maps(given)


def test_copies_and_pickles_are_maps():
    for again in (copy.deepcopy(two()), pickle.loads(pickle.dumps(two()))):
        assert torch.equal(again["alti"].scores, two()["alti"].scores)


def test_a_file_gives_back_identical_maps(tmp_path):
    pixels = torch.rand(3, 4, 4)
    shares = random_attention(2, None, 5, causal=True, seed=3)[..., 0]
    maps = Maps(
        {
            "attention": make(heads=3, method="attention", features=pixels, notes=("a note",)),
            "alti": make(method="alti", features=pixels, residual_shares=shares),
        }
    )
    maps.save(tmp_path / "maps.safetensors")
    again = Maps.load(tmp_path / "maps.safetensors")
    assert list(again) == list(maps)
    for name, each in maps.items():
        assert torch.equal(again[name].scores, each.scores)
        assert torch.equal(again[name].features, pixels)
        assert (again[name].tokens, again[name].notes) == (each.tokens, each.notes)
    assert torch.equal(again["alti"].residual_shares, shares)


def test_files_of_one_and_of_several_maps_are_told_apart(tmp_path):
    make().save(tmp_path / "one.safetensors")
    two().save(tmp_path / "two.safetensors")
    with pytest.raises(ValueError, match=r"maps that Maps.save wrote .* got format 'lens_mix.MixingMap/1'"):
        Maps.load(tmp_path / "one.safetensors")
    with pytest.raises(ValueError, match=r"that MixingMap.save wrote .* got format 'lens_mix.Maps/1'"):
        MixingMap.load(tmp_path / "two.safetensors")
    text = (tmp_path / "two.safetensors").read_bytes().replace(b"Tower", b"Towel")
    (tmp_path / "two.safetensors").write_bytes(text)
    with pytest.raises(ValueError, match="which was changed after it was written"):
        Maps.load(tmp_path / "two.safetensors")


def test_the_table_has_the_rows_of_all_maps():
    maps = Maps({"attention": make(heads=3, method="attention"), "alti": make(method="alti")})
    table = maps.to_dataframe()
    for name, each in maps.items():
        own = table[table["method"] == name].drop(columns="method").reset_index(drop=True)
        expected = each.to_dataframe()
        pd.testing.assert_frame_equal(
            pd.DataFrame(own[expected.columns]), pd.DataFrame(expected), check_dtype=False
        )
        assert table.attrs["maps"][name] == expected.attrs
    assert table[table["method"] == "alti"]["head"].isna().all()


def test_its_methods_are_calls_of_the_functions(tmp_path):
    maps = two()
    pd.testing.assert_frame_equal(maps.compare(k=2), lm.compare(maps, k=2))
    pd.testing.assert_frame_equal(maps.table(" Tower"), lm.table(maps, " Tower"))
    page = maps.page(tmp_path / "page.html")
    assert page.html == lm.page(maps).html
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == page.html
    figures = (maps.show(query=" Tower", columns=1), lm.show_position(maps, query=" Tower", columns=1))
    shown, expected = ([text.get_text() for text in each.findobj(Text)] for each in figures)
    assert shown == expected
    assert len(shown) > len(maps["alti"].show(query=" Tower").findobj(Text))
    plt.close("all")


def test_maps_of_other_tokens_are_shown_as_a_page():
    maps = Maps({"encoder": make(), "decoder": make(tokens=["<pad>", "Der"])})
    assert type(maps.show()).__name__ == "Page"
    assert type(two().show("page")).__name__ == "Page"
    with pytest.raises(ValueError, match=r"for query=, got 2 maps .* write maps\['encoder'\].show\("):
        maps.show("page", query=0)
    with pytest.raises(ValueError, match="expected a figure of one map for picture=, got 2 maps"):
        two().show("position", picture=True)
    with pytest.raises(ValueError, match="kind: expected 'page' or 'position', got 'layers'"):
        maps.show("layers")


def test_it_prints_a_line_for_each_map():
    lines = repr(two()).splitlines()
    assert lines[0] == "Maps(2)"
    assert lines[1].split() == f"attention {two()['attention']!r}".split()


def test_a_notebook_shows_the_first_map_and_folds_the_others():
    text = two()._repr_html_()
    assert text.count("<details") == 2 == text.count("<img")
    assert text.count("<details open>") == 1
    assert text.index("<strong>attention</strong>") < text.index("<strong>alti</strong>")
    assert "<script" not in text


@pytest.mark.parametrize("case", cases(refused=False), ids=str)
def test_every_model_class_gives_maps(case, tmp_path):
    model = model_of(case)
    maps = lm.run(model, prompt_of(model), ["attention", "value_norm"], part=case.part)
    assert isinstance(maps, Maps)
    maps.save(tmp_path / "maps.safetensors")
    again = Maps.load(tmp_path / "maps.safetensors")
    assert all(torch.equal(again[name].scores, each.scores) for name, each in maps.items())
    assert set(maps.to_dataframe()["method"]) == set(maps)
    assert len(maps.compare(k=1)) == len(maps["attention"])
    assert maps._repr_html_().count("<details") == 2
    assert maps.page().html
