"""The attribution tree: the few strong edges that carry a prediction, top-down (Hao et al., AAAI 2021)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lens_mix.aggregation.rollout import require_stackable, to_float64
from lens_mix.arguments import flags, number, one_of, shown
from lens_mix.maps import MixingMap
from lens_mix.maps.positions import Dropped, kept_positions, query_position

if TYPE_CHECKING:
    import networkx
    import rich.tree

Order = Literal["score", "position"]


def attribution_tree(
    mixing_map: MixingMap,
    *,
    threshold: float = 0.4,
    cost: float = 0.0,
    root: int | str | None = None,
    special: Dropped = (),
    top_layer: int | None = None,
    order: Order = "score",
    within_layer: bool = False,
) -> networkx.DiGraph:
    """The attribution tree of a stack of layer maps (Hao et al., AAAI 2021, section 5 and algorithm 1).

    argmax over trees of Σ_(i,j) a_ij - cost · (number of edges), where an edge of layer l needs
    a_ij / max(a of layer l) > threshold; heads are summed, and each token joins once. As in the paper it is
    solved top-down: from the top layer to the lowest, a token that is in the tree takes in those that are
    not. Then every branch that costs more than it brings is cut, which is exact for the tree found. The
    released code is `special=[0], top_layer=-2, order="position", within_layer=True`: it skips the last
    layer because only the row of [CLS], its position 0, counts there.

    Args:
        mixing_map: layer maps [layer, query, key], or with heads; signed scores are fine.
        threshold: τ, 0 to 1, as a share of the largest score of the layer.
        cost: λ, 0 or more, in the scores' unit.
        root: position or token to start from. None: the token whose positive off-diagonal scores, summed
            over all layers, are the largest.
        special: positions or tokens that are never the root, take nothing in, and don't count in a layer's
            largest score; they can be taken in. ([CLS] in the paper's code.)
        top_layer: label of the layer to start from (negative: from the end); None: the last.
        order: who takes in a token that several could have: the one with the largest "score", or the first by
            "position" (the released code).
        within_layer: a token taken in through a layer may take in others through the same layer. The
            released code allows it (where positions ascend), though information can't go that way.

    Returns:
        A networkx DiGraph, one node per token: `(level, position)`, where level l + 1 is the output of the
        l-th layer and the root stands at the top; a token taken in through the l-th layer is `(l, position)`.
        Nodes carry `level`, `layer` (label of the layer whose output they are), `position`, `token`; edges go
        the way the information went, from the token taken in to the one that took it, and carry `weight` (the
        score), `share` (of the layer's largest) and `layer`. `graph.graph` holds `root`, `objective`,
        `tokens` and the options.

    Raises:
        TypeError, ValueError: as `lm.rollout`; options out of range; no positive score.
    """
    require_stackable(mixing_map, "attribution_tree")
    threshold, cost = number("threshold", threshold, 0, 1), number("cost", cost, 0)
    one_of("order", order, ("score", "position"))
    flags(within_layer=within_layer)
    scores = to_float64(mixing_map.scores)
    scores = scores.sum(1) if mixing_map.has_heads else scores
    ordinary = torch.zeros(len(mixing_map.tokens), dtype=torch.bool, device="cpu")
    ordinary[kept_positions(mixing_map.tokens, special, "special")] = True
    top = len(scores) - 1 if top_layer is None else mixing_map.layer_index(top_layer, "top_layer")
    start = _strongest(scores, ordinary) if root is None else query_position(mixing_map.tokens, root, "root")
    shares = _shares(scores, ordinary)
    edges = _grow(shares, ordinary, start, top, threshold, order, within_layer)
    edges, objective = _cut(edges, scores, start, cost)
    graph = _graph(mixing_map, edges, scores, shares, start, top)
    options = {"threshold": threshold, "cost": cost, "order": order, "within_layer": within_layer}
    graph.graph.update(objective=objective, **options)
    return graph


class _Edge(NamedTuple):
    """`query` takes in `key` through the layer at this place."""

    layer: int
    query: int
    key: int


def _strongest(scores: Float[Tensor, "layer query key"], ordinary: Bool[Tensor, " pos"]) -> int:
    # Sums are 0 or more: with -1 a special token is never the largest.
    rows = scores.sum(0).clamp_min(0).fill_diagonal_(0).sum(-1).cpu().masked_fill(~ordinary, -1)
    if float(rows.max()) <= 0:
        raise ValueError(
            "mixing_map: expected a positive score between two tokens, got none; no tree to grow"
        )
    return int(rows.argmax())


def _shares(
    scores: Float[Tensor, "layer query key"], ordinary: Bool[Tensor, " pos"]
) -> Float[Tensor, "layer query key"]:
    """Scores as a share of the largest of the layer's ordinary rows; 0 in a layer without a positive one."""
    largest = scores[:, ordinary.to(scores.device)].amax((1, 2), keepdim=True)
    return torch.where(largest > 0, scores / largest, 0.0).cpu()


def _grow(
    shares: Float[Tensor, "layer query key"],
    ordinary: Bool[Tensor, " pos"],
    root: int,
    top: int,
    threshold: float,
    order: Order,
    within_layer: bool,
) -> list[_Edge]:
    edges: list[_Edge] = []
    inside = {root}
    for layer in range(top, -1, -1):
        above_threshold = (shares[layer] > threshold) & ordinary[:, None]
        candidates = [_Edge(layer, query, key) for query, key in above_threshold.nonzero().tolist()]
        if order == "score":
            candidates.sort(key=lambda edge: -shares[edge.layer, edge.query, edge.key].item())
        # Only the root is in the tree above the top layer. Where both are one set, parents grow as well.
        parents = inside if within_layer and layer != top else set(inside)
        once_more = True
        while once_more:
            before = len(edges)
            for edge in candidates:
                if edge.query in parents and edge.key not in inside:
                    inside.add(edge.key)
                    edges.append(edge)
            once_more = order == "score" and within_layer and len(edges) > before
    return edges


def _cut(
    edges: list[_Edge], scores: Float[Tensor, "layer query key"], root: int, cost: float
) -> tuple[list[_Edge], float]:
    """The branches that bring more than they cost, and what the whole tree brings."""
    gain: dict[int, float] = {}
    branches: set[_Edge] = set()
    # a token takes in others after it was taken in itself, so backwards the branches come first
    for edge in reversed(edges):
        brings = scores[edge.layer, edge.query, edge.key].item() - cost + gain.get(edge.key, 0.0)
        if brings > 0:
            gain[edge.query] = gain.get(edge.query, 0.0) + brings
            branches.add(edge)
    reached, result = {root}, []
    for edge in edges:
        if edge in branches and edge.query in reached:
            reached.add(edge.key)
            result.append(edge)
    return result, gain.get(root, 0.0)


def _graph(
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
    """The tree as lines: each token under the one that took it in, with the layer and the score."""
    import rich.console

    # The same text whatever the terminal.
    console = rich.console.Console(width=200, color_system=None, legacy_windows=False)
    with console.capture() as written:
        console.print(_tree_rich(tree))
    return written.get().rstrip("\n")


def _tree_rich(tree: networkx.DiGraph) -> rich.tree.Tree:
    """The tree as a `rich.tree.Tree`, to print in a terminal; another graph is a ValueError."""
    import rich.text
    import rich.tree

    if "root" not in getattr(tree, "graph", ()):
        raise ValueError(f"tree: expected a graph of attribution_tree (with a root), got {shown(tree)}")

    def branch(node: Any) -> rich.text.Text:
        values = tree.nodes[node]
        label = rich.text.Text(f"{values['token']!r} @{values['position']}")
        for _, _, edge in tree.out_edges(node, data=True):
            label.append(f"  layer {edge['layer']}, {edge['weight']:.3g}", style="dim")
        return label

    root = tree.graph["root"]
    top = rich.tree.Tree(branch(root))
    todo = [(root, top)]
    while todo:
        node, place = todo.pop()
        entering = list(tree.in_edges(node, data=True))
        entering.sort(key=lambda edge: (-edge[2]["layer"], -edge[2]["weight"]))
        todo += [(start, place.add(branch(start))) for start, _, _ in entering]
    return top
