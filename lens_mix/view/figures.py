"""Figures of mixing maps.

| function | shows |
|---|---|
| `layer_maps` | one heat map per layer, query × key |
| `query_maps` | one heat map per method, layer × key, for one query |
| `token_bars` | one row of bars over the tokens per method |

All return a matplotlib Figure that belongs to no pyplot state: `figure.savefig("maps.png")`. They raise an
ImportError where matplotlib is not installed.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix.arguments import flags, instance, real_tensor, several, whole_number
from lens_mix.maps import MixingMap
from lens_mix.maps.positions import as_position
from lens_mix.view.bars import BarFrame, draw_bars
from lens_mix.view.heat_maps import Grid, default_title, draw_grid
from lens_mix.view.labels import FONT, INK, NAME_FONT, room_for, visible_token
from lens_mix.view.lazy import need_canvas

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Longer names of a row of bars are broken.
LONGEST_NAME = 30


def layer_maps(
    mixing_map: MixingMap,
    layers: Sequence[int] | None = None,
    head: int | None = None,
    columns: int = 6,
    normalize: bool | None = None,
    title: str | None = None,
) -> Figure:
    """One heat map per layer, query × key, on a common colour scale.

    A map that holds only some rows is drawn with these. Keys that a query could not see are grey. Tokens
    are written at the left and at the bottom, and thinned where there is no room for all.

    Args:
        mixing_map: its scores are `[layer, query, key]` or `[layer, head, query, key]`.
        layers: labels of the layers to draw (negative: from the end); None: all.
        head: one head; None: the mean over heads.
        columns: heat maps side by side, 1 or more.
        normalize: rows divided by their sum (0 to 1); False: the scores as they are; None: their sum, but
            where there are negative scores, which are drawn as they are, on a scale around 0.
        title: above the figure; None: the method's name, and the aggregation's if there was one.

    Raises:
        TypeError: `mixing_map` is no MixingMap.
        ValueError: no such layer or head; no layer at all; columns below 1; negative scores with
            `normalize=True`.
    """
    instance("mixing_map", mixing_map, MixingMap, "a MixingMap")
    columns = _checked_options(columns, normalize, title)
    shown = mixing_map if layers is None else mixing_map.select_layers(layers)
    shown = (shown if head is None else shown.head(head)).merge_heads()
    normalize = _normalizes(normalize, [shown])
    shown = shown.normalized() if normalize else shown
    before = "" if shown.kind == "layer" else "up to "
    names = [f"{before}layer {label}" for label in shown.layer_labels]
    title = default_title(mixing_map, head) if title is None else title
    grid = Grid(names, columns, _visible(shown.query_labels), _visible(shown.key_labels), title)
    panels = list(zip(shown.scores, shown.visible(), strict=True))
    return draw_grid(grid, panels, "query", "share of the row" if normalize else "score")


def query_maps(
    maps: Mapping[str, MixingMap],
    query: int = -1,
    columns: int = 2,
    normalize: bool | None = None,
    title: str | None = None,
) -> Figure:
    """One heat map per method, layer × key: what one query used in each layer. One colour scale for all.

    Args:
        maps: label to map, all over the same tokens; of maps with heads, the mean over heads.
        query: position (negative: from the end); each map has to hold its row.
        columns, normalize: as in `layer_maps`.
        title: above the figure; None: the query's position and token.

    Raises:
        TypeError: an entry of `maps` is no MixingMap.
        ValueError: no maps; maps over different tokens or layers; no such query; columns below 1; negative
            scores with `normalize=True`.
    """
    columns = _checked_options(columns, normalize, title)
    if not instance("maps", maps, Mapping, "a dict of MixingMaps"):
        raise ValueError("maps: expected at least one map, got none")
    shown = {name: instance(f"maps[{name!r}]", each, MixingMap, "a MixingMap") for name, each in maps.items()}
    shown = {name: each.merge_heads() for name, each in shown.items()}
    normalize = _normalizes(normalize, shown.values())
    shown = {name: each.normalized() if normalize else each for name, each in shown.items()}
    first = next(iter(shown.values()))
    for name, each in shown.items():
        if (each.tokens, each.key_labels, each.layers) != (first.tokens, first.key_labels, first.layers):
            raise ValueError(f"maps[{name!r}]: expected the tokens and layers of the first map, got others")
    position = as_position(query, len(first.tokens))
    # Each map may hold other rows.
    rows = [(each, each.row_index(position)) for each in shown.values()]
    if title is None:
        title = f"what position {position}, “{visible_token(first.tokens[position])}”, used"
    labels = [str(label) for label in first.layer_labels]
    grid = Grid(list(shown), columns, labels, _visible(first.key_labels), title)
    panels = [(each.scores[:, row], each.visible()[:, row]) for each, row in rows]
    return draw_grid(grid, panels, "layer", "share" if normalize else "score")


def token_bars(
    rows: Mapping[str, Float[Tensor, " key"] | MixingMap],
    tokens: Sequence[str],
    title: str | None = None,
    query: int = -1,
    layer: int = -1,
) -> Figure:
    """One row of bars over the tokens per method; each row has its own scale, from 0 to its largest.

    The largest bars carry their value. Where one token takes more than 90 % of a row, the row says so,
    for the other bars can then not be seen. A NaN stands for a token that the method left out: its place
    carries a dash.

    Args:
        rows: label to scores `[key]`, or to a MixingMap, of which the row `query` of `layer` is taken (mean
            over heads). A map whose tokens are the last ones of `tokens` (the first dropped) is accepted.
        tokens: one per bar.
        title: above the figure.
        query, layer: which row and layer of the MixingMaps (negative: from the end).

    Raises:
        TypeError: a row that is neither a vector nor a MixingMap.
        ValueError: no rows; a row of another length than `tokens`; an infinite score.
    """
    canvas = need_canvas()
    if not instance("rows", rows, Mapping, "a dict of rows of scores"):
        raise ValueError("rows: expected at least one row, got none")
    tokens = several("tokens", tokens, "a list of strings", kind=str)
    instance("title", title, (str, type(None)), "a text")
    query, layer = whole_number("query", query), whole_number("layer", layer)
    vectors = {name: _row(name, row, tokens, query, layer) for name, row in rows.items()}
    labels = _visible(tokens)
    names = [_in_lines(name) for name in vectors]
    frame = BarFrame(names, labels, title)
    picture = canvas.Picture(frame.width, frame.height)
    for place, (name, values) in enumerate(zip(names, vectors.values(), strict=True)):
        bottom = frame.height - frame.top - (place + 1) * frame.row + frame.gap
        axes = picture.add_box(frame.left, bottom, frame.inner, frame.row - frame.gap)
        draw_bars(axes, values, labels)
        middle = bottom + (frame.row - frame.gap) / 2
        picture.write(frame.left - 0.42, middle, name, size=NAME_FONT, color=INK, ha="right", va="center")
    limit, rotation = (room_for(frame.inner, FONT), 90) if frame.turned else (None, 0)
    canvas.label_ticks(axes.xaxis, labels, limit, rotation=rotation)
    picture.write_title(title)
    return picture


def _row(name: str, row: Any, tokens: list[str], query: int, layer: int) -> Float[Tensor, " key"]:
    if isinstance(row, MixingMap):
        return _row_of_map(name, row, tokens, query, layer)
    if not isinstance(row, (Tensor, np.ndarray, list, tuple)):
        raise TypeError(f"rows[{name!r}]: expected scores [key] or a MixingMap, got {type(row).__name__}")
    vector = real_tensor(f"rows[{name!r}]", row).to("cpu", torch.float64)
    if vector.shape != (len(tokens),):
        raise ValueError(f"rows[{name!r}]: expected shape ({len(tokens)},), got {tuple(vector.shape)}")
    if bool(vector.isinf().any()):
        raise ValueError(f"rows[{name!r}]: expected finite scores, got an infinite one")
    return vector


def _row_of_map(
    name: str, row: MixingMap, tokens: list[str], query: int, layer: int
) -> Float[Tensor, " key"]:
    keys = row.key_labels
    left_out = len(tokens) - len(keys)
    if left_out < 0 or keys != tokens[left_out:]:
        raise ValueError(
            f"rows[{name!r}]: expected a map over the tokens, or over their last ones, got {len(keys)} keys "
            f"{keys[:4]} … for {len(tokens)} tokens {tokens[:4]} …"
        )
    # A position counts in `tokens`; a map without the first ones counts from where it starts.
    position = query if query < 0 else query - left_out
    if not -len(row.tokens) <= position < len(row.tokens) or (query >= 0 and position < 0):
        raise ValueError(f"query: expected a position that {name!r} has, got {query}")
    place = row.row_index(position)
    scores = row.merge_heads().scores[row.layer_index(layer), place].detach().to("cpu", torch.float64)
    return torch.cat([torch.full((left_out,), torch.nan, dtype=torch.float64), scores])


def _checked_options(columns: int, normalize: bool | None, title: str | None) -> int:
    if normalize is not None:
        flags(normalize=normalize)
    instance("title", title, (str, type(None)), "a text")
    return whole_number("columns", columns, 1)


def _normalizes(asked: bool | None, maps: Iterable[MixingMap]) -> bool:
    """Whether rows are divided by their sum: as asked, or where no map has scores below 0."""
    return not any(bool((each.scores < 0).any()) for each in maps) if asked is None else asked


def _in_lines(name: str) -> str:
    """A long name broken after its commas, or else where it gets too long."""
    if len(name) <= LONGEST_NAME:
        return name
    parts = [part if part == name.split(", ")[-1] else f"{part}," for part in name.split(", ")]
    return "\n".join(line for part in parts for line in textwrap.wrap(part, LONGEST_NAME))


def _visible(tokens: Sequence[str]) -> list[str]:
    return [visible_token(token) for token in tokens]
