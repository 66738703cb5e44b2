"""Draw the attribution tree of one sentence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lens_mix.arguments import describe_value
from lens_mix.view.labels import FONT, INK, QUIET, count_labels, make_visible
from lens_mix.view.lazy import load_canvas

if TYPE_CHECKING:
    import networkx
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_EDGE = "#1c75ad"
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
    canvas.label_ticks(axes.yaxis, rows, count_labels(height, FONT), color=QUIET)
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
        look = {"arrowstyle": "-|>", "color": _EDGE, "shrinkA": 4, "shrinkB": 4, **by_strength}
        tail, head = (start[1], height_of[start[0]]), (end[1], height_of[end[0]])
        axes.annotate("", xy=head, xytext=tail, arrowprops=look, zorder=2)
