"""Build networkx graphs from maps: the layered graph, and the information-flow graph of one query.

Nodes are `(level, position)`: level 0 is the input of the first layer, and level l is the output of the l-th
layer. Edges have the direction of the information, from (l − 1, key) to (l, query). Nodes have the attributes
`level`, `position`, `token` and `layer` (the label of the layer whose output they are; for the input, the
first label minus 1). Edges have `weight` and `layer`. `MixingMap.to_networkx(layer)` is the graph of one
layer.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Literal

import networkx as nx

from lens_mix.aggregation.flow import capacity_stack
from lens_mix.arguments import check_choice, check_flags, check_instance, check_number
from lens_mix.maps import MixingMap
from lens_mix.maps.spans import find_query


def layered_graph(
    mixing_map: MixingMap,
    *,
    residual: float | None = None,
    layer: int | None = None,
    drop_bos: bool = False,
    threshold: float = 0.0,
) -> nx.DiGraph:
    """Return the graph of all layers on which rollout and flow are defined.

        >>> m = lm.run(model, "The Eiffel Tower is in the city of", "attention")
        >>> graph = lm.graphs.layered_graph(m, threshold=0.05)
        >>> graph.number_of_edges()

    The edge from (l − 1, key) to (l, query) has `capacity` = `weight` = Â_l[query, key], 0 to 1, as in
    `lens_mix.rollout`. The rollout score of an input and a query is the sum over paths of the product of
    weights, and the flow is the maximum flow (Abnar & Zuidema, ACL 2020, section 3).

    Args:
        mixing_map: The layer maps.
        residual: The residual weight, 0 to 1. None: the weight of the method.
        layer: The label of the last layer (negative: from the end). None: all layers.
        drop_bos: Whether to leave out position 0.
        threshold: The graph has only edges whose weight is above this number, 0 or more.

    Raises:
        TypeError: As in `lens_mix.flow`.
        ValueError: As in `lens_mix.flow`, or if `threshold` is below 0.
    """
    threshold = check_number("threshold", threshold, 0)
    check_flags(drop_bos=drop_bos)
    stack = capacity_stack(mixing_map, residual, to_layer=layer, drop_bos=drop_bos).capacities
    graph: nx.DiGraph = stack.to_networkx(threshold=threshold)
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
    """Return the edges of the layered graph that matter most for one query, with new weights.

        >>> m = lm.run(model, "The Eiffel Tower is in the city of", "value_zeroing")
        >>> graph = lm.graphs.information_flow_graph(m, threshold=0.02)
        >>> lm.view.information_flow(graph).savefig("graph.png")

    The graph contains the edges whose amount is above `threshold`, and the nodes that then lie on a path from
    an input to the query (`prune_graph`). The amount of an edge is defined by `by`:

    | `by` | amount of an edge |
    |---|---|
    | "rollout" | its share of the query's rollout: over paths through it, the sum of products of weights |
    | "flow" | its share of a maximum flow from `key` to the query (there may be several such flows) |
    | "weight" | its weight Â |

    Args:
        mixing_map: The layer maps.
        query: The query at the last level: a position (negative: from the end), or a text of the prompt, of
            which the last token is meant. None: the row of `MixingMap.default_query`.
        by: The definition of the amount.
        key: The input position, or a text in the same way, for "flow" only, which needs it.
        threshold: The threshold for amounts, 0 or more. Amounts of "rollout" and "flow" sum to 1 over the
            edges of each level. None: 0.01, or half the largest threshold that leaves a path, if that is
            less.
        layer: The label of the last layer, as in `layered_graph`.
        residual: The residual weight, as in `layered_graph`.
        drop_bos: Whether to leave out position 0.

    Returns:
        The graph. Edges have `weight` (the weights into a node sum to 1), `share` (of the query's information
        in this graph), `amount` (before pruning) and `capacity`. Nodes have `share`, which sums to 1 in each
        level.

    Raises:
        ValueError: If the query or key does not exist, no path is above the threshold (the message gives the
            largest threshold), or nothing flows from key to query.
    """
    check_choice("by", by, ("rollout", "flow", "weight"))
    if (by == "flow") != (key is not None):
        raise ValueError(
            f"key: expected a key with by='flow', and None otherwise, got key={key!r} with by={by!r}"
        )
    graph = layered_graph(mixing_map, residual=residual, layer=layer, drop_bos=drop_bos)
    tokens: list[str] = graph.graph["tokens"]
    if query is None:
        query = (mixing_map.drop_bos() if drop_bos else mixing_map).default_query_position
    target = (max(level for level, _ in graph.nodes), find_query(tokens, query))
    if key is not None:
        _set_flow_amounts(graph, (0, find_query(tokens, key, "key")), target)
    else:
        shares = _compute_shares(graph, target) if by == "rollout" else dict.fromkeys(graph, 1.0)
        for _, end, values in graph.edges(data=True):
            values["amount"] = shares[end] * values["weight"]
    if threshold is None:
        threshold = min(0.01, _compute_widths(graph, "amount")[target] / 2)
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
    """Return a copy of the graph with only the edges above a threshold that lead to `target`.

        >>> m = lm.run(model, "The Eiffel Tower is in the city of", "information_flow_routes")
        >>> graph = lm.graphs.information_flow_routes(m)
        >>> lm.graphs.prune_graph(graph, threshold=0.05).number_of_edges()

    Args:
        graph: An acyclic graph whose edges have the direction of the information, such as an attribution
            tree.
        target: The node to which the edges must lead. None: the `root` or the `target` of `graph.graph`.
        threshold: An edge stays if its attribute `by` is above this number, 0 or more.
        by: The edge attribute to compare.
        renormalize: Whether to divide the weights into each node by their sum (`raw_weight` keeps the old
            weight), and to give nodes and edges a `share`: 1 at the target, and distributed below by weight.
        from_inputs: Whether to keep only paths from the nodes of the lowest level.

    Raises:
        TypeError: If `graph` is not a DiGraph.
        ValueError: If the graph has a cycle, the target does not exist, an edge lacks the attribute, the
            threshold is below 0, or no edge is left.
    """
    threshold = check_number("threshold", threshold, 0)
    check_flags(renormalize=renormalize, from_inputs=from_inputs)
    if target is None and isinstance(graph, nx.DiGraph):
        target = graph.graph.get("root", graph.graph.get("target"))
    _check_graph(graph, target)
    amounts = {edge: _read_amount(graph, edge, by) for edge in graph.edges}
    subgraph = graph.edge_subgraph([edge for edge, amount in amounts.items() if amount > threshold])
    nodes = nx.ancestors(subgraph, target) if target in subgraph else set()
    largest, start = max((amounts[edge] for edge in graph.in_edges(target)), default=0.0), "a path"
    if from_inputs:
        widths = _compute_widths(graph, by)
        nodes = {node for node in nodes if widths[node] > threshold}
        largest, start = widths[target], "a path from the lowest level"
    if not nodes:
        raise ValueError(
            f"threshold: expected less than {largest:.6g} to keep {start} to {target}, got {threshold}"
        )
    # `DiGraph` copies the subgraph, so that new weights do not change the given graph.
    pruned = nx.DiGraph(subgraph.subgraph(nodes | {target}))
    pruned.graph.update(graph.graph)
    pruned.graph["target"] = target
    if renormalize:
        _renormalize(pruned, target)
    return pruned


def _check_graph(graph: nx.DiGraph, target: Hashable) -> None:
    check_instance("graph", graph, nx.DiGraph, "a networkx DiGraph")
    if target not in graph:
        count = graph.number_of_nodes()
        raise ValueError(f"target: expected one of the {count} nodes of the graph, got {target!r}")
    if not nx.is_directed_acyclic_graph(graph):
        raise ValueError(
            "graph: expected an acyclic graph, got one with a cycle; make one node per level and position"
        )


def _read_amount(graph: nx.DiGraph, edge: tuple[Hashable, Hashable], by: str) -> float:
    values = graph.edges[edge]
    if by not in values or "weight" not in values:
        raise ValueError(
            f"by: expected every edge to have {by!r} and 'weight', got {sorted(values)} at {edge}"
        )
    return float(values[by])


def _compute_widths(graph: nx.DiGraph, by: str) -> dict[Hashable, float]:
    """Return the width of each node: the largest, over paths from an input, of the smallest `by` on the path.

    The width of a node that no input reaches is 0.
    """
    lowest = min(level for level, _ in graph.nodes)
    widths = {node: math.inf if node[0] == lowest else 0.0 for node in graph}
    for node in nx.topological_sort(graph):
        for start, _, values in graph.in_edges(node, data=True):
            widths[node] = max(widths[node], min(widths[start], values[by]))
    return widths


def _set_flow_amounts(graph: nx.DiGraph, source: tuple[int, int], target: tuple[int, int]) -> None:
    value, flows = nx.maximum_flow(graph, source, target)
    if value <= 0:
        raise ValueError(
            f"key: expected an input with a flow above 0 to {target}, got {source} with a flow of 0"
        )
    into = dict.fromkeys(graph, 0.0)
    for start, ends in flows.items():
        for end, amount in ends.items():
            graph.edges[start, end]["amount"] = amount / value
            into[end] += amount / value
    for _, end, values in graph.edges(data=True):
        # The weight is this edge's share of the flow that enters its end.
        values["weight"] = values["amount"] / into[end] if into[end] > 0 else 0.0


def _compute_shares(graph: nx.DiGraph, target: Hashable) -> dict[Hashable, float]:
    """Return the share of each node: 1 at the target, distributed down the edges by their weights."""
    shares: dict[Hashable, float] = dict.fromkeys(graph, 0.0)
    shares[target] = 1.0
    for node in reversed(list(nx.topological_sort(graph))):
        for start, _, values in graph.in_edges(node, data=True):
            shares[start] += shares[node] * values["weight"]
    return shares


def _renormalize(graph: nx.DiGraph, target: Hashable) -> None:
    for node in graph:
        entering = [values for _, _, values in graph.in_edges(node, data=True)]
        total = sum(values["weight"] for values in entering)
        for values in entering:
            values["raw_weight"] = values["weight"]
            values["weight"] = values["weight"] / total if total else 0.0
    for node, share in _compute_shares(graph, target).items():
        graph.nodes[node]["share"] = share
    for _, end, values in graph.edges(data=True):
        values["share"] = graph.nodes[end]["share"] * values["weight"]
