"""Grow the graph of information-flow routes from the top, over one stack of layers or two."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import networkx as nx
import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix.methods.component_shares import PartShares

Node = tuple[int, int]
# The importance of each head's contribution to a position, and that of the residual stream before it.
Received = tuple[Float[Tensor, "layer head query _key"], Float[Tensor, "layer query"]]

# The levels of each layer, by their names in TransformerLens.
_KINDS = ("resid_mid", "mlp_out", "resid_post")
_DECODER_KINDS = ("resid_mid", "resid_mid_cross", "mlp_out", "resid_post")


@dataclasses.dataclass(frozen=True, eq=False)
class RouteStack:
    """The layers of one stack (a decoder-only model, an encoder, or a decoder) in the graph.

    Attributes:
        tokens: The tokens of the stack's positions.
        labels: The labels of the layers.
        attention: The importance of self-attention, without the residual, and that of the residual.
        shares: The importance of the other components. In a decoder, `resid_mid` is after cross-attention.
        by_head: Whether edges list their heads.
        first_level: The level of the stack's input in the graph.
        first_position: The first position of the stack in the graph.
        cross: For a decoder, the importance of cross-attention, and that of the residual before it.
    """

    tokens: list[str]
    labels: list[int]
    attention: Received
    shares: PartShares
    by_head: bool
    first_level: int = 0
    first_position: int = 0
    cross: Received | None = None

    @property
    def node_kinds(self) -> tuple[str, ...]:
        """Return the kinds of a layer's nodes, from below."""
        return _KINDS if self.cross is None else _DECODER_KINDS

    @property
    def last_level(self) -> int:
        """Return the level of the last layer's output."""
        return self.first_level + len(self.node_kinds) * len(self.labels)

    def contains(self, node: Node) -> bool:
        """Return whether a node belongs to this stack."""
        return self.first_position <= node[1] < self.first_position + len(self.tokens)

    def locate(self, node: Node) -> tuple[int, str, int]:
        """Return a node's layer (-1 for the input of the first), its kind, and its position in the stack."""
        layer, step = divmod(node[0] - self.first_level - 1, len(self.node_kinds))
        return layer, "resid_pre" if layer < 0 else self.node_kinds[step], node[1] - self.first_position

    def make_attributes(self, node: Node) -> dict[str, Any]:
        """Return the attributes of a node in the graph."""
        layer, kind, position = self.locate(node)
        label = self.labels[0] - 1 if layer < 0 else self.labels[layer]
        attributes = {"token": self.tokens[position], "layer": label, "kind": kind}
        return {"level": node[0], "position": node[1], **attributes}

    def find_edges(self, node: Node, threshold: float) -> Iterator[tuple[Node, dict[str, Any]]]:
        """Yield the edges into a node that are above the threshold: the start, and the attributes."""
        (level, position), (layer, kind, own_position), shares = node, self.locate(node), self.shares
        input_level = self.first_level + len(self.node_kinds) * layer
        if kind == "resid_mid":
            first_key = (input_level, self.first_position)
            yield from self._find_attention_edges(self.attention, first_key, node, threshold)
        elif kind == "resid_mid_cross" and self.cross is not None:
            yield from self._find_attention_edges(self.cross, (self.first_level, 0), node, threshold)
        elif kind == "mlp_out":
            yield (input_level if shares.parallel[layer] else level - 1, position), {"weight": 1.0}
        elif kind == "resid_post":
            mid, mlp = shares.resid_mid[layer, own_position], shares.mlp_out[layer, own_position]
            for start, weight in ((level - 2, mid), (level - 1, mlp)):
                if weight > threshold:
                    yield (start, position), {"weight": float(weight)}

    def _find_attention_edges(
        self, received: Received, first_key: Node, node: Node, threshold: float
    ) -> Iterator[tuple[Node, dict[str, Any]]]:
        """Yield the edges into a node from the keys of an attention, and from the residual stream."""
        layer, _, position = self.locate(node)
        heads, share = received[0][layer, :, position], float(received[1][layer, position])
        own_node, weights = (node[0] - 1, node[1]), torch.where(heads > threshold, heads, 0.0)
        level, first = first_key
        attention = weights.sum(0).tolist()
        keys: dict[Node, int | None] = {
            (level, first + key): key for key, weight in enumerate(attention) if weight
        }
        if share > threshold:
            keys.setdefault(own_node, None)
        for start, key in keys.items():
            values: dict[str, Any] = {
                "attention": 0.0 if key is None else attention[key],
                "residual": share if start == own_node and share > threshold else 0.0,
            }
            if self.by_head:
                order = [] if key is None else weights[:, key].argsort(descending=True).tolist()
                values["heads"] = [[head, float(weights[head, key])] for head in order if weights[head, key]]
            yield start, {"weight": values["attention"] + values["residual"], **values}


def grow_graph(stacks: Sequence[RouteStack], targets: Sequence[Node], threshold: float) -> nx.DiGraph:
    """Return the graph of the edges above the threshold that lead to the targets."""
    graph, unvisited = nx.DiGraph(), list(targets)

    def find_stack(node: Node) -> RouteStack:
        return next(stack for stack in stacks if stack.contains(node))

    for node in unvisited:
        graph.add_node(node, **find_stack(node).make_attributes(node))
    while unvisited:
        node = unvisited.pop()
        for start, values in find_stack(node).find_edges(node, threshold):
            if start not in graph:
                graph.add_node(start, **find_stack(start).make_attributes(start))
                unvisited.append(start)
            graph.add_edge(start, node, **values, layer=graph.nodes[node]["layer"])
    return graph
