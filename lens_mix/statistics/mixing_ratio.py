"""Mixing ratio: how much of a representation came from other positions, stage by stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix.algebra.feed_forward import feed_forward_shares
from lens_mix.algebra.vectors import AttentionVectors, attention_vectors
from lens_mix.arguments import check_columns, one_of, several
from lens_mix.lens.block import Block
from lens_mix.lens.model_classes import TransformerLensModel, UnsupportedModelError
from lens_mix.lens.precision import in_full_precision
from lens_mix.method import Method
from lens_mix.methods.atb_ff import AtbFfResLn
from lens_mix.methods.attn_res import AttnResLn
from lens_mix.statistics.passes import PromptBlocks, each_prompt
from lens_mix.statistics.ranks import spearman
from lens_mix.statistics.token_kinds import TokenKind, token_kind
from lens_mix.tables import Table

_ATTENTION_STAGES = ("attn_w", "attn_n", "attn_res_w", "attn_res", "attn_res_ln")
_STAGES = (*_ATTENTION_STAGES, "atb_ff_res_ln")


@in_full_precision
def mixing_ratios(
    model: TransformerLensModel, prompts: Any, stages: Sequence[str] | None = None, **options: Any
) -> pd.DataFrame:
    """The mixing ratio of every token, layer and stage (Kobayashi et al., EMNLP 2021, section 4).

    r_i = ‖Σ_{j≠i} F_ij‖ / (‖Σ_{j≠i} F_ij‖ + ‖F_ii‖), in 0..1: 0 where nothing came from elsewhere. For the
    weight-based stages the sum of the weights stands for the norm.

    Args:
        model: any TransformerLens model.
        prompts: one prompt, or a list of them, as in `lens_mix.run`.
        stages: some of "attn_w" (attention weights), "attn_n" (`value_norm`), "attn_res_w", "attn_res",
            "attn_res_ln", "atb_ff_res_ln" (after the feed-forward, variant A); None: all that the model has.
        options: `queries`, `layers`, `part`, `prepend_bos`, further model inputs, as in `lens_mix.run`.

    Returns:
        Columns prompt, layer, position, token, token_id, stage, ratio.

    Raises:
        ValueError: an unknown stage.
        UnsupportedModelError: a stage that the model's blocks can't be followed to.
    """
    expected = f"some of {list(_STAGES)}"
    names = tuple(_STAGES if stages is None else several("stages", stages, expected, least=1))
    for stage in names:
        one_of("stages", stage, _STAGES)
    rows = []
    for number, (checked, followed) in enumerate(_passes(model, prompts, names, stages is None, options)):
        places = [(row, checked.tokens[row], int(checked.token_ids[row])) for row in checked.queries]
        for block in checked.blocks:
            with torch.no_grad():
                ratios = block_mixing_ratios(block, followed)
            rows += [
                (number, block.layer, *place, stage, value)
                for stage, ratio in ratios.items()
                for place, value in zip(places, ratio[0].tolist(), strict=True)
            ]
    return Table(rows, columns=["prompt", "layer", "position", "token", "token_id", "stage", "ratio"])


def _passes(
    model: TransformerLensModel, prompts: Any, stages: Sequence[str], fewer: bool, options: dict[str, Any]
) -> Iterator[tuple[PromptBlocks, Sequence[str]]]:
    """Clean passes; without the stage after the feed-forward where `fewer` allows it and it is refused."""
    methods: list[Method] = [AttnResLn()]
    if "atb_ff_res_ln" in stages:
        methods.append(AtbFfResLn())
    begun = False
    try:
        for checked in each_prompt(model, prompts, methods, **options):
            begun = True
            yield checked, stages
    except UnsupportedModelError:
        # A model is refused with its first prompt; what is refused later is that prompt.
        if begun or not fewer or len(methods) == 1:
            raise
        for checked in each_prompt(model, prompts, methods[:1], **options):
            yield checked, _ATTENTION_STAGES


@in_full_precision
def block_mixing_ratios(
    block: Block, stages: Sequence[str] = _ATTENTION_STAGES
) -> dict[str, Float[Tensor, "batch query"]]:
    """The mixing ratios of one block by stage; no pair of positions is formed.

    Args:
        block: a block whose clean pass recorded "pattern", "value" and "z".
        stages: as in `mixing_ratios`.
    """
    vectors = attention_vectors(block)
    ratio_of = {
        "attn_w": lambda: _weight_ratio(block, residual=0.0),
        "attn_n": lambda: vectors.attention.mixing_ratio(),
        "attn_res_w": lambda: _weight_ratio(block, residual=1.0),
        "attn_res": lambda: vectors.residual.mixing_ratio(),
        "attn_res_ln": lambda: vectors.normed.mixing_ratio(),
        "atb_ff_res_ln": lambda: _after_feed_forward(block, vectors),
    }
    return {stage: ratio_of[stage]() for stage in stages}


def _after_feed_forward(block: Block, vectors: AttentionVectors) -> Float[Tensor, "batch query"]:
    shares = feed_forward_shares(block, vectors, "on_path")
    total, diagonal = vectors.normed.total, vectors.normed.diagonal
    if block.anatomy.parallel:
        added = shares.joined(shares.share(vectors.resid_pre))
        total, diagonal = total + added, diagonal + added
    diagonal_norm = torch.linalg.vector_norm(shares.after(diagonal), dim=-1)
    mixed = torch.linalg.vector_norm(shares.after(total - diagonal), dim=-1)
    return mixed / (mixed + diagonal_norm)


def _weight_ratio(block: Block, residual: float) -> Float[Tensor, "batch query"]:
    pattern = block.recorded("pattern")
    weights = pattern.to(torch.promote_types(pattern.dtype, torch.float32)).mean(dim=1)
    diagonal = weights.gather(2, block.queries[..., None])[..., 0]
    mixed = weights.sum(-1) - diagonal
    return mixed / (mixed + diagonal + residual)  # of 0.5 A + 0.5 I: the halves cancel


# ------------------------------------------------------------------ tables


def by_layer(table: pd.DataFrame) -> pd.DataFrame:
    """Mean of a table of `mixing_ratios`, a row per layer, a column per stage; a last row "mean" over all."""
    check_columns("table", table, ("layer", "stage", "ratio"))
    out = table.pivot_table(index="layer", columns="stage", values="ratio", aggfunc="mean", sort=True)
    out = out[[stage for stage in _STAGES if stage in out.columns]]
    return pd.concat([out, out.mean().to_frame("mean").T])


def by_kind(table: pd.DataFrame, kind: TokenKind = token_kind) -> pd.DataFrame:
    """Mean of a table of `mixing_ratios` by kind of token, a column per stage, and the count of tokens."""
    check_columns("table", table, ("layer", "stage", "ratio", "token"))
    token_kinds = table["token"].map(kind).rename("kind")
    out = table.groupby([token_kinds, "stage"])["ratio"].mean().unstack("stage")
    out = out[[stage for stage in _STAGES if stage in out.columns]]
    one = table[(table["layer"] == table["layer"].min()) & (table["stage"] == table["stage"].iloc[0])]
    return out.assign(tokens=one["token"].map(kind).value_counts())


def by_rank(
    table: pd.DataFrame, ranks: Mapping[str, float] | Callable[[str], float] | None = None
) -> pd.DataFrame:
    """Spearman correlation of the mixing ratio with the token's frequency rank, by layer and stage.

    Args:
        table: from `mixing_ratios`.
        ranks: token -> frequency rank, 1 the most frequent; tokens it does not know are left out. None:
            counted in the table's own prompts.
    """
    check_columns("table", table, ("layer", "stage", "ratio", "token"))
    ranked = table.assign(rank=table["token"].map(counted_ranks(table) if ranks is None else ranks))
    ranked = ranked.dropna(subset=["rank"])
    groups = ranked.groupby(["layer", "stage"])[["rank", "ratio"]]
    out = groups.apply(lambda part: spearman(part["rank"].to_numpy(), part["ratio"].to_numpy()))
    out = out.unstack("stage")
    return out[[stage for stage in _STAGES if stage in out.columns]]


def counted_ranks(table: pd.DataFrame) -> dict[str, float]:
    """Frequency ranks of the tokens of a table of positions, 1 the most frequent, ties sharing a rank."""
    check_columns("table", table, ("prompt", "position", "token"))
    positions = table.drop_duplicates(subset=["prompt", "position"])
    counts = positions["token"].value_counts()
    return counts.rank(ascending=False, method="average").to_dict()
