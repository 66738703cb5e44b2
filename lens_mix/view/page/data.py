"""A `MixingMap` as the page reads it: words for what it is, and its numbers packed layer by layer."""

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
from lens_mix.maps.characters import whole_texts
from lens_mix.maps.exchange import as_json
from lens_mix.maps.words import is_special, word_groups
from lens_mix.methods.component_shares import part_shares
from lens_mix.view.layers import layer_names

_MOST_FLOAT16 = 400_000  # up to so many numbers are kept as float16 (three digits), more as one byte each
_STEPS = {"uint8": 255, "int8": 127}
# What ends a sentence; Ċ is a line break where tokens are shown as the vocabulary has them.
_ENDS = (".", "!", "?", "\u3002", "\uff01", "\uff1f", "\n", "\u010a")


def pack(mixing_map: MixingMap, label: str) -> dict[str, Any]:
    """What the page is told of a map; JSON-able."""
    scores, visible = mixing_map.scores.detach().cpu(), mixing_map.visible().cpu()
    code = _code(scores, visible)
    masked = mixing_map.mask is not None
    layers = [
        {**_packed(layer, keys, code), **({"visible": _bits(keys)} if masked else {})}
        for layer, keys in zip(scores, visible, strict=True)
    ]
    # What a method noted of each block can be larger than the map.
    provenance = {name: value for name, value in mixing_map.provenance.items() if name != "details"}
    return {
        "label": label,
        "method": mixing_map.method,
        "kind": mixing_map.kind,
        "tokens": mixing_map.tokens,
        "keys": mixing_map.key_tokens,
        "queries": mixing_map.query_positions,
        "query": mixing_map.meant_query,
        "causal": mixing_map.causal,
        "residual": _residual(mixing_map),
        "heads": scores.shape[1] if mixing_map.has_heads else 0,
        "names": mixing_map.layer_labels,
        "layer_names": layer_names(mixing_map),
        "signed": bool((scores < 0).any()),
        "code": code,
        "words": _starts(mixing_map.tokens),
        "key_words": None if mixing_map.key_tokens is None else _starts(mixing_map.key_tokens),
        "feed_forward": _feed_forward(mixing_map),
        "notes": list(mixing_map.notes),
        "parameters": plain(mixing_map.parameters),
        "provenance": plain(provenance),
        "layers": layers,
    }


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """JSON-able; what is no finite number is written as text."""
    return json.loads(as_json(dict(values)), parse_constant=str)


def _residual(mixing_map: MixingMap) -> float:
    """What rollout mixes in; 0 where nobody has said."""
    try:
        return residual_weight(mixing_map, None)
    except ValueError:
        return 0.0


def _starts(tokens: Sequence[str]) -> dict[str, list[int]]:
    """Where the words and the sentences start; no words where they can't be told from pieces."""
    try:
        return {"word": [word[0] for word in word_groups(tokens)], "sentence": _sentences(tokens)}
    except ValueError:
        return {"sentence": _sentences(tokens)}


def _sentences(tokens: Sequence[str]) -> list[int]:
    """A sentence starts after a token that ends one, and special tokens stand alone."""
    starts, previous = [0], ""
    for (position, *_), text in whole_texts(tokens):
        if position and (previous.endswith(_ENDS) or is_special(previous) or is_special(text)):
            starts.append(position)
        previous = text
    return starts


def _feed_forward(mixing_map: MixingMap) -> list[list[float]] | None:
    """The feed-forward's share of what leaves each block, [layer][query]; None where it was not measured."""
    if mixing_map.kind != "layer" or mixing_map.method != "information_flow_routes":
        return None
    try:
        shares = part_shares(mixing_map).mlp_out
    except ValueError:
        return None
    return [[float(f"{share:.4g}") for share in layer] for layer in shares.tolist()]


def _code(scores: Tensor, visible: Tensor) -> str:
    heads = scores.shape[1] if scores.ndim == 4 else 1
    if int(visible.sum()) * heads <= _MOST_FLOAT16:
        return "float16"
    return "int8" if bool((scores < 0).any()) else "uint8"


def _packed(
    layer: Float[Tensor, "*head query key"], visible: Bool[Tensor, "query key"], code: str
) -> dict[str, Any]:
    """The visible numbers of one layer, row by row, head by head; `largest`, and the largest `error`.

    float16: x / largest. uint8 and int8: the square root of it in steps, so that small numbers keep digits.
    """
    values = layer[..., visible].to(torch.float64).numpy()
    largest = float(np.abs(values).max(initial=0.0)) or 1.0
    if code == "float16":
        encoded = (values / largest).astype("<f2")
        back = encoded.astype(np.float64)
    else:
        steps = _STEPS[code]
        encoded = np.rint(np.sign(values) * np.sqrt(np.abs(values) / largest) * steps).astype(code)
        part = encoded.astype(np.float64) / steps
        back = np.sign(part) * part**2
    error = float(np.abs(back * largest - values).max(initial=0.0))
    return {"largest": largest, "error": error, "data": _text(encoded.tobytes())}


def _bits(visible: Bool[Tensor, "query key"]) -> str:
    return _text(np.packbits(visible.numpy(), axis=None, bitorder="little").tobytes())


def _text(data: bytes) -> str:
    """Deflated, in base 64."""
    return base64.b64encode(zlib.compress(data, 9)).decode("ascii")
