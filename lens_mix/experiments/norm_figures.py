"""Draw figures of the tables in `lens_mix.experiments`.

| function | figure |
|---|---|
| `mixing_by_layer` | mean mixing ratio per layer, one line per stage |
| `mixing_by_kind` | mean mixing ratio per kind of token, one bar per stage |
| `weights_against_norms` | the cancel effect: attention weight against ‖f(x)‖, one dot per token and layer |
| `expansion_rates` | expansion rate, layer × head |
| `contextualisation` | contextualisation change per layer, one line per component of the block |

Each function raises a ValueError if the table has no column of a needed name, and an ImportError if
matplotlib is not installed. Each takes `ax=`, matplotlib axes to draw in, or `figsize=`, the width and height
of a new figure in inches. `lens_mix.view.layer_maps(..., normalize=False)` draws maps of amplification.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lens_mix.arguments import check_columns
from lens_mix.experiments.mixing_ratio import by_kind, by_layer
from lens_mix.maps.token_kinds import TokenKind, token_kind
from lens_mix.view.labels import FONT, INK, NAME_FONT, TITLE_FONT, make_visible
from lens_mix.view.lazy import load_canvas

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Stages of weights are orange and dashed; stages of vectors get darker along the block.
_STAGES = {
    "attn_w": ("weights (AttnW)", "#e6550d", "o"),
    "attn_n": ("vectors (AttnN)", "#74b3d8", "o"),
    "attn_res_w": ("weights + residual", "#fd9a4e", "s"),
    "attn_res": ("vectors + residual (AttnRes)", "#3787c0", "s"),
    "attn_res_ln": ("… + norm (AttnResLn)", "#105ba4", "D"),
    "atb_ff_res_ln": ("… + feed-forward", "#08254d", "^"),
}
_KINDS = {"mask": "#d94801", "special": "#6a3d9a", "punctuation": "#1b9e77", "other": "#9a9a9a"}


def mixing_by_layer(table: pandas.DataFrame, title: str = "Mixing ratio by layer", **look: Any) -> Figure:
    """Return a figure of the mean mixing ratio per layer, with one line per stage.

    Stages with the same numbers share one line. For example, AttnResLn equals AttnRes in pre-norm blocks,
    which have no norm on the residual stream.

    Args:
        table: A table of `mixing_ratios`.
        title: The title above the figure.
        **look: `ax=`, `figsize=`.
    """
    check_columns("table", table, ("layer", "stage", "ratio"))
    means = by_layer(table).drop(index="mean")
    axes = _make_axes(7.0, 3.6, title, "layer", "share from other positions", **look)
    for stages in _group_equal_stages(means):
        _, color, mark = _STAGES[stages[0]]
        axes.plot(
            means.index.astype(int),
            means[stages[0]],
            marker=mark,
            markersize=3.5,
            color=color,
            linestyle="--" if stages[0].endswith("_w") else "-",
            label="\n= ".join(_STAGES[stage][0] for stage in stages),
        )
    axes.set_ylim(0, 1)
    _draw_legend(axes)
    return _finish(axes)


def _group_equal_stages(means: pandas.DataFrame) -> list[list[str]]:
    """Return groups of stages with the same numbers (up to float32's rounding), in their order."""
    groups: dict[str, list[str]] = {}
    for stage in means.columns:
        equal = (first for first in groups if float((means[first] - means[stage]).abs().max()) < 1e-6)
        groups.setdefault(next(equal, stage), []).append(stage)
    return list(groups.values())


def mixing_by_kind(
    table: pandas.DataFrame,
    kind: TokenKind = token_kind,
    title: str = "Mixing ratio by kind of token",
    **look: Any,
) -> Figure:
    """Return a figure of the mean mixing ratio per kind of token, with one bar per stage.

    Args:
        table: A table of `mixing_ratios`.
        kind: A function from a token to the name of its kind.
        title: The title above the figure.
        **look: `ax=`, `figsize=`.
    """
    check_columns("table", table, ("layer", "stage", "ratio", "token"))
    means = by_kind(table, kind)
    stages = [stage for stage in _STAGES if stage in means.columns]
    axes = _make_axes(7.0, 3.6, title, "", "share from other positions", **look)
    width = 0.8 / len(stages)
    for index, stage in enumerate(stages):
        centers = [group - 0.4 + (index + 0.5) * width for group in range(len(means))]
        name, color, _ = _STAGES[stage]
        axes.bar(centers, means[stage], width, color=color, label=name)
    names = [f"{name} ({count})" for name, count in zip(means.index, means["tokens"], strict=True)]
    axes.set_xticks(range(len(means)), labels=names)
    _draw_legend(axes)
    return _finish(axes)


def weights_against_norms(
    table: pandas.DataFrame,
    kind: TokenKind = token_kind,
    named: int = 3,
    title: str = "Attention weight against the length of what is sent",
    **look: Any,
) -> Figure:
    """Return a figure of the cancel effect: mean attention weight against mean ‖f(x)‖.

    There is one dot per token and layer, colored by the kind of token.

    Args:
        table: A table of `weights_and_norms`.
        kind: A function from a token to the name of its kind.
        named: How many dots get a ring and a label with their token and layer: those with most weight. Dots
            of the same token share one label.
        title: The title above the figure.
        **look: `ax=`, `figsize=`.
    """
    check_columns("table", table, ("layer", "token", "weight", "norm"))
    dots = table.groupby(["layer", "token"])[["weight", "norm"]].mean().reset_index()
    y_label = "attention weight, mean over heads and queries"
    axes = _make_axes(5.6, 4.0, title, "‖f(x)‖, mean over heads", y_label, **look)
    token_kinds = dots["token"].map(kind)
    # The largest kind is drawn first, so that its dots do not cover those of the other kinds.
    for name in token_kinds.value_counts().index:
        of_kind = dots[token_kinds == name]
        axes.scatter(of_kind["norm"], of_kind["weight"], s=9, color=_KINDS.get(name, "#3182bd"), label=name)
    chosen = dots.nlargest(named, "weight")
    axes.scatter(chosen["norm"], chosen["weight"], s=26, facecolors="none", edgecolors=INK, linewidths=0.7)
    on_the_right = {"xytext": (7, 0), "textcoords": "offset points", "va": "center"}
    for token, heaviest in chosen.groupby("token", sort=False):
        numbers = ", ".join(str(layer) for layer in sorted(heaviest["layer"]))
        text = f"{make_visible(token)}, layer{'s' if len(heaviest) > 1 else ''} {numbers}"
        point = heaviest["norm"].max(), heaviest["weight"].mean()
        axes.annotate(text, point, fontsize=FONT, color=INK, parse_math=False, **on_the_right)
    axes.locator_params(axis="x", integer=False)
    _draw_legend(axes)
    return _finish(axes)


def expansion_rates(
    table: pandas.DataFrame, title: str = "Expansion rate of the heads", **look: Any
) -> Figure:
    """Return a heat map of expansion rates, layer × head.

    Args:
        table: A table of `lens_mix.experiments.expansion_rate.expansion_rates`.
        title: The title above the figure.
        **look: `ax=`, `figsize=`, `cmap=`.
    """
    check_columns("table", table, ("layer", "head", "rate"))
    grid = table[table["head"] != "all"].pivot(index="layer", columns="head", values="rate")
    layers, heads = grid.shape
    colors = load_canvas().choose_color_map(False, look.pop("cmap", None))
    axes = _make_axes(1.6 + 0.3 * heads, 1.2 + 0.22 * layers, title, "head", "layer", **look)
    image = axes.imshow(grid.to_numpy(dtype=float), cmap=colors, aspect="auto", vmin=0)
    axes.locator_params(axis="y", integer=True)
    axes.figure.colorbar(image, ax=axes).ax.tick_params(labelsize=FONT)
    return _finish(axes)


def contextualisation(
    table: pandas.DataFrame, title: str = "Contextualisation change", **look: Any
) -> Figure:
    """Return a figure of the contextualisation change per layer, with one line per component of the block.

    Args:
        table: A table of `lens_mix.experiments.contextualisation.changes`.
        title: The title above the figure.
        **look: `ax=`, `figsize=`.
    """
    check_columns("table", table, ("feed_forward", "residual", "norm", "whole"))
    axes = _make_axes(6.4, 3.4, title, "layer", "1 − Spearman", **look)
    for component, color in zip(table.columns, ("#d94801", "#2171b5", "#6a3d9a", "#333333"), strict=False):
        axes.plot(table.index, table[component], marker="o", markersize=3, color=color, label=component)
    axes.set_ylim(bottom=0)
    _draw_legend(axes)
    return _finish(axes)


def _make_axes(
    width: float,
    height: float,
    title: str,
    x_label: str,
    y_label: str,
    *,
    ax: Axes | None = None,
    figsize: tuple[float, float] | None = None,
) -> Any:
    """Return axes with their title and labels; they are the user's if `ax` is given."""
    canvas = load_canvas()
    axes: Any = ax
    if ax is not None:
        canvas.check_axes(ax, figsize, 1, "")
    else:
        picture = canvas.DrawnPicture(*((width, height) if figsize is None else canvas.check_size(figsize)))
        picture.set_layout_engine("constrained")
        axes = picture.subplots()
    axes.set_title(title, fontsize=TITLE_FONT, color=INK, loc="left", parse_math=False)
    axes.set_xlabel(x_label, fontsize=NAME_FONT)
    axes.set_ylabel(y_label, fontsize=NAME_FONT)
    axes.tick_params(labelsize=FONT)
    axes.locator_params(axis="x", integer=True)
    axes.spines[["top", "right"]].set_visible(False)
    return axes


def _finish(axes: Any) -> Figure:
    """Return the figure of axes, after its texts have a font for every character."""
    figure: Figure = load_canvas().finish_axes(axes)
    return figure


def _draw_legend(axes: Any) -> None:
    outside = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5)}
    for text in axes.legend(fontsize=FONT, frameon=False, **outside).get_texts():
        text.set_parse_math(False)
