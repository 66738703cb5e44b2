"""Figures of the tables in `lens_mix.statistics`.

| function | draws |
|---|---|
| `mixing_by_layer` | mean mixing ratio per layer, one line per stage |
| `mixing_by_kind` | mean mixing ratio per kind of token, one bar per stage |
| `weights_against_norms` | the cancel effect: attention weight against ‖f(x)‖, one dot per token and layer |
| `expansion_rates` | expansion rate, layer × head |
| `contextualisation` | contextualisation change per layer, one line per part of the block |

`kind` is a function token -> name of its kind, `title` is written above the figure. Each raises a ValueError
where the table lacks a column, and an ImportError where matplotlib is not installed. Maps of amplification
are `MixingMap`s: `lens_mix.view.layer_maps(..., normalize=False)` draws them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lens_mix.arguments import check_columns
from lens_mix.statistics.mixing_ratio import by_kind, by_layer
from lens_mix.statistics.token_kinds import TokenKind, token_kind
from lens_mix.view.labels import FONT, INK, NAME_FONT, TITLE_FONT, visible_token
from lens_mix.view.lazy import need_canvas

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

# Weights in orange and dashed, vectors from light to dark along the block, each with a mark of its own.
_STAGES = {
    "attn_w": ("weights (AttnW)", "#e6550d", "o"),
    "attn_n": ("vectors (AttnN)", "#74b3d8", "o"),
    "attn_res_w": ("weights + residual", "#fd9a4e", "s"),
    "attn_res": ("vectors + residual (AttnRes)", "#3787c0", "s"),
    "attn_res_ln": ("… + norm (AttnResLn)", "#105ba4", "D"),
    "atb_ff_res_ln": ("… + feed-forward", "#08254d", "^"),
}
_KINDS = {"mask": "#d94801", "special": "#6a3d9a", "punctuation": "#1b9e77", "other": "#9a9a9a"}


def mixing_by_layer(table: pandas.DataFrame, title: str = "Mixing ratio by layer") -> Figure:
    """Mean of a table of `mixing_ratios` per layer, a line per stage; stages with the same numbers share one.

    In blocks that put no norm on the residual stream (pre-norm), AttnResLn is AttnRes.
    """
    check_columns("table", table, ("layer", "stage", "ratio"))
    means = by_layer(table).drop(index="mean")
    picture, axes = _axes(7.0, 3.6, title, "layer", "share from other positions")
    for stages in _alike(means):
        _, colour, mark = _STAGES[stages[0]]
        axes.plot(
            means.index.astype(int),
            means[stages[0]],
            marker=mark,
            markersize=3.5,
            color=colour,
            linestyle="--" if stages[0].endswith("_w") else "-",
            label="\n= ".join(_STAGES[stage][0] for stage in stages),
        )
    axes.set_ylim(0, 1)
    _legend(axes)
    return picture


def _alike(means: pandas.DataFrame) -> list[list[str]]:
    """Stages with the same numbers (to float32's rounding), together; in the order of the stages."""
    groups: dict[str, list[str]] = {}
    for stage in means.columns:
        same = (first for first in groups if float((means[first] - means[stage]).abs().max()) < 1e-6)
        groups.setdefault(next(same, stage), []).append(stage)
    return list(groups.values())


def mixing_by_kind(
    table: pandas.DataFrame, kind: TokenKind = token_kind, title: str = "Mixing ratio by kind of token"
) -> Figure:
    """Mean of a table of `mixing_ratios` per kind of token, one bar per stage."""
    check_columns("table", table, ("layer", "stage", "ratio", "token"))
    means = by_kind(table, kind)
    stages = [stage for stage in _STAGES if stage in means.columns]
    picture, axes = _axes(7.0, 3.6, title, "", "share from other positions")
    width = 0.8 / len(stages)
    for place, stage in enumerate(stages):
        lefts = [group - 0.4 + (place + 0.5) * width for group in range(len(means))]
        name, colour, _ = _STAGES[stage]
        axes.bar(lefts, means[stage], width, color=colour, label=name)
    names = [f"{name} ({count})" for name, count in zip(means.index, means["tokens"], strict=True)]
    axes.set_xticks(range(len(means)), labels=names)
    _legend(axes)
    return picture


def weights_against_norms(
    table: pandas.DataFrame,
    kind: TokenKind = token_kind,
    named: int = 3,
    title: str = "Attention weight against the length of what is sent",
) -> Figure:
    """The cancel effect: one dot per token and layer, mean attention weight against mean ‖f(x)‖.

    The colours are those of `kind`. The `named` dots with most weight get a ring and their token and layer
    written; dots of one token share what is written.
    """
    check_columns("table", table, ("layer", "token", "weight", "norm"))
    dots = table.groupby(["layer", "token"])[["weight", "norm"]].mean().reset_index()
    up = "attention weight, mean over heads and queries"
    picture, axes = _axes(5.6, 4.0, title, "‖f(x)‖, mean over heads", up)
    token_kinds = dots["token"].map(kind)
    # The largest kind first: those with fewer dots are drawn above it.
    for name in token_kinds.value_counts().index:
        part = dots[token_kinds == name]
        axes.scatter(part["norm"], part["weight"], s=9, color=_KINDS.get(name, "#3182bd"), label=name)
    chosen = dots.nlargest(named, "weight")
    axes.scatter(chosen["norm"], chosen["weight"], s=26, facecolors="none", edgecolors=INK, linewidths=0.7)
    beside = {"xytext": (7, 0), "textcoords": "offset points", "va": "center"}
    for token, heaviest in chosen.groupby("token", sort=False):
        numbers = ", ".join(str(layer) for layer in sorted(heaviest["layer"]))
        text = f"{visible_token(token)}, layer{'s' if len(heaviest) > 1 else ''} {numbers}"
        place = heaviest["norm"].max(), heaviest["weight"].mean()
        axes.annotate(text, place, fontsize=FONT, color=INK, parse_math=False, **beside)
    axes.locator_params(axis="x", integer=False)
    _legend(axes)
    return picture


def expansion_rates(table: pandas.DataFrame, title: str = "Expansion rate of the heads") -> Figure:
    """A table of `lens_mix.statistics.expansion_rate.expansion_rates` as a heat map, layer × head."""
    check_columns("table", table, ("layer", "head", "rate"))
    grid = table[table["head"] != "all"].pivot(index="layer", columns="head", values="rate")
    layers, heads = grid.shape
    picture, axes = _axes(1.6 + 0.3 * heads, 1.2 + 0.22 * layers, title, "head", "layer")
    image = axes.imshow(grid.to_numpy(dtype=float), cmap=need_canvas().colours(False), aspect="auto", vmin=0)
    axes.locator_params(axis="y", integer=True)
    picture.colorbar(image, ax=axes).ax.tick_params(labelsize=FONT)
    return picture


def contextualisation(table: pandas.DataFrame, title: str = "Contextualisation change") -> Figure:
    """A table of `lens_mix.statistics.contextualisation.changes` by layer, one line per part of the block."""
    check_columns("table", table, ("feed_forward", "residual", "norm", "whole"))
    picture, axes = _axes(6.4, 3.4, title, "layer", "1 − Spearman")
    for part, colour in zip(table.columns, ("#d94801", "#2171b5", "#6a3d9a", "#333333"), strict=False):
        axes.plot(table.index, table[part], marker="o", markersize=3, color=colour, label=part)
    axes.set_ylim(bottom=0)
    _legend(axes)
    return picture


def _axes(width: float, height: float, title: str, across: str, up: str) -> tuple[Any, Any]:
    picture = need_canvas().Picture(width, height)
    picture.set_layout_engine("constrained")
    axes = picture.subplots()
    axes.set_title(title, fontsize=TITLE_FONT, color=INK, loc="left", parse_math=False)
    axes.set_xlabel(across, fontsize=NAME_FONT)
    axes.set_ylabel(up, fontsize=NAME_FONT)
    axes.tick_params(labelsize=FONT)
    axes.locator_params(axis="x", integer=True)
    axes.spines[["top", "right"]].set_visible(False)
    return picture, axes


def _legend(axes: Any) -> None:
    beside = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5)}
    for text in axes.legend(fontsize=FONT, frameon=False, **beside).get_texts():
        text.set_parse_math(False)
