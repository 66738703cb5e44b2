"""Test the figure of an information-flow graph: the places of its elements, and its errors."""

import networkx as nx
import numpy as np
import pytest
import torch
from matplotlib.collections import LineCollection
from matplotlib.colors import to_hex

import lens_mix as lm
from lens_mix.graphs import information_flow_graph, layered_graph
from lens_mix.view.graph_figures import _MOVES, _STAYS, _TARGET, THICKEST, information_flow


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
    assert names == ["input", "layer 0", "layer 1", "layer 2"]


def test_wider_edges_carry_more_and_colours_tell_staying_from_moving():
    graph = information_flow_graph(make(), threshold=0.02)
    _, lines, dots = drawn(information_flow(graph))
    widths, shares = lines.get_linewidths(), sorted(share for *_, share in graph.edges(data="share"))
    assert list(widths) == sorted(widths)
    assert max(widths) == THICKEST
    assert np.allclose(np.diff(widths) * shares[-1], np.diff(shares) * (THICKEST - 0.4))
    for line, colour in zip(lines.get_segments(), lines.get_colors(), strict=True):
        assert to_hex(colour) == (_STAYS if line[0][0] == line[1][0] else _MOVES)
    colours = {
        tuple(place): to_hex(colour)
        for place, colour in zip(dots.get_offsets(), dots.get_facecolors(), strict=True)
    }
    assert [place for place, colour in colours.items() if colour == _TARGET] == [(4, 3)]


def test_an_attribution_tree_is_drawn_as_it_comes():
    tree = nx.DiGraph()
    tree.add_node((3, 7), token="root")
    tree.add_edge((2, 4), (3, 7), weight=0.5)
    tree.add_edge((1, 9), (2, 4), weight=0.25)
    axes, lines, _ = drawn(information_flow(tree))
    assert len(lines.get_segments()) == 2
    assert [label.get_text() for label in axes.get_xticklabels()] == ["4", "root", "9"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["layer 1", "layer 2", "layer 3"]


def test_long_prompts_show_the_positions_in_use_only():
    graph = layered_graph(make(size=60), threshold=0.4)
    graph.remove_nodes_from([node for node in list(graph) if node[1] > 2 and node[1] != 50])
    axes, _, _ = drawn(information_flow(graph))
    assert [label.get_text() for label in axes.get_xticklabels()] == ["·t0", "·t1", "·t2", "·t50"]


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
    with pytest.raises(ValueError, match="layer_height: expected a finite number, above 0"):
        information_flow(layered_graph(make()), layer_height=0)
    for weight in (-1.0, float("nan"), "thick"):
        graph = nx.DiGraph()
        graph.add_edge((0, 0), (1, 0), weight=weight)
        with pytest.raises(ValueError, match="by: expected every edge to have 'weight', a finite number"):
            information_flow(graph)
