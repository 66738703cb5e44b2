"""Information-flow routes: what leads to a prediction, top-down, by edges above a threshold.

Nodes are `(level, position)`, three levels per layer: the residual stream after attention, the feed-forward,
the residual stream after the layer. Level 0 is the first layer's input.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import networkx as nx
import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix.aggregation.rollout import layers_to_mix
from lens_mix.arguments import number, several
from lens_mix.maps import MixingMap
from lens_mix.maps.positions import query_position
from lens_mix.maps.words import merge_axis, resolve_groups
from lens_mix.methods.information_flow_routes import PartShares, part_shares

Words = Literal["words"] | Sequence[str] | Sequence[Sequence[int]] | None
Node = tuple[int, int]

# Of the levels from 1 on, three per layer, in TransformerLens's names.
KINDS = ("resid_mid", "mlp_out", "resid_post")


def information_flow_routes(
    mixing_map: MixingMap,
    queries: int | str | Sequence[int | str] = -1,
    *,
    threshold: float = 0.04,
    words: Words = None,
) -> nx.DiGraph:
    """What leads to some positions at the last layer, top-down by edges whose importance exceeds a threshold.

    Starting from the queries, each node that is reached takes in the edges into it that are above the
    threshold (Ferrando & Voita, EMNLP 2024, section 2); a branch may end above the input. The importance of
    edges is that of `InformationFlowRoutes`. With `per_head` maps each head is an edge of its own, as in the
    authors' code, and what is left of the heads between two tokens is summed; else heads are summed first.

    Args:
        mixing_map: of `information_flow_routes`, with all rows and layers that follow one another.
        queries: positions (negative: from the end) or tokens that occur once, among the words where
            `words` are given.
        threshold: 0 to 1. 0.04 is the authors' tool's.
        words: merge tokens: "words" finds them; or as text, or as lists of positions. A word's row is the
            mean of its tokens', a word's column the sum (`MixingMap.merge_words`).

    Returns:
        Edges the way the information went, with `layer` and `weight` (importance, 0 to 1; 1 into the
        feed-forward, which has one source). `weight` of edges into a "resid_mid" is the sum of their
        `attention` and `residual`, of which each is 0 where it is not above the threshold; with `per_head`
        maps `heads` are the [head, importance] pairs that `attention` is the sum of, the largest first.
        Nodes with `level`, `position`, `token`, `layer` and `kind`: "resid_pre", "resid_mid", "mlp_out" or
        "resid_post". `graph.graph` holds `targets`, `target` where there is one, `tokens`, `threshold`.

    Raises:
        TypeError: no `MixingMap`; a query or threshold of a wrong type.
        ValueError: a map of another method, of some rows, or with tokens dropped or merged; no such query; a
            query twice; a threshold outside 0 to 1; words that don't fit the tokens.
    """
    layers_to_mix(mixing_map, "information_flow_routes", 0.0, None, None, drop_bos=False)
    threshold = number("threshold", threshold, 0, 1)
    shares = part_shares(mixing_map)
    merged = mixing_map
    if words is not None:
        merged, shares = _merged(mixing_map, shares, words)
    asked = several("queries", [queries] if isinstance(queries, (int, str)) else queries, "queries", least=1)
    positions = [query_position(merged.tokens, query, "queries") for query in asked]
    if len(set(positions)) != len(positions):
        raise ValueError(f"queries: expected different positions, got {positions}")
    routes = _Routes(merged, shares, threshold)
    targets = tuple((3 * len(merged.layer_labels), position) for position in positions)
    routes.grow(targets)
    routes.graph.graph.update(targets=targets, tokens=list(merged.tokens), threshold=threshold)
    if len(targets) == 1:
        routes.graph.graph["target"] = targets[0]
    return routes.graph


def _merged(mixing_map: MixingMap, shares: PartShares, words: Words) -> tuple[MixingMap, PartShares]:
    groups = None if words == "words" else words
    positions, _ = resolve_groups(mixing_map.tokens, groups, "words")

    def mean(values: Float[Tensor, "layer query"]) -> Float[Tensor, "layer word"]:
        return merge_axis(values, positions, -1, torch.mean)

    resid_pre, resid_mid, mlp_out = map(mean, shares[:3])
    return mixing_map.merge_words(groups), PartShares(resid_pre, resid_mid, mlp_out, shares.parallel)


class _Routes:
    """The graph as it grows from the top."""

    def __init__(self, mixing_map: MixingMap, shares: PartShares, threshold: float) -> None:
        self.graph, self._map, self._shares, self._threshold = nx.DiGraph(), mixing_map, shares, threshold
        scores = mixing_map.scores.double().cpu()
        heads = scores if mixing_map.has_heads else scores[:, None]
        # The residual has an edge of its own; of its importance each head's diagonal holds an equal part.
        self._heads = heads - torch.diag_embed(shares.resid_pre / heads.shape[1])[:, None]

    def grow(self, targets: Sequence[Node]) -> None:
        todo = list(targets)
        for node in todo:
            self._add_node(node)
        while todo:
            node = todo.pop()
            for source, values in self._into(node):
                if source not in self.graph:
                    self._add_node(source)
                    todo.append(source)
                self.graph.add_edge(source, node, **values, layer=self.graph.nodes[node]["layer"])

    def _add_node(self, node: Node) -> None:
        (level, position), labels = node, self._map.layer_labels
        kind = "resid_pre" if level == 0 else KINDS[(level - 1) % 3]
        layer = labels[0] - 1 if level == 0 else labels[(level - 1) // 3]
        token = self._map.tokens[position]
        self.graph.add_node(node, level=level, position=position, token=token, layer=layer, kind=kind)

    def _into(self, node: Node) -> Iterator[tuple[Node, dict[str, Any]]]:
        """The edges into a node that are above the threshold."""
        (level, position), shares = node, self._shares
        if level == 0:
            return
        place, kind = (level - 1) // 3, KINDS[(level - 1) % 3]
        if kind == "resid_mid":
            yield from self._into_mid(place, position)
        elif kind == "mlp_out":
            yield (level - 2 if shares.parallel[place] else level - 1, position), {"weight": 1.0}
        else:
            parts = {level - 2: shares.resid_mid[place, position], level - 1: shares.mlp_out[place, position]}
            for source, weight in parts.items():
                if weight > self._threshold:
                    yield (source, position), {"weight": float(weight)}

    def _into_mid(self, place: int, position: int) -> Iterator[tuple[Node, dict[str, Any]]]:
        heads = self._heads[place, :, position]
        kept = torch.where(heads > self._threshold, heads, 0.0)
        own = float(self._shares.resid_pre[place, position])
        residual = own if own > self._threshold else 0.0
        attention = kept.sum(0).tolist()
        for key, of_key in enumerate(attention):
            values = {"attention": of_key, "residual": residual if key == position else 0.0}
            if any(values.values()):
                if self._map.has_heads:
                    order = kept[:, key].argsort(descending=True).tolist()
                    values["heads"] = [[head, float(kept[head, key])] for head in order if kept[head, key]]
                yield (3 * place, key), {"weight": of_key + values["residual"], **values}
