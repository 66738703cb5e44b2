"""Figures of the tables in `lens_mix.statistics`.

| function | draws |
|---|---|
| `mixing_by_layer` | mean mixing ratio per layer, one line per stage |
| `mixing_by_kind` | mean mixing ratio per kind of token, one bar per stage |
| `weights_against_norms` | the cancel effect: attention weight against ‖f(x)‖, one dot per token and layer |
| `expansion_rates` | expansion rate, layer × head |
| `contextualisation` | contextualisation change per layer, one line per part of the block |

`title` is written above the figure. Each raises a ValueError where the table lacks a column, and an
ImportError where matplotlib is not installed. Maps of amplification are `MixingMap`s:
`lens_mix.view.layer_maps(..., normalize=False)` draws them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lens_mix.statistics.mixing_ratio import STAGES, by_kind, by_layer
from lens_mix.statistics.token_kinds import TokenKind, token_kind
from lens_mix.view.labels import FONT, INK, NAME_FONT, TITLE_FONT, visible_token
from lens_mix.view.lazy import need_canvas

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

STAGE_NAMES = {
    "attn_w": "weights (AttnW)",
    "attn_n": "vectors (AttnN)",
    "attn_res_w": "weights + residual",
    "attn_res": "vectors + residual (AttnRes)",
    "attn_res_ln": "… + norm (AttnResLn)",
    "atb_ff_res_ln": "… + feed-forward",
}
# Weights in orange and dashed, vectors from light to dark along the block, each with a mark of its own.
COLOURS = ("#e6550d", "#74b3d8", "#fd9a4e", "#3787c0", "#105ba4", "#08254d")
MARKS = ("o", "o", "s", "s", "D", "^")
KINDS = {"mask": "#d94801", "special": "#6a3d9a", "punctuation": "#1b9e77", "other": "#9a9a9a"}


def mixing_by_layer(table: pandas.DataFrame, title: str = "Mixing ratio by layer") -> Figure:
    """Mean mixing ratio per layer, one line per stage; stages that are one and the same share a line.

    In blocks that put no norm on the residual stream (pre-norm), AttnResLn is AttnRes.

    Args:
        table: from `lens_mix.statistics.mixing_ratio.mixing_ratios`.
    """
    _check_columns("table", table, ("layer", "stage", "ratio"))
    means = by_layer(table).drop(index="mean")
    picture, axes = _axes(7.0, 3.6, title)
    for stages in _alike(means):
        place = STAGES.index(stages[0])
        axes.plot(
            means.index.astype(int),
            means[stages[0]],
            marker=MARKS[place],
            markersize=3.5,
            color=COLOURS[place],
            linestyle="--" if stages[0].endswith("_w") else "-",
            label="\n= ".join(STAGE_NAMES[stage] for stage in stages),
        )
    axes.set_xlabel("layer", fontsize=NAME_FONT)
    axes.set_ylabel("share from other positions", fontsize=NAME_FONT)
    axes.set_ylim(0, 1)
    _legend(axes)
    return picture


def _alike(means: pandas.DataFrame) -> list[list[str]]:
    """Stages with the same numbers (to float32's rounding), together; in the order of the stages."""
    groups: list[list[str]] = []
    for stage in means.columns:
        same = (group for group in groups if float((means[group[0]] - means[stage]).abs().max()) < 1e-6)
        group = next(same, None)
        if group is None:
            groups.append([stage])
        else:
            group.append(stage)
    return groups


def mixing_by_kind(
    table: pandas.DataFrame, kind: TokenKind = token_kind, title: str = "Mixing ratio by kind of token"
) -> Figure:
    """Mean mixing ratio per kind of token, one bar per stage.

    Args:
        table: from `lens_mix.statistics.mixing_ratio.mixing_ratios`.
        kind: a function token -> name of its kind.
    """
    _check_columns("table", table, ("layer", "stage", "ratio", "token"))
    means = by_kind(table, kind)
    stages = [stage for stage in STAGES if stage in means.columns]
    picture, axes = _axes(7.0, 3.6, title)
    width = 0.8 / len(stages)
    for place, stage in enumerate(stages):
        lefts = [group - 0.4 + (place + 0.5) * width for group in range(len(means))]
        axes.bar(lefts, means[stage], width, color=COLOURS[STAGES.index(stage)], label=STAGE_NAMES[stage])
    names = [f"{name} ({count})" for name, count in zip(means.index, means["tokens"], strict=True)]
    axes.set_xticks(range(len(means)), labels=names)
    axes.set_ylabel("share from other positions", fontsize=NAME_FONT)
    _legend(axes)
    return picture


def weights_against_norms(
    table: pandas.DataFrame,
    kind: TokenKind = token_kind,
    named: int = 3,
    title: str = "Attention weight against the length of what is sent",
) -> Figure:
    """The cancel effect: one dot per token and layer, mean attention weight against mean ‖f(x)‖.

    Args:
        table: from `lens_mix.statistics.cancel_effect.weights_and_norms`.
        kind: a function token -> name of its kind, for the colours.
        named: how many of the dots with most weight get a ring and their token and layer written; dots of
            one token share what is written.
    """
    _check_columns("table", table, ("layer", "token", "weight", "norm"))
    dots = table.groupby(["layer", "token"])[["weight", "norm"]].mean().reset_index()
    picture, axes = _axes(5.6, 4.0, title)
    kinds = dots["token"].map(kind)
    # Kinds with fewer dots are drawn later, above the others.
    for name in kinds.value_counts().index:
        part = dots[kinds == name]
        axes.scatter(part["norm"], part["weight"], s=9, color=KINDS.get(name, "#3182bd"), label=name)
    chosen = dots.nlargest(named, "weight")
    axes.scatter(chosen["norm"], chosen["weight"], s=26, facecolors="none", edgecolors=INK, linewidths=0.7)
    for token, heaviest in chosen.groupby("token", sort=False):
        numbers = ", ".join(str(layer) for layer in sorted(heaviest["layer"]))
        axes.annotate(
            f"{visible_token(token)}, layer{'s' if len(heaviest) > 1 else ''} {numbers}",
            (heaviest["norm"].max(), heaviest["weight"].mean()),
            fontsize=FONT,
            color=INK,
            xytext=(7, 0),
            textcoords="offset points",
            va="center",
            parse_math=False,
        )
    axes.locator_params(axis="x", integer=False)
    axes.set_xlabel("‖f(x)‖, mean over heads", fontsize=NAME_FONT)
    axes.set_ylabel("attention weight, mean over heads and queries", fontsize=NAME_FONT)
    _legend(axes)
    return picture


def expansion_rates(table: pandas.DataFrame, title: str = "Expansion rate of the heads") -> Figure:
    """Expansion rate as a heat map, layer × head.

    Args:
        table: from `lens_mix.statistics.expansion_rate.expansion_rates`.
    """
    _check_columns("table", table, ("layer", "head", "rate"))
    grid = table[table["head"] != "all"].pivot(index="layer", columns="head", values="rate")
    picture, axes = _axes(1.6 + 0.3 * grid.shape[1], 1.2 + 0.22 * grid.shape[0], title)
    image = axes.imshow(grid.to_numpy(dtype=float), cmap=need_canvas().colours(False), aspect="auto", vmin=0)
    axes.locator_params(axis="y", integer=True)
    axes.set_xlabel("head", fontsize=NAME_FONT)
    axes.set_ylabel("layer", fontsize=NAME_FONT)
    picture.colorbar(image, ax=axes).ax.tick_params(labelsize=FONT)
    return picture


def contextualisation(table: pandas.DataFrame, title: str = "Contextualisation change") -> Figure:
    """1 - Spearman per layer, one line per part of the block.

    Args:
        table: from `lens_mix.statistics.contextualisation.changes`.
    """
    _check_columns("table", table, ("feed_forward", "residual", "norm", "whole"))
    picture, axes = _axes(6.4, 3.4, title)
    for part, colour in zip(table.columns, ("#d94801", "#2171b5", "#6a3d9a", "#333333"), strict=False):
        axes.plot(table.index, table[part], marker="o", markersize=3, color=colour, label=part)
    axes.set_xlabel("layer", fontsize=NAME_FONT)
    axes.set_ylabel("1 − Spearman", fontsize=NAME_FONT)
    axes.set_ylim(bottom=0)
    _legend(axes)
    return picture


def _axes(width: float, height: float, title: str) -> tuple[Any, Any]:
    picture = need_canvas().Picture(width, height)
    picture.set_layout_engine("constrained")
    axes = picture.subplots()
    axes.set_title(title, fontsize=TITLE_FONT, color=INK, loc="left", parse_math=False)
    axes.tick_params(labelsize=FONT)
    axes.locator_params(axis="x", integer=True)
    axes.spines[["top", "right"]].set_visible(False)
    return picture, axes


def _legend(axes: Any) -> None:
    axes.legend(fontsize=FONT, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _check_columns(name: str, table: Any, columns: tuple[str, ...]) -> None:
    missing = [column for column in columns if column not in getattr(table, "columns", ())]
    if missing:
        raise ValueError(f"{name}: expected a table with the columns {list(columns)}, missing {missing}")
