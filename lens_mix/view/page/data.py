"""Convert a `MixingMap` to the form that the page reads: a description, and its numbers layer by layer."""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lens_mix.aggregation.rollout import residual_weight
from lens_mix.maps import MixingMap
from lens_mix.maps.characters import join_characters
from lens_mix.maps.exchange import as_json
from lens_mix.maps.explained import as_records
from lens_mix.maps.words import find_words, is_special
from lens_mix.methods.component_shares import part_shares
from lens_mix.registry import describe, list_names
from lens_mix.view.labels import name_method, name_model, name_positions
from lens_mix.view.layers import name_layers
from lens_mix.view.strongest import find_sinks

_MOST_FLOAT16 = (
    400_000  # a map with more numbers is stored as one byte each instead of float16 (three digits)
)
_STEPS = {"uint8": 255, "int8": 127}
# The ends of a sentence; Ċ is the line break in raw tokens of a vocabulary.
_ENDS = (".", "!", "?", "\u3002", "\uff01", "\uff1f", "\n", "\u010a")


class Numbers:
    """Collect the numbers of all layers as two texts, so that the page reads only those that it shows.

    The first text has what the page shows first. The second one, which comes after the page's script, has the
    numbers of single heads: most of the file, which the first view does not wait for.
    """

    def __init__(self) -> None:
        self._pieces: tuple[list[str], list[str]] = ([], [])
        self._lengths = [0, 0]

    def add(self, data: bytes, *, is_late: bool = False) -> list[int]:
        """Append compressed bytes (deflate) as base 64.

        Returns:
            The start and the end in a text, and which text it is: 0 or 1.
        """
        # Scores contain runs of zeros, but hardly a sequence twice, so a search for these takes long in vain.
        deflate = zlib.compressobj(strategy=zlib.Z_RLE)
        packed = deflate.compress(data) + deflate.flush()
        piece, text = base64.b64encode(packed).decode("ascii"), int(is_late)
        start = self._lengths[text]
        self._pieces[text].append(piece)
        self._lengths[text] += len(piece)
        return [start, self._lengths[text], text]

    def texts(self) -> tuple[str, str]:
        """Return the two texts."""
        first, late = self._pieces
        return "".join(first), "".join(late)


def pack(mixing_map: MixingMap, label: str, numbers: Numbers) -> dict[str, Any]:
    """Return the description of a map for the page, which can be written as JSON.

    Args:
        mixing_map: The map.
        label: The name of the map on the page.
        numbers: The numbers of the map are added to these; the description has their places.
    """
    scores, visible = mixing_map.scores.detach().cpu(), mixing_map.visible().cpu()
    sinks = find_sinks(mixing_map)
    heads = scores.shape[1] if mixing_map.has_heads else 0
    # The details of a method, which has some for each block, can be larger than the map.
    kept = {name: value for name, value in mixing_map.provenance.items() if name != "details"}
    provenance = _name_models(kept)
    return {
        "label": label,
        "title": _make_title(label),
        "line": name_positions(_describe(mixing_map), mixing_map),
        "method": mixing_map.method,
        "kind": mixing_map.kind,
        "tokens": mixing_map.tokens,
        "grid": _pack_grid(mixing_map),
        "keys": None if mixing_map.keys_are_tokens else mixing_map.key_tokens,
        "queries": mixing_map.query_positions,
        "query": mixing_map.default_query_position,
        "explained": as_records(mixing_map.explained),
        "predicts_next": mixing_map.predicts_next,
        "sinks": sinks,
        "sink_share": _measure_sinks(mixing_map, sinks),
        "causal": mixing_map.causal,
        "residual": _find_residual(mixing_map),
        "heads": heads,
        "names": mixing_map.layer_labels,
        "layer_names": name_layers(mixing_map),
        "signed": bool((scores < 0).any()),
        "words": _find_starts(mixing_map.tokens),
        "key_words": None if mixing_map.keys_are_tokens else _find_starts(mixing_map.key_tokens),
        "feed_forward": _compute_feed_forward(mixing_map),
        "notes": list(mixing_map.notes),
        "parameters": make_plain(mixing_map.parameters),
        "provenance": make_plain(provenance),
        "visible": None if mixing_map.mask is None else [numbers.add(_as_bits(keys)) for keys in visible],
        **_pack_layers(scores, visible, numbers, is_late=heads > 1),
        # The first view needs the mean over heads of every layer, so it is stored too.
        "mean": _pack_layers(_mean_over_heads(scores), visible, numbers) if heads > 1 else None,
    }


def _pack_grid(mixing_map: MixingMap) -> dict[str, Any] | None:
    grid = mixing_map.grid
    return None if grid is None else {**grid.record(), "noun": grid.noun, "sound": grid.is_sound}


def _mean_over_heads(scores: Float[Tensor, "layer head query key"]) -> Float[Tensor, "layer query key"]:
    return scores.to(torch.float32).mean(1) if scores.dtype != torch.float64 else scores.mean(1)


def _pack_layers(
    scores: Float[Tensor, "layer *head query key"],
    visible: Bool[Tensor, "layer query key"],
    numbers: Numbers,
    *,
    is_late: bool = False,
) -> dict[str, Any]:
    code = _choose_code(scores, visible)
    layers = [
        _pack_layer(*layer, code, numbers, is_late=is_late) for layer in zip(scores, visible, strict=True)
    ]
    return {"code": code, "layers": layers}


def _make_title(label: str) -> str:
    """Return a label as a title: the name of a method with capitals, and any other label as it is."""
    return name_method(label) if label in list_names() else label


def _describe(mixing_map: MixingMap) -> str:
    """Return what a score of the map says, as one plain line; "" if it is not known."""
    aggregation = mixing_map.provenance.get("aggregation")
    if isinstance(aggregation, Mapping):
        name = str(aggregation.get("name", "aggregation")).replace("_", " ")
        return f"{name}: the layer maps combined down to the input tokens"
    return describe(mixing_map.method).line


def _name_models(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record with each model's own name, because a page is shown to others and a folder is private.

    The record of a difference contains those of its two maps.
    """
    named = {
        key: _name_models(value) if isinstance(value, Mapping) else value for key, value in record.items()
    }
    return named | {"model": name_model(record)} if isinstance(record.get("model"), str) else named


def make_plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values in a form that can be written as JSON; NaN and infinity become text."""
    plain: dict[str, Any] = json.loads(as_json(dict(values)), parse_constant=str)
    return plain


def _find_residual(mixing_map: MixingMap) -> float:
    """Return the residual weight that rollout uses for this map; 0 if it is not known."""
    try:
        return residual_weight(mixing_map, None)
    except ValueError:
        return 0.0


def _measure_sinks(mixing_map: MixingMap, sinks: Sequence[int]) -> float:
    """Return the share that the sinks take in one step of a rollout, as the mean over layers and heads.

    It is that of the default row.
    """
    row = mixing_map.query_positions.index(mixing_map.default_query_position)
    sizes = mixing_map.scores.detach().cpu()[..., row, :].abs().to(torch.float64)
    shares = sizes[..., list(sinks)].sum(-1) / sizes.sum(-1).clamp(min=1e-12)
    return (1 - _find_residual(mixing_map)) * float(shares.mean())


def _find_starts(tokens: Sequence[str]) -> dict[str, list[int]]:
    """Return the positions at which words and sentences start; without words if tokens do not show these."""
    try:
        return {"word": [word[0] for word in find_words(tokens)], "sentence": _find_sentences(tokens)}
    except ValueError:
        return {"sentence": _find_sentences(tokens)}


def _find_sentences(tokens: Sequence[str]) -> list[int]:
    """Return the positions at which sentences start; a special token is a sentence of its own."""
    starts, previous = [0], ""
    for (position, *_), text in join_characters(tokens):
        if position and (previous.endswith(_ENDS) or is_special(previous) or is_special(text)):
            starts.append(position)
        previous = text
    return starts


def _compute_feed_forward(mixing_map: MixingMap) -> list[list[float]] | None:
    """Return the feed-forward's share of each block's output, [layer][query]; None if it was not measured."""
    if mixing_map.kind != "layer":
        return None
    try:
        shares = part_shares(mixing_map).mlp_out
    except ValueError:
        return None
    return [[float(f"{share:.4g}") for share in layer] for layer in shares.tolist()]


def _choose_code(scores: Tensor, visible: Tensor) -> str:
    heads = scores.shape[1] if scores.ndim == 4 else 1
    if int(visible.sum()) * heads <= _MOST_FLOAT16:
        return "float16"
    return "int8" if bool((scores < 0).any()) else "uint8"


def _pack_layer(
    layer: Float[Tensor, "*head query key"],
    visible: Bool[Tensor, "query key"],
    code: str,
    numbers: Numbers,
    *,
    is_late: bool,
) -> dict[str, Any]:
    """Return the place of the visible numbers of one layer, head by head and row by row.

    `largest` is the largest magnitude, and `error` the largest error of the stored numbers. float16 stores
    x / largest. uint8 and int8 store its square root in steps, so that small numbers have a small error.
    """
    values = layer[..., visible].to(torch.float64).numpy()
    largest = float(np.abs(values).max(initial=0.0)) or 1.0
    if code == "float16":
        encoded = (values / largest).astype("<f2")
        decoded = encoded.astype(np.float64)
    else:
        steps = _STEPS[code]
        encoded = np.rint(np.sign(values) * np.sqrt(np.abs(values) / largest) * steps).astype(code)
        root = encoded.astype(np.float64) / steps
        decoded = np.sign(root) * root**2
    error = float(np.abs(decoded * largest - values).max(initial=0.0))
    return {"largest": largest, "error": error, "data": numbers.add(encoded.tobytes(), is_late=is_late)}


def _as_bits(visible: Bool[Tensor, "query key"]) -> bytes:
    return np.packbits(visible.numpy(), axis=None, bitorder="little").tobytes()


def to_ranges(positions: Iterable[int]) -> list[list[int]]:
    """Return ascending positions as pairs of the first one and the one after the last."""
    ranges: list[list[int]] = []
    for position in positions:
        if ranges and ranges[-1][1] == position:
            ranges[-1][1] = position + 1
        else:
            ranges.append([position, position + 1])
    return ranges


def round_number(number: float) -> float | None:
    """Return a number with six digits; None if it is not finite, which JSON cannot represent."""
    return float(f"{number:.6g}") if math.isfinite(number) else None
