"""Figures of attribution: the tree of one sentence, head importance, pruning curves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lens_mix.arguments import number, shown
from lens_mix.view.labels import FONT, INK, QUIET, labels_that_fit, visible_token
from lens_mix.view.lazy import need_canvas

if TYPE_CHECKING:
    import networkx
    from matplotlib.figure import Figure

    from lens_mix.evaluation import HeadImportance, PruningCurves

# Six hues apart in lightness too, and marks, so that curves are told apart without colour.
_HUES = ("#1c75ad", "#d1662c", "#3f8f5b", "#8a4fa3", "#b3902f", "#a33b52")
_MARKS = "osD^vP"


def tree_figure(tree: networkx.DiGraph, title: str | None = None) -> Figure:
    """An attribution tree over its sentence: a token stands where it joined, the root on top.

    `title` stands above the figure, as in the figures below; all raise ImportError without matplotlib.

    Raises:
        ValueError: the graph is not one of `lens_mix.attribution_tree`.
    """
    if "root" not in getattr(tree, "graph", ()):
        raise ValueError(f"tree: expected a graph of attribution_tree (with a root), got {shown(tree)}")
    canvas = need_canvas()
    tokens = [visible_token(token) for token in tree.graph["tokens"]]
    levels = sorted({level for level, _ in tree.nodes})
    height_of = {level: place for place, level in enumerate(levels)}
    bottom = 0.25 + canvas.longest(tokens, FONT)
    inner = (max(0.34 * len(tokens), 3.0), max(0.34 * len(levels), 1.0))
    left, top = 1.05, 0.45
    picture = canvas.Picture(left + inner[0] + 0.2, bottom + inner[1] + top)
    axes = picture.add_box(left, bottom, *inner)
    axes.set(xlim=(-0.6, len(tokens) - 0.4), ylim=(-0.6, len(levels) - 0.4))
    _draw_edges(axes, tree, height_of)
    look = {"textcoords": "offset points", "size": FONT, "color": INK, "parse_math": False, "zorder": 4}
    for (level, position), values in tree.nodes(data=True):
        place = position, height_of[level]
        axes.plot(*place, "o", ms=5, color=INK, zorder=3)
        # beside the arrows, which mostly run from the lower left to the upper right
        offset, side = ((-5, 4), "right") if position else ((0, 6), "center")
        axes.annotate(visible_token(values["token"]), place, xytext=offset, ha=side, **look)
    names = {level: values["layer"] for (level, _), values in tree.nodes(data=True)}
    rows = [f"after layer {names[level]}" if level else "input" for level in levels]
    canvas.label_ticks(axes.yaxis, rows, colour=QUIET)
    canvas.label_ticks(axes.xaxis, tokens, rotation=90)
    canvas.thin_frame(axes, ticks=0)
    axes.spines[["left", "right", "top"]].set_visible(False)
    axes.grid(axis="y", color="#eeeeee", lw=0.6)
    axes.set_axisbelow(True)
    picture.write_title(title, size=10)
    return picture


def _draw_edges(axes: Any, tree: networkx.DiGraph, height_of: dict[int, int]) -> None:
    for start, end, values in tree.edges(data=True):
        strength = min(max(values.get("share", 1.0), 0.0), 1.0)
        strong = {"alpha": 0.35 + 0.65 * strength, "linewidth": 0.6 + 1.6 * strength}
        look = {"arrowstyle": "-|>", "color": _HUES[0], "shrinkA": 4, "shrinkB": 4, **strong}
        tail, head = (start[1], height_of[start[0]]), (end[1], height_of[end[0]])
        axes.annotate("", xy=head, xytext=tail, arrowprops=look, zorder=2)


def head_map(importance: HeadImportance, title: str | None = None, highest: float | None = None) -> Figure:
    """Head importance as a heat map, layer x head, the first layer at the bottom.

    Args:
        importance: of `lens_mix.evaluation.head_importance`.
        title: None: how it was measured.
        highest: larger scores share the last colour, and the bar ends in a point; None: the largest score.
            Raises ValueError: it is not positive.
    """
    highest = None if highest is None else number("highest", highest, 0, above=True)
    if not hasattr(importance, "scores"):
        raise TypeError(f"importance: expected a HeadImportance, got {shown(importance)}")
    canvas = need_canvas()
    layers, heads = importance.scores.shape
    inner = (min(max(0.22 * heads, 1.6), 7.0), min(max(0.16 * layers, 1.2), 6.0))
    picture = canvas.Picture(max(0.6 + inner[0] + 0.9, 3.2), 0.55 + inner[1] + 0.65)
    axes = picture.add_box(0.6, 0.55, *inner)
    low, high = float(importance.scores.min()), float(importance.scores.max())
    signed = low < 0
    bound = min(max(high, -low) or 1.0, float("inf") if highest is None else highest)
    image = axes.imshow(
        importance.scores.numpy(),
        origin="lower",
        aspect="auto",
        cmap=canvas.colours(signed=signed),
        vmin=-bound if signed else 0.0,
        vmax=bound,
        interpolation="nearest",
    )
    for axis, count, inches in ((axes.xaxis, heads, inner[0]), (axes.yaxis, layers, inner[1])):
        canvas.label_ticks(axis, [str(place) for place in range(count)], labels_that_fit(inches, FONT + 3))
    axes.set_xlabel("head", size=FONT + 1, color=QUIET)
    axes.set_ylabel("layer", size=FONT + 1, color=QUIET)
    canvas.thin_frame(axes, ticks=2)
    cut = {(False, False): "neither", (True, False): "max", (False, True): "min", (True, True): "both"}
    extend = cut[high > bound, low < -bound]
    picture.add_colour_bar(image, 0.6 + inner[0] + 0.1, 0.55, inner[1], extend)
    name = f"Head importance by {importance.name},\n{importance.examples} examples"
    picture.write_title(name if title is None else title, size=10)
    return picture


def pruning_figure(curves: PruningCurves, title: str | None = None, metric: str = "metric") -> Figure:
    """All of `lens_mix.evaluation.pruning_curves` in one figure; of "random", the range of draws is shaded.

    `metric` is the name of the vertical axis.
    """
    if not hasattr(curves, "fractions"):
        raise TypeError(f"curves: expected PruningCurves, got {shown(curves)}")
    canvas = need_canvas()
    picture = canvas.Picture(6.0, 3.6)
    axes = picture.add_box(0.65, 0.5, 3.9, 2.65)
    shares = [100 * fraction for fraction in curves.fractions]
    for place, (name, values) in enumerate(curves.values.items()):
        random = name == "random"
        hue = "#8a8a8a" if random else _HUES[place % len(_HUES)]
        mark = "x" if random else _MARKS[place % len(_MARKS)]
        axes.plot(shares, values, marker=mark, ms=3.5, lw=1.3, color=hue, label=name)
        if curves.lowest[name] != curves.highest[name]:
            axes.fill_between(shares, curves.lowest[name], curves.highest[name], color=hue, alpha=0.15, lw=0)
    axes.set_xlabel(f"heads removed, % of {curves.total}", size=FONT + 1, color=QUIET)
    axes.set_ylabel(metric, size=FONT + 1, color=QUIET)
    canvas.thin_frame(axes, ticks=2)
    axes.tick_params(labelsize=FONT, labelcolor=INK)
    axes.grid(color="#eeeeee", lw=0.6)
    axes.set_axisbelow(True)
    beside = {"loc": "upper left", "bbox_to_anchor": (1.02, 1.0), "borderaxespad": 0}
    for text in axes.legend(frameon=False, fontsize=FONT, **beside).get_texts():
        text.set(color=INK, parse_math=False)
    picture.write_title(title or "pruning curves", size=10)
    return picture
