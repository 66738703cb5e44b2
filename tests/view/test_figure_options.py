"""Test the options of figures (words, a crop, heads, a logarithmic scale), and their titles and legends."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import numpy
import pytest
import torch
from matplotlib import colors

import lens_mix as lm
from lens_mix.graphs import information_flow_graph
from lens_mix.view import canvas, information_flow, layer_maps, query_maps, token_bars
from lens_mix.view.labels import place_labels
from tests.random_maps import map_of, random_attention
from tests.view.test_figures import heat_maps, inside, overlaps, tick_labels, written

RECORD = {"model": "someone/SomeModel", "prompt": "Once upon a time"}


def long_map(size: int = 400, layers: int = 2) -> lm.MixingMap:
    """Return a flat map with three strong columns, two of them neighbours."""
    scores = torch.full((layers, size, size), 1e-4).tril()
    for column in (57, 58, 333):
        scores[1, column:, column] = 0.3
    tokens = [f" t{i}" for i in range(size)]
    return lm.MixingMap(scores=scores, tokens=tokens, method="attention", causal=True)


# ---------------------------------------------------------------------- labels


@pytest.mark.parametrize("limit", [1, 2, 5, 20, 60])
@pytest.mark.parametrize("strongest", [[], [57, 58, 399], [0, 1, 2, 3], [399, 398]])
def test_the_strongest_have_labels_that_keep_their_distance(limit: int, strongest: list[int]) -> None:
    places = place_labels(400, limit, strongest)
    assert set(strongest[: max(1, limit // 2)]) <= {position for position, _ in places}
    assert all(0 <= at <= 399 for _, at in places)
    gaps = [right - left for (_, left), (_, right) in itertools.pairwise(places)]
    assert min(gaps, default=400) >= 400 / limit - 1e-9
    assert [position for position, _ in places] == sorted(position for position, _ in places)


def test_all_have_labels_where_there_is_room() -> None:
    assert place_labels(3, 5, [1]) == [(0, 0.0), (1, 1.0), (2, 2.0)]


@pytest.mark.slow
def test_strong_columns_are_labelled_at_400_tokens() -> None:
    figure = layer_maps(long_map(), columns=1)
    shown = tick_labels(heat_maps(figure)[-1].xaxis)
    assert {"·t57", "·t58", "·t333"} <= set(shown)
    figure.canvas.draw()
    labels = heat_maps(figure)[-1].get_xticklabels()
    assert not overlaps(figure, labels)
    assert all(inside(figure, label) for label in labels)
    row = query_maps({"a": long_map()})
    assert {"·t57", "·t58", "·t333"} <= set(tick_labels(heat_maps(row)[-1].xaxis))
    bars = token_bars({"a": long_map()}, long_map().tokens)
    assert {"·t57", "·t58", "·t333"} <= set(tick_labels(bars.axes[-1].xaxis))


# ---------------------------------------------------------------------- options


def test_one_layer() -> None:
    mixing_map = map_of()
    assert [axes.get_title() for axes in heat_maps(mixing_map.show(layer=-1))] == ["layer 3"]
    with pytest.raises(ValueError, match=r"layer: expected None beside layers=\[0\]"):
        mixing_map.show(layer=1, layers=[0])


def test_every_head_of_a_layer() -> None:
    mixing_map = map_of(random_attention(heads=3))
    figure = mixing_map.show(layer=2, head="all")
    assert [axes.get_title() for axes in heat_maps(figure)] == ["head 0", "head 1", "head 2"]
    assert "attention, layer 2" in written(figure)
    for head, axes in enumerate(heat_maps(figure)):
        assert numpy.allclose(axes.images[0].get_array().filled(0), mixing_map.scores[2, head], atol=1e-7)
    names = [axes.get_title() for axes in heat_maps(mixing_map.show(layers=[0, 1], head="all"))]
    assert names[3] == "layer 1, head 0"
    with pytest.raises(ValueError, match=r"a map with heads for 'all'.*per_head=True"):
        map_of().show(head="all")


def test_words() -> None:
    tokens = ["<s>", "▁un", "believ", "able", "▁is", "▁it"]
    mixing_map = map_of().replace(tokens=tokens)
    (axes,) = heat_maps(mixing_map.show(layer=1, words=True))
    assert tick_labels(axes.xaxis) == ["<s>", "·unbelievable", "·is", "·it"]
    expected = mixing_map.normalized().merge_words().scores[1]
    assert numpy.allclose(axes.images[0].get_array().filled(0), expected, atol=1e-7)
    (axes,) = heat_maps(query_maps({"a": mixing_map}, words=True))
    assert numpy.allclose(axes.images[0].get_array()[1], expected[-1], atol=1e-7)
    bars = token_bars({"a": mixing_map, "b": torch.arange(6.0)}, tokens, words=True)
    heights = [[bar.get_height() for bar in axes.patches] for axes in bars.axes]
    assert heights[0] == pytest.approx(mixing_map.merge_words().scores[-1, -1].tolist())
    assert heights[1] == [0, 6, 4, 5]


def test_a_crop_of_shares_of_whole_rows() -> None:
    mixing_map = map_of()
    (axes,) = heat_maps(mixing_map.show(layer=0, queries=slice(-2, None), keys=[0, 3]))
    assert (tick_labels(axes.yaxis), tick_labels(axes.xaxis)) == (["·t4", "·t5"], ["·t0", "·t3"])
    assert numpy.allclose(axes.images[0].get_array(), mixing_map.scores[0, 4:][:, [0, 3]], atol=1e-7)
    with pytest.raises(ValueError, match="keys: expected a position from -6 to 5, got 6"):
        mixing_map.show(keys=[6])


def test_a_hidden_diagonal_leaves_the_colours_to_the_others() -> None:
    scores = torch.eye(4)[None] * 100 + torch.ones(1, 4, 4).tril()
    mixing_map = lm.MixingMap(scores=scores, tokens=list("abcd"), causal=True)
    (axes,) = heat_maps(mixing_map.show(normalize=False, diagonal=False))
    assert axes.images[0].get_clim() == (0, 1)
    assert numpy.ma.getmaskarray(axes.images[0].get_array()).diagonal().all()
    (axes,) = heat_maps(query_maps({"a": mixing_map}, normalize=False, diagonal=False))
    assert numpy.ma.getmaskarray(axes.images[0].get_array()).tolist() == [[False] * 3 + [True]]


def test_a_logarithmic_scale_tells_zeros_from_hidden_keys() -> None:
    scores = torch.tensor([[[1.0, 0, 0], [0.5, 0.5, 0], [0, 1e-3, 0.999]]])
    mixing_map = lm.MixingMap(scores=scores, tokens=list("abc"), causal=True)
    figure = mixing_map.show(scale="log")
    image = heat_maps(figure)[0].images[0]
    assert isinstance(image.norm, colors.LogNorm)
    assert image.get_clim() == pytest.approx((1e-4, 1))
    assert image.get_array()[2, 0] == pytest.approx(1e-4)
    assert numpy.ma.getmaskarray(image.get_array()).tolist() == numpy.triu(numpy.ones((3, 3)), 1).tolist()
    assert "logarithmic from 0.0001" in figure.axes[-1].get_ylabel()
    signed = lm.MixingMap(scores=-scores, tokens=list("abc"), causal=True).show(scale="log")
    assert isinstance(heat_maps(signed)[0].images[0].norm, colors.SymLogNorm)
    with pytest.raises(ValueError, match="scale: expected 'linear' or 'log', got 'log10'"):
        mixing_map.show(scale="log10")


# ---------------------------------------------------------------------- texts of every figure


def test_model_prompt_and_unit() -> None:
    mixing_map = map_of(provenance=RECORD)
    line = "someone/SomeModel · “Once upon a time” · "
    assert line + "share of the row" in written(mixing_map.show())
    assert line + "raw score" in written(mixing_map.show(normalize=False))
    assert line + "share of the row" in written(query_maps({"a": mixing_map}))
    assert line + "each row in its own unit" in written(token_bars({"a": mixing_map}, mixing_map.tokens))
    assert "share of the row" in written(map_of().show())


def test_the_row_that_is_meant() -> None:
    mixing_map = map_of(default_query=2)
    assert "what position 2, “·t2”, used" in written(query_maps({"a": map_of(), "b": mixing_map}))
    heights = [bar.get_height() for bar in token_bars({"a": mixing_map}, mixing_map.tokens).axes[0].patches]
    assert heights == pytest.approx(mixing_map.scores[-1, 2].tolist())
    graph = information_flow_graph(mixing_map)
    assert graph.graph["target"][1] == 2


@pytest.mark.parametrize("row", [[-3.0, 0.05, 0], [3.0, -0.05, 0], [1.0, -1, 0], [0.0, 0, 0], [-1.0, -2, 0]])
def test_numbers_at_the_axis_do_not_overlap(row: list[float]) -> None:
    figure = token_bars({"a": torch.tensor(row)}, list("abc"))
    figure.canvas.draw()
    labels = figure.axes[0].get_yticklabels()
    assert "0" in [label.get_text() for label in labels]
    assert not overlaps(figure, sorted(labels, key=lambda label: label.get_position()[1]))


def test_a_graph_says_what_its_looks_mean_and_what_was_pruned() -> None:
    mixing_map = map_of(random_attention(size=8))
    graph = information_flow_graph(mixing_map, threshold=0.05)
    figure = information_flow(graph, title="which way")
    (legend,) = figure.legends
    lines = [text.get_text() for text in legend.get_texts()]
    assert lines[0].startswith("from another position; width: share, up to")
    assert lines[1] == "stays at its position"
    before = graph.graph["edges_before"]
    assert before == 4 * 36
    assert lines[-1] == f"pruned: {graph.number_of_edges()} of {before} edges are left, those above 0.05"
    figure.canvas.draw()
    assert all(inside(figure, text) for text in legend.get_texts())
    below = min(label.get_window_extent().y0 for label in figure.axes[0].get_xticklabels())
    assert legend.get_window_extent().y1 <= below + 2


# ---------------------------------------------------------------------- other scripts


def test_no_character_becomes_a_box(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(canvas, "_OTHER_FONTS", ())
    tokens = ["<s>", "我", "喜欢", "日本", "\U0001f680", "été"]
    canvas._list_families.cache_clear(), canvas._has_glyph.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for figure in (
            map_of().replace(tokens=tokens).show(title="日本"),
            token_bars({"方": torch.rand(6)}, tokens),
        ):
            figure.savefig(tmp_path / "figure.png")
            labels = tick_labels(
                next(axes for axes in reversed(figure.axes) if tick_labels(axes.xaxis)).xaxis
            )
            assert {"<s>", "U+6211", "U+559CU+6B22", "U+1F680", "été"} <= set(labels)
    monkeypatch.undo()
    canvas._list_families.cache_clear(), canvas._has_glyph.cache_clear()


def test_fonts_that_are_installed_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canvas, "_OTHER_FONTS", ("No Such Font", "DejaVu Serif"))
    canvas._list_families.cache_clear()
    assert canvas._list_families() == ["DejaVu Sans", "DejaVu Serif"]
    figure = map_of().show()
    figure.canvas.draw()
    assert heat_maps(figure)[0].get_xticklabels()[0].get_fontfamily() == ["DejaVu Sans", "DejaVu Serif"]
    monkeypatch.undo()
    canvas._list_families.cache_clear()
