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
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix.arguments import flags, instance, one_of, real_tensor, several, whole_number
from lens_mix.maps import MixingMap
from lens_mix.maps.positions import Queries, as_position, as_positions
from lens_mix.maps.words import merge_axis, resolve_groups
from lens_mix.view.bars import BarFrame, draw_bars, largest
from lens_mix.view.drawn import Drawn, sum_of_known
from lens_mix.view.heat_maps import Grid, default_title, draw_grid, subtitle
from lens_mix.view.labels import FONT, INK, NAME_FONT, labels_that_fit, visible_token
from lens_mix.view.layers import layer_names
from lens_mix.view.lazy import need_canvas

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LONGEST_NAME = 30  # longer names of a row of bars are broken
_LABELLED = 8  # so many of the strongest columns have a label whatever the room
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
    """One heat map per layer, query × key, on a common colour scale.

    A map that holds only some rows is drawn with these. Keys that a query could not see are grey. Tokens
    are written at the left and at the bottom; where there is no room for all, the strongest columns keep
    theirs. Below the title stand the model, the prompt and the unit, where the map's record tells them.

    Args:
        mixing_map: its scores are `[layer, query, key]` or `[layer, head, query, key]`.
        layers: labels of the layers to draw (negative: from the end); None: all.
        head: one head; "all": a heat map per head; None: the mean over heads.
        columns: heat maps side by side, 1 or more.
        normalize: rows divided by their sum (0 to 1); False: the scores as they are; None: their sum, but
            where there are negative scores, which are drawn as they are, on a scale around 0.
        title: above the figure; None: the method's name, and the aggregation's if there was one.
        layer: one layer, in place of `layers`.
        words: pieces merged into words (`MixingMap.merge_words`).
        scale: "linear", or "log": from 1/10,000 of the largest score on.
        diagonal: False: each position's share of itself is hidden, and does not count for the colours.
        queries, keys: positions of the rows and columns to draw (of words, if merged), as in `lm.run`.

    Raises:
        TypeError: `mixing_map` is no MixingMap.
        ValueError: no such layer, head, row or key; no layer at all; columns below 1; negative scores with
            `normalize=True`.
    """
    instance("mixing_map", mixing_map, MixingMap, "a MixingMap")
    columns = _checked_options(columns, normalize, title, words, scale, diagonal)
    if layer is not None and layers is not None:
        raise ValueError(f"layer: expected None beside layers={layers!r}, got {layer!r}")
    layers = layers if layer is None else [layer]
    shown = mixing_map if layers is None else mixing_map.select_layers(layers)
    title = default_title(shown, head) if title is None else title
    if head == "all" and not shown.has_heads:
        raise ValueError(
            f"head: expected a map with heads for 'all', got shape {tuple(shown.scores.shape)}; many methods "
            "keep them with per_head=True"
        )
    if head != "all":
        shown = (shown if head is None else shown.head(whole_number("head", head))).merge_heads()
    normalize = _normalizes(normalize, [shown])
    drawn = Drawn.of(shown, normalize, words, diagonal, queries, keys)
    names, panels = _panels(shown, drawn)
    unit = SHARE if normalize else RAW
    grid = Grid(names, columns, drawn.rows, drawn.keys, title, subtitle(mixing_map, unit))
    return draw_grid(grid, panels, "query", unit, scale == "log", drawn.strongest("sum")[:_LABELLED])


def _panels(shown: MixingMap, drawn: Drawn) -> tuple[list[str], list[tuple[Tensor, Tensor]]]:
    """The names of the heat maps, and their scores with which of them are visible."""
    names = layer_names(shown)
    if drawn.scores.ndim == 3:
        return names, list(zip(drawn.scores, drawn.visible, strict=True))
    heads = range(drawn.scores.shape[1])
    named = [
        f"head {head}" if len(names) == 1 else f"{name}, head {head}" for name in names for head in heads
    ]
    pairs = zip(drawn.scores, drawn.visible, strict=True)
    return named, [(scores, visible) for of_heads, visible in pairs for scores in of_heads]


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
    """One heat map per method, layer × key: what one query used in each layer. One colour scale for all.

    Args:
        maps: label to map, all over the same tokens; of maps with heads, the mean over heads.
        query: position (negative: from the end); each map has to hold its row. None: the row that the first
            map means that names one (`MixingMap.default_query`), else the last.
        columns, normalize, words, scale, diagonal, keys: as in `layer_maps`.
        title: above the figure; None: the query's position and token.

    Raises:
        TypeError: an entry of `maps` is no MixingMap.
        ValueError: no maps; maps over different tokens or layers; no such query; columns below 1; negative
            scores with `normalize=True`.
    """
    columns = _checked_options(columns, normalize, title, words, scale, diagonal)
    if not instance("maps", maps, Mapping, "a dict of MixingMaps"):
        raise ValueError("maps: expected at least one map, got none")
    given = {name: instance(f"maps[{name!r}]", each, MixingMap, "a MixingMap") for name, each in maps.items()}
    given = {name: each.merge_heads() for name, each in given.items()}
    first = next(iter(given.values()))
    for name, each in given.items():
        if (each.tokens, each.key_labels, each.layers) != (first.tokens, first.key_labels, first.layers):
            raise ValueError(f"maps[{name!r}]: expected the tokens and layers of the first map, got others")
    meant = next((each for each in given.values() if each.default_query is not None), first).meant_query
    position = as_position(meant if query is None else query, len(first.tokens))
    normalize = _normalizes(normalize, given.values())
    # Each map may hold other rows; of a word the row of its piece is drawn.
    rows = {name: each.select_queries([position]) for name, each in given.items()}
    drawn = {name: _of_row(each, normalize, words, diagonal, keys) for name, each in rows.items()}
    if title is None:
        title = f"what position {position}, “{visible_token(first.tokens[position])}”, used"
    # A map of the whole model has a row, but no layer.
    named = zip(layer_names(first), map(str, first.layer_labels), strict=True)
    labels = [label if name.endswith(label) else name for name, label in named]
    columns_of = next(iter(drawn.values()))
    unit = SHARE if normalize else RAW
    grid = Grid(list(drawn), columns, labels, columns_of.keys, title, subtitle(first, unit))
    panels = [(each.scores[:, 0], each.visible[:, 0]) for each in drawn.values()]
    strongest = [place for each in drawn.values() for place in each.strongest("max")[:_LABELLED]]
    return draw_grid(grid, panels, "layer", unit, scale == "log", list(dict.fromkeys(strongest)))


def _of_row(row: MixingMap, normalize: bool, words: bool, diagonal: bool, keys: Queries | None) -> Drawn:
    """One row, with its keys merged into words if asked."""
    if not words:
        return Drawn.of(row, normalize, diagonal=diagonal, keys=keys)
    groups, names = resolve_groups(row.key_labels, None, "tokens")
    plain = Drawn.of(row, normalize, diagonal=diagonal)
    places = as_positions(slice(None) if keys is None else keys, len(names), "keys")
    return Drawn(
        merge_axis(plain.scores.masked_fill(~plain.visible, 0), groups, -1, torch.sum)[..., places],
        merge_axis(plain.visible, groups, -1, torch.any)[..., places],
        plain.rows,
        [visible_token(names[place]) for place in places],
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
    """One row of bars over the tokens per method; each row has its own scale, from 0 to its largest.

    The largest bars carry their value, in the row's own unit, and their tokens are written whatever the room.
    Where one token takes more than 90 % of a row, the row says so, for the other bars can then not be seen. A
    NaN stands for a token that the method left out: its place carries a dash.

    Args:
        rows: label to scores `[key]`, or to a MixingMap, of which the row `query` of `layer` is taken (mean
            over heads). A map whose tokens are the last ones of `tokens` (the first dropped) is accepted.
        tokens: one per bar.
        title: above the figure.
        query, layer: which row and layer of the MixingMaps (negative: from the end); query None: the one that
            each map means (`MixingMap.default_query`).
        words: pieces merged into words, their scores summed.

    Raises:
        TypeError: a row that is neither a vector nor a MixingMap.
        ValueError: no rows; a row of another length than `tokens`; an infinite score; words that can't be
            told from the tokens.
    """
    canvas = need_canvas()
    if not instance("rows", rows, Mapping, "a dict of rows of scores"):
        raise ValueError("rows: expected at least one row, got none")
    tokens = several("tokens", tokens, "a list of strings", kind=str)
    instance("title", title, (str, type(None)), "a text")
    flags(words=words)
    query = None if query is None else whole_number("query", query)
    layer = whole_number("layer", layer)
    vectors = {name: _row(name, row, tokens, query, layer) for name, row in rows.items()}
    if words:
        groups, tokens = resolve_groups(tokens, None, "tokens")
        vectors = {name: merge_axis(row, groups, -1, sum_of_known) for name, row in vectors.items()}
    labels = [visible_token(token) for token in tokens]
    names = [_in_lines(name) for name in vectors]
    of_map = next((row for row in rows.values() if isinstance(row, MixingMap)), None)
    below = "" if of_map is None else subtitle(of_map, "each row in its own unit")
    frame = BarFrame(names, labels, title, below)
    picture = canvas.Picture(frame.width, frame.height)
    for place, (name, values) in enumerate(zip(names, vectors.values(), strict=True)):
        bottom = frame.height - frame.top - (place + 1) * frame.row + frame.gap
        axes = picture.add_box(frame.left, bottom, frame.inner, frame.row - frame.gap)
        draw_bars(axes, values, labels)
        middle = bottom + (frame.row - frame.gap) / 2
        picture.write(frame.left - 0.42, middle, name, size=NAME_FONT, color=INK, ha="right", va="center")
    limit, rotation = (labels_that_fit(frame.inner, FONT), 90) if frame.turned else (None, 0)
    canvas.label_ticks(axes.xaxis, labels, limit, rotation=rotation, strongest=largest(vectors.values()))
    picture.write_title(title, below)
    return picture


def _row(name: str, row: Any, tokens: list[str], query: int | None, layer: int) -> Float[Tensor, " key"]:
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
    name: str, row: MixingMap, tokens: list[str], query: int | None, layer: int
) -> Float[Tensor, " key"]:
    keys = row.key_labels
    left_out = len(tokens) - len(keys)
    if left_out < 0 or keys != tokens[left_out:]:
        raise ValueError(
            f"rows[{name!r}]: expected a map over the tokens, or over their last ones, got {len(keys)} keys "
            f"{keys[:4]} … for {len(tokens)} tokens {tokens[:4]} …"
        )
    # A position counts in `tokens`; a map without the first ones counts from where it starts.
    if query is None:
        query = row.meant_query + left_out
    position = query if query < 0 else query - left_out
    if not -len(row.tokens) <= position < len(row.tokens) or (query >= 0 and position < 0):
        raise ValueError(f"query: expected a position that {name!r} has, got {query}")
    place = row.row_index(position)
    scores = row.merge_heads().scores[row.layer_index(layer), place].detach().to("cpu", torch.float64)
    return torch.cat([torch.full((left_out,), torch.nan, dtype=torch.float64, device="cpu"), scores])


def _checked_options(
    columns: int, normalize: bool | None, title: str | None, words: bool, scale: str, diagonal: bool
) -> int:
    if normalize is not None:
        flags(normalize=normalize)
    flags(words=words, diagonal=diagonal)
    one_of("scale", scale, get_args(Scale))
    instance("title", title, (str, type(None)), "a text")
    return whole_number("columns", columns, 1)


def _normalizes(asked: bool | None, maps: Iterable[MixingMap]) -> bool:
    """Whether rows are divided by their sum: as asked, or where no map has scores below 0."""
    return not any(bool((each.scores < 0).any()) for each in maps) if asked is None else asked


def _in_lines(name: str) -> str:
    """A long name broken after its commas, or else where it gets too long."""
    if len(name) <= _LONGEST_NAME:
        return name
    *before, last = name.split(", ")
    parts = [*(f"{part}," for part in before), last]
    return "\n".join(line for part in parts for line in textwrap.wrap(part, _LONGEST_NAME))
