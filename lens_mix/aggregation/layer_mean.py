"""The mean over layers: no products, and what a layer did counts as much as it did."""

from __future__ import annotations

from lens_mix.aggregation.rollout import require_layer_maps, to_float64
from lens_mix.arguments import flags
from lens_mix.maps import MixingMap


def layer_mean(mixing_map: MixingMap, *, normalize: bool = False) -> MixingMap:
    """One map from a stack of layer maps: their mean, raw scores as they are.

    No path through several layers is followed: what a layer's row says of a *position* is taken as said of
    the token that stands there, which a deep layer has long mixed with others. In exchange nothing is divided
    by a row's sum, so that layers which change little count little. On deep causal models this mean orders
    tokens better than a rollout of the same maps (docs/leaderboard.md).

    Args:
        mixing_map: layer maps [layer, query, key], or with heads, which are averaged; any signs, and any rows
            (`queries=[-1]` will do).
        normalize: bring each layer's rows to sum 1 first (scores of 0 or more): all layers count alike.

    Returns:
        A map of kind "input" with one layer, labelled as the last one that is held.

    Raises:
        TypeError, ValueError: not layer maps; with `normalize`, scores below 0.
    """
    flags(normalize=normalize)
    require_layer_maps(mixing_map, "layer_mean")
    merged = mixing_map.replace(scores=to_float64(mixing_map.scores)).merge_heads()
    if normalize:
        merged = merged.normalized()
    return merged.replace(
        scores=merged.scores.mean(0, keepdim=True),
        mask=None if merged.mask is None else merged.visible().any(0),
        kind="input",
        layers=merged.layer_labels[-1:],
        provenance={**merged.provenance, "aggregation": {"name": "layer_mean", "normalize": normalize}},
    )
