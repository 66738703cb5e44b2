"""Draw figures of mixing maps.

| function | figure |
|---|---|
| `layer_maps` | one heat map per layer, query × key |
| `token_bars` | one row of bars over the tokens per method |

`position_figure.show_position` draws one position in every layer. All functions return a matplotlib Figure
that is independent of pyplot; `figure.savefig("maps.png")` writes it. They raise an ImportError if matplotlib
is not installed.

If there are too many tokens, all figures label them by the same rule: from the strongest to the weakest, each
if there is space beside the labels before it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix.arguments import (
    check_choice,
    check_flags,
    check_instance,
    check_items,
    check_real_tensor,
    check_whole_number,
)
from lens_mix.maps import MixingMap
from lens_mix.maps.spans import Span, find_query
from lens_mix.maps.words import merge_axis, resolve_groups
from lens_mix.view.bars import BarFrame, draw_bars, rank_bars
from lens_mix.view.drawn import DrawnMap, sum_known
from lens_mix.view.heat_maps import (
    HeatMapPlaces,
    Scale,
    check_vmax,
    draw_cells,
    draw_grid,
    finish_bar,
    make_norm,
    make_title,
)
from lens_mix.view.labels import FONT, INK, NAME_FONT, Style, count_labels, make_subtitle, make_visible
from lens_mix.view.layers import name_layers
from lens_mix.view.lazy import load_canvas
from lens_mix.view.position import RAW, SHARE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

    from lens_mix.view.canvas import DrawnPicture

_LONGEST_NAME = 30  # a longer name of a row of bars is broken into lines


def layer_maps(
    mixing_map: MixingMap,
    layers: Sequence[int] | None = None,
    head: int | Literal["all"] | None = None,
    columns: int = 6,
    normalize: bool | None = None,
    title: str | None = None,
    *,
    layer: int | None = None,
    words: bool = False,
    scale: Scale = "linear",
    diagonal: bool = True,
    queries: Span | None = None,
    keys: Span | None = None,
    ax: Axes | None = None,
    figsize: tuple[float, float] | None = None,
    cmap: str | Colormap | None = None,
    vmax: float | None = None,
    style: Style = "screen",
) -> Figure:
    """Return a figure with one heat map per layer, query × key, on a common color scale.

        >>> m = lm.run(model, "The Eiffel Tower is in the city of", "value_zeroing")
        >>> lm.view.layer_maps(m, layers=[0, 1]).savefig("layers.png")

    Keys that a query cannot see are gray. Tokens are labels on the left and at the bottom; on the left also
    with the model's prediction, `, → which`. If there are too many, rows are labeled at equal distances, and
    columns from the strongest to the weakest, each if there is space. Below the title are the model, the
    prompt and the unit, as far as the map's record contains them.

    Args:
        mixing_map: A map with scores `[layer, query, key]` or `[layer, head, query, key]`.
        layers: The labels of the layers to draw (negative: from the end); None: all.
        head: One head; "all": one heat map per head; None: the mean over heads.
        columns: The largest number of heat maps side by side, 1 or more.
        normalize: True: rows are divided by their sum (0 to 1). False: raw scores. None: True, unless there
            are negative scores; these are drawn raw, on a scale around 0.
        title: The title above the figure; None: the name of the method, and of the aggregation if there is
            one.
        layer: One layer, instead of `layers`.
        words: Whether pieces are merged into words (`MixingMap.merge_words`).
        scale: "linear", or "log" for a logarithmic scale from 1/10,000 of the largest score.
        diagonal: Whether each position's share of itself is drawn. Hidden shares do not count for the color
            scale.
        queries: The positions of the rows to draw (of words, if merged), or a text, as in `lm.run`; None: all
            rows of the map.
        keys: The positions of the columns to draw (of words, if merged), or a text; None: all.
        ax: matplotlib axes to draw in, for a single heat map (`layer=`); None: a new figure.
        figsize: The width and height of the figure in inches; None: as the content needs.
        cmap: A matplotlib color map or its name; None: blues, and orange to purple for negative scores.
        vmax: The end of the color scale, above 0, so that several figures have the same scale:
            `layer_maps(m, vmax=0.5)`. Larger scores have its last color, and the color bar then ends in a
            point. A scale with negative scores begins at -vmax. None: the largest score.
        style: "paper" is for a column of a printed page: 3.3 inches wide with text of 8 points, without a
            title, and in greys, so that nothing depends on hue: a scale with negative scores goes from white
            to black. `figsize=`, `title=` and `cmap=` change that. `m.show(style="paper").savefig("m.pdf")`

    Raises:
        TypeError: `mixing_map` is not a MixingMap.
        ValueError: A layer, head, row or key that the map does not have; no layers; `columns` below 1;
            negative scores with `normalize=True`; several heat maps or `figsize` with `ax`; a `figsize` that
            is too small for the labels; a `vmax` that is not above 0.
    """
    check_instance("mixing_map", mixing_map, MixingMap, "a MixingMap")
    columns, vmax = _check_options(columns, normalize, title, words, scale, diagonal), check_vmax(vmax)
    if layer is not None and layers is not None:
        raise ValueError(f"layer: expected None beside layers={layers!r}, got {layer!r}")
    layers = layers if layer is None else [layer]
    shown = mixing_map if layers is None else mixing_map.select_layers(layers)
    check_choice("style", style, get_args(Style))
    if style == "paper":
        title, cmap = title or "", cmap or "Greys"
    title = make_title(shown, head) if title is None else title
    if head == "all" and not shown.has_heads:
        raise ValueError(
            f"head: expected a map with heads for 'all', got shape {tuple(shown.scores.shape)}; many methods "
            "keep them with per_head=True"
        )
    if head != "all":
        shown = (shown if head is None else shown.head(check_whole_number("head", head))).merge_heads()
    normalize = _decide_normalize(normalize, [shown])
    drawn = DrawnMap.from_map(shown, normalize, words, diagonal, queries, keys)
    if style == "paper":
        # A column has no space for the predictions.
        drawn = DrawnMap.from_map(shown.replace(explained=None), normalize, words, diagonal, queries, keys)
    names, panels = _list_panels(shown, drawn)
    unit = SHARE if normalize else RAW
    strongest = drawn.rank_keys("sum")
    if ax is not None:
        canvas = load_canvas()
        canvas.check_axes(ax, figsize, len(panels), "layer= (and head=)")
        drawn_scores = [scores.masked_fill(~visible, 0) for scores, visible in panels]
        norm = make_norm(drawn_scores, scale == "log", vmax)
        _draw_in_axes(ax, drawn, draw_cells(ax, *panels[0], norm, cmap), unit, strongest)
        ax.set_title(title, size=NAME_FONT, color=INK, loc="left", parse_math=False)
        drawn_in: Figure = canvas.finish_axes(ax)
        return drawn_in
    explanation = mixing_map.explanation() if mixing_map.scores.shape[-2] == 1 else ""
    subtitle = " · ".join(filter(None, (explanation, make_subtitle(mixing_map, unit))))
    subtitle, size = "" if style == "paper" else subtitle, load_canvas().choose_size(figsize, style)
    grid = HeatMapPlaces(names, columns, drawn.rows, drawn.keys, title, subtitle, size)
    picture = draw_grid(grid, panels, "query", unit, scale == "log", strongest, cmap, vmax)
    finished: Figure = load_canvas().finish_style(picture, style)
    return finished


def _draw_in_axes(axes: Any, drawn: DrawnMap, image: Any, unit: str, strongest: list[int]) -> None:
    """Write the labels and the color bar of a heat map in axes of a user's figure."""
    canvas = load_canvas()
    bar = axes.figure.colorbar(image, ax=axes, pad=0.02, aspect=30)
    canvas.style_bar(bar)
    finish_bar(bar, image.norm, unit)
    width, height = canvas.measure_axes(axes)
    canvas.label_ticks(axes.yaxis, drawn.rows, count_labels(height, FONT))
    canvas.label_ticks(axes.xaxis, drawn.keys, count_labels(width, FONT), rotation=90, strongest=strongest)


def _list_panels(shown: MixingMap, drawn: DrawnMap) -> tuple[list[str], list[tuple[Tensor, Tensor]]]:
    """Return the names of the heat maps, and for each its scores and which of them are visible."""
    names = name_layers(shown)
    if drawn.scores.ndim == 3:
        return names, list(zip(drawn.scores, drawn.visible, strict=True))
    heads = range(drawn.scores.shape[1])
    named = [
        f"head {head}" if len(names) == 1 else f"{name}, head {head}" for name in names for head in heads
    ]
    pairs = zip(drawn.scores, drawn.visible, strict=True)
    return named, [(scores, visible) for head_scores, visible in pairs for scores in head_scores]


def token_bars(
    rows: Mapping[str, Float[Tensor, " key"] | MixingMap],
    tokens: Sequence[str],
    title: str | None = None,
    query: int | str | None = None,
    layer: int = -1,
    *,
    words: bool = False,
    ax: Axes | None = None,
    figsize: tuple[float, float] | None = None,
) -> Figure:
    """Return a figure with one row of bars over the tokens per method.

        >>> m = lm.run(model, "The Eiffel Tower is in the city of", "value_zeroing")
        >>> rows = {"rollout": lm.rollout(m).scores[-1, -1], "mean": lm.layer_mean(m).scores[-1, -1]}
        >>> lm.view.token_bars(rows, m.tokens).savefig("bars.png")

    Each row has its own scale, from 0 to its largest value. The largest bars have their value above them, in
    the unit of the row, and their tokens always have labels. If one token has more than 90 % of a row, its
    share is written into the row. A NaN means that the method left the token out, and is drawn as a dash.

    Args:
        rows: For each label either scores `[key]`, or a MixingMap, of which the row `query` of `layer` is
            drawn (mean over heads). A map without the first tokens of `tokens` is accepted.
        tokens: One token per bar.
        title: The title above the figure; None: no title.
        query: The row of the MixingMaps (negative: from the end), or a text of `tokens`; None: the default
            row of each map (`MixingMap.default_query`).
        layer: The layer of the MixingMaps (negative: from the end).
        words: Whether pieces are merged into words and their scores summed.
        ax: matplotlib axes to draw in, for a single row; None: a new figure.
        figsize: The width and height of the figure in inches; None: as the content needs.

    Raises:
        TypeError: A row that is neither a vector nor a MixingMap.
        ValueError: No rows; a row with another length than `tokens`; an infinite score; `words` with tokens
            that do not show where words begin; several rows or `figsize` with `ax`; a `figsize` that is too
            small for the labels.
    """
    canvas = load_canvas()
    if not check_instance("rows", rows, Mapping, "a dict of rows of scores"):
        raise ValueError("rows: expected at least one row, got none")
    tokens = check_items("tokens", tokens, "a list of strings", kind=str)
    check_instance("title", title, (str, type(None)), "a text")
    check_flags(words=words)
    if query is not None:
        query = find_query(tokens, query) if isinstance(query, str) else check_whole_number("query", query)
    layer = check_whole_number("layer", layer)
    vectors = {name: _read_row(name, row, tokens, query, layer) for name, row in rows.items()}
    if words:
        groups, tokens = resolve_groups(tokens, None, "tokens")
        vectors = {name: merge_axis(row, groups, -1, sum_known) for name, row in vectors.items()}
    labels = [make_visible(token) for token in tokens]
    names = [_break_name(name) for name in vectors]
    ranked = rank_bars(vectors.values())
    if ax is not None:
        canvas.check_axes(ax, figsize, len(vectors), "one row in rows")
        draw_bars(ax, next(iter(vectors.values())), labels)
        limit = count_labels(canvas.measure_axes(ax)[0], FONT)
        canvas.label_ticks(ax.xaxis, labels, limit, rotation=90, strongest=ranked)
        ax.set_title(title or names[0], size=NAME_FONT, color=INK, loc="left", parse_math=False)
        drawn_in: Figure = canvas.finish_axes(ax)
        return drawn_in
    maps = [row for row in rows.values() if isinstance(row, MixingMap)]
    subtitle = "" if not maps else make_subtitle(maps[0], "each row in its own unit")
    explanation = next(filter(None, (_explain(row, query) for row in maps)), "")
    frame = BarFrame(names, labels, title, " · ".join(filter(None, (explanation, subtitle))), figsize)
    picture: DrawnPicture = canvas.DrawnPicture(frame.width, frame.height)
    for row_index, (name, values) in enumerate(zip(names, vectors.values(), strict=True)):
        bottom = frame.height - frame.top - (row_index + 1) * frame.row + frame.gap
        axes = picture.add_box(frame.left, bottom, frame.inner, frame.row - frame.gap)
        draw_bars(axes, values, labels)
        middle = bottom + (frame.row - frame.gap) / 2
        picture.write(frame.left - 0.42, middle, name, size=NAME_FONT, color=INK, ha="right", va="center")
    limit = count_labels(frame.inner, FONT) if frame.turned else len(labels)
    canvas.label_ticks(axes.xaxis, labels, limit, rotation=90 if frame.turned else 0, strongest=ranked)
    picture.write_title(frame.title, frame.subtitle)
    return picture


def _explain(row: MixingMap, query: int | None) -> str:
    """Return what a row explains; a negative position is the same in maps without the first tokens."""
    return row.explanation(query) if query is None or query < 0 else ""


def _read_row(name: str, row: Any, tokens: list[str], query: int | None, layer: int) -> Float[Tensor, " key"]:
    if isinstance(row, MixingMap):
        return _read_row_of_map(name, row, tokens, query, layer)
    if not isinstance(row, (Tensor, np.ndarray, list, tuple)):
        raise TypeError(f"rows[{name!r}]: expected scores [key] or a MixingMap, got {type(row).__name__}")
    vector = check_real_tensor(f"rows[{name!r}]", row).to("cpu", torch.float64)
    if vector.shape != (len(tokens),):
        raise ValueError(f"rows[{name!r}]: expected shape ({len(tokens)},), got {tuple(vector.shape)}")
    if bool(vector.isinf().any()):
        raise ValueError(f"rows[{name!r}]: expected finite scores, got an infinite one")
    return vector


def _read_row_of_map(
    name: str, row: MixingMap, tokens: list[str], query: int | None, layer: int
) -> Float[Tensor, " key"]:
    keys = row.key_labels
    left_out = len(tokens) - len(keys)
    if left_out < 0 or keys != tokens[left_out:]:
        raise ValueError(
            f"rows[{name!r}]: expected a map over the tokens, or over their last ones, got {len(keys)} keys "
            f"{keys[:4]} … for {len(tokens)} tokens {tokens[:4]} …"
        )
    # `query` is a position in `tokens`; the positions of a map without the first tokens are smaller.
    if query is None:
        query = row.default_query_position + left_out
    position = query if query < 0 else query - left_out
    if not -len(row.tokens) <= position < len(row.tokens) or (query >= 0 and position < 0):
        raise ValueError(f"query: expected a position that {name!r} has, got {query}")
    row_index = row.row_index(position)
    scores = row.merge_heads().scores[row.layer_index(layer), row_index].detach().to("cpu", torch.float64)
    return torch.cat([torch.full((left_out,), torch.nan, dtype=torch.float64, device="cpu"), scores])


def _check_options(
    columns: int, normalize: bool | None, title: str | None, words: bool, scale: str, diagonal: bool
) -> int:
    if normalize is not None:
        check_flags(normalize=normalize)
    check_flags(words=words, diagonal=diagonal)
    check_choice("scale", scale, get_args(Scale))
    check_instance("title", title, (str, type(None)), "a text")
    return check_whole_number("columns", columns, 1)


def _decide_normalize(normalize: bool | None, maps: Iterable[MixingMap]) -> bool:
    """Return whether rows are divided by their sum; for None, whether no score is negative."""
    if normalize is not None:
        return normalize
    return not any(bool((mixing_map.scores < 0).any()) for mixing_map in maps)


def _break_name(name: str) -> str:
    """Return a long name with line breaks after its commas, or where a line would be too long."""
    if len(name) <= _LONGEST_NAME:
        return name
    *before, last = name.split(", ")
    pieces = [*(f"{piece}," for piece in before), last]
    return "\n".join(line for piece in pieces for line in textwrap.wrap(piece, _LONGEST_NAME))
