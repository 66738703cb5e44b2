"""The graph of information-flow routes as it grows from the top, over one stack of layers or two."""

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
# What heads sent, and what was there before.
Received = tuple[Float[Tensor, "layer head query _key"], Float[Tensor, "layer query"]]

# Of the levels from 1 on, three per layer, in TransformerLens's names.
_KINDS = ("resid_mid", "mlp_out", "resid_post")
_DECODER_KINDS = ("resid_mid", "resid_mid_cross", "mlp_out", "resid_post")


@dataclasses.dataclass(frozen=True, eq=False)
class RouteStack:
    """The layers of one stack, from a level and a position on.

    Attributes:
        attention: importance of what heads sent, the residual not in it, and of the residual.
        shares: importance of the other parts; of a decoder `resid_mid` is after cross-attention.
        by_head: whether heads are to be told apart.
        first_level, first_position: of its input, in the graph.
        cross: of a decoder, importance of what heads sent of the source, and of what was there before.
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
        return _KINDS if self.cross is None else _DECODER_KINDS

    @property
    def last_level(self) -> int:
        return self.first_level + len(self.node_kinds) * len(self.labels)

    def holds(self, node: Node) -> bool:
        return self.first_position <= node[1] < self.first_position + len(self.tokens)

    def place(self, node: Node) -> tuple[int, str, int]:
        """Which layer (-1: what enters the first), of which kind, and the position among the stack's own."""
        layer, step = divmod(node[0] - self.first_level - 1, len(self.node_kinds))
        return layer, "resid_pre" if layer < 0 else self.node_kinds[step], node[1] - self.first_position

    def attributes(self, node: Node) -> dict[str, Any]:
        layer, kind, place = self.place(node)
        label = self.labels[0] - 1 if layer < 0 else self.labels[layer]
        attributes = {"token": self.tokens[place], "layer": label, "kind": kind}
        return {"level": node[0], "position": node[1], **attributes}

    def into(self, node: Node, threshold: float) -> Iterator[tuple[Node, dict[str, Any]]]:
        """The edges into a node that are above the threshold."""
        (level, position), (layer, kind, place), shares = node, self.place(node), self.shares
        entering = self.first_level + len(self.node_kinds) * layer
        if kind == "resid_mid":
            yield from self._received(self.attention, (entering, self.first_position), node, threshold)
        elif kind == "resid_mid_cross" and self.cross is not None:
            yield from self._received(self.cross, (self.first_level, 0), node, threshold)
        elif kind == "mlp_out":
            yield (entering if shares.parallel[layer] else level - 1, position), {"weight": 1.0}
        elif kind == "resid_post":
            parts = {level - 2: shares.resid_mid[layer, place], level - 1: shares.mlp_out[layer, place]}
            for source, weight in parts.items():
                if weight > threshold:
                    yield (source, position), {"weight": float(weight)}

    def _received(
        self, received: Received, first: Node, node: Node, threshold: float
    ) -> Iterator[tuple[Node, dict[str, Any]]]:
        """The edges of an attention branch: from its keys, `first` the first of them, and the residual's."""
        layer, _, place = self.place(node)
        heads, share = received[0][layer, :, place], float(received[1][layer, place])
        own_node, weights = (node[0] - 1, node[1]), torch.where(heads > threshold, heads, 0.0)
        keys = {(first[0], first[1] + key): of_key for key, of_key in enumerate(weights.T)}
        for source in dict.fromkeys([*keys, own_node]):
            of_key = keys.get(source, weights.new_zeros(len(weights)))
            attention = float(of_key.sum())
            residual = share if source == own_node and share > threshold else 0.0
            if attention or residual:
                values: dict[str, Any] = {"attention": attention, "residual": residual}
                if self.by_head:
                    order = of_key.argsort(descending=True).tolist()
                    values["heads"] = [[head, float(of_key[head])] for head in order if of_key[head]]
                yield source, {"weight": attention + residual, **values}


def grown(stacks: Sequence[RouteStack], targets: Sequence[Node], threshold: float) -> nx.DiGraph:
    """The graph as it grows from the top."""
    graph, todo = nx.DiGraph(), list(targets)

    def stack_of(node: Node) -> RouteStack:
        return next(stack for stack in stacks if stack.holds(node))

    for node in todo:
        graph.add_node(node, **stack_of(node).attributes(node))
    while todo:  # a node is put here once, when it joins the graph
        node = todo.pop()
        for source, values in stack_of(node).into(node, threshold):
            if source not in graph:
                graph.add_node(source, **stack_of(source).attributes(source))
                todo.append(source)
            graph.add_edge(source, node, **values, layer=graph.nodes[node]["layer"])
    return graph
