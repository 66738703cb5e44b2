"""Compute the mixing ratio: how much of a representation came from other positions, by stage of the block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix import UnsupportedModelError
from lens_mix.arguments import check_choice, check_columns, check_items
from lens_mix.evaluation.ranks import spearman
from lens_mix.experiments.passes import PromptBlocks, iterate_prompts, require_matrices
from lens_mix.maps.token_kinds import TokenKind, token_kind
from lens_mix.method import Method
from lens_mix.methods.atb_ff import AtbFfResLn
from lens_mix.methods.attn_res import AttnResLn
from lens_mix.models import TransformerLensModel, feed_forward_shares, states_of
from lens_mix.tables import Table

if TYPE_CHECKING:
    from lens_mix.method import Block

_ATTENTION_STAGES = ("attn_w", "attn_n", "attn_res_w", "attn_res", "attn_res_ln")
_STAGES = (*_ATTENTION_STAGES, "atb_ff_res_ln")


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


def block_mixing_ratios(
    block: Block, stages: Sequence[str] = _ATTENTION_STAGES
) -> dict[str, Float[Tensor, "batch query"]]:
    """Return the mixing ratios of one block by stage, without a vector for each pair of positions.

    Args:
        block: A block whose clean pass recorded "pattern" and "value".
        stages: As in `mixing_ratios`.

    Raises:
        UnsupportedModelError: A query of cross-attention has no key of its own.
    """
    if block.stack.is_cross:
        raise UnsupportedModelError(
            "block_mixing_ratios: expected self-attention, got cross-attention, in which no key is the "
            "query's own; choose a block of the encoder or the decoder"
        )
    with block.clean.lens.evaluation_mode():
        sums = _sum_vectors(block)
        functions = {
            "attn_w": lambda: _compute_weight_ratio(block, residual=0.0),
            "attn_n": lambda: sums["attention"].ratio(),
            "attn_res_w": lambda: _compute_weight_ratio(block, residual=1.0),
            "attn_res": lambda: sums["residual"].ratio(),
            "attn_res_ln": lambda: sums["normed"].ratio(),
            "atb_ff_res_ln": lambda: _compute_feed_forward_ratio(block, sums["normed"]),
        }
        return {stage: functions[stage]() for stage in stages}


class _Sums(NamedTuple):
    """The sum Σ_j F_ij of the vectors of every query, and its own vector F_ii among them."""

    total: Float[Tensor, "batch query d_model"]
    own: Float[Tensor, "batch query d_model"]

    def map(self, function: Callable[[Tensor], Tensor]) -> _Sums:
        """Return both after a linear function."""
        return _Sums(function(self.total), function(self.own))

    def ratio(self) -> Float[Tensor, "batch query"]:
        """Return ‖Σ_{j≠i} F_ij‖ / (‖Σ_{j≠i} F_ij‖ + ‖F_ii‖) (Kobayashi et al., EMNLP 2021, eq. 13)."""
        mixed: Tensor = torch.linalg.vector_norm(self.total - self.own, dim=-1)
        own: Tensor = torch.linalg.vector_norm(self.own, dim=-1)
        return mixed / (mixed + own)


def _sum_vectors(block: Block) -> dict[str, _Sums]:
    """Return the sums of the vectors of attention, with the residual stream, and after the norm on it."""
    states, queries = states_of(block), block.queries
    x, W_O = states.resid_pre, require_matrices(block.layer, block.anatomy.value_path).W_O
    prompts = torch.arange(len(queries), device=queries.device)[:, None]
    # Fewer value heads than query heads are shared by groups of these.
    value = states.value[prompts, queries].repeat_interleave(len(W_O) // states.value.shape[2], dim=2)
    weighted = _own_weights(block).mT.to(x)[..., None] * value.to(x)
    own = weighted.flatten(2) @ W_O.flatten(0, 1).to(x)
    attention = _Sums(states.attention_total, own)
    factor = block.anatomy.residual_multiplier
    # The residual stream is a part of each query's own vector.
    residual = attention.map(lambda vectors: states.attention_branch(vectors) * factor + x)
    return {
        "attention": attention,
        "residual": residual,
        "normed": residual.map(states.attention_residual),
    }


def _compute_feed_forward_ratio(block: Block, normed: _Sums) -> Float[Tensor, "batch query"]:
    shares = feed_forward_shares(block)
    if block.anatomy.parallel:
        # The feed-forward of such a block reads the query's own input, and nothing of the attention.
        added = shares.joined(shares.share(states_of(block).resid_pre))
        normed = normed.map(lambda vectors: vectors + added)
    return normed.map(shares.after).ratio()


def _own_weights(block: Block) -> Float[Tensor, "batch head query"]:
    """Return the weight of each query's own position, by head."""
    pattern = block.recorded("pattern")
    return pattern.gather(3, block.queries[:, None, :, None].expand(-1, pattern.shape[1], -1, 1))[..., 0]


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
