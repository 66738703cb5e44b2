"""What a `MixingMap` is given, turned into plain tensors and lists, or refused with the reason."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lens_mix.arguments import instance, number, real_tensor, several, whole_number
from lens_mix.maps.positions import as_positions

if TYPE_CHECKING:
    from lens_mix.maps import MixingMap

_DEEPEST = 100  # deeper ones end in Python's own errors, when they are made plain or written as JSON


def as_scores(scores: object) -> Float[Tensor, "layer *head query key"]:
    """A detached floating-point tensor `[layer, query, key]` or `[layer, head, query, key]`.

    Tensors keep their dtype and device and are not copied; numpy arrays and nested lists are copied
    (Python floats become float64); whole numbers and booleans become float32. Anything but real numbers is
    a TypeError; ragged lists, a wrong number of axes, or an empty axis a ValueError.
    """
    tensor = real_tensor("scores", scores)
    if not tensor.is_floating_point():
        tensor = tensor.to(torch.float32)
    if tensor.ndim not in (3, 4):
        raise ValueError(
            "scores: expected 3 axes [layer, query, key] or 4 axes [layer, head, query, key], "
            f"got {tensor.ndim} with shape {tuple(tensor.shape)}"
        )
    if 0 in tensor.shape:
        raise ValueError(f"scores: expected no empty axis, got shape {tuple(tensor.shape)}")
    return tensor


def require_finite(mixing_map: MixingMap) -> None:
    """Raise a ValueError that names the first NaN or infinity, if any."""
    scores = mixing_map.scores
    # A sum is finite only if every number in it is; it needs no tensor as large as the scores.
    if math.isfinite(scores.sum().item()):
        return
    wrong = ~torch.isfinite(scores)
    if bool(wrong.any()):
        where = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"scores: expected finite numbers, got {scores[tuple(where)].item()} at "
            f"{_entry(mixing_map, where)} ({int(wrong.sum())} such entries)"
        )


def _entry(mixing_map: MixingMap, where: Sequence[int]) -> str:
    layer, *head, row, key = where
    heads = f" head {head[0]}," if head else ""
    query = mixing_map.query_positions[row]
    return f"layer {mixing_map.layer_labels[layer]},{heads} query {query}, key {key}"


def as_tokens(tokens: object, count: int | None, argument: str, axis: str) -> list[str]:
    """`tokens` as a list of strings, one per place of an axis of `count` places (None: of any length).

    Anything but strings is a TypeError, another number of them a ValueError.
    """
    strings = several(argument, tokens, "a list of strings")
    for position, token in enumerate(strings):
        if not isinstance(token, str):
            kind = type(token).__name__
            raise TypeError(f"{argument}: expected strings, got {kind} at position {position}")
    if count is not None and len(strings) != count:
        raise ValueError(
            f"{argument}: expected {count}, one per {axis} position of scores, got {len(strings)}"
        )
    return strings


def as_queries(queries: object, count: int, rows: int) -> list[int] | None:
    """The positions of `rows` rows among `count` tokens; None where they are all positions in order.

    No list is a TypeError; no such position, one twice, or another number of them a ValueError.
    """
    positions = as_positions(several("queries", queries, "a list of positions"), count)
    if len(positions) != rows:
        raise ValueError(f"queries: expected {rows} positions, one per row of scores, got {len(positions)}")
    return None if positions == list(range(count)) else positions


def as_mask(mask: object, scores: Tensor) -> Bool[Tensor, "*layer query key"] | None:
    """`mask` as a boolean tensor `[query, key]` or `[layer, query, key]` on the device of `scores`.

    Other numbers than 0 and 1 are a TypeError, a shape that does not fit `scores` is a ValueError.
    """
    if mask is None:
        return None
    tensor = real_tensor("mask", mask)
    if tensor.dtype != torch.bool and not bool(((tensor == 0) | (tensor == 1)).all()):
        raise TypeError(f"mask: expected booleans (True: the query could see the key), got {tensor.dtype}")
    matrix, stack = tuple(scores.shape[-2:]), (len(scores), *scores.shape[-2:])
    if tuple(tensor.shape) not in (matrix, stack):
        raise ValueError(
            f"mask: expected shape {matrix} [query, key] or {stack} [layer, query, key], "
            f"got {tuple(tensor.shape)}"
        )
    return tensor.to(scores.device, torch.bool)


def as_shares(shares: object, scores: Tensor) -> Float[Tensor, "layer query"] | None:
    """`residual_shares` as numbers `[layer, query]` from 0 to 1; other shapes or numbers are a ValueError."""
    if shares is None:
        return None
    tensor, shape = real_tensor("residual_shares", shares), (len(scores), scores.shape[-2])
    if tuple(tensor.shape) != shape:
        raise ValueError(f"residual_shares: expected shape {shape} [layer, query], got {tuple(tensor.shape)}")
    if not bool(((tensor >= 0) & (tensor <= 1)).all()):
        raise ValueError("residual_shares: expected numbers from 0 to 1, got others")
    return tensor.to(scores.device)


def as_layers(layers: object, count: int) -> list[int]:
    """Labels of the layers: `count` different whole numbers, 0 or more.

    Anything but whole numbers is a TypeError; another count, a negative or a repeated label a ValueError.
    """
    if layers is None:
        return list(range(count))
    labels = [whole_number("layers", label) for label in several("layers", layers, "a list of whole numbers")]
    if len(labels) != count:
        raise ValueError(f"layers: expected {count} labels, one per layer of scores, got {len(labels)}")
    if min(labels) < 0 or len(set(labels)) != len(labels):
        raise ValueError(f"layers: expected different labels, 0 or more, got {labels}")
    return labels


def as_residual(residual: object) -> float:
    """A residual weight; no number is a TypeError, NaN or one outside 0 to 1 a ValueError."""
    return number("residual", residual, 0, 1)


def as_record(name: str, value: object) -> dict[str, Any]:
    """A mapping, made plain by `_as_plain`; anything else is a TypeError."""
    return _as_plain(instance(name, value, Mapping, "a dict"), name)


def _as_plain(value: Any, name: str, depth: int = 0) -> Any:
    """Tuples as lists and numpy or torch scalars as Python numbers, throughout, so that JSON keeps all."""
    if depth > _DEEPEST:
        raise ValueError(f"{name}: expected at most {_DEEPEST} levels of lists and dicts, got more")
    if isinstance(value, Mapping):
        # JSON knows no numbers as names: {3: [1, 5]} is kept as {"3": [1, 5]}.
        items = ((str(key) if type(key) is int else key, item) for key, item in value.items())
        return {key: _as_plain(item, name, depth + 1) for key, item in items}
    if isinstance(value, (list, tuple)):
        return [_as_plain(item, name, depth + 1) for item in value]
    if isinstance(value, np.generic) or (isinstance(value, Tensor) and value.ndim == 0):
        return value.item()
    return value


def later_keys(mixing_map: MixingMap) -> Bool[Tensor, "query key"]:
    """Which keys stand after the position of each row."""
    device = mixing_map.scores.device
    rows = torch.tensor(mixing_map.query_positions, device=device, dtype=torch.long)
    return torch.arange(mixing_map.scores.shape[-1], device=device) > rows[:, None]


def require_no_hidden_weight(mixing_map: MixingMap) -> None:
    """Raise a ValueError that names the first weight on a key that its query could not see, if any."""
    if mixing_map.mask is None and not mixing_map.causal:
        return
    # One layer at a time and without a comparison of numbers, because that is faster.
    for place, (matrices, keys) in enumerate(zip(mixing_map.scores, mixing_map.visible(), strict=True)):
        weighted = matrices.bool()
        if torch.equal(weighted & keys, weighted):
            continue
        wrong = weighted & ~keys
        where = [place, *wrong.nonzero()[0].tolist()]
        above = mixing_map.causal and where[-1] > mixing_map.query_positions[where[-2]]
        reason = "a causal map has no weight above the diagonal" if above else "mask hides this key"
        raise ValueError(
            f"scores: expected 0 at {_entry(mixing_map, where)}, because {reason}, "
            f"got {mixing_map.scores[tuple(where)].item():.6g} ({int(wrong.sum())} such entries in the layer)"
        )


def require_causal(mixing_map: MixingMap) -> None:
    """Raise a ValueError for `causal=True` where the keys are not the tokens, or the mask says otherwise."""
    if not mixing_map.causal:
        return
    if mixing_map.key_tokens is not None:
        raise ValueError(
            "causal: expected False where key_tokens are given (their order says nothing about the "
            "queries'); say with mask= which keys each query could see"
        )
    wrong = None if mixing_map.mask is None else mixing_map.mask & later_keys(mixing_map)
    if wrong is not None and bool(wrong.any()):
        *_, row, key = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"mask: expected no visible key above the diagonal with causal=True, got one at query "
            f"{mixing_map.query_positions[row]}, key {key}"
        )
