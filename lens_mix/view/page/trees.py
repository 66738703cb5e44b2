"""Attribution trees, and other layered graphs, as the page reads them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import networkx as nx

from lens_mix.aggregation.tree import attribution_tree
from lens_mix.arguments import instance
from lens_mix.graphs import information_flow_routes
from lens_mix.maps import MixingMap
from lens_mix.view.page.data import plain

Graphs: TypeAlias = nx.DiGraph | Mapping[str, nx.DiGraph]
# Of a larger graph the page holds so many edges, the largest: more can neither be drawn nor read.
_MOST_EDGES = 4_000
_OPTIONS = ("threshold", "cost", "order", "within_layer", "by", "edges_before")


def trees_of(
    maps: Sequence[Mapping[str, MixingMap]], trees: Graphs | Sequence[Graphs] | None
) -> list[list[dict[str, Any]]]:
    """Per prompt the graphs that are given; None: those that its maps have.

    Raises:
        TypeError: no graphs of networkx. ValueError: not one entry per prompt; nodes that are no (level,
            position); edges without a weight.
    """
    if trees is None:
        trees = [_graphs_of_papers(labelled) for labelled in maps]
    listed = [trees] if isinstance(trees, (nx.DiGraph, Mapping)) else trees
    instance("trees", listed, Sequence, "a graph, several by name, or a list with one of these per prompt")
    if len(listed) != len(maps):
        raise ValueError(f"trees: expected one entry per prompt, {len(maps)}, got {len(listed)}")
    graphs = [{"tree": one} if isinstance(one, nx.DiGraph) else one for one in listed]
    named = [instance("trees", one, Mapping, "graphs by name") for one in graphs]
    return [[_packed(graph, str(name)) for name, graph in one.items()] for one in named]


def _graphs_of_papers(maps: Mapping[str, MixingMap]) -> dict[str, nx.DiGraph]:
    """What the papers draw of their maps; of a map that can't have it (some rows, merged tokens), nothing."""
    grown: dict[str, Callable[[MixingMap], nx.DiGraph]] = {
        # From the position that is explained, if the map names one.
        "attention_attribution": lambda m: attribution_tree(m, root=m.default_query),
        "information_flow_routes": lambda m: information_flow_routes(m, m.meant_query),
    }
    graphs = {}
    for label, m in maps.items():
        if m.kind == "layer" and m.method in grown:
            try:
                graphs[label] = grown[m.method](m)
            except ValueError:
                continue
    return graphs


def _packed(graph: nx.DiGraph, name: str) -> dict[str, Any]:
    instance("trees", graph, nx.DiGraph, "a networkx graph, as attribution_tree returns it")
    edges = [(start, end, _weighed(values, start, end)) for start, end, values in graph.edges(data=True)]
    edges.sort(key=lambda edge: -abs(edge[2]["weight"]))
    strongest = edges[:_MOST_EDGES]
    root = graph.graph.get("root", graph.graph.get("target"))
    roots = [root] if root is not None else list(graph.graph.get("targets", ()))
    used = dict.fromkeys(node for start, end, _ in strongest for node in (start, end))
    nodes = list(dict.fromkeys([*roots, *used, *([] if edges else graph)]))
    place = {node: index for index, node in enumerate(nodes)}
    return {
        "name": name,
        "tokens": [str(token) for token in graph.graph.get("tokens", ())],
        "options": {key: graph.graph[key] for key in _OPTIONS if key in graph.graph},
        "roots": [place[node] for node in roots],
        "whole": [graph.number_of_nodes(), len(edges)],
        "nodes": [_node(graph, node) for node in nodes],
        "edges": [[place[start], place[end], values] for start, end, values in strongest],
    }


def _node(graph: nx.DiGraph, node: Any) -> dict[str, Any]:
    place = isinstance(node, tuple) and len(node) == 2 and all(isinstance(number, int) for number in node)
    if not place or "token" not in graph.nodes[node]:
        raise ValueError(
            f"trees: expected nodes (level, position) with a token, got {node!r}; lm.attribution_tree and "
            "lens_mix.graphs make such graphs"
        )
    held = plain(graph.nodes[node])
    return held | {"level": node[0], "position": node[1], "token": str(held["token"])}


def _weighed(values: Mapping[str, Any], start: Any, end: Any) -> dict[str, Any]:
    weight = values.get("weight")
    if not isinstance(weight, (int, float)) or not math.isfinite(weight):
        raise ValueError(f"trees: expected edges with a finite weight, got {weight!r} from {start} to {end}")
    return plain(values)
