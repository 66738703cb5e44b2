"""Draw figures of attribution: the tree of one sentence, head importance, pruning curves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lens_mix.arguments import check_number, describe_value
from lens_mix.view.labels import FONT, INK, QUIET, count_labels, make_visible
from lens_mix.view.lazy import load_canvas

if TYPE_CHECKING:
    import networkx
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

    from lens_mix.evaluation import HeadImportance, PruningCurves

# Curves differ in hue, in lightness and in their marks, so that they can be distinguished without colours.
_HUES = ("#1c75ad", "#d1662c", "#3f8f5b", "#8a4fa3", "#b3902f", "#a33b52")
_MARKS = "osD^vP"

_PAGE = (5.7, 7.5)  # the largest width and height of a tree, which leave space for its labels on a page


def tree_figure(
    tree: networkx.DiGraph,
    title: str | None = None,
    *,
    ax: Axes | None = None,
    figsize: tuple[float, float] | None = None,
) -> Figure:
    """Return a figure of an attribution tree above its sentence, with the root on top.

    Each token is at the level at which it joined the tree. The figure fits on a page; if there is no space
    for all labels, the tokens of the tree have theirs first.

    Args:
        tree: A tree of `lens_mix.attribution_tree`.
        title: The title above the figure; None: no title.
        ax: matplotlib axes to draw in; None: a new figure.
        figsize: The width and height of the figure in inches; None: as the content needs.

    Raises:
        ValueError: The graph is not such a tree; `figsize` with `ax`; a `figsize` that is too small.
        ImportError: Matplotlib is not installed.
    """
    if "root" not in getattr(tree, "graph", ()):
        raise ValueError(
            f"tree: expected a graph of attribution_tree (with a root), got {describe_value(tree)}"
        )
    canvas = load_canvas()
    tokens = [make_visible(token) for token in tree.graph["tokens"]]
    levels = sorted({level for level, _ in tree.nodes})
    height_of = {level: height for height, level in enumerate(levels)}
    bottom = 0.25 + canvas.measure_longest(tokens, FONT)
    width, height = min(max(0.34 * len(tokens), 3.0), _PAGE[0]), min(max(0.34 * len(levels), 1.0), _PAGE[1])
    inner = (width, height)
    panel = canvas.open_panel(1.05, bottom, inner, (0.2, 0.45), title, ax, figsize)
    axes = panel.axes
    axes.set(xlim=(-0.6, len(tokens) - 0.4), ylim=(-0.6, len(levels) - 0.4))
    _draw_edges(axes, tree, height_of)
    look = {"textcoords": "offset points", "size": FONT, "color": INK, "parse_math": False, "zorder": 4}
    for (level, position), values in tree.nodes(data=True):
        point = position, height_of[level]
        axes.plot(*point, "o", ms=5, color=INK, zorder=3)
        # Most arrows run from the lower left to the upper right, so the label is on the upper left.
        offset, side = ((-5, 4), "right") if position else ((0, 6), "center")
        axes.annotate(make_visible(values["token"]), point, xytext=offset, ha=side, **look)
    names = {level: values["layer"] for (level, _), values in tree.nodes(data=True)}
    rows = [f"after layer {names[level]}" if level else "input" for level in levels]
    width, height = canvas.measure_axes(axes)
    canvas.label_ticks(axes.yaxis, rows, count_labels(height, FONT), colour=QUIET)
    used = list(dict.fromkeys(position for _, position in tree.nodes))
    canvas.label_ticks(axes.xaxis, tokens, count_labels(width, FONT), rotation=90, strongest=used)
    canvas.draw_thin_frame(axes, ticks=0)
    axes.spines[["left", "right", "top"]].set_visible(False)
    axes.grid(axis="y", color="#eeeeee", lw=0.6)
    axes.set_axisbelow(True)
    figure: Figure = panel.finish()
    return figure


def _draw_edges(axes: Any, tree: networkx.DiGraph, height_of: dict[int, int]) -> None:
    for start, end, values in tree.edges(data=True):
        strength = min(max(values.get("share", 1.0), 0.0), 1.0)
        by_strength = {"alpha": 0.35 + 0.65 * strength, "linewidth": 0.6 + 1.6 * strength}
        look = {"arrowstyle": "-|>", "color": _HUES[0], "shrinkA": 4, "shrinkB": 4, **by_strength}
        tail, head = (start[1], height_of[start[0]]), (end[1], height_of[end[0]])
        axes.annotate("", xy=head, xytext=tail, arrowprops=look, zorder=2)


def head_map(
    importance: HeadImportance,
    title: str | None = None,
    highest: float | None = None,
    *,
    ax: Axes | None = None,
    figsize: tuple[float, float] | None = None,
    cmap: str | Colormap | None = None,
) -> Figure:
    """Return a heat map of head importance, layer x head, with the first layer at the bottom.

    Args:
        importance: A result of `lens_mix.evaluation.head_importance`.
        title: The title above the figure; None: how the importance was measured.
        highest: The score of the last colour. Larger scores have the same colour, and the colour bar then
            ends in a point. None: the largest score.
        ax: matplotlib axes to draw in; None: a new figure.
        figsize: The width and height of the figure in inches; None: as the content needs.
        cmap: A matplotlib colour map or its name; None: blues, and orange to purple for negative scores.

    Raises:
        TypeError: `importance` is not a HeadImportance.
        ValueError: `highest` is not positive; `figsize` with `ax`; a `figsize` that is too small.
        ImportError: Matplotlib is not installed.
    """
    highest = None if highest is None else check_number("highest", highest, 0, above=True)
    if not hasattr(importance, "scores"):
        raise TypeError(f"importance: expected a HeadImportance, got {describe_value(importance)}")
    canvas = load_canvas()
    layers, heads = importance.scores.shape
    inner = (min(max(0.22 * heads, 1.6), 7.0), min(max(0.16 * layers, 1.2), 6.0))
    inner = (max(inner[0], 1.7), inner[1])
    name = f"Head importance by {importance.name},\n{importance.examples} examples"
    panel = canvas.open_panel(0.6, 0.55, inner, (0.9, 0.65), name if title is None else title, ax, figsize)
    axes = panel.axes
    low, high = float(importance.scores.min()), float(importance.scores.max())
    signed = low < 0
    bound = min(max(high, -low) or 1.0, float("inf") if highest is None else highest)
    image = axes.imshow(
        importance.scores.numpy(),
        origin="lower",
        aspect="auto",
        cmap=canvas.choose_colour_map(signed, cmap),
        vmin=-bound if signed else 0.0,
        vmax=bound,
        interpolation="nearest",
    )
    width, height = canvas.measure_axes(axes)
    for axis, count, inches in ((axes.xaxis, heads, width), (axes.yaxis, layers, height)):
        canvas.label_ticks(axis, [str(index) for index in range(count)], count_labels(inches, FONT + 3))
    axes.set_xlabel("head", size=FONT + 1, color=QUIET)
    axes.set_ylabel("layer", size=FONT + 1, color=QUIET)
    canvas.draw_thin_frame(axes, ticks=2)
    extensions = {(False, False): "neither", (True, False): "max", (False, True): "min", (True, True): "both"}
    extend = extensions[high > bound, low < -bound]
    panel.add_colour_bar(image, extend)
    figure: Figure = panel.finish()
    return figure


def pruning_figure(
    curves: PruningCurves,
    title: str | None = None,
    metric: str = "metric",
    *,
    ax: Axes | None = None,
    figsize: tuple[float, float] | None = None,
) -> Figure:
    """Return a figure of all pruning curves; the range of the random draws is shaded.

    Args:
        curves: A result of `lens_mix.evaluation.pruning_curves`.
        title: The title above the figure; None: "pruning curves".
        metric: The name of the vertical axis.
        ax: matplotlib axes to draw in; None: a new figure.
        figsize: The width and height of the figure in inches; None: 6 x 3.6.

    Raises:
        TypeError: `curves` is not a PruningCurves.
        ValueError: `figsize` with `ax`; a `figsize` that is too small.
        ImportError: Matplotlib is not installed.
    """
    if not hasattr(curves, "fractions"):
        raise TypeError(f"curves: expected PruningCurves, got {describe_value(curves)}")
    canvas = load_canvas()
    panel = canvas.open_panel(0.65, 0.5, (3.9, 2.65), (1.45, 0.45), title or "pruning curves", ax, figsize)
    axes = panel.axes
    shares = [100 * fraction for fraction in curves.fractions]
    for index, (name, values) in enumerate(curves.values.items()):
        is_random = name == "random"
        hue = "#8a8a8a" if is_random else _HUES[index % len(_HUES)]
        mark = "x" if is_random else _MARKS[index % len(_MARKS)]
        axes.plot(shares, values, marker=mark, ms=3.5, lw=1.3, color=hue, label=name)
        if curves.lowest[name] != curves.highest[name]:
            axes.fill_between(shares, curves.lowest[name], curves.highest[name], color=hue, alpha=0.15, lw=0)
    axes.set_xlabel(f"heads removed, % of {curves.total}", size=FONT + 1, color=QUIET)
    axes.set_ylabel(metric, size=FONT + 1, color=QUIET)
    canvas.draw_thin_frame(axes, ticks=2)
    axes.tick_params(labelsize=FONT, labelcolor=INK)
    axes.grid(color="#eeeeee", lw=0.6)
    axes.set_axisbelow(True)
    outside = {"loc": "upper left", "bbox_to_anchor": (1.02, 1.0), "borderaxespad": 0}
    for text in axes.legend(frameon=False, fontsize=FONT, **outside).get_texts():
        text.set(color=INK, parse_math=False)
    figure: Figure = panel.finish()
    return figure
