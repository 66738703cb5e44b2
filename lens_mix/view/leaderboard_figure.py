"""Draw a leaderboard as bars with their intervals."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lens_mix.view.labels import FONT, INK, QUIET
from lens_mix.view.lazy import load_canvas

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def leaderboard_figure(
    table: pandas.DataFrame,
    metric: str,
    title: str,
    *,
    ax: Axes | None = None,
    figsize: tuple[float, float] | None = None,
) -> Figure:
    """Return a figure with one horizontal bar per method and aggregation, the last row of the table on top.

    Args:
        table: A table with the columns method, aggregation, `metric`, and `metric` with `_low` and `_high`.
        metric: The column to draw.
        title: The title above the bars.
        ax: matplotlib axes to draw in; None: a new figure.
        figsize: The width and height of the figure in inches; None: as the content needs.
    """
    canvas = load_canvas()
    names = [
        row.method if row.aggregation == "-" else f"{row.method} · {row.aggregation}"
        for row in table.itertuples()
    ]
    height = 0.2 * len(names)
    label = 0.075 * max(map(len, names)) + 0.2
    panel = canvas.open_panel(label, 0.5, (4.3, height), (0.3, 0.5), title, ax, figsize)
    axes = panel.axes
    means = table[metric].to_numpy()
    spread = [means - table[f"{metric}_low"].to_numpy(), table[f"{metric}_high"].to_numpy() - means]
    colors = [QUIET if method in ("random", "position") else "#2985bc" for method in table["method"]]
    axes.barh(range(len(names)), means, xerr=spread, color=colors, error_kw={"lw": 0.8, "ecolor": INK})
    axes.set_yticks(range(len(names)), names, fontsize=FONT, color=INK)
    axes.set_ylim(-0.6, len(names) - 0.4)
    axes.axvline(0, color=INK, lw=0.8)
    axes.tick_params(axis="x", labelsize=FONT)
    axes.set_xlabel(
        f"{metric.replace('_', ' ')}, mean over cases and its 95 % interval", fontsize=FONT, color=INK
    )
    figure: Figure = panel.finish()
    return figure
