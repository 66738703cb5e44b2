"""Mixing maps as networkx graphs: the layered graph, and the information-flow graph of one query.

Nodes are `(level, position)`: level 0 is the input of the first layer, level l the output of the l-th layer.
Edges go the way the information went, from (l − 1, key) to (l, query). Nodes carry `level`, `position`,
`token` and `layer` (the label of the layer whose output they are; for the input one less than the first);
edges carry `weight` and `layer`. `MixingMap.to_networkx(layer)` is the graph of one layer.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Literal

import networkx as nx

from lens_mix.aggregation.flow import capacity_stack
from lens_mix.arguments import flags, instance, number, one_of
from lens_mix.maps import MixingMap
from lens_mix.maps.positions import query_position


def layered_graph(
    mixing_map: MixingMap,
    *,
    residual: float | None = None,
    layer: int | None = None,
    drop_bos: bool = False,
    threshold: float = 0.0,
) -> nx.DiGraph:
    """The graph that rollout and flow go through: all layers, rows to 1, heads averaged, residual mixed in.

    The edge from (l − 1, key) to (l, query) has `capacity` = `weight` = Â_l[query, key], 0 to 1. Rollout
    from an input to a query is the sum over paths of the product of weights; flow the maximum flow
    (Abnar & Zuidema, ACL 2020, section 3).

    Args:
        residual: the weight of the residual, 0 to 1; None: what the method calls for.
        layer: the last layer, by label (negative: from the end); None: all.
        drop_bos: leave out position 0.
        threshold: only edges whose weight is above this, 0 or more.

    Raises:
        TypeError, ValueError: as `lens_mix.flow`; a threshold below 0.
    """
    threshold = number("threshold", threshold, 0)
    flags(drop_bos=drop_bos)
    stack = capacity_stack(mixing_map, residual, to_layer=layer, drop_bos=drop_bos).capacities
    graph: nx.DiGraph = stack.to_networkx(threshold=threshold)
    labels = [stack.layer_labels[0] - 1, *stack.layer_labels]
    for _, values in graph.nodes(data=True):
        values["layer"] = labels[values["level"]]
    for _, _, values in graph.edges(data=True):
        values["capacity"] = values["weight"]
    graph.graph["tokens"] = list(stack.tokens)
    return graph


def information_flow_graph(
    mixing_map: MixingMap,
    query: int | str | None = None,
    *,
    by: Literal["rollout", "flow", "weight"] = "rollout",
    key: int | str | None = None,
    threshold: float | None = None,
    layer: int | None = None,
    residual: float | None = None,
    drop_bos: bool = False,
) -> nx.DiGraph:
    """The edges that carry the information of one query, the others cut off, renormalised.

    The layered graph without the edges whose amount is not above `threshold`, and without the nodes that are
    then on no path from an input to the query (`prune_graph`). What an edge's amount is:

    | `by` | amount of an edge |
    |---|---|
    | "rollout" | its share of the rollout of the query (over paths through it, products of weights) |
    | "flow" | its share of a maximum flow from `key` to the query (there may be several such flows) |
    | "weight" | its weight Â |

    Args:
        query: position (negative: from the end), or a token that occurs once, at the last level; None: the
            row that the map means (`MixingMap.default_query`).
        key: the input position or token; for "flow" only, and needed there.
        threshold: 0 or more. Amounts of "rollout" and "flow" sum to 1 over the edges of each level. None:
            0.01, or half the largest that leaves a path from an input, if that is less.
        layer, residual, drop_bos: as in `layered_graph`.

    Returns:
        Edges with `weight` (those into a node sum to 1), `share` (of the query's information, in the pruned
        graph), `amount` (before pruning) and `capacity`; nodes with `share`, which sums to 1 in each level.

    Raises:
        ValueError: no such query or key; no path left above the threshold (the message says below which one
            is left); nothing flows from key to query.
    """
    one_of("by", by, ("rollout", "flow", "weight"))
    if (by == "flow") != (key is not None):
        raise ValueError(f"key: expected one with by='flow' and none otherwise, got key={key!r}, by={by!r}")
    graph = layered_graph(mixing_map, residual=residual, layer=layer, drop_bos=drop_bos)
    tokens: list[str] = graph.graph["tokens"]
    if query is None:
        query = (mixing_map.drop_bos() if drop_bos else mixing_map).meant_query
    target = (max(level for level, _ in graph.nodes), query_position(tokens, query))
    if key is not None:
        _flow_amounts(graph, (0, query_position(tokens, key, "key")), target)
    else:
        shares = _passed_down(graph, target) if by == "rollout" else dict.fromkeys(graph, 1.0)
        for _, end, values in graph.edges(data=True):
            values["amount"] = shares[end] * values["weight"]
    if threshold is None:
        threshold = min(0.01, _widths(graph, "amount")[target] / 2)
    pruned = prune_graph(graph, target, threshold, by="amount", from_inputs=True)
    pruned.graph.update(by=by, threshold=threshold, edges_before=graph.number_of_edges())
    return pruned


def prune_graph(
    graph: nx.DiGraph,
    target: Hashable = None,
    threshold: float = 0.0,
    *,
    by: str = "weight",
    renormalize: bool = True,
    from_inputs: bool = False,
) -> nx.DiGraph:
    """Only the edges above a threshold that lead to `target`; weights renormalised. The graph itself stays.

    Args:
        graph: acyclic, edges the way the information went; an attribution tree, say.
        target: the node whose sources are asked for; None: the `root` of an attribution tree.
        threshold: an edge stays if its `by` is above this, 0 or more.
        by: the edge attribute that is compared.
        renormalize: weights into a node divided by their sum (the old weight stays as `raw_weight`), and
            `share` given to nodes and edges: 1 at the target, passed down by weight.
        from_inputs: leave out what does not come from the nodes of the lowest level.

    Raises:
        TypeError: not a DiGraph.
        ValueError: a cycle; no such target; an edge without the attribute; a threshold below 0; nothing left.
    """
    threshold = number("threshold", threshold, 0)
    flags(renormalize=renormalize, from_inputs=from_inputs)
    if target is None and isinstance(graph, nx.DiGraph):
        target = graph.graph.get("root", graph.graph.get("target"))
    _check_graph(graph, target)
    amounts = {edge: _amount(graph, edge, by) for edge in graph.edges}
    subgraph = graph.edge_subgraph([edge for edge, amount in amounts.items() if amount > threshold])
    nodes = nx.ancestors(subgraph, target) if target in subgraph else set()
    largest, where = max((amounts[edge] for edge in graph.in_edges(target)), default=0.0), ""
    if from_inputs:
        widths = _widths(graph, by)
        nodes = {node for node in nodes if widths[node] > threshold}  # some path from below holds throughout
        largest, where = widths[target], " from the lowest level"
    if not nodes:
        reason = f"up to which something leads to {target}{where}"
        raise ValueError(f"threshold: expected less than {largest:.6g}, {reason}, got {threshold}")
    pruned = nx.DiGraph(subgraph.subgraph(nodes | {target}))  # a copy: weights are written over below
    pruned.graph.update(graph.graph)
    pruned.graph["target"] = target
    if renormalize:
        _renormalize(pruned, target)
    return pruned


def _check_graph(graph: nx.DiGraph, target: Hashable) -> None:
    instance("graph", graph, nx.DiGraph, "a networkx DiGraph")
    if target not in graph:
        raise ValueError(f"target: expected a node of the graph ({graph.number_of_nodes()}), got {target!r}")
    if not nx.is_directed_acyclic_graph(graph):
        raise ValueError("graph: expected none with a cycle, got one; a node per level and position has none")


def _amount(graph: nx.DiGraph, edge: tuple[Hashable, Hashable], by: str) -> float:
    values = graph.edges[edge]
    if by not in values or "weight" not in values:
        raise ValueError(
            f"by: expected every edge to have {by!r} and 'weight', got {sorted(values)} at {edge}"
        )
    return float(values[by])


def _widths(graph: nx.DiGraph, by: str) -> dict[Hashable, float]:
    """Per node, the smallest `by` on the path from an input where that smallest is largest; 0 if none."""
    lowest = min(level for level, _ in graph.nodes)
    widths = {node: math.inf if node[0] == lowest else 0.0 for node in graph}
    for node in nx.topological_sort(graph):
        for start, _, values in graph.in_edges(node, data=True):
            widths[node] = max(widths[node], min(widths[start], values[by]))
    return widths


def _flow_amounts(graph: nx.DiGraph, source: tuple[int, int], target: tuple[int, int]) -> None:
    value, flows = nx.maximum_flow(graph, source, target)
    if value <= 0:
        expected = f"expected an input from which something flows to {target}"
        raise ValueError(f"key: {expected}, got {source}: none does")
    into = dict.fromkeys(graph, 0.0)
    for start, ends in flows.items():
        for end, amount in ends.items():
            graph.edges[start, end]["amount"] = amount / value
            into[end] += amount / value
    for _, end, values in graph.edges(data=True):
        # What the target got through this edge, as a part of what came to the edge's end.
        values["weight"] = values["amount"] / into[end] if into[end] > 0 else 0.0


def _passed_down(graph: nx.DiGraph, target: Hashable) -> dict[Hashable, float]:
    """What reaches each node of 1 at the target, divided by the weights on the way down."""
    mass: dict[Hashable, float] = dict.fromkeys(graph, 0.0)
    mass[target] = 1.0
    for node in reversed(list(nx.topological_sort(graph))):
        for start, _, values in graph.in_edges(node, data=True):
            mass[start] += mass[node] * values["weight"]
    return mass


def _renormalize(graph: nx.DiGraph, target: Hashable) -> None:
    for node in graph:
        entering = [values for _, _, values in graph.in_edges(node, data=True)]
        total = sum(values["weight"] for values in entering)
        for values in entering:
            values["raw_weight"] = values["weight"]
            values["weight"] = values["weight"] / total if total else 0.0
    for node, share in _passed_down(graph, target).items():
        graph.nodes[node]["share"] = share
    for _, end, values in graph.edges(data=True):
        values["share"] = graph.nodes[end]["share"] * values["weight"]
