"""The cancel effect: keys that get much attention and send short vectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
import torch

from lens_mix.algebra.vectors import attention_vectors
from lens_mix.arguments import check_columns, several, whole_number
from lens_mix.lens.model_classes import TransformerLensModel
from lens_mix.lens.precision import in_full_precision
from lens_mix.methods.value_norms import ValueNorms
from lens_mix.statistics.passes import each_prompt
from lens_mix.statistics.ranks import spearman
from lens_mix.statistics.token_kinds import TokenKind, token_kind
from lens_mix.tables import Table


@in_full_precision
def weights_and_norms(model: TransformerLensModel, prompts: Any, **options: Any) -> pd.DataFrame:
    """Attention weight against the length of the value-output vector, by head and key.

    Args:
        model, prompts, options: as in `lens_mix.statistics.mixing_ratio.mixing_ratios`; with
            part="cross" positions and tokens are those of the source.

    Returns:
        Columns prompt, layer, head, position, token, weight (mean over the queries that can see the key, in
        0..1), norm (‖f(x)‖ = ‖v W_O‖) and weighted_norm (mean of weight × norm).
    """
    tables = []
    for number, checked in enumerate(each_prompt(model, prompts, ValueNorms(), cross=True, **options)):
        for block in checked.blocks:
            with torch.no_grad():
                pairs = attention_vectors(block).pairs
                norm = pairs.head_norms[0]
            # No head's weight at all: the query can't see the key, and is no witness.
            pattern = pairs.pattern[0].to(norm.dtype)
            query_counts = (pattern > 0).any(0).sum(0).clamp_min(1)
            weight = pattern.sum(1).T / query_counts[:, None]
            keys, heads = weight.shape
            columns = {
                "prompt": number,
                "layer": block.layer,
                "head": list(range(heads)) * keys,
                "position": [key for key in range(keys) for _ in range(heads)],
                "token": [token for token in checked.key_tokens for _ in range(heads)],
                "weight": weight.flatten().tolist(),
                "norm": norm.flatten().tolist(),
                "weighted_norm": (weight * norm).flatten().tolist(),
            }
            tables.append(Table(columns))
    return pd.concat(tables, ignore_index=True)


def no_op_table(table: pd.DataFrame, kind: TokenKind = token_kind) -> pd.DataFrame:
    """Means of a table of `weights_and_norms` by layer and kind of token (Kobayashi et al., 2020, fig. 5)."""
    check_columns("table", table, ("layer", "token", "weight", "norm", "weighted_norm"))
    token_kinds = table["token"].map(kind).rename("kind")
    return table.groupby(["layer", token_kinds])[["weight", "norm", "weighted_norm"]].mean()


def correlations(table: pd.DataFrame, by: Sequence[str] = ("layer",)) -> pd.DataFrame:
    """Spearman correlation of attention weight and norm; far below 0 is the cancel effect.

    Args:
        table: from `weights_and_norms`.
        by: the groups, e.g. ("layer",) or ("layer", "head").
    """
    by = several("by", by, "names of columns", least=1)
    check_columns("by, table", table, ("weight", "norm", *by))
    groups = table.groupby(by)[["weight", "norm"]]
    out = groups.apply(lambda part: spearman(part["weight"].to_numpy(), part["norm"].to_numpy()))
    return out.to_frame("spearman")


def cancelled_tokens(table: pd.DataFrame, count: int = 5) -> pd.DataFrame:
    """The `count` tokens that the cancel effect sits on: most attention for the shortest vectors.

    Columns layer, token, weight, norm (means of the table of `weights_and_norms`) and others_norm, the mean
    of the layer's other tokens; sorted by weight · (1 - norm / others_norm), above 0 where it is at work.
    """
    check_columns("table", table, ("layer", "token", "weight", "norm"))
    count = whole_number("count", count, 1)
    means = table.groupby(["layer", "token"])[["weight", "norm"]].mean()
    sums = table.groupby(["layer", "token"])["norm"].agg(["sum", "size"])
    layers = table.groupby("layer")["norm"].agg(["sum", "size"]).reindex(sums.index, level="layer")
    rest = layers - sums  # of all other tokens in the layer
    out = means.assign(others_norm=rest["sum"] / rest["size"])
    order = (out["weight"] * (1 - out["norm"] / out["others_norm"])).sort_values(ascending=False)
    return out.loc[order.index[:count]].reset_index()
