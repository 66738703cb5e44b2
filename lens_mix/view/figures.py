"""Draw figures of mixing maps.

| function | figure |
|---|---|
| `layer_maps` | one heat map per layer, query × key |
| `query_maps` | one heat map per method, layer × key, for one query |
| `token_bars` | one row of bars over the tokens per method |

All functions return a matplotlib Figure that is independent of pyplot; `figure.savefig("maps.png")` writes
it. They raise an ImportError if matplotlib is not installed.
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
from lens_mix.maps.positions import Queries, as_position, as_positions
from lens_mix.maps.words import merge_axis, resolve_groups
from lens_mix.view.bars import BarFrame, draw_bars, find_largest
from lens_mix.view.drawn import DrawnMap, sum_known
from lens_mix.view.heat_maps import Grid, draw_grid, make_subtitle, make_title
from lens_mix.view.labels import FONT, INK, NAME_FONT, count_labels, make_visible
from lens_mix.view.layers import name_layers
from lens_mix.view.lazy import load_canvas

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from lens_mix.view.canvas import Picture

_LONGEST_NAME = 30  # a longer name of a row of bars is broken into lines
_LABELLED = 8  # the number of strongest columns that always have a label
SHARE, RAW = "share of the row", "raw score"

Scale = Literal["linear", "log"]


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
    queries: Queries | None = None,
    keys: Queries | None = None,
) -> Figure:
    """Return a figure with one heat map per layer, query × key, on a common colour scale.

    Keys that a query cannot see are grey. Tokens are labels on the left and at the bottom. If there are too
    many, the strongest columns keep their labels. Below the title are the model, the prompt and the unit, as
    far as the map's record contains them.

    Args:
        mixing_map: a map with scores `[layer, query, key]` or `[layer, head, query, key]`.
        layers: The labels of the layers to draw (negative: from the end); None: all.
        head: One head; "all": one heat map per head; None: the mean over heads.
        columns: The number of heat maps side by side, 1 or more.
        normalize: True: rows are divided by their sum (0 to 1). False: raw scores. None: True, unless there
            are negative scores; these are drawn raw, on a scale around 0.
        title: The title above the figure; None: the name of the method, and of the aggregation if there is
            one.
        layer: One layer, instead of `layers`.
        words: Whether pieces are merged into words (`MixingMap.merge_words`).
        scale: "linear", or "log" for a logarithmic scale from 1/10,000 of the largest score.
        diagonal: Whether each position's share of itself is drawn. Hidden shares do not count for the colour
            scale.
        queries: The positions of the rows to draw (of words, if merged), as in `lm.run`; None: all rows of
            the map.
        keys: The positions of the columns to draw (of words, if merged); None: all.

    Raises:
        TypeError: `mixing_map` is not a MixingMap.
        ValueError: a layer, head, row or key that the map does not have; no layers; `columns` below 1;
            negative scores with `normalize=True`.
    """
    check_instance("mixing_map", mixing_map, MixingMap, "a MixingMap")
    columns = _check_options(columns, normalize, title, words, scale, diagonal)
    if layer is not None and layers is not None:
        raise ValueError(f"layer: expected None beside layers={layers!r}, got {layer!r}")
    layers = layers if layer is None else [layer]
    shown = mixing_map if layers is None else mixing_map.select_layers(layers)
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
    names, panels = _list_panels(shown, drawn)
    unit = SHARE if normalize else RAW
    grid = Grid(names, columns, drawn.rows, drawn.keys, title, make_subtitle(mixing_map, unit))
    return draw_grid(grid, panels, "query", unit, scale == "log", drawn.rank_keys("sum")[:_LABELLED])


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


def query_maps(
    maps: Mapping[str, MixingMap],
    query: int | None = None,
    columns: int = 2,
    normalize: bool | None = None,
    title: str | None = None,
    *,
    words: bool = False,
    scale: Scale = "linear",
    diagonal: bool = True,
    keys: Queries | None = None,
) -> Figure:
    """Return a figure with one heat map per method, layer × key, of one query, on a common colour scale.

    Args:
        maps: a map for each label, all over the same tokens. Of maps with heads the mean over heads is drawn.
        query: The position of the query (negative: from the end); each map must have its row. None: the
            default row of the first map that has one (`MixingMap.default_query`), else the last row.
        columns: As in `layer_maps`.
        normalize: As in `layer_maps`.
        title: The title above the figure; None: the query's position and token.
        words: As in `layer_maps`.
        scale: As in `layer_maps`.
        diagonal: As in `layer_maps`.
        keys: As in `layer_maps`.

    Raises:
        TypeError: An entry of `maps` is not a MixingMap.
        ValueError: No maps; maps over different tokens or layers; a query that a map does not have; `columns`
            below 1; negative scores with `normalize=True`.
    """
    columns = _check_options(columns, normalize, title, words, scale, diagonal)
    if not check_instance("maps", maps, Mapping, "a dict of MixingMaps"):
        raise ValueError("maps: expected at least one map, got none")
    checked = {
        name: check_instance(f"maps[{name!r}]", m, MixingMap, "a MixingMap") for name, m in maps.items()
    }
    merged = {name: mixing_map.merge_heads() for name, mixing_map in checked.items()}
    first = next(iter(merged.values()))
    for name, m in merged.items():
        if (m.tokens, m.key_labels, m.layers) != (first.tokens, first.key_labels, first.layers):
            raise ValueError(f"maps[{name!r}]: expected the tokens and layers of the first map, got others")
    with_default = next((m for m in merged.values() if m.default_query is not None), first)
    position = as_position(with_default.default_query_position if query is None else query, len(first.tokens))
    normalize = _decide_normalize(normalize, merged.values())
    # Each row is selected by its position, because the maps may contain different rows.
    rows = {name: mixing_map.select_queries([position]) for name, mixing_map in merged.items()}
    drawn = {name: _draw_row(row, normalize, words, diagonal, keys) for name, row in rows.items()}
    if title is None:
        title = f"what position {position}, “{make_visible(first.tokens[position])}”, used"
    # A map of the whole model has a row, but no layer.
    named = zip(name_layers(first), map(str, first.layer_labels), strict=True)
    labels = [label if name.endswith(label) else name for name, label in named]
    first_drawn = next(iter(drawn.values()))
    unit = SHARE if normalize else RAW
    grid = Grid(list(drawn), columns, labels, first_drawn.keys, title, make_subtitle(first, unit))
    panels = [(row.scores[:, 0], row.visible[:, 0]) for row in drawn.values()]
    strongest = [key for row in drawn.values() for key in row.rank_keys("max")[:_LABELLED]]
    return draw_grid(grid, panels, "layer", unit, scale == "log", list(dict.fromkeys(strongest)))


def _draw_row(row: MixingMap, normalize: bool, words: bool, diagonal: bool, keys: Queries | None) -> DrawnMap:
    """Return what is drawn of one row, with its keys merged into words if `words` is True."""
    if not words:
        return DrawnMap.from_map(row, normalize, diagonal=diagonal, keys=keys)
    groups, names = resolve_groups(row.key_labels, None, "tokens")
    pieces = DrawnMap.from_map(row, normalize, diagonal=diagonal)
    positions = as_positions(slice(None) if keys is None else keys, len(names), "keys")
    return DrawnMap(
        merge_axis(pieces.scores.masked_fill(~pieces.visible, 0), groups, -1, torch.sum)[..., positions],
        merge_axis(pieces.visible, groups, -1, torch.any)[..., positions],
        pieces.rows,
        [make_visible(names[position]) for position in positions],
    )


def token_bars(
    rows: Mapping[str, Float[Tensor, " key"] | MixingMap],
    tokens: Sequence[str],
    title: str | None = None,
    query: int | None = None,
    layer: int = -1,
    *,
    words: bool = False,
) -> Figure:
    """Return a figure with one row of bars over the tokens per method.

    Each row has its own scale, from 0 to its largest value. The largest bars have their value above them, in
    the unit of the row, and their tokens always have labels. If one token has more than 90 % of a row, its
    share is written into the row. A NaN means that the method left the token out, and is drawn as a dash.

    Args:
        rows: For each label either scores `[key]`, or a MixingMap, of which the row `query` of `layer` is
            drawn (mean over heads). A map without the first tokens of `tokens` is accepted.
        tokens: One token per bar.
        title: The title above the figure; None: no title.
        query: The row of the MixingMaps (negative: from the end); None: the default row of each map
            (`MixingMap.default_query`).
        layer: The layer of the MixingMaps (negative: from the end).
        words: Whether pieces are merged into words and their scores summed.

    Raises:
        TypeError: a row that is neither a vector nor a MixingMap.
        ValueError: No rows; a row with another length than `tokens`; an infinite score; `words` with tokens
            that do not show where words begin.
    """
    canvas = load_canvas()
    if not check_instance("rows", rows, Mapping, "a dict of rows of scores"):
        raise ValueError("rows: expected at least one row, got none")
    tokens = check_items("tokens", tokens, "a list of strings", kind=str)
    check_instance("title", title, (str, type(None)), "a text")
    check_flags(words=words)
    query = None if query is None else check_whole_number("query", query)
    layer = check_whole_number("layer", layer)
    vectors = {name: _read_row(name, row, tokens, query, layer) for name, row in rows.items()}
    if words:
        groups, tokens = resolve_groups(tokens, None, "tokens")
        vectors = {name: merge_axis(row, groups, -1, sum_known) for name, row in vectors.items()}
    labels = [make_visible(token) for token in tokens]
    names = [_break_name(name) for name in vectors]
    first_map = next((row for row in rows.values() if isinstance(row, MixingMap)), None)
    subtitle = "" if first_map is None else make_subtitle(first_map, "each row in its own unit")
    frame = BarFrame(names, labels, title, subtitle)
    picture: Picture = canvas.Picture(frame.width, frame.height)
    for row_index, (name, values) in enumerate(zip(names, vectors.values(), strict=True)):
        bottom = frame.height - frame.top - (row_index + 1) * frame.row + frame.gap
        axes = picture.add_box(frame.left, bottom, frame.inner, frame.row - frame.gap)
        draw_bars(axes, values, labels)
        middle = bottom + (frame.row - frame.gap) / 2
        picture.write(frame.left - 0.42, middle, name, size=NAME_FONT, color=INK, ha="right", va="center")
    limit, rotation = (count_labels(frame.inner, FONT), 90) if frame.turned else (None, 0)
    canvas.label_ticks(axes.xaxis, labels, limit, rotation=rotation, strongest=find_largest(vectors.values()))
    picture.write_title(title, subtitle)
    return picture


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
