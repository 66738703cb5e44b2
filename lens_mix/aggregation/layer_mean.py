"""Average layer maps over layers."""

from __future__ import annotations

from lens_mix.aggregation.rollout import require_layer_maps, to_float64
from lens_mix.arguments import check_flags
from lens_mix.maps import MixingMap


def layer_mean(mixing_map: MixingMap, *, normalize: bool = False) -> MixingMap:
    """Return the mean of the layer maps, with their raw scores.

        >>> m = lm.run(model, "The Eiffel Tower is in the city of", "value_zeroing")
        >>> lm.layer_mean(m).top(3)

    The mean follows no path through several layers. It treats the score of a *position* in each layer as that
    of the token there, although deep layers have mixed this position with others. But no row is divided by
    its sum, so layers that change little count little. On deep causal models, the mean orders tokens better
    than a rollout of the same maps, as the leaderboard in the documentation shows.

    Args:
        mixing_map: Layer maps `[layer, query, key]` of any sign, with all rows or some. Heads are averaged.
        normalize: Whether to divide each layer's rows by their sum first, so that all layers count equally.
            It needs scores of 0 or more.

    Returns:
        A map of kind "input" with one layer, whose label is that of the last layer of `mixing_map`.

    Raises:
        TypeError: If `mixing_map` is not a `MixingMap`.
        ValueError: If it does not contain layer maps, or if a score is below 0 with `normalize`.
    """
    check_flags(normalize=normalize)
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
