"""Measure the cancel effect: keys that get much attention but have short value-output vectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix.arguments import check_columns, check_items, check_whole_number
from lens_mix.evaluation.ranks import spearman
from lens_mix.experiments.passes import iterate_prompts, require_matrices
from lens_mix.maps.token_kinds import TokenKind, token_kind
from lens_mix.methods.value_norms import ValueNorms
from lens_mix.models import TransformerLensModel, states_of
from lens_mix.tables import Table

if TYPE_CHECKING:
    from lens_mix.method import Block


def weights_and_norms(model: TransformerLensModel, prompts: Any, **options: Any) -> pd.DataFrame:
    """Return the attention weight and the norm of the value-output vector, by head and key.

    Args:
        model: Any TransformerLens model.
        prompts: One prompt, or a list of them, as in `lens_mix.run`.
        options: As in `lens_mix.experiments.mixing_ratio.mixing_ratios`. With part="cross", positions and
            tokens are those of the source.

    Returns:
        A table with the columns prompt, layer, head, position, token, weight, norm and weighted_norm. The
        weight (0..1) is the mean over the queries that can see the key, norm is ‖f(x)‖ = ‖v W_O‖, and
        weighted_norm is the mean of weight × norm.
    """
    tables = []
    for prompt_index, checked in enumerate(
        iterate_prompts(model, prompts, ValueNorms(), cross=True, **options)
    ):
        for block in checked.blocks:
            norm = _value_output_norms(block)
            # If no head has any weight at a key, the query cannot see it, and is left out of the mean.
            pattern = block.recorded("pattern")[0].to(norm.dtype)
            query_counts = (pattern > 0).any(0).sum(0).clamp_min(1)
            weight = pattern.sum(1).T / query_counts[:, None]
            keys, heads = weight.shape
            columns = {
                "prompt": prompt_index,
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


def _value_output_norms(block: Block) -> Float[Tensor, "key head"]:
    """Return ‖f(x)‖ = ‖v W_O‖ of a block's first prompt, in float32 at least."""
    with block.clean.lens.evaluation_mode():
        value = states_of(block).value[0]
        value = value.to(torch.promote_types(value.dtype, torch.float32))
        W_O = require_matrices(block.layer, block.anatomy.value_path).W_O.to(value.dtype)
        # Fewer value heads than query heads are shared by groups of these.
        group = len(W_O) // value.shape[1]
        # One head at a time, because the vectors of all heads need more memory than the rest of the table.
        norms = [(value[:, head // group] @ matrix).norm(dim=-1) for head, matrix in enumerate(W_O)]
        return torch.stack(norms, dim=1)


def no_op_table(table: pd.DataFrame, kind: TokenKind = token_kind) -> pd.DataFrame:
    """Return the means of a table by layer and kind of token (Kobayashi et al., 2020, fig. 5).

    Args:
        table: A table of `weights_and_norms`.
        kind: A function from a token to the name of its kind.
    """
    check_columns("table", table, ("layer", "token", "weight", "norm", "weighted_norm"))
    token_kinds = table["token"].map(kind).rename("kind")
    return table.groupby(["layer", token_kinds])[["weight", "norm", "weighted_norm"]].mean()


def correlations(table: pd.DataFrame, by: Sequence[str] = ("layer",)) -> pd.DataFrame:
    """Return Spearman's correlation of attention weight and norm; far below 0 means a cancel effect.

    Args:
        table: A table of `weights_and_norms`.
        by: The columns that define the groups, as ("layer",) or ("layer", "head").
    """
    by = check_items("by", by, "names of columns", least=1)
    check_columns("by, table", table, ("weight", "norm", *by))
    groups = table.groupby(by)[["weight", "norm"]]
    correlation = groups.apply(lambda rows: spearman(rows["weight"].to_numpy(), rows["norm"].to_numpy()))
    return correlation.to_frame("spearman")


def cancelled_tokens(table: pd.DataFrame, count: int = 5) -> pd.DataFrame:
    """Return the tokens with the largest cancel effect: much attention, but short vectors.

    The rows are sorted by weight · (1 - norm / others_norm), which is positive if there is a cancel effect.

    Args:
        table: A table of `weights_and_norms`.
        count: How many tokens to return, 1 or more.

    Returns:
        A table with the columns layer, token, weight and norm (means of `table`), and others_norm, the mean
        norm of the layer's other tokens.
    """
    check_columns("table", table, ("layer", "token", "weight", "norm"))
    count = check_whole_number("count", count, 1)
    means = table.groupby(["layer", "token"])[["weight", "norm"]].mean()
    sums = table.groupby(["layer", "token"])["norm"].agg(["sum", "size"])
    layers = table.groupby("layer")["norm"].agg(["sum", "size"]).reindex(sums.index, level="layer")
    others = layers - sums
    ranked = means.assign(others_norm=others["sum"] / others["size"])
    order = (ranked["weight"] * (1 - ranked["norm"] / ranked["others_norm"])).sort_values(ascending=False)
    return ranked.loc[order.index[:count]].reset_index()
