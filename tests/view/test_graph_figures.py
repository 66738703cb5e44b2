"""Test the figure of an information-flow graph: the places of its elements, and its errors."""

import itertools

import networkx as nx
import numpy as np
import pytest
import torch
from matplotlib.collections import LineCollection
from matplotlib.colors import to_hex

import lens_mix as lm
from lens_mix.graphs import information_flow_graph, information_flow_routes, layered_graph
from lens_mix.view.graph_figures import (
    _FEED_FORWARD,
    _MOVES,
    _STAYS,
    _TARGET,
    STAYS,
    THICKEST,
    THINNEST,
    information_flow,
)
from tests.view.page.routes import routes_map


def make(layers=3, size=5, tokens=None):
    scores = torch.rand(layers, size, size, generator=torch.Generator().manual_seed(0)).tril()
    scores = scores / scores.sum(-1, keepdim=True)
    tokens = tokens or [f" t{position}" for position in range(size)]
    return lm.MixingMap(scores=scores, tokens=tokens, method="attention", causal=True)


def drawn(figure):
    (axes,) = figure.axes
    lines = next(part for part in axes.collections if isinstance(part, LineCollection))
    dots = next(part for part in axes.collections if part is not lines)
    return axes, lines, dots


def legend_of(figure):
    (legend,) = figure.legends
    return [text.get_text() for text in legend.get_texts()]


def test_edges_nodes_and_labels_stand_where_the_graph_says():
    graph = information_flow_graph(make(), threshold=0.02)
    axes, lines, dots = drawn(information_flow(graph, title="which way"))
    ends = {tuple(map(tuple, line.astype(int))) for line in lines.get_segments()}
    assert ends == {((key, below), (query, above)) for (below, key), (above, query) in graph.edges}
    assert {tuple(place) for place in dots.get_offsets().astype(int)} == {
        (place, level) for level, place in graph
    }
    assert [label.get_text() for label in axes.get_xticklabels()] == [f"·t{place}" for place in range(5)]
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == ["input", "0", "1", "2"]
    assert axes.get_ylabel() == "layer"


def test_the_width_of_a_move_is_its_share_and_what_stays_is_thin():
    graph = information_flow_graph(make(), threshold=0.02)
    _, lines, dots = drawn(information_flow(graph))
    shares = {
        ((key, below), (query, above)): share
        for (below, key), (above, query), share in graph.edges(data="share")
    }
    most = max(share for (start, end), share in shares.items() if start[0] != end[0])
    looks = zip(lines.get_segments(), lines.get_linewidths(), lines.get_colors(), strict=True)
    for line, width, color in looks:
        ends = tuple(map(tuple, line.astype(int)))
        moves = ends[0][0] != ends[1][0]
        expected = THINNEST + (THICKEST - THINNEST) * shares[ends] / most if moves else STAYS
        assert width == pytest.approx(expected)
        assert to_hex(color) == (_MOVES if moves else _STAYS)
    assert max(lines.get_linewidths()) == THICKEST
    colors = {
        tuple(place): to_hex(color)
        for place, color in zip(dots.get_offsets(), dots.get_facecolors(), strict=True)
    }
    assert [place for place, color in colors.items() if color == _TARGET] == [(4, 3)]
    areas = {tuple(place): size for place, size in zip(dots.get_offsets(), dots.get_sizes(), strict=True)}
    for (level, position), share in graph.nodes(data="share"):
        assert areas[position, level] / areas[4, 3] == pytest.approx((4 + 40 * share) / 44)


@pytest.mark.parametrize("layers", [1, 3, 40])
def test_routes_fit_on_a_page_and_name_each_layer_once(layers):
    m = routes_map(layers=layers, size=40)
    graph = information_flow_routes(m, threshold=0.01)
    figure = information_flow(graph, title="routes")
    width, height = figure.get_size_inches()
    assert width <= 7
    assert height <= 10
    axes = figure.axes[0]
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == ["input", *(str(label) for label in m.layer_labels)]
    kinds = {level: kind for (level, _), kind in graph.nodes(data="kind")}
    levels = sorted(kinds)
    assert {kinds[levels[int(place)]] for place in axes.get_yticks()} == {"resid_pre", "resid_post"}
    figure.canvas.draw()
    boxes = [label.get_window_extent() for label in axes.get_yticklabels()]
    assert all(low.y1 <= high.y0 for low, high in itertools.pairwise(boxes))
    squares = axes.collections[2]
    assert {to_hex(color) for color in squares.get_facecolors()} == {_FEED_FORWARD}
    assert len(squares.get_offsets()) == [kinds for _, kinds in graph.nodes(data="kind")].count("mlp_out")
    assert "feed-forward" in legend_of(figure)


def test_layers_have_names_at_equal_distances_if_there_are_too_many():
    names = [
        label.get_text() for label in information_flow(layered_graph(make(200, 3))).axes[0].get_yticklabels()
    ]
    steps = np.diff([int(name) for name in names[1:-1]])
    assert len(set(steps)) == 1
    assert steps[0] > 1
    assert (names[0], names[-1]) == ("input", "199")


def test_the_parts_of_an_encoder_decoder_have_names():
    graph = nx.DiGraph(source=2, targets=((2, 2),))
    graph.add_node((0, 0), level=0, layer=-1, token="a")
    graph.add_node((1, 0), level=1, layer=0, token="a")
    graph.add_node((2, 2), level=2, layer=0, token="b")
    graph.add_edge((0, 0), (1, 0), weight=1.0)
    graph.add_edge((1, 0), (2, 2), weight=1.0)
    axes = information_flow(graph).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["input", "encoder 0", "decoder 0"]


def test_axes_and_sizes_of_the_users():
    import matplotlib.pyplot as plt

    graph = information_flow_graph(make(), threshold=0.02)
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3))
    assert information_flow(graph, title="which way", ax=right) is figure
    assert not left.collections
    assert right.get_title(loc="left") == "which way"
    assert [label.get_text() for label in right.get_yticklabels()] == ["input", "0", "1", "2"]
    assert right.get_legend().get_texts()[0].get_text().startswith("from another position; width: share")
    plt.close(figure)
    assert tuple(information_flow(graph, figsize=(5, 4)).get_size_inches()) == pytest.approx((5, 4))
    for wrong, kind, says in (
        ({"ax": 3}, TypeError, "ax: expected axes of matplotlib"),
        ({"ax": right, "figsize": (5, 4)}, ValueError, "figsize: expected None beside ax="),
        ({"figsize": (0.5, 4)}, ValueError, r"figsize: expected at least \d+\.\d x \d+\.\d inches"),
        ({"figsize": (4, 0.5)}, ValueError, r"figsize: expected at least \d+\.\d x \d+\.\d inches"),
        ({"figsize": (4, -1)}, ValueError, "figsize: expected a finite number, above 0"),
        ({"title": 3}, TypeError, "title: expected a text"),
    ):
        with pytest.raises(kind, match=says):
            information_flow(graph, **wrong)


def test_too_many_tokens_are_labeled_by_their_edges():
    graph = layered_graph(make(2, 120), threshold=0.001)
    figure = information_flow(graph)
    assert "labeled: tokens with wide edges, as far as there is space" in legend_of(figure)
    figure.canvas.draw()
    labels = figure.axes[0].get_xticklabels()
    assert 20 < len(labels) < 120
    boxes = [label.get_window_extent() for label in labels]
    assert all(left.x1 <= right.x0 + 1 for left, right in itertools.pairwise(boxes))
    assert {to_hex(label.get_color()) for label in labels} == {"#333333"}


def test_an_attribution_tree_is_drawn_as_it_comes():
    tree = nx.DiGraph()
    tree.add_node((3, 7), token="root")
    tree.add_edge((2, 4), (3, 7), weight=0.5)
    tree.add_edge((1, 9), (2, 4), weight=0.25)
    axes, lines, _ = drawn(information_flow(tree))
    assert len(lines.get_segments()) == 2
    assert [label.get_text() for label in axes.get_xticklabels()] == ["4", "root", "9"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["1", "2", "3"]


def test_long_prompts_show_the_positions_in_use_only():
    graph = layered_graph(make(size=60), threshold=0.4)
    graph.remove_nodes_from([node for node in list(graph) if node[1] > 2 and node[1] != 50])
    figure = information_flow(graph)
    labels = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    assert labels == ["·t0", "·t1", "·t2", "·t50"]
    assert "tokens without a node are left out" in legend_of(figure)


def test_by_another_attribute():
    graph = layered_graph(make())
    _, lines, _ = drawn(information_flow(graph, by="capacity"))
    assert len(lines.get_segments()) == graph.number_of_edges()
    with pytest.raises(ValueError, match="by: expected every edge to have 'share'"):
        information_flow(graph, by="share")


def test_one_node_and_odd_tokens(tmp_path):
    graph = nx.DiGraph()
    graph.add_node((0, 0), token="$a_b\n")
    information_flow(graph).savefig(tmp_path / "one.png")
    assert (tmp_path / "one.png").stat().st_size > 1000
    information_flow(information_flow_graph(make(tokens=["$", "\n", "", "^_{", " "]))).savefig(
        tmp_path / "two.png"
    )


def test_other_graphs_are_refused():
    with pytest.raises(TypeError, match="graph: expected a networkx DiGraph, got MixingMap"):
        information_flow(make())
    with pytest.raises(ValueError, match="graph: expected at least one node"):
        information_flow(nx.DiGraph())
    with pytest.raises(ValueError, match=r"graph: expected nodes \(level, position\), got 0"):
        information_flow(make().to_networkx(1))
    for weight in (-1.0, float("nan"), "thick"):
        graph = nx.DiGraph()
        graph.add_edge((0, 0), (1, 0), weight=weight)
        with pytest.raises(ValueError, match="by: expected every edge to have 'weight', a finite number"):
            information_flow(graph)
