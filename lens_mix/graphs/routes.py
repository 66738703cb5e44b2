"""Information-flow routes: what leads to a prediction, top-down, by edges above a threshold.

Nodes are `(level, position)`, three levels per layer: the residual stream after attention, the feed-forward,
the residual stream after the layer. Level 0 is the first layer's input. An encoder-decoder's layers stand one
above the other, the decoder's with a fourth level, after cross-attention; source positions come first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import networkx as nx
import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix.aggregation.joint import fitting_parts
from lens_mix.aggregation.rollout import layers_to_mix
from lens_mix.arguments import number, several
from lens_mix.graphs.route_stacks import RouteStack, grown
from lens_mix.maps import MixingMap
from lens_mix.maps.positions import query_position
from lens_mix.maps.words import merge_axis, resolve_groups
from lens_mix.methods.component_shares import PartShares, own_share, part_shares

Words = Literal["words"] | Sequence[str] | Sequence[Sequence[int]] | None


def information_flow_routes(
    mixing_map: MixingMap | Mapping[str, MixingMap],
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
        mixing_map: of `information_flow_routes`, with all rows and layers that follow one another. Of an
            encoder-decoder the three parts (`lm.run(..., part="all")`): a graph down to source and prefix.
        queries: positions (negative: from the end) or tokens that occur once, among the words where
            `words` are given; of an encoder-decoder in the target.
        threshold: 0 to 1. 0.04 is the authors' tool's.
        words: merge tokens: "words" finds them; or as text, or as lists of positions. A word's row is the
            mean of its tokens', a word's column the sum (`MixingMap.merge_words`). For one part only.

    Returns:
        Edges the way the information went, with `layer` and `weight` (importance, 0 to 1; 1 into the
        feed-forward, which has one source). `weight` of edges into a "resid_mid" is the sum of their
        `attention` and `residual`, of which each is 0 where it is not above the threshold; with `per_head`
        maps `heads` are the [head, importance] pairs that `attention` is the sum of, the largest first.
        Nodes with `level`, `position`, `token`, `layer` and `kind`: "resid_pre", "resid_mid", "mlp_out" or
        "resid_post"; after a decoder's cross-attention "resid_mid_cross". `graph.graph` holds `targets`,
        `target` where there is one, `tokens`, `threshold`, and of an encoder-decoder `source`, how many of
        the tokens are the source's; the decoder's input stands at the level that the encoder ends at.

    Raises:
        TypeError: no `MixingMap`; a query or threshold of a wrong type.
        ValueError: a map of another method, of some rows, or with tokens dropped or merged; no such query; a
            query twice; a threshold outside 0 to 1; words that don't fit the tokens.
    """
    threshold = number("threshold", threshold, 0, 1)
    if isinstance(mixing_map, Mapping):
        if words is not None:
            raise ValueError(f"words: expected None for the parts of an encoder-decoder, got {words!r}")
        stacks, query_tokens = _joint_stacks(mixing_map), mixing_map["decoder"].tokens
    else:
        stacks = [_one_stack(mixing_map, words)]
        query_tokens = stacks[0].tokens
    asked = several("queries", [queries] if isinstance(queries, (int, str)) else queries, "queries", least=1)
    positions = [query_position(query_tokens, query, "queries") for query in asked]
    if len(set(positions)) != len(positions):
        raise ValueError(f"queries: expected different positions, got {positions}")
    top = stacks[-1]
    targets = tuple((top.last_level, top.first_position + position) for position in positions)
    graph = grown(stacks, targets, threshold)
    tokens = [token for stack in stacks for token in stack.tokens]
    graph.graph.update(targets=targets, tokens=tokens, threshold=threshold)
    if len(targets) == 1:
        graph.graph["target"] = targets[0]
    if len(stacks) > 1:
        graph.graph["source"] = top.first_position
    return graph


def _one_stack(mixing_map: MixingMap, words: Words) -> RouteStack:
    layers_to_mix(mixing_map, "information_flow_routes", 0.0, None, None, drop_bos=False)
    shares = part_shares(mixing_map)
    if words is not None:
        groups = None if words == "words" else words
        positions, _ = resolve_groups(mixing_map.tokens, groups, "words")
        resid_pre, resid_mid, mlp_out = (merge_axis(each, positions, -1, torch.mean) for each in shares[:3])
        shares = PartShares(resid_pre, resid_mid, mlp_out, shares.parallel)
        mixing_map = mixing_map.merge_words(groups)
    return _stack(mixing_map, shares.resid_pre, shares)


def _joint_stacks(maps: Mapping[str, MixingMap]) -> list[RouteStack]:
    """The encoder, and above it the decoder, whose cross-attention reads what the encoder ends in."""
    parts = fitting_parts(maps)
    encoder, decoder, cross = _one_stack(parts["encoder"], None), parts["decoder"], parts["cross"]
    upper = _stack(
        decoder,
        own_share(decoder),
        part_shares(cross),
        first_level=encoder.last_level,
        first_position=len(encoder.tokens),
        cross=(_heads(cross)[..., : len(encoder.tokens)], own_share(cross)),
    )
    return [encoder, upper]


def _stack(
    mixing_map: MixingMap, residual: Float[Tensor, "layer query"], shares: PartShares, **above: Any
) -> RouteStack:
    heads = _heads(mixing_map)
    # The residual has an edge of its own: each head's diagonal holds an equal part of it.
    heads = heads - torch.diag_embed(residual / heads.shape[1])[:, None]
    tokens, labels = mixing_map.tokens, mixing_map.layer_labels
    return RouteStack(tokens, labels, (heads, residual), shares, mixing_map.has_heads, **above)


def _heads(mixing_map: MixingMap) -> Float[Tensor, "layer head query key"]:
    scores = mixing_map.scores.double().cpu()
    return scores if mixing_map.has_heads else scores[:, None]
