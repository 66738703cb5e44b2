"""Build an attribution tree: the few edges with the largest scores, top-down (Hao et al., AAAI 2021)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lens_mix.aggregation.rollout import require_chain, to_float64
from lens_mix.arguments import check_choice, check_flags, check_number, describe_value
from lens_mix.maps import MixingMap
from lens_mix.maps.positions import Dropped
from lens_mix.maps.spans import find_query, kept_positions

if TYPE_CHECKING:
    import networkx
    import rich.tree

TreeOrder = Literal["score", "position"]


def attribution_tree(
    mixing_map: MixingMap,
    *,
    threshold: float = 0.4,
    cost: float = 0.0,
    root: int | str | None = None,
    special: Dropped = (),
    top_layer: int | None = None,
    order: TreeOrder = "score",
    within_layer: bool = False,
) -> networkx.DiGraph:
    """Return the attribution tree of layer maps (Hao et al., AAAI 2021, section 5 and algorithm 1).

        >>> m = lm.run(model, "The Eiffel Tower is in the city of", "attention_attribution")
        >>> tree = lm.attribution_tree(m, threshold=0.2)
        >>> print(lm.aggregation.tree_text(tree))

    The objective is to maximize Σ_(i,j) a_ij - cost · (number of edges). An edge of layer l needs
    a_ij / max(a of layer l) > threshold. Heads are summed, and each token is added once.

    As in the paper, the tree grows from the top layer to the lowest: a token of the tree adds tokens that are
    not in it as its children. Then each branch that costs more than its scores is removed, which is exact for
    the tree that was grown. The options of the released code are `special=[0], top_layer=-2,
    order="position", within_layer=True`. It skips the last layer because only the row of [CLS], at position
    0, counts there.

    Args:
        mixing_map: Layer maps `[layer, query, key]`, or with heads. Scores may be negative.
        threshold: τ, 0 to 1, as a share of the largest score of the layer.
        cost: λ, 0 or more, in the unit of the scores.
        root: The position of the root, or a text of the prompt, of which the last token is meant. None: the
            token whose positive off-diagonal scores have the largest sum over all layers.
        special: Positions or tokens that are never the root and add no tokens. They do not count in a layer's
            largest score, but can be added themselves ([CLS] in the paper's code).
        top_layer: The label of the layer to start from (negative: from the end). None: the last.
        order: Which token adds one that several could add: the one with the largest "score", or the first by
            "position" (as in the released code).
        within_layer: Whether a token that was added through a layer may add others through the same layer.
            The released code allows it for ascending positions, although information cannot flow that way.

    Returns:
        A networkx DiGraph with one node `(level, position)` per token. Level l + 1 is the output of the l-th
        layer, and the root is at the top; a token that was added through the l-th layer is `(l, position)`.
        Nodes have `level`, `layer` (the label of the layer whose output they are), `position` and `token`.
        Edges have the direction of the information, from the added token to the one that added it, and
        `weight` (the score), `share` (of the layer's largest score) and `layer`. `graph.graph` contains
        `root`, `objective`, `tokens` and the options.

    Raises:
        TypeError: As in `lm.rollout`.
        ValueError: As in `lm.rollout`, or if an option is out of range, or there is no positive score.
    """
    require_chain(mixing_map, "attribution_tree")
    threshold, cost = check_number("threshold", threshold, 0, 1), check_number("cost", cost, 0)
    check_choice("order", order, ("score", "position"))
    check_flags(within_layer=within_layer)
    scores = to_float64(mixing_map.scores)
    scores = scores.sum(1) if mixing_map.has_heads else scores
    ordinary = torch.zeros(len(mixing_map.tokens), dtype=torch.bool, device="cpu")
    ordinary[kept_positions(mixing_map.tokens, special, "special")] = True
    top = len(scores) - 1 if top_layer is None else mixing_map.layer_index(top_layer, "top_layer")
    start = _find_root(scores, ordinary) if root is None else find_query(mixing_map.tokens, root, "root")
    shares = _compute_shares(scores, ordinary)
    edges = _grow(shares, ordinary, start, top, threshold, order, within_layer)
    edges, objective = _remove_costly_branches(edges, scores, start, cost)
    graph = _make_graph(mixing_map, edges, scores, shares, start, top)
    options = {"threshold": threshold, "cost": cost, "order": order, "within_layer": within_layer}
    graph.graph.update(objective=objective, **options)
    return graph


class _Edge(NamedTuple):
    """An edge of the tree: `query` added `key` through the layer with index `layer`."""

    layer: int
    query: int
    key: int


def _find_root(scores: Float[Tensor, "layer query key"], ordinary: Bool[Tensor, " pos"]) -> int:
    # Sums are 0 or more, so a special token with -1 is never the largest.
    rows = scores.sum(0).clamp_min(0).fill_diagonal_(0).sum(-1).cpu().masked_fill(~ordinary, -1)
    if float(rows.max()) <= 0:
        raise ValueError(
            "mixing_map: expected a positive score between two different tokens to grow a tree, got none"
        )
    return int(rows.argmax())


def _compute_shares(
    scores: Float[Tensor, "layer query key"], ordinary: Bool[Tensor, " pos"]
) -> Float[Tensor, "layer query key"]:
    """Return the scores divided by the largest of the layer's ordinary rows, or 0 if that is not positive."""
    largest = scores[:, ordinary.to(scores.device)].amax((1, 2), keepdim=True)
    return torch.where(largest > 0, scores / largest, 0.0).cpu()


def _grow(
    shares: Float[Tensor, "layer query key"],
    ordinary: Bool[Tensor, " pos"],
    root: int,
    top: int,
    threshold: float,
    order: TreeOrder,
    within_layer: bool,
) -> list[_Edge]:
    """Return the edges of the tree in the order in which they are added, from the top layer down."""
    edges: list[_Edge] = []
    inside = {root}
    for layer in range(top, -1, -1):
        above_threshold = (shares[layer] > threshold) & ordinary[:, None]
        candidates = [_Edge(layer, query, key) for query, key in above_threshold.nonzero().tolist()]
        if order == "score":
            candidates.sort(key=lambda edge: -shares[edge.layer, edge.query, edge.key].item())
        # With `within_layer`, `parents` is the set `inside` itself and grows with it. Through the top layer,
        # only the root may add tokens.
        parents = inside if within_layer and layer != top else set(inside)
        may_grow = True
        while may_grow:
            before = len(edges)
            for edge in candidates:
                if edge.query in parents and edge.key not in inside:
                    inside.add(edge.key)
                    edges.append(edge)
            may_grow = order == "score" and within_layer and len(edges) > before
    return edges


def _remove_costly_branches(
    edges: list[_Edge], scores: Float[Tensor, "layer query key"], root: int, cost: float
) -> tuple[list[_Edge], float]:
    """Return the edges of the branches whose scores exceed their cost, and the objective of the tree."""
    gains: dict[int, float] = {}
    kept: set[_Edge] = set()
    # A token adds others after it was added itself, so in reverse order its branches come before it.
    for edge in reversed(edges):
        gain = scores[edge.layer, edge.query, edge.key].item() - cost + gains.get(edge.key, 0.0)
        if gain > 0:
            gains[edge.query] = gains.get(edge.query, 0.0) + gain
            kept.add(edge)
    reached, result = {root}, []
    for edge in edges:
        if edge in kept and edge.query in reached:
            reached.add(edge.key)
            result.append(edge)
    return result, gains.get(root, 0.0)


def _make_graph(
    mixing_map: MixingMap, edges: list[_Edge], scores: Tensor, shares: Tensor, root: int, top: int
) -> networkx.DiGraph:
    import networkx as nx

    labels = [mixing_map.layer_labels[0] - 1, *mixing_map.layer_labels]
    graph = nx.DiGraph()
    levels = {root: top + 1, **{edge.key: edge.layer for edge in edges}}
    for position, level in levels.items():
        token = mixing_map.tokens[position]
        graph.add_node((level, position), level=level, layer=labels[level], position=position, token=token)
    for edge in edges:
        graph.add_edge(
            (levels[edge.key], edge.key),
            (levels[edge.query], edge.query),
            weight=scores[edge.layer, edge.query, edge.key].item(),
            share=shares[edge.layer, edge.query, edge.key].item(),
            layer=labels[edge.layer + 1],
        )
    graph.graph.update(root=(levels[root], root), tokens=list(mixing_map.tokens), method=mixing_map.method)
    return graph


def tree_text(tree: networkx.DiGraph) -> str:
    """Return the tree as lines of text: each token below the one that added it, with layer and score.

    >>> m = lm.run(model, "The Eiffel Tower is in the city of", "attention_attribution")
    >>> print(lm.aggregation.tree_text(lm.attribution_tree(m)))
    """
    import rich.console

    # Fixed options make the text independent of the terminal, and of a notebook, which would show it twice.
    console = rich.console.Console(width=200, color_system=None, legacy_windows=False, force_jupyter=False)
    with console.capture() as written:
        console.print(_make_rich_tree(tree))
    return written.get().rstrip("\n")


def _make_rich_tree(tree: networkx.DiGraph) -> rich.tree.Tree:
    """Return the tree as a `rich.tree.Tree`, which rich can print.

    Raises:
        ValueError: If the graph has no root.
    """
    import rich.text
    import rich.tree

    if "root" not in getattr(tree, "graph", ()):
        raise ValueError(
            f"tree: expected a graph of attribution_tree (with a root), got {describe_value(tree)}"
        )

    def write_label(node: Any) -> rich.text.Text:
        values = tree.nodes[node]
        label = rich.text.Text(f"{values['token']!r} @{values['position']}")
        for _, _, edge in tree.out_edges(node, data=True):
            label.append(f"  layer {edge['layer']}, {edge['weight']:.3g}", style="dim")
        return label

    root = tree.graph["root"]
    rich_root = rich.tree.Tree(write_label(root))
    unvisited = [(root, rich_root)]
    while unvisited:
        node, rich_node = unvisited.pop()
        entering = list(tree.in_edges(node, data=True))
        entering.sort(key=lambda edge: (-edge[2]["layer"], -edge[2]["weight"]))
        unvisited += [(start, rich_node.add(write_label(start))) for start, _, _ in entering]
    return rich_root
