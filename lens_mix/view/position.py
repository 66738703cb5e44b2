"""Read one position from several maps, as a figure or a notebook shows it."""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lens_mix.arguments import check_instance
from lens_mix.maps import MixingMap
from lens_mix.maps.exchange import full_name
from lens_mix.maps.spans import Span, find_positions, find_query
from lens_mix.maps.words import merge_axis, resolve_groups
from lens_mix.view.labels import make_subtitle, name_map, quote
from lens_mix.view.layers import name_layers
from lens_mix.view.strongest import Strongest, find_noise, find_sinks, find_strongest

MapsToDraw = MixingMap | Mapping[str, MixingMap] | Sequence[MixingMap]

SHARE, RAW = "share of the row", "raw score"


@dataclasses.dataclass(frozen=True)
class LayerRow:
    """The row of one map in each layer.

    Attributes:
        name: The name of the map.
        layers: The names of the layers.
        scores: The scores, 0 where the key is not visible.
        visible: The keys that the position could see.
        is_share: Whether the scores are shares of the row's sum.
    """

    name: str
    layers: list[str]
    scores: Float[Tensor, "layer key"]
    visible: Bool[Tensor, "layer key"]
    is_share: bool

    @property
    def layer_labels(self) -> list[str]:
        """Return short labels of the layers: their numbers, or "whole model"."""
        return [name.rsplit(" ", 1)[-1] if name[-1].isdigit() else name for name in self.layers]

    @property
    def has_one_layer(self) -> bool:
        """Return whether the map has one layer, as an input map of the whole model has."""
        return len(self.layers) == 1

    @property
    def unit(self) -> str:
        """Return the unit of the scores."""
        return SHARE if self.is_share else RAW

    def total(self, keys: Sequence[int]) -> Float[Tensor, " layer"]:
        """Return the sum of the scores of some keys in each layer."""
        return self.scores[:, list(keys)].sum(-1)

    def write_score(self, score: float) -> str:
        """Return a score as a string: a share in per cent, another score with two digits."""
        return f"{100 * score:.0f} %" if self.is_share else f"{score:.2g}"


@dataclasses.dataclass(frozen=True)
class PositionView:
    """One position in several maps over the same keys.

    Attributes:
        panels: The maps.
        keys: The tokens or words that are the keys.
        columns: The keys to draw as columns.
        numbers: The keys to write as a number beside each layer, by the number's heading: "first" is the
            first token of a decoder, "special" the special tokens of another text, "own" the position itself.
        title: What is explained, or which position is shown.
        sentence: A sentence about the largest score; "" if there is none. These keys (in cross-attention,
            also the residual stream) do not count.
        best: The index of the map with this score, and the score.
        subtitle: The model, the prompt and the unit.
        prediction: The most probable next token of a causal map; None if it is unknown.
        has_grid: Whether the keys are patches or frames.
    """

    panels: list[LayerRow]
    keys: list[str]
    columns: list[int]
    numbers: dict[str, list[int]]
    title: str
    sentence: str
    best: tuple[int, Strongest] | None
    subtitle: str
    prediction: str | None
    has_grid: bool = False

    @staticmethod
    def from_maps(
        maps: MapsToDraw,
        query: int | str | None = None,
        normalize: bool | None = None,
        words: bool = False,
        keys: Span | None = None,
        as_numbers: bool = True,
    ) -> PositionView:
        """Return one position of the maps, with the arguments of `show_position`."""
        named = _name_maps(maps)
        _require_same_axes(named)
        chosen = next((m for m in named.values() if m.default_query is not None), next(iter(named.values())))
        tokens = chosen.tokens
        position = find_query(tokens, chosen.default_query_position if query is None else query)
        # Each row is selected by its position, because the maps may contain different rows.
        for name, m in named.items():
            m.row_index(position, f"maps[{name!r}], query")
        rows = {name: m.select_queries([position]).merge_heads() for name, m in named.items()}
        groups, names = _group_keys(chosen, words)
        panels = [_read_panel(name, row, normalize, groups) for name, row in rows.items()]
        own = _find_group(groups, position) if chosen.keys_are_tokens else None
        sinks = sorted({_find_group(groups, key) for key in find_sinks(chosen)} - {own})
        special = {"first" if chosen.causal else "special": sinks}
        kinds = {**special, "own": [] if own is None else [own]}
        columns, numbers = _choose_columns(panels, kinds, names, keys, as_numbers)
        left_out = {*sinks, *kinds["own"], *(_find_residual(names) if own is None else ())}
        part = "key" if own is None else "word" if words else "position" if chosen.grid else "token"
        # Only keys that are drawn can have the frame.
        undrawn = () if keys is None else set(range(len(names))) - set(columns)
        best = _find_best(panels, {*left_out, *undrawn})
        found = "" if best is None else f"{quote(names[best[1].key])} ({part} {best[1].key})"
        explanation = _choose_explanation(rows.values())
        unit = ", ".join(dict.fromkeys(panel.unit for panel in panels))
        return PositionView(
            panels,
            names,
            columns,
            numbers,
            explanation[:1].upper() + explanation[1:]
            or f"What position {position}, {quote(tokens[position])}, used",
            "" if best is None else _describe_best(panels, best, found),
            best,
            make_subtitle(chosen, unit),
            next(filter(None, map(_read_prediction, rows.values())), None),
            chosen.grid is not None,
        )

    @property
    def number_keys(self) -> list[int]:
        """Return the keys that are part of a number."""
        return [key for keys in self.numbers.values() for key in keys]

    def read_columns(
        self, panel: LayerRow
    ) -> tuple[Float[Tensor, "layer column"], Bool[Tensor, "layer column"]]:
        """Return the scores of the columns, and which of them are visible."""
        return panel.scores[:, self.columns], panel.visible[:, self.columns]

    def is_noise(self, panel: LayerRow) -> bool:
        """Return whether the keys that are colored have next to nothing in any layer; see `find_noise`."""
        return bool(find_noise(panel.scores, self.number_keys).all())

    def read_scaled(self, panels: Sequence[LayerRow]) -> list[Float[Tensor, "layer column"]]:
        """Return the scores whose largest one ends the scale of some maps: the columns, or whole rows."""
        whole = all(map(self.is_noise, panels))
        return [
            panel.scores.abs().sum(-1, keepdim=True) if whole else self.read_columns(panel)[0]
            for panel in panels
        ]

    def describe_noise(self, panel: LayerRow) -> str:
        """Return why a map has no colors; "" if it has."""
        if not self.is_noise(panel):
            return ""
        others = [key for key in range(len(self.keys)) if key not in self.number_keys]
        largest = float(panel.scores[:, others].abs().max()) if others else 0.0
        written = f"{100 * largest:.2g} %" if panel.is_share else f"{largest:.2g}"
        noun = "position" if self.has_grid else "token"
        return f"no other {noun} has more than {written}, so none is colored"

    def rank_columns(self, panels: Iterable[LayerRow] | None = None) -> list[int]:
        """Return the indices of the columns, the one with the largest score in any layer first.

        Args:
            panels: The maps that count; None: all. Their scores are compared as shares of the largest one.
        """
        largest = torch.zeros(len(self.columns), dtype=torch.float64, device="cpu")
        for panel in self.panels if panels is None else panels:
            sizes = self.read_columns(panel)[0].abs().amax(0)
            largest = torch.maximum(largest, sizes / (sizes.max() or 1))
        return largest.argsort(descending=True, stable=True).tolist()


def _choose_explanation(rows: Iterable[MixingMap]) -> str:
    """Return what the position explains: that of the first map with a target, else of the first that has one.

    Args:
        rows: The maps with this position as their only row.
    """
    known = [row for row in rows if row.explained is not None]
    with_target = [row for row in known if row.explained and row.explained[0].target is not None]
    return next((row.explanation() for row in (*with_target, *known)), "")


def _name_maps(maps: MapsToDraw) -> dict[str, MixingMap]:
    """Return the maps by name; the names of a sequence are those of the methods, each different.

    Raises:
        TypeError: If `maps` is or contains something else.
        ValueError: If there are no maps.
    """
    if isinstance(maps, MixingMap):
        maps = [maps]
    if not isinstance(maps, Mapping):
        check_instance("maps", maps, Sequence, "a MixingMap, a dict of MixingMaps by name, or a list of them")
        names = [name_map(check_instance("maps", m, MixingMap, "MixingMaps")) for m in maps]
        counted = [f"{name} ({names[:index].count(name) + 1})" for index, name in enumerate(names)]
        maps = {
            name if names.count(name) == 1 else number: m
            for name, number, m in zip(names, counted, maps, strict=True)
        }
    if not maps:
        raise ValueError("maps: expected at least one map, got none")
    checked = {
        str(name): check_instance(f"maps[{name!r}]", m, MixingMap, "a MixingMap") for name, m in maps.items()
    }
    # The names of methods are written as words; a name that a user chose does not change.
    return {name_map(m) if name in (m.method, full_name(m)) else name: m for name, m in checked.items()}


def have_same_axes(named: Mapping[str, MixingMap]) -> bool:
    """Return whether maps have the same tokens, keys and layers, so that they can be drawn side by side."""
    return _find_other_axis(named) is None


def _require_same_axes(named: Mapping[str, MixingMap]) -> None:
    """Raise a ValueError if the maps have different tokens, or different layers (except one layer alone)."""
    found = _find_other_axis(named)
    if found is not None:
        name, what, own, expected = found
        raise ValueError(
            f"maps[{name!r}]: expected the same {what} as in the other maps, {reprlib.repr(expected)}, got "
            f"{reprlib.repr(own)}; draw this map alone"
        )


def _find_other_axis(named: Mapping[str, MixingMap]) -> tuple[str, str, Any, Any] | None:
    """Return the first map that cannot be beside the others: its name, the axis, its labels and theirs."""
    first = next((m for m in named.values() if len(m) > 1), next(iter(named.values())))
    for name, m in named.items():
        for what, own, expected in (
            ("tokens", m.tokens, first.tokens),
            ("keys", m.key_labels, first.key_labels),
            ("layers", m.layers if len(m) > 1 else first.layers, first.layers),
        ):
            if own != expected:
                return name, what, own, expected
    return None


def _group_keys(chosen: MixingMap, words: bool) -> tuple[list[list[int]], list[str]]:
    """Return the positions of each key that is drawn, and the names of these keys."""
    if words:
        return resolve_groups(chosen.key_labels, None, "tokens")
    return [[key] for key in range(len(chosen.key_labels))], chosen.key_labels


def _find_residual(names: Sequence[str]) -> set[int]:
    """Return the key that is the position's own residual stream, which some cross-attention maps have."""
    # Only such a map needs the import, which takes seconds because it imports TransformerLens.
    from lens_mix.method import RESIDUAL_KEY

    return {key for key, name in enumerate(names) if name == RESIDUAL_KEY}


def _find_group(groups: list[list[int]], position: int) -> int:
    return next(index for index, group in enumerate(groups) if position in group)


def _read_panel(name: str, row: MixingMap, normalize: bool | None, groups: list[list[int]]) -> LayerRow:
    is_share = not bool((row.scores < 0).any()) if normalize is None else normalize
    shown = row.normalized() if is_share else row
    visible = shown.visible()[:, 0].cpu()
    scores = shown.scores[:, 0].detach().to("cpu", torch.float64).masked_fill(~visible, 0)
    return LayerRow(
        name,
        name_layers(row),
        merge_axis(scores, groups, -1, torch.sum),
        merge_axis(visible, groups, -1, torch.any),
        is_share,
    )


def _choose_columns(
    panels: Sequence[LayerRow],
    kinds: Mapping[str, list[int]],
    names: Sequence[str],
    keys: Span | None,
    as_numbers: bool,
) -> tuple[list[int], dict[str, list[int]]]:
    """Return the keys that are columns, and those that are numbers.

    Without `keys`, keys that the position could not see in any map are left out.

    Args:
        panels: The maps.
        kinds: The keys that may be numbers, by the heading of the number.
        names: The name of each key.
        keys: The columns that were asked for; None: all.
        as_numbers: Whether there are numbers.
    """
    seen = torch.stack([panel.visible.any(0) for panel in panels]).any(0)
    # A position that sees no key has all of them as columns.
    seen = seen if bool(seen.any()) else torch.ones_like(seen)
    columns = seen.nonzero().flatten().tolist() if keys is None else find_positions(names, keys, "keys")
    if not as_numbers:
        return columns, {}
    numbers = {
        name: own for name, own in kinds.items() if any(bool(panel.scores[:, own].any()) for panel in panels)
    }
    remaining = [key for key in columns if not any(key in own for own in numbers.values())]
    # A position that sees these keys only has them as columns.
    return (remaining, numbers) if remaining else (columns, {})


def _find_best(panels: Sequence[LayerRow], left_out: Iterable[int]) -> tuple[int, Strongest] | None:
    """Return the index of the map with the largest score, and that score; None if no key has a score.

    Layer maps come before maps with one layer, and shares before raw scores.

    Args:
        panels: The maps.
        left_out: The keys that do not count.
    """
    left_out = list(left_out)
    found = [find_strongest(panel.scores, panel.visible, left_out) for panel in panels]
    known = [(index, best) for index, best in enumerate(found) if best is not None]

    def rank(entry: tuple[int, Strongest]) -> tuple[bool, bool, float]:
        panel = panels[entry[0]]
        return not panel.has_one_layer, panel.is_share, abs(entry[1].score)

    return max(known, key=rank) if known else None


def _describe_best(panels: Sequence[LayerRow], best: tuple[int, Strongest], key: str) -> str:
    """Return a sentence about the largest score.

    An example is "Layer 23: 94 % of the attention row is from ' Italy' (token 6)." The other maps with the
    same layers are compared in the same layer.

    Args:
        panels: The maps.
        best: A result of `_find_best`.
        key: The text of the key.
    """
    panel, strongest = panels[best[0]], best[1]
    layer = panel.layers[strongest.layer]
    where = "" if panel.has_one_layer and not layer[-1].isdigit() else f"{layer[0].upper()}{layer[1:]}: "
    number = panel.write_score(strongest.score)
    if panel.is_share and strongest.score < 0.005:
        number = "less than 1 %"
    if panel.is_share:
        first = f"{where}{number} of the {panel.name} row is from {key}"
    else:
        size = " by magnitude" if bool((panel.scores < 0).any()) else ""
        first = f"{where}the largest score of {panel.name}{size} is {number}, from {key}"
    others = [
        f"{other.name}: {other.write_score(other.scores[strongest.layer, strongest.key].item())}"
        for other in panels
        if other is not panel and other.layers == panel.layers and other.is_share and panel.is_share
    ]
    return "; ".join([first[:1].upper() + first[1:], *others]) + "."


def _read_prediction(row: MixingMap) -> str | None:
    entry = row.explained[0] if row.explained and (row.causal or row.predicts_next) else None
    return None if entry is None else entry.prediction
