"""Convert attribution trees and other layered graphs to the form that the page reads."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import networkx as nx

from lens_mix.aggregation.tree import attribution_tree
from lens_mix.arguments import check_instance
from lens_mix.graphs import information_flow_routes
from lens_mix.maps import MixingMap
from lens_mix.methods.component_shares import part_shares
from lens_mix.view.page.data import make_plain

Graphs: TypeAlias = nx.DiGraph | Mapping[str, nx.DiGraph]
# Of a larger graph the page contains only the largest edges, because more cannot be drawn or read.
_MOST_EDGES = 4_000
_OPTIONS = ("threshold", "cost", "order", "within_layer", "by", "edges_before")


def pack_trees(
    maps: Sequence[Mapping[str, MixingMap]], trees: Graphs | Sequence[Graphs] | None
) -> list[list[dict[str, Any]]]:
    """Return the graphs of each prompt: the given ones, or for None those that its maps can have.

    Args:
        maps: For each prompt its maps by label.
        trees: As in `lens_mix.page`.

    Raises:
        TypeError: `trees` contains something else than networkx graphs.
        ValueError: The number of entries is not that of the prompts; a node that is not (level, position); an
            edge without a weight.
    """
    if trees is None:
        return [_make_graphs(labeled) for labeled in maps]
    listed = [trees] if isinstance(trees, (nx.DiGraph, Mapping)) else trees
    check_instance(
        "trees", listed, Sequence, "a graph, several by name, or a list with one of these per prompt"
    )
    if len(listed) != len(maps):
        raise ValueError(f"trees: expected one entry per prompt, {len(maps)}, got {len(listed)}")
    graphs = [{"tree": entry} if isinstance(entry, nx.DiGraph) else entry for entry in listed]
    named = [check_instance("trees", entry, Mapping, "graphs by name") for entry in graphs]
    return [[_pack_graph(graph, str(name)) for name, graph in entry.items()] for entry in named]


def _make_graphs(maps: Mapping[str, MixingMap]) -> list[dict[str, Any]]:
    """Return the packed graph of each map whose method's paper draws one, to the explained position.

    It is the tree of a method with `has_tree`, or the routes of a map that records the shares of components.
    The page can compute such a graph again for another position, so the entry `of` names its map. Maps from
    which no graph can be made (with some rows only, or merged tokens) are left out.
    """
    graphs = []
    for label, m in maps.items():
        if m.kind == "layer":
            try:
                graph, more = _make_tree(m) if m.provenance.get("has_tree") else _make_routes(m)
            except ValueError:
                continue
            graphs.append(_pack_graph(graph, label) | {"of": label, "most_edges": _MOST_EDGES} | more)
    return graphs


def _make_tree(m: MixingMap) -> tuple[nx.DiGraph, dict[str, Any]]:
    graph = attribution_tree(m, root=m.default_query_position)
    if not graph.number_of_edges():
        # A tree of a map without positive scores is empty from every root.
        attribution_tree(m)
    return graph, {}


def _make_routes(m: MixingMap) -> tuple[nx.DiGraph, dict[str, Any]]:
    """Return the routes, and the shares from which the page computes them for another position."""
    shares = part_shares(m)
    packed = {name: _round_shares(getattr(shares, name).tolist()) for name in ("resid_pre", "resid_mid")}
    graph = information_flow_routes(m, m.default_query_position)
    return graph, {"shares": packed | {"parallel": shares.parallel}}


def _round_shares(shares: list[list[float]]) -> list[list[float]]:
    """Return the shares with four digits."""
    return [[float(f"{share:.4g}") for share in layer] for layer in shares]


def _pack_graph(graph: nx.DiGraph, name: str) -> dict[str, Any]:
    check_instance("trees", graph, nx.DiGraph, "a networkx graph, as attribution_tree returns it")
    edges = [(start, end, _pack_edge(values, start, end)) for start, end, values in graph.edges(data=True)]
    edges.sort(key=lambda edge: -abs(edge[2]["weight"]))
    strongest = edges[:_MOST_EDGES]
    root = graph.graph.get("root", graph.graph.get("target"))
    roots = [root] if root is not None else list(graph.graph.get("targets", ()))
    used = dict.fromkeys(node for start, end, _ in strongest for node in (start, end))
    nodes = list(dict.fromkeys([*roots, *used, *([] if edges else graph)]))
    index_of = {node: index for index, node in enumerate(nodes)}
    return {
        "name": name,
        "tokens": [str(token) for token in graph.graph.get("tokens", ())],
        "options": {key: graph.graph[key] for key in _OPTIONS if key in graph.graph},
        "roots": [index_of[node] for node in roots],
        "whole": [graph.number_of_nodes(), len(edges)],
        "nodes": [_pack_node(graph, node) for node in nodes],
        "edges": [[index_of[start], index_of[end], values] for start, end, values in strongest],
    }


def _pack_node(graph: nx.DiGraph, node: Any) -> dict[str, Any]:
    is_pair = isinstance(node, tuple) and len(node) == 2 and all(isinstance(index, int) for index in node)
    if not is_pair or "token" not in graph.nodes[node]:
        raise ValueError(
            f"trees: expected nodes (level, position) with a token, got {node!r}; lm.attribution_tree and "
            "lens_mix.graphs make such graphs"
        )
    attributes = make_plain(graph.nodes[node])
    return attributes | {"level": node[0], "position": node[1], "token": str(attributes["token"])}


def _pack_edge(values: Mapping[str, Any], start: Any, end: Any) -> dict[str, Any]:
    weight = values.get("weight")
    if not isinstance(weight, (int, float)) or not math.isfinite(weight):
        raise ValueError(f"trees: expected edges with a finite weight, got {weight!r} from {start} to {end}")
    return make_plain(values)
