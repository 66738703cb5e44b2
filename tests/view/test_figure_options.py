"""Test the options of figures (words, a crop, heads, a logarithmic scale), and their titles and legends."""

from __future__ import annotations

import itertools

import numpy
import pytest
import torch
from matplotlib import colors

import lens_mix as lm
from lens_mix.graphs import information_flow_graph
from lens_mix.view import information_flow, layer_maps, show_position, token_bars
from lens_mix.view.labels import place_labels
from tests.random_maps import map_of, random_attention
from tests.view.test_figures import heat_maps, inside, overlaps, tick_labels, written

RECORD = {"model": "someone/SomeModel", "prompt": "Once upon a time"}


def long_map(size: int = 400, layers: int = 2) -> lm.MixingMap:
    """Return a flat map with three strong columns, two of them neighbors."""
    scores = torch.full((layers, size, size), 1e-4).tril()
    for column in (57, 58, 333):
        scores[1, column:, column] = 0.3
    tokens = [f" t{i}" for i in range(size)]
    return lm.MixingMap(scores=scores, tokens=tokens, method="attention", causal=True)


# ---------------------------------------------------------------------- labels


@pytest.mark.parametrize("limit", [1, 2, 5, 20, 60])
@pytest.mark.parametrize("strongest", [[57, 58, 399], [0, 1, 2, 3], [399, 398]])
def test_labels_go_to_the_strongest_first_and_keep_their_distance(limit: int, strongest: list[int]) -> None:
    ranked = [*strongest, *(position for position in range(400) if position not in strongest)]
    places = place_labels(400, limit, ranked)
    assert strongest[0] in places
    assert places == sorted(set(places))
    assert min((right - left for left, right in itertools.pairwise(places)), default=400) >= 400 / limit
    # No position without a label has space for one.
    for position in ranked:
        stronger = [place for place in places if ranked.index(place) <= ranked.index(position)]
        assert min(abs(position - place) for place in stronger) < 400 / limit


def test_without_strengths_labels_are_evenly_spaced() -> None:
    assert place_labels(10, 4) == [0, 3, 6, 9]


def test_all_have_labels_where_there_is_room() -> None:
    assert place_labels(3, 5, [1, 0, 2]) == [0, 1, 2]


@pytest.mark.slow
def test_strong_columns_are_labeled_at_400_tokens() -> None:
    figure = layer_maps(long_map(), columns=1)
    shown = tick_labels(heat_maps(figure)[-1].xaxis)
    # Of the two neighbors one has a label.
    assert "·t333" in shown
    assert len({"·t57", "·t58"} & set(shown)) == 1
    figure.canvas.draw()
    labels = heat_maps(figure)[-1].get_xticklabels()
    assert not overlaps(figure, labels)
    assert all(inside(figure, label) for label in labels)
    row = show_position({"a": long_map()})
    assert {"·t57", "·t333"} <= set(tick_labels(heat_maps(row)[-1].xaxis))
    bars = token_bars({"a": long_map()}, long_map().tokens)
    assert {"·t57", "·t333"} <= set(tick_labels(bars.axes[-1].xaxis))


# ---------------------------------------------------------------------- options


def test_one_layer() -> None:
    mixing_map = map_of()
    assert [axes.get_title() for axes in heat_maps(layer_maps(mixing_map, layer=-1))] == ["layer 3"]
    with pytest.raises(ValueError, match=r"layer: expected None beside layers=\[0\]"):
        layer_maps(mixing_map, layer=1, layers=[0])


def test_every_head_of_a_layer() -> None:
    mixing_map = map_of(random_attention(heads=3))
    figure = layer_maps(mixing_map, layer=2, head="all")
    assert [axes.get_title() for axes in heat_maps(figure)] == ["head 0", "head 1", "head 2"]
    assert "Attention, layer 2" in written(figure)
    for head, axes in enumerate(heat_maps(figure)):
        assert numpy.allclose(axes.images[0].get_array().filled(0), mixing_map.scores[2, head], atol=1e-7)
    names = [axes.get_title() for axes in heat_maps(layer_maps(mixing_map, layers=[0, 1], head="all"))]
    assert names[3] == "layer 1, head 0"
    with pytest.raises(ValueError, match=r"a map with heads for 'all'.*per_head=True"):
        layer_maps(map_of(), head="all")


def test_words() -> None:
    tokens = ["<s>", "▁un", "believ", "able", "▁is", "▁it"]
    mixing_map = map_of().replace(tokens=tokens)
    (axes,) = heat_maps(layer_maps(mixing_map, layer=1, words=True))
    assert tick_labels(axes.xaxis) == ["<s>", "·unbelievable", "·is", "·it"]
    expected = mixing_map.normalized().merge_words().scores[1]
    assert numpy.allclose(axes.images[0].get_array().filled(0), expected, atol=1e-7)
    bars = token_bars({"a": mixing_map, "b": torch.arange(6.0)}, tokens, words=True)
    heights = [[bar.get_height() for bar in axes.patches] for axes in bars.axes]
    assert heights[0] == pytest.approx(mixing_map.merge_words().scores[-1, -1].tolist())
    assert heights[1] == [0, 6, 4, 5]


def test_a_crop_of_shares_of_whole_rows() -> None:
    mixing_map = map_of()
    (axes,) = heat_maps(layer_maps(mixing_map, layer=0, queries=slice(-2, None), keys=[0, 3]))
    assert (tick_labels(axes.yaxis), tick_labels(axes.xaxis)) == (["·t4", "·t5"], ["·t0", "·t3"])
    assert numpy.allclose(axes.images[0].get_array(), mixing_map.scores[0, 4:][:, [0, 3]], atol=1e-7)
    with pytest.raises(ValueError, match="keys: expected a position from -6 to 5, got 6"):
        layer_maps(mixing_map, keys=[6])


def test_a_hidden_diagonal_leaves_the_colors_to_the_others() -> None:
    scores = torch.eye(4)[None] * 100 + torch.ones(1, 4, 4).tril()
    mixing_map = lm.MixingMap(scores=scores, tokens=list("abcd"), causal=True)
    (axes,) = heat_maps(layer_maps(mixing_map, normalize=False, diagonal=False))
    assert axes.images[0].get_clim() == (0, 1)
    assert numpy.ma.getmaskarray(axes.images[0].get_array()).diagonal().all()


def test_a_logarithmic_scale_tells_zeros_from_hidden_keys() -> None:
    scores = torch.tensor([[[1.0, 0, 0], [0.5, 0.5, 0], [0, 1e-3, 0.999]]])
    mixing_map = lm.MixingMap(scores=scores, tokens=list("abc"), causal=True)
    figure = layer_maps(mixing_map, scale="log")
    image = heat_maps(figure)[0].images[0]
    assert isinstance(image.norm, colors.LogNorm)
    assert image.get_clim() == pytest.approx((1e-4, 1))
    assert image.get_array()[2, 0] == pytest.approx(1e-4)
    assert numpy.ma.getmaskarray(image.get_array()).tolist() == numpy.triu(numpy.ones((3, 3)), 1).tolist()
    assert "logarithmic from 0.0001" in figure.axes[-1].get_ylabel()
    signed = lm.MixingMap(scores=-scores, tokens=list("abc"), causal=True).show("layers", scale="log")
    assert isinstance(heat_maps(signed)[0].images[0].norm, colors.SymLogNorm)
    with pytest.raises(ValueError, match="scale: expected 'linear' or 'log', got 'log10'"):
        layer_maps(mixing_map, scale="log10")


# ---------------------------------------------------------------------- texts of every figure


def test_model_prompt_and_unit() -> None:
    mixing_map = map_of(provenance=RECORD)
    line = "someone/SomeModel · “Once upon a time” · "
    assert line + "share of the row" in written(layer_maps(mixing_map))
    assert line + "raw score" in written(layer_maps(mixing_map, normalize=False))
    assert any(text.startswith(line + "share of the row · first: ") for text in written(mixing_map.show()))
    assert line + "each row in its own unit" in written(token_bars({"a": mixing_map}, mixing_map.tokens))
    assert "share of the row" in written(layer_maps(map_of()))


def test_the_row_that_is_meant() -> None:
    mixing_map = map_of(default_query=2)
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
