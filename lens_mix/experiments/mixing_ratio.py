"""Compute the mixing ratio: how much of a representation came from other positions, by stage of the block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix._algebra.feed_forward import feed_forward_shares
from lens_mix._algebra.vectors import AttentionVectors, attention_vectors
from lens_mix._blocks.block import Block
from lens_mix._care.precision import in_full_precision
from lens_mix._classes.model_classes import TransformerLensModel, UnsupportedModelError
from lens_mix.arguments import check_choice, check_columns, check_items
from lens_mix.evaluation.ranks import spearman
from lens_mix.experiments.passes import PromptBlocks, iterate_prompts
from lens_mix.maps.token_kinds import TokenKind, token_kind
from lens_mix.method import Method
from lens_mix.methods.atb_ff import AtbFfResLn
from lens_mix.methods.attn_res import AttnResLn
from lens_mix.tables import Table

_ATTENTION_STAGES = ("attn_w", "attn_n", "attn_res_w", "attn_res", "attn_res_ln")
_STAGES = (*_ATTENTION_STAGES, "atb_ff_res_ln")


@in_full_precision
def mixing_ratios(
    model: TransformerLensModel, prompts: Any, stages: Sequence[str] | None = None, **options: Any
) -> pd.DataFrame:
    """Return the mixing ratio of every token, layer and stage (Kobayashi et al., EMNLP 2021, section 4).

    The ratio is r_i = ‖Σ_{j≠i} F_ij‖ / (‖Σ_{j≠i} F_ij‖ + ‖F_ii‖), in 0..1; 0 means that nothing came from
    other positions. The weight-based stages use the sum of the weights instead of the norm.

    Args:
        model: Any TransformerLens model.
        prompts: One prompt, or a list of them, as in `lens_mix.run`.
        stages: Some of "attn_w" (attention weights), "attn_n" (`value_norm`), "attn_res_w", "attn_res",
            "attn_res_ln", "atb_ff_res_ln" (after the feed-forward, variant A). None: all stages that can be
            computed for the model.
        options: `queries`, `layers`, `part`, `prepend_bos`, further model inputs, as in `lens_mix.run`.

    Returns:
        A table with the columns prompt, layer, position, token, token_id, stage, ratio.

    Raises:
        ValueError: An unknown stage.
        UnsupportedModelError: A given stage cannot be computed for the model.
    """
    expected = f"some of {list(_STAGES)}"
    names = tuple(_STAGES if stages is None else check_items("stages", stages, expected, least=1))
    for stage in names:
        check_choice("stages", stage, _STAGES)
    rows = []
    passes = _run_prompts(model, prompts, names, stages is None, options)
    for prompt_index, (checked, computed_stages) in enumerate(passes):
        queries = [(query, checked.tokens[query], int(checked.token_ids[query])) for query in checked.queries]
        for block in checked.blocks:
            with torch.no_grad():
                ratios = block_mixing_ratios(block, computed_stages)
            rows += [
                (prompt_index, block.layer, *query, stage, value)
                for stage, ratio in ratios.items()
                for query, value in zip(queries, ratio[0].tolist(), strict=True)
            ]
    return Table(rows, columns=["prompt", "layer", "position", "token", "token_id", "stage", "ratio"])


def _run_prompts(
    model: TransformerLensModel,
    prompts: Any,
    stages: Sequence[str],
    may_skip_feed_forward: bool,
    options: dict[str, Any],
) -> Iterator[tuple[PromptBlocks, Sequence[str]]]:
    """Yield the clean pass of each prompt, and the stages to compute.

    If the model does not support the stage after the feed-forward and `may_skip_feed_forward` is True, that
    stage is left out.
    """
    methods: list[Method] = [AttnResLn()]
    if "atb_ff_res_ln" in stages:
        methods.append(AtbFfResLn())
    has_first = False
    try:
        for checked in iterate_prompts(model, prompts, methods, **options):
            has_first = True
            yield checked, stages
    except UnsupportedModelError:
        # An unsupported model fails with its first prompt. A later error is about that prompt, not the model.
        if has_first or not may_skip_feed_forward or len(methods) == 1:
            raise
        for checked in iterate_prompts(model, prompts, methods[:1], **options):
            yield checked, _ATTENTION_STAGES


@in_full_precision
def block_mixing_ratios(
    block: Block, stages: Sequence[str] = _ATTENTION_STAGES
) -> dict[str, Float[Tensor, "batch query"]]:
    """Return the mixing ratios of one block by stage, without a vector for each pair of positions.

    Args:
        block: A block whose clean pass recorded "pattern" and "value".
        stages: As in `mixing_ratios`.
    """
    vectors = attention_vectors(block)
    functions = {
        "attn_w": lambda: _compute_weight_ratio(block, residual=0.0),
        "attn_n": lambda: vectors.attention.mixing_ratio(),
        "attn_res_w": lambda: _compute_weight_ratio(block, residual=1.0),
        "attn_res": lambda: vectors.residual.mixing_ratio(),
        "attn_res_ln": lambda: vectors.normed.mixing_ratio(),
        "atb_ff_res_ln": lambda: _compute_feed_forward_ratio(block, vectors),
    }
    return {stage: functions[stage]() for stage in stages}


def _compute_feed_forward_ratio(block: Block, vectors: AttentionVectors) -> Float[Tensor, "batch query"]:
    shares = feed_forward_shares(block, vectors, "on_path")
    total, diagonal = vectors.normed.total, vectors.normed.diagonal
    if block.anatomy.parallel:
        added = shares.joined(shares.share(vectors.states.resid_pre))
        total, diagonal = total + added, diagonal + added
    diagonal_norm: Tensor = torch.linalg.vector_norm(shares.after(diagonal), dim=-1)
    mixed: Tensor = torch.linalg.vector_norm(shares.after(total - diagonal), dim=-1)
    return mixed / (mixed + diagonal_norm)


def _compute_weight_ratio(block: Block, residual: float) -> Float[Tensor, "batch query"]:
    pattern = block.recorded("pattern")
    weights = pattern.to(torch.promote_types(pattern.dtype, torch.float32)).mean(dim=1)
    diagonal = weights.gather(2, block.queries[..., None])[..., 0]
    mixed = weights.sum(-1) - diagonal
    # The map with the residual is 0.5 A + 0.5 I; the factors 0.5 cancel in the ratio.
    return mixed / (mixed + diagonal + residual)


# ------------------------------------------------------------------ tables


def by_layer(table: pd.DataFrame) -> pd.DataFrame:
    """Return the mean ratio per layer and stage of a table of `mixing_ratios`.

    There is one row per layer, one column per stage, and a last row "mean" over all layers.
    """
    check_columns("table", table, ("layer", "stage", "ratio"))
    means = table.pivot_table(index="layer", columns="stage", values="ratio", aggfunc="mean", sort=True)
    means = means[[stage for stage in _STAGES if stage in means.columns]]
    return pd.concat([means, means.mean().to_frame("mean").T])


def by_kind(table: pd.DataFrame, kind: TokenKind = token_kind) -> pd.DataFrame:
    """Return the mean ratio per kind of token and stage, and the number of tokens of each kind.

    Args:
        table: A table of `mixing_ratios`.
        kind: A function from a token to the name of its kind.
    """
    check_columns("table", table, ("layer", "stage", "ratio", "token"))
    token_kinds = table["token"].map(kind).rename("kind")
    means = table.groupby([token_kinds, "stage"])["ratio"].mean().unstack("stage")
    means = means[[stage for stage in _STAGES if stage in means.columns]]
    # Rows of one layer and one stage contain each token once.
    once = table[(table["layer"] == table["layer"].min()) & (table["stage"] == table["stage"].iloc[0])]
    return means.assign(tokens=once["token"].map(kind).value_counts())


def by_rank(
    table: pd.DataFrame, ranks: Mapping[str, float] | Callable[[str], float] | None = None
) -> pd.DataFrame:
    """Return Spearman's correlation of the mixing ratio with the token's frequency rank, by layer and stage.

    Args:
        table: A table of `mixing_ratios`.
        ranks: The frequency rank of each token, 1 for the most frequent. Tokens without a rank are left out.
            None: ranks are counted in the prompts of the table.
    """
    check_columns("table", table, ("layer", "stage", "ratio", "token"))
    ranked = table.assign(rank=table["token"].map(counted_ranks(table) if ranks is None else ranks))
    ranked = ranked.dropna(subset=["rank"])
    groups = ranked.groupby(["layer", "stage"])[["rank", "ratio"]]
    correlation = groups.apply(lambda rows: spearman(rows["rank"].to_numpy(), rows["ratio"].to_numpy()))
    by_stage = correlation.unstack("stage")
    return by_stage[[stage for stage in _STAGES if stage in by_stage.columns]]


def counted_ranks(table: pd.DataFrame) -> dict[str, float]:
    """Return the frequency rank of each token in a table of positions.

    The most frequent token has rank 1; equally frequent tokens have the mean of their ranks.
    """
    check_columns("table", table, ("prompt", "position", "token"))
    positions = table.drop_duplicates(subset=["prompt", "position"])
    counts = positions["token"].value_counts()
    ranks: dict[str, float] = counts.rank(ascending=False, method="average").to_dict()
    return ranks
