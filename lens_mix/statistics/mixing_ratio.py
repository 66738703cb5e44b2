"""Mixing ratio: how much of a representation came from other positions, stage by stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix.algebra.feed_forward import feed_forward_shares
from lens_mix.algebra.vectors import Vectors, attention_vectors
from lens_mix.lens.block import Block
from lens_mix.lens.model_classes import UnsupportedModelError
from lens_mix.methods.atb_ff import AtbFfResLn
from lens_mix.methods.attn_res import AttnResLn
from lens_mix.methods.base import Method
from lens_mix.statistics.passes import each_prompt
from lens_mix.statistics.ranks import spearman
from lens_mix.statistics.token_kinds import TokenKind, token_kind

if TYPE_CHECKING:
    import pandas

ATTENTION_STAGES = ("attn_w", "attn_n", "attn_res_w", "attn_res", "attn_res_ln")
STAGES = (*ATTENTION_STAGES, "atb_ff_res_ln")


def mixing_ratios(
    model: Any, prompts: Any, stages: Sequence[str] | None = None, **options: Any
) -> pandas.DataFrame:
    """The mixing ratio of every token, layer and stage (Kobayashi et al., EMNLP 2021, section 4).

    r_i = ‖Σ_{j≠i} F_ij‖ / (‖Σ_{j≠i} F_ij‖ + ‖F_ii‖), in 0..1: 0 where nothing came from elsewhere. For the
    weight-based stages the sum of the weights stands for the norm.

    Args:
        model: any TransformerLens model.
        prompts: one prompt, or a list of them, as in `lens_mix.run`.
        stages: some of "attn_w" (attention weights), "attn_n" (`value_norm`), "attn_res_w", "attn_res",
            "attn_res_ln", "atb_ff_res_ln" (after the feed-forward, variant A); None: all that the model's
            blocks have.
        options: `stack`, `prepend_bos`, further model inputs, as in `lens_mix.run`.

    Returns:
        Columns prompt, layer, position, token, token_id, stage, ratio.

    Raises:
        ValueError: an unknown stage.
        UnsupportedModelError: a stage that the model's blocks can't be followed to.
    """
    import pandas as pd

    wanted = tuple(STAGES if stages is None else stages)
    unknown = [stage for stage in wanted if stage not in STAGES]
    if unknown or not wanted:
        raise ValueError(f"stages: expected some of {list(STAGES)}, got {list(wanted)}")
    rows = []
    for number, passed in enumerate(_passes(model, prompts, wanted, stages is None, options)):
        with torch.no_grad():
            for layer, block in enumerate(passed.blocks):
                for stage, ratio in block_mixing_ratios(block, passed.stages).items():
                    values = ratio[0].tolist()
                    rows += [
                        (number, layer, position, token, int(token_id), stage, value)
                        for position, (token, token_id, value) in enumerate(
                            zip(passed.tokens, passed.token_ids, values, strict=True)
                        )
                    ]
    return pd.DataFrame(rows, columns=["prompt", "layer", "position", "token", "token_id", "stage", "ratio"])


class _Passed:
    def __init__(self, passed: Any, stages: Sequence[str]) -> None:
        self.tokens, self.token_ids, self.blocks = passed.tokens, passed.token_ids, passed.blocks
        self.stages = stages


def _passes(model: Any, prompts: Any, stages: Sequence[str], fewer: bool, options: dict[str, Any]) -> Any:
    """Clean passes; without the stage after the feed-forward where `fewer` allows it and it is refused."""
    methods: list[Method] = [AttnResLn()]
    if "atb_ff_res_ln" in stages:
        methods.append(AtbFfResLn())
    try:
        for passed in each_prompt(model, prompts, methods, **options):
            yield _Passed(passed, stages)
    except UnsupportedModelError:
        if not fewer or len(methods) == 1:
            raise
        for passed in each_prompt(model, prompts, methods[:1], **options):
            yield _Passed(passed, ATTENTION_STAGES)


def block_mixing_ratios(
    block: Block, stages: Sequence[str] = ATTENTION_STAGES
) -> dict[str, Float[Tensor, "batch query"]]:
    """The mixing ratios of one block by stage; no pair of positions is formed.

    Args:
        block: a block whose clean pass recorded "pattern", "value" and "z".
        stages: as in `mixing_ratios`.
    """
    vectors = attention_vectors(block)
    by_norm: dict[str, Vectors] = {
        "attn_n": vectors.attention,
        "attn_res": vectors.residual,
        "attn_res_ln": vectors.normed,
    }
    ratios = {}
    for stage in stages:
        if stage in by_norm:
            ratios[stage] = by_norm[stage].mixing_ratio()
        elif stage == "atb_ff_res_ln":
            ratios[stage] = _after_feed_forward(block)
        else:
            ratios[stage] = _weight_ratio(block, residual=stage == "attn_res_w")
    return ratios


def _after_feed_forward(block: Block) -> Float[Tensor, "batch query"]:
    vectors = attention_vectors(block)
    shares = feed_forward_shares(block, vectors, "on_path")
    total, kept = vectors.normed.total, vectors.normed.diagonal
    if block.anatomy.parallel:
        added = shares.joined(shares.share(vectors.resid_pre))
        total, kept = total + added, kept + added
    kept_norm = torch.linalg.vector_norm(shares.after(kept), dim=-1)
    mixed = torch.linalg.vector_norm(shares.after(total - kept), dim=-1)
    return mixed / (mixed + kept_norm)


def _weight_ratio(block: Block, residual: bool) -> Float[Tensor, "batch query"]:
    pattern = block.recorded("pattern")
    weights = pattern.to(torch.promote_types(pattern.dtype, torch.float32)).mean(dim=1)
    kept = weights.gather(2, block.queries[..., None])[..., 0]
    mixed = weights.sum(-1) - kept
    return mixed / (mixed + kept + (1.0 if residual else 0.0))


# ------------------------------------------------------------------ tables


def by_layer(table: pandas.DataFrame) -> pandas.DataFrame:
    """Mean mixing ratio, one row per layer and one column per stage, and a last row "mean" over all.

    Args:
        table: from `mixing_ratios`.
    """
    import pandas as pd

    out = table.pivot_table(index="layer", columns="stage", values="ratio", aggfunc="mean", sort=True)
    out = out[[stage for stage in STAGES if stage in out.columns]]
    return pd.concat([out, out.mean().to_frame("mean").T])


def by_kind(table: pandas.DataFrame, kind: TokenKind = token_kind) -> pandas.DataFrame:
    """Mean mixing ratio by kind of token, one column per stage, with the count of tokens.

    Args:
        table: from `mixing_ratios`.
        kind: a function token -> name of its kind.
    """
    kinds = table["token"].map(kind).rename("kind")
    out = table.groupby([kinds, "stage"])["ratio"].mean().unstack("stage")
    out = out[[stage for stage in STAGES if stage in out.columns]]
    one = table[(table["layer"] == table["layer"].min()) & (table["stage"] == table["stage"].iloc[0])]
    return out.assign(tokens=one["token"].map(kind).value_counts())


def by_rank(
    table: pandas.DataFrame, ranks: Mapping[str, float] | Callable[[str], float] | None = None
) -> pandas.DataFrame:
    """Spearman correlation of the mixing ratio with the token's frequency rank, by layer and stage.

    Args:
        table: from `mixing_ratios`.
        ranks: token -> frequency rank, 1 the most frequent; tokens it does not know are left out. None:
            counted in the table's own prompts.
    """
    ranked = table.assign(rank=table["token"].map(counted_ranks(table) if ranks is None else ranks))
    ranked = ranked.dropna(subset=["rank"])
    out = ranked.groupby(["layer", "stage"])[["rank", "ratio"]].apply(
        lambda part: spearman(part["rank"].to_numpy(), part["ratio"].to_numpy())
    )
    out = out.unstack("stage")
    return out[[stage for stage in STAGES if stage in out.columns]]


def counted_ranks(table: pandas.DataFrame) -> dict[str, float]:
    """Frequency ranks of the tokens of a table of positions, 1 the most frequent, ties sharing a rank."""
    positions = table.drop_duplicates(subset=["prompt", "position"])
    counts = positions["token"].value_counts()
    return counts.rank(ascending=False, method="average").to_dict()
