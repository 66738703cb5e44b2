"""Convert a `MixingMap` to the form that the page reads: a description, and its numbers layer by layer."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lens_mix.aggregation import residual_weight
from lens_mix.maps import MixingMap
from lens_mix.maps.characters import join_characters
from lens_mix.maps.exchange import as_json
from lens_mix.maps.words import find_words, is_special
from lens_mix.methods.component_shares import part_shares
from lens_mix.view.layers import name_layers

_MOST_FLOAT16 = (
    400_000  # a map with more numbers is stored as one byte each instead of float16 (three digits)
)
_STEPS = {"uint8": 255, "int8": 127}
# The ends of a sentence; Ċ is the line break in raw tokens of a vocabulary.
_ENDS = (".", "!", "?", "\u3002", "\uff01", "\uff1f", "\n", "\u010a")


def pack(mixing_map: MixingMap, label: str) -> dict[str, Any]:
    """Return the data of a map for the page, which can be written as JSON."""
    scores, visible = mixing_map.scores.detach().cpu(), mixing_map.visible().cpu()
    code = _choose_code(scores, visible)
    has_mask = mixing_map.mask is not None
    layers = [
        {**_pack_layer(layer, keys, code), **({"visible": _encode_bits(keys)} if has_mask else {})}
        for layer, keys in zip(scores, visible, strict=True)
    ]
    # The details of a method, which has some for each block, can be larger than the map.
    provenance = {name: value for name, value in mixing_map.provenance.items() if name != "details"}
    return {
        "label": label,
        "method": mixing_map.method,
        "kind": mixing_map.kind,
        "tokens": mixing_map.tokens,
        "keys": None if mixing_map.keys_are_tokens else mixing_map.key_tokens,
        "queries": mixing_map.query_positions,
        "query": mixing_map.default_query_position,
        "causal": mixing_map.causal,
        "residual": _find_residual(mixing_map),
        "heads": scores.shape[1] if mixing_map.has_heads else 0,
        "names": mixing_map.layer_labels,
        "layer_names": name_layers(mixing_map),
        "signed": bool((scores < 0).any()),
        "code": code,
        "words": _find_starts(mixing_map.tokens),
        "key_words": None if mixing_map.keys_are_tokens else _find_starts(mixing_map.key_tokens),
        "feed_forward": _compute_feed_forward(mixing_map),
        "notes": list(mixing_map.notes),
        "parameters": make_plain(mixing_map.parameters),
        "provenance": make_plain(provenance),
        "layers": layers,
    }


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
    if mixing_map.kind != "layer" or mixing_map.method != "information_flow_routes":
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
    layer: Float[Tensor, "*head query key"], visible: Bool[Tensor, "query key"], code: str
) -> dict[str, Any]:
    """Return the visible numbers of one layer, head by head and row by row, with `largest` and `error`.

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
    return {"largest": largest, "error": error, "data": _encode_bytes(encoded.tobytes())}


def _encode_bits(visible: Bool[Tensor, "query key"]) -> str:
    return _encode_bytes(np.packbits(visible.numpy(), axis=None, bitorder="little").tobytes())


def _encode_bytes(data: bytes) -> str:
    """Return compressed bytes (deflate) as base 64."""
    return base64.b64encode(zlib.compress(data, 9)).decode("ascii")
