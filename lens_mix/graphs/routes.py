"""Build the graph of information-flow routes: the edges above a threshold that lead to a prediction.

Nodes are `(level, position)`, with three levels per layer: the residual stream after attention, the
feed-forward, and the residual stream after the layer. Level 0 is the first layer's input. In an
encoder-decoder, the decoder's levels are above those of the encoder, with a fourth level per layer after
cross-attention. Source positions come first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import networkx as nx
import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix.aggregation.joint import check_parts
from lens_mix.aggregation.rollout import layers_to_mix
from lens_mix.arguments import check_number
from lens_mix.graphs.route_stacks import RouteStack, grow_graph
from lens_mix.maps import MixingMap
from lens_mix.maps.spans import Span, find_positions
from lens_mix.maps.words import merge_axis, resolve_groups
from lens_mix.methods.component_shares import PartShares, own_share, part_shares

RouteWords = Literal["words"] | Sequence[str] | Sequence[Sequence[int]] | None


def information_flow_routes(
    mixing_map: MixingMap | Mapping[str, MixingMap],
    queries: Span = -1,
    *,
    threshold: float = 0.04,
    words: RouteWords = None,
) -> nx.DiGraph:
    """Return the graph of the important edges that lead to some positions at the last layer.

        >>> m = lm.run(model, "The Eiffel Tower is in the city of", "information_flow_routes")
        >>> graph = lm.graphs.information_flow_routes(m, threshold=0.02)
        >>> lm.view.information_flow(graph).savefig("routes.png")

    The graph grows from the queries down: each node adds the edges into it that are above the threshold
    (Ferrando & Voita, EMNLP 2024, section 2). A branch may end above the input. The importance of edges is
    that of `InformationFlowRoutes`. With `per_head` maps, the threshold applies to each head, as in the
    authors' code, and the remaining heads between two tokens are summed. Otherwise heads are summed first.

    Args:
        mixing_map: The map of `information_flow_routes`, with all rows and consecutive layers. For an
            encoder-decoder, the maps of the three parts (`lm.run(..., part="all")`); the graph then leads
            down to the source and the target's prefix.
        queries: Positions (negative: from the end), or texts of the prompt. With `words` they are words; for
            an encoder-decoder they are in the target.
        threshold: The threshold, 0 to 1. The authors' tool uses 0.04.
        words: The words to merge, for one part only: "words" (found from the tokens), text, or lists of
            positions. A word's row is the mean of its tokens' rows, and its column the sum of their columns
            (`MixingMap.merge_words`).

    Returns:
        The graph. Edges have the direction of the information, and the attributes `layer` and `weight`
        (importance, 0 to 1; 1 into the feed-forward, which has one input). The `weight` of an edge into a
        "resid_mid" is the sum of its `attention` and `residual`, each of which is 0 unless it is above the
        threshold. With `per_head` maps, `heads` lists the [head, importance] pairs that `attention` is the
        sum of, the largest first.

        Nodes have `level`, `position`, `token`, `layer` and `kind`: "resid_pre", "resid_mid", "mlp_out",
        "resid_post", or "resid_mid_cross" after a decoder's cross-attention. `graph.graph` contains
        `targets`, `tokens`, `threshold`, `target` if there is only one, and for an encoder-decoder `source`,
        the number of source tokens. The decoder's input has the level of the encoder's output. Targets also
        have the model's `prediction` and its `probability`, if the map has them.

    Raises:
        TypeError: If `mixing_map` is not a `MixingMap`, or a query or the threshold has a wrong type.
        ValueError: If the map is of another method, has only some rows, or has tokens dropped or merged. If a
            query does not exist or occurs twice, the threshold is outside 0 to 1, or the words do not fit the
            tokens.
    """
    threshold = check_number("threshold", threshold, 0, 1)
    if isinstance(mixing_map, Mapping):
        if words is not None:
            raise ValueError(f"words: expected None for the parts of an encoder-decoder, got {words!r}")
        stacks, query_tokens = _joint_stacks(mixing_map), mixing_map["decoder"].tokens
    else:
        stacks = [_read_stack(mixing_map, words)]
        query_tokens = stacks[0].tokens
    positions = find_positions(query_tokens, queries, "queries")
    top = stacks[-1]
    targets = tuple((top.last_level, top.first_position + position) for position in positions)
    graph = grow_graph(stacks, targets, threshold)
    predicting = mixing_map["decoder"] if isinstance(mixing_map, Mapping) else mixing_map
    if words is None and predicting.explained is not None:
        # The map has all rows, so that the row of a position has its number.
        for target, position in zip(targets, positions, strict=True):
            entry = predicting.explained[position]
            if entry.probability is not None:
                graph.nodes[target].update(prediction=entry.prediction, probability=entry.probability)
    tokens = [token for stack in stacks for token in stack.tokens]
    graph.graph.update(targets=targets, tokens=tokens, threshold=threshold)
    if len(targets) == 1:
        graph.graph["target"] = targets[0]
    if len(stacks) > 1:
        graph.graph["source"] = top.first_position
    return graph


def _read_stack(mixing_map: MixingMap, words: RouteWords) -> RouteStack:
    layers_to_mix(mixing_map, "information_flow_routes", 0.0, None, None, drop_bos=False)
    shares = part_shares(mixing_map)
    if words is not None:
        groups = None if words == "words" else words
        positions, _ = resolve_groups(mixing_map.tokens, groups, "words")
        resid_pre, resid_mid, mlp_out = (merge_axis(each, positions, -1, torch.mean) for each in shares[:3])
        shares = PartShares(resid_pre, resid_mid, mlp_out, shares.parallel)
        mixing_map = mixing_map.merge_words(groups)
    return _make_stack(mixing_map, shares.resid_pre, shares)


def _joint_stacks(maps: Mapping[str, MixingMap]) -> list[RouteStack]:
    """Return the stack of the encoder, and that of the decoder above it."""
    parts = check_parts(maps)
    encoder, decoder, cross = _read_stack(parts["encoder"], None), parts["decoder"], parts["cross"]
    upper = _make_stack(
        decoder,
        own_share(decoder),
        part_shares(cross),
        first_level=encoder.last_level,
        first_position=len(encoder.tokens),
        cross=(_split_heads(cross)[..., : len(encoder.tokens)], own_share(cross)),
    )
    return [encoder, upper]


def _make_stack(
    mixing_map: MixingMap, residual: Float[Tensor, "layer query"], shares: PartShares, **above: Any
) -> RouteStack:
    heads = _split_heads(mixing_map)
    # The residual has its own edge, so each head's equal share of it is subtracted from the diagonal.
    heads = heads - torch.diag_embed(residual / heads.shape[1])[:, None]
    tokens, labels = mixing_map.tokens, mixing_map.layer_labels
    return RouteStack(tokens, labels, (heads, residual), shares, mixing_map.has_heads, **above)


def _split_heads(mixing_map: MixingMap) -> Float[Tensor, "layer head query key"]:
    """Return the scores in float64, with a head axis of size 1 if the map has no heads."""
    scores = mixing_map.scores.double().cpu()
    return scores if mixing_map.has_heads else scores[:, None]
