"""How much a part of the block changes the map: contextualisation change, and what it amplifies."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix.arguments import flags, instance, several, whole_number
from lens_mix.maps import MixingMap
from lens_mix.statistics.ranks import spearman

# Part of the block -> (map before it, map after it).
PARTS = {
    "feed_forward": ("attn_res_ln", "atb_ff"),
    "residual": ("atb_ff", "atb_ff_res"),
    "norm": ("atb_ff_res", "atb_ff_res_ln"),
    "whole": ("attn_res_ln", "atb_ff_res_ln"),
}
METHODS = ("attn_res_ln", "atb_ff", "atb_ff_res", "atb_ff_res_ln")  # what `lens_mix.run` is to be asked for


def change(before: MixingMap, after: MixingMap) -> Float[Tensor, " layer"]:
    """1 - Spearman between two maps, per layer, over all pairs that can be (Kobayashi et al., 2024, eq. 10).

    In 0..2: 0 where the order of the pairs is the same. Raises ValueError: maps with heads, of different
    prompts or shapes, or without the rows of all positions.
    """
    _check_pair(before, after)
    before.require_every_row("the order of all pairs", "before")
    layers = zip(before.scores.cpu(), after.scores.cpu(), before.visible().cpu(), strict=True)
    values = [1 - spearman(x[pairs].double().numpy(), y[pairs].double().numpy()) for x, y, pairs in layers]
    return torch.tensor(values, dtype=torch.float64, device="cpu")


def changes(maps: Mapping[str, MixingMap]) -> pd.DataFrame:
    """Contextualisation change by the feed-forward, its residual connection, its norm, and all together.

    One row per layer, one column per part. `maps` is what `lens_mix.run(model, prompt, METHODS)` gives.
    Raises ValueError: one is missing.
    """
    instance("maps", maps, Mapping, "a dict of MixingMaps")
    missing = [name for name in METHODS if name not in maps]
    if missing:
        raise ValueError(f"maps: expected {list(METHODS)}, got none of {missing}")
    several("maps", maps.values(), "MixingMaps", kind=MixingMap)
    columns = {part: change(maps[x], maps[y]).tolist() for part, (x, y) in PARTS.items()}
    return pd.DataFrame(columns, index=pd.Index(maps[METHODS[0]].layer_labels, name="layer"))


def amplification(before: MixingMap, after: MixingMap) -> MixingMap:
    """FF-amp: map after minus map before, of either sign (Kobayashi et al., 2024, section 5.2).

    `normalized()` maps compare shares. Raises ValueError: maps with heads, of other prompts, shapes or rows.
    """
    _check_pair(before, after)
    return after.replace(
        scores=after.scores - before.scores,
        method=f"{after.method} - {before.method}",
        parameters={"after": after.parameters, "before": before.parameters},
    )


def top_pairs(amplified: MixingMap, count: int = 10, diagonal: bool = False) -> pd.DataFrame:
    """The pairs that were amplified most, over all layers.

    Columns layer, query, key, query_token, key_token, amplification, largest first.

    Args:
        amplified: from `amplification`.
        count: how many, 1 or more (else ValueError).
        diagonal: count pairs of a position with itself too.
    """
    count = whole_number("count", count, 1)
    flags(diagonal=diagonal)
    table = instance("amplified", amplified, MixingMap, "a MixingMap").to_dataframe()
    # Where keys are other tokens, no pair is one of a position with itself.
    diagonal = diagonal or amplified.key_tokens is not None
    # the table has the order of the scores
    visible = amplified.visible().cpu().numpy().ravel()
    table = table[visible & (diagonal | (table["query"] != table["key"]))]
    table = table.nlargest(count, "score").rename(columns={"score": "amplification"})
    names = ["layer", "query", "key", "query_token", "key_token", "amplification"]
    return table[names].reset_index(drop=True)


def _check_pair(before: MixingMap, after: MixingMap) -> None:
    for name, each in (("before", before), ("after", after)):
        instance(name, each, MixingMap, "a MixingMap")
    places = [(each.scores.shape, each.tokens, each.query_positions) for each in (before, after)]
    if places[0] != places[1]:
        raise ValueError(
            "after: expected a map of the same prompt and shape, with the same rows, as before, got shapes "
            f"{list(before.scores.shape)} and {list(after.scores.shape)}"
        )
    if before.scores.ndim != 3:
        raise ValueError(f"before: expected [layer, query, key], got shape {list(before.scores.shape)}")
