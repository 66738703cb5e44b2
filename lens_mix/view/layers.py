"""Name the layers of a map, for the titles of its pictures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lens_mix.maps import MixingMap


def name_layers(mixing_map: MixingMap) -> list[str]:
    """Return a name per layer: "layer 3" for a layer map.

    For an input map it is "up to layer 3" (rollout, flow, `decompx`), "added by layer 3" (`alti_logit`),
    "whole model" (`gim`, `occlusion`, ...) or "mean of the layers".
    """
    labels = mixing_map.layer_labels
    if mixing_map.kind == "layer":
        return [f"layer {label}" for label in labels]
    # Both maps of a difference have the same layers, so the names are those of its first map.
    record = _mapping(_mapping(mixing_map.provenance, "difference"), "of") or mixing_map.provenance
    aggregation = _mapping(record, "aggregation")
    if len(labels) == 1 and aggregation.get("name") == "layer_mean":
        return ["mean of the layers"]
    if len(labels) == 1 and record.get("whole_model") and not aggregation:
        return ["whole model"]
    # If layers add up, layer l is what block l adds; in every other input map, what reached its output.
    reaches = "added by" if record.get("layers_add_up") else "up to"
    return [f"{reaches} layer {label}" for label in labels]


def _mapping(record: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the entry of a record that a user may have written; an empty one if it is not a mapping."""
    entry = record.get(name)
    return entry if isinstance(entry, Mapping) else {}
