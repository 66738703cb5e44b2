"""Measure how much a component of the block changes the map, and which pairs it amplifies."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix.arguments import check_flags, check_instance, check_items, check_whole_number
from lens_mix.evaluation.ranks import spearman
from lens_mix.maps import MixingMap

# Component of the block -> (map before it, map after it).
_COMPONENTS = {
    "feed_forward": ("attn_res_ln", "atb_ff"),
    "residual": ("atb_ff", "atb_ff_res"),
    "norm": ("atb_ff_res", "atb_ff_res_ln"),
    "whole": ("attn_res_ln", "atb_ff_res_ln"),
}
METHODS = ("attn_res_ln", "atb_ff", "atb_ff_res", "atb_ff_res_ln")  # the methods that `changes` needs


def change(before: MixingMap, after: MixingMap) -> Float[Tensor, " layer"]:
    """Return 1 - Spearman's correlation of two maps, per layer (Kobayashi et al., 2024, eq. 10).

    It is computed over all visible pairs and lies in 0..2; 0 if the order of the pairs is the same.

    Args:
        before: The map before a component.
        after: The map after it, of the same prompt and shape.

    Raises:
        ValueError: Maps with heads, of different prompts or shapes, or without the rows of all positions.
    """
    _check_pair(before, after)
    before.require_every_row("the order of all pairs", "before")
    layers = zip(before.scores.cpu(), after.scores.cpu(), before.visible().cpu(), strict=True)
    values = [1 - spearman(x[pairs].double().numpy(), y[pairs].double().numpy()) for x, y, pairs in layers]
    return torch.tensor(values, dtype=torch.float64, device="cpu")


def changes(maps: Mapping[str, MixingMap]) -> pd.DataFrame:
    """Return the contextualisation change by the feed-forward, its residual connection, its norm, and all.

    Args:
        maps: The result of `lens_mix.run(model, prompt, METHODS)`.

    Returns:
        A table with one row per layer and one column per component.

    Raises:
        ValueError: A map is missing.
    """
    check_instance("maps", maps, Mapping, "a dict of MixingMaps")
    missing = [name for name in METHODS if name not in maps]
    if missing:
        raise ValueError(f"maps: expected {list(METHODS)}, got none of {missing}")
    check_items("maps", maps.values(), "MixingMaps", kind=MixingMap)
    columns = {
        component: change(maps[before], maps[after]).tolist()
        for component, (before, after) in _COMPONENTS.items()
    }
    return pd.DataFrame(columns, index=pd.Index(maps[METHODS[0]].layer_labels, name="layer"))


def amplification(before: MixingMap, after: MixingMap) -> MixingMap:
    """Return FF-amp, the map after minus the map before (Kobayashi et al., 2024, section 5.2).

    The scores may be negative. Give `normalized()` maps to compare shares.

    Args:
        before: The map before a component.
        after: The map after it, of the same prompt and shape.

    Raises:
        ValueError: Maps with heads, or of different prompts, shapes or rows.
    """
    _check_pair(before, after)
    return after.replace(
        scores=after.scores - before.scores,
        method=f"{after.method} - {before.method}",
        parameters={"after": after.parameters, "before": before.parameters},
    )


def top_pairs(amplified: MixingMap, count: int = 10, diagonal: bool = False) -> pd.DataFrame:
    """Return the pairs that are amplified most, over all layers, the largest first.

    Args:
        amplified: A map of `amplification`.
        count: How many pairs to return, 1 or more.
        diagonal: Whether to include pairs of a position with itself.

    Returns:
        A table with the columns layer, query, key, query_token, key_token, amplification.

    Raises:
        ValueError: `count` is below 1.
    """
    count = check_whole_number("count", count, 1)
    check_flags(diagonal=diagonal)
    table = check_instance("amplified", amplified, MixingMap, "a MixingMap").to_dataframe()
    # If keys are another sequence than queries, no pair is a position with itself.
    diagonal = diagonal or not amplified.keys_are_tokens
    # The rows of the table have the order of the flattened scores.
    visible = amplified.visible().cpu().numpy().ravel()
    table = table[visible & (diagonal | (table["query"] != table["key"]))]
    table = table.nlargest(count, "score").rename(columns={"score": "amplification"})
    names = ["layer", "query", "key", "query_token", "key_token", "amplification"]
    return table[names].reset_index(drop=True)


def _check_pair(before: MixingMap, after: MixingMap) -> None:
    for name, mixing_map in (("before", before), ("after", after)):
        check_instance(name, mixing_map, MixingMap, "a MixingMap")
    axes = [(found.scores.shape, found.tokens, found.query_positions) for found in (before, after)]
    if axes[0] != axes[1]:
        raise ValueError(
            "after: expected a map of the same prompt and shape, with the same rows, as before, got shapes "
            f"{list(before.scores.shape)} and {list(after.scores.shape)}"
        )
    if before.scores.ndim != 3:
        raise ValueError(f"before: expected [layer, query, key], got shape {list(before.scores.shape)}")
