"""Draw figures of heads: their importance, and curves of a model whose heads are pruned."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lens_mix.arguments import describe_value
from lens_mix.view.heat_maps import check_vmax, make_norm
from lens_mix.view.labels import FONT, INK, QUIET, count_labels
from lens_mix.view.lazy import load_canvas

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

    from lens_mix.experiments import HeadImportance, PruningCurves

# Curves differ in hue, in lightness and in their marks, so that they can be distinguished without colors.
_HUES = ("#1c75ad", "#d1662c", "#3f8f5b", "#8a4fa3", "#b3902f", "#a33b52")
_MARKS = "osD^vP"


def head_map(
    importance: HeadImportance,
    title: str | None = None,
    vmax: float | None = None,
    *,
    ax: Axes | None = None,
    figsize: tuple[float, float] | None = None,
    cmap: str | Colormap | None = None,
) -> Figure:
    """Return a heat map of head importance, layer x head, with the first layer at the bottom.

    Args:
        importance: A result of `lens_mix.experiments.head_importance`.
        title: The title above the figure; None: how the importance was measured.
        vmax: The end of the color scale, above 0. Larger scores have its last color, and the color bar
            then ends in a point. None: the largest score.
        ax: matplotlib axes to draw in; None: a new figure.
        figsize: The width and height of the figure in inches; None: as the content needs.
        cmap: A matplotlib color map or its name; None: blues, and orange to purple for negative scores.

    Raises:
        TypeError: `importance` is not a HeadImportance.
        ValueError: `vmax` is not above 0; `figsize` with `ax`; a `figsize` that is too small.
        ImportError: Matplotlib is not installed.
    """
    vmax = check_vmax(vmax)
    if not hasattr(importance, "scores"):
        raise TypeError(f"importance: expected a HeadImportance, got {describe_value(importance)}")
    canvas = load_canvas()
    layers, heads = importance.scores.shape
    inner = (min(max(0.22 * heads, 1.6), 7.0), min(max(0.16 * layers, 1.2), 6.0))
    inner = (max(inner[0], 1.7), inner[1])
    name = f"Head importance by {importance.name},\n{importance.examples} examples"
    panel = canvas.open_panel(0.6, 0.55, inner, (0.9, 0.65), name if title is None else title, ax, figsize)
    axes = panel.axes
    norm = make_norm([importance.scores], logarithmic=False, vmax=vmax)
    image = axes.imshow(
        importance.scores.numpy(),
        origin="lower",
        aspect="auto",
        cmap=canvas.choose_color_map(norm.vmin < 0, cmap),
        norm=norm,
        interpolation="nearest",
    )
    width, height = canvas.measure_axes(axes)
    for axis, count, inches in ((axes.xaxis, heads, width), (axes.yaxis, layers, height)):
        canvas.label_ticks(axis, [str(index) for index in range(count)], count_labels(inches, FONT + 3))
    axes.set_xlabel("head", size=FONT + 1, color=QUIET)
    axes.set_ylabel("layer", size=FONT + 1, color=QUIET)
    canvas.draw_thin_frame(axes, ticks=2)
    panel.add_color_bar(image)
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
        curves: A result of `lens_mix.experiments.pruning_curves`.
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
