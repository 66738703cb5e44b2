"""Check the fields of a `MixingMap`, and convert them to tensors, lists and plain numbers.

Each function returns the converted value, or raises an error that names the field.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lens_mix.arguments import (
    check_instance,
    check_items,
    check_number,
    check_real_tensor,
    check_whole_number,
)
from lens_mix.maps.positions import as_positions, shorten

if TYPE_CHECKING:
    from lens_mix.maps import MixingMap

# With many more levels, Python's own recursion limit would raise an error without the argument's name.
_MAX_DEPTH = 100


def as_scores(scores: object) -> Float[Tensor, "layer *head query key"]:
    """Return a detached floating-point tensor `[layer, query, key]` or `[layer, head, query, key]`.

    A tensor keeps its dtype and device, and is not copied. A numpy array or a nested list is copied; Python
    floats become float64. Whole numbers and booleans become float32.

    Raises:
        TypeError: If `scores` contains anything but real numbers.
        ValueError: If a list is ragged, the number of axes is wrong or an axis is empty.
    """
    tensor = check_real_tensor("scores", scores)
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
    """Raise a ValueError that names the first NaN or infinity, if there is one."""
    scores = mixing_map.scores
    # A finite sum shows that all scores are finite, and needs no tensor as large as the scores.
    if math.isfinite(scores.sum().item()):
        return
    wrong = ~torch.isfinite(scores)
    if bool(wrong.any()):
        index = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"scores: expected finite numbers, got {scores[tuple(index)].item()} at "
            f"{_name_entry(mixing_map, index)} ({int(wrong.sum())} such entries)"
        )


def _name_entry(mixing_map: MixingMap, index: Sequence[int]) -> str:
    layer, *head, row, key = index
    heads = f" head {head[0]}," if head else ""
    query = mixing_map.query_positions[row]
    return f"layer {mixing_map.layer_labels[layer]},{heads} query {query}, key {key}"


def as_tokens(tokens: object, count: int | None, argument: str, axis: str) -> list[str]:
    """Return `tokens` as a list of strings.

    Args:
        tokens: The tokens.
        count: The expected number of tokens; None: any number.
        argument: The name of the argument, for errors.
        axis: The name of the axis whose positions the tokens label, for errors.

    Raises:
        TypeError: If an item is not a string.
        ValueError: If the number of tokens is not `count`.
    """
    strings = check_items(argument, tokens, "a list of strings")
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
    """Return the position of each row; None if the rows are all positions in order.

    Args:
        queries: The positions.
        count: The number of tokens.
        rows: The number of rows.

    Raises:
        TypeError: If `queries` is not a list of whole numbers.
        ValueError: If a position does not exist or occurs twice, or if there are not `rows` of them.
    """
    positions = as_positions(check_items("queries", queries, "a list of positions"), count)
    if len(positions) != rows:
        raise ValueError(f"queries: expected {rows} positions, one per row of scores, got {len(positions)}")
    return None if positions == list(range(count)) else positions


def as_mask(mask: object, scores: Tensor) -> Bool[Tensor, "*layer query key"] | None:
    """Return `mask` as a boolean tensor `[query, key]` or `[layer, query, key]` on the device of `scores`.

    Raises:
        TypeError: If `mask` contains numbers other than 0 and 1.
        ValueError: If the shape of `mask` does not fit `scores`.
    """
    if mask is None:
        return None
    tensor = check_real_tensor("mask", mask)
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
    """Return `residual_shares` as a tensor `[layer, query]` of numbers from 0 to 1.

    Raises:
        ValueError: If the shape does not fit `scores`, or if a number is outside 0 to 1.
    """
    if shares is None:
        return None
    tensor, shape = check_real_tensor("residual_shares", shares), (len(scores), scores.shape[-2])
    if tuple(tensor.shape) != shape:
        raise ValueError(f"residual_shares: expected shape {shape} [layer, query], got {tuple(tensor.shape)}")
    if not bool(((tensor >= 0) & (tensor <= 1)).all()):
        raise ValueError(
            "residual_shares: expected numbers from 0 to 1, "
            f"got {tensor.min().item():.6g} to {tensor.max().item():.6g}"
        )
    return tensor.to(scores.device)


def as_features(features: object) -> Tensor | None:
    """Return `features` as a detached tensor of real numbers; None if there are none."""
    return None if features is None else check_real_tensor("features", features).detach()


def as_layers(layers: object, count: int) -> list[int]:
    """Return the labels of `count` layers; None becomes 0, 1, 2, ….

    Raises:
        TypeError: If a label is not a whole number.
        ValueError: If there are not `count` labels, or if a label is negative or occurs twice.
    """
    if layers is None:
        return list(range(count))
    labels = [
        check_whole_number("layers", label)
        for label in check_items("layers", layers, "a list of whole numbers")
    ]
    if len(labels) != count:
        raise ValueError(f"layers: expected {count} labels, one per layer of scores, got {len(labels)}")
    if min(labels) < 0 or len(set(labels)) != len(labels):
        raise ValueError(f"layers: expected different labels, 0 or more, got {labels}")
    return labels


def as_residual(residual: object) -> float:
    """Return a residual weight from 0 to 1; raise a TypeError or ValueError for anything else."""
    return check_number("residual", residual, 0, 1)


def as_record(name: str, value: object) -> dict[str, Any]:
    """Return a mapping as a dict that JSON can represent; raise a TypeError for anything else."""
    record: dict[str, Any] = _as_plain(check_instance(name, value, Mapping, "a dict"), name)
    return record


def _as_plain(value: Any, name: str, depth: int = 0) -> Any:
    """Return the value with every tuple as a list, and every numpy or torch scalar as a Python number."""
    if depth > _MAX_DEPTH:
        raise ValueError(f"{name}: expected at most {_MAX_DEPTH} levels of lists and dicts, got more")
    if isinstance(value, Mapping):
        # The names in a JSON object are strings, so {3: [1, 5]} becomes {"3": [1, 5]}.
        items = ((str(key) if type(key) is int else key, item) for key, item in value.items())
        return {key: _as_plain(item, name, depth + 1) for key, item in items}
    if isinstance(value, (list, tuple)):
        return [_as_plain(item, name, depth + 1) for item in value]
    if isinstance(value, np.generic) or (isinstance(value, Tensor) and value.ndim == 0):
        return value.item()
    return value


def later_keys(mixing_map: MixingMap) -> Bool[Tensor, "query key"]:
    """Return, for each row, which keys come after its own position."""
    device = mixing_map.scores.device
    rows = torch.tensor(mixing_map.query_positions, device=device, dtype=torch.long)
    return torch.arange(mixing_map.scores.shape[-1], device=device) > rows[:, None]


def require_no_hidden_weight(mixing_map: MixingMap) -> None:
    """Raise a ValueError that names the first weight on a key that its query could not see."""
    if mixing_map.mask is None and not mixing_map.causal:
        return
    # Booleans of one layer at a time are faster than a comparison of all scores with 0.
    for layer, (matrices, keys) in enumerate(zip(mixing_map.scores, mixing_map.visible(), strict=True)):
        weighted = matrices.bool()
        if torch.equal(weighted & keys, weighted):
            continue
        wrong = weighted & ~keys
        index = [layer, *wrong.nonzero()[0].tolist()]
        is_later = mixing_map.causal and index[-1] > mixing_map.query_positions[index[-2]]
        reason = "a causal map has no weight above the diagonal" if is_later else "mask hides this key"
        raise ValueError(
            f"scores: expected 0 at {_name_entry(mixing_map, index)}, because {reason}, "
            f"got {mixing_map.scores[tuple(index)].item():.6g} ({int(wrong.sum())} such entries in the layer)"
        )


def require_consistent_causal(mixing_map: MixingMap) -> None:
    """Raise a ValueError for `causal=True` if the keys are not the tokens, or the mask shows a later key."""
    if not mixing_map.causal:
        return
    if not mixing_map.keys_are_tokens:
        raise ValueError(
            "causal: expected False for a map with other keys than its tokens, because their order is not "
            "that of the queries, got True; give the keys that each query could see as mask="
        )
    wrong = None if mixing_map.mask is None else mixing_map.mask & later_keys(mixing_map)
    if wrong is not None and bool(wrong.any()):
        *_, row, key = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"mask: expected no visible key above the diagonal with causal=True, got one at query "
            f"{mixing_map.query_positions[row]}, key {key}"
        )


def require_visible_keys(mixing_map: MixingMap, row: int, keys: Sequence[int], argument: str) -> None:
    """Raise a ValueError that names the keys that a row cannot see in any layer.

    Args:
        mixing_map: The map.
        row: The index of the row.
        keys: The positions of the keys.
        argument: The name of the argument, for the error.
    """
    seen = mixing_map.visible()[:, row].any(0)
    hidden = [key for key in keys if not seen[key]]
    if hidden:
        raise ValueError(
            f"{argument}: expected keys that query {mixing_map.query_positions[row]} can see, got "
            f"{shorten(hidden)}; choose a later row with query="
        )
