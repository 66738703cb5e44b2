"""Draw a leaderboard as bars with their intervals."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lens_mix.view.labels import FONT, INK, QUIET
from lens_mix.view.lazy import load_canvas

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

    from lens_mix.view.canvas import Picture


def leaderboard_figure(table: pandas.DataFrame, metric: str, title: str) -> Figure:
    """Return a figure with one horizontal bar per method and aggregation, the last row of the table on top.

    Args:
        table: a table with the columns method, aggregation, `metric`, and `metric` with `_low` and `_high`.
        metric: The column to draw.
        title: The title above the bars.
    """
    names = [
        row.method if row.aggregation == "-" else f"{row.method} · {row.aggregation}"
        for row in table.itertuples()
    ]
    height = 0.2 * len(names)
    label = 0.075 * max(map(len, names)) + 0.2
    figure: Picture = load_canvas().Picture(label + 4.6, height + 1.0)
    figure.write_title(title)
    axes = figure.add_box(label, 0.5, 4.3, height)
    means = table[metric].to_numpy()
    spread = [means - table[f"{metric}_low"].to_numpy(), table[f"{metric}_high"].to_numpy() - means]
    colours = [QUIET if method in ("random", "position") else "#2985bc" for method in table["method"]]
    axes.barh(range(len(names)), means, xerr=spread, color=colours, error_kw={"lw": 0.8, "ecolor": INK})
    axes.set_yticks(range(len(names)), names, fontsize=FONT, color=INK)
    axes.set_ylim(-0.6, len(names) - 0.4)
    axes.axvline(0, color=INK, lw=0.8)
    axes.tick_params(axis="x", labelsize=FONT)
    axes.set_xlabel(
        f"{metric.replace('_', ' ')}, mean over cases and its 95 % interval", fontsize=FONT, color=INK
    )
    return figure
