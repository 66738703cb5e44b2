"""What the statistics of heads share: maps read one after the other, heads, groups of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lens_mix.maps import MixingMap

TokenGroup = int | str | Iterable[int | str] | Callable[[str], bool]


class Head(NamedTuple):
    """A head and a number that it was found by."""

    layer: int
    head: int
    value: float


def each_map(maps: MixingMap | Iterable[MixingMap]) -> Iterable[MixingMap]:
    """The maps one after the other, each with the tokens as keys."""
    if not isinstance(maps, MixingMap) and not isinstance(maps, Iterable):
        raise TypeError(f"maps: expected a MixingMap or several, got {type(maps).__name__}")
    for mixing_map in [maps] if isinstance(maps, MixingMap) else maps:
        if not isinstance(mixing_map, MixingMap):
            raise TypeError(f"maps: expected MixingMaps, got {type(mixing_map).__name__}")
        if mixing_map.key_tokens is not None:
            raise ValueError(
                f"maps: expected the tokens as keys, got {len(mixing_map.key_labels)} other keys for "
                f"{len(mixing_map.tokens)} tokens"
            )
        yield mixing_map


def with_heads(mixing_map: MixingMap) -> Float[Tensor, "layer head query key"]:
    """Rows that sum to 1, float64, on the CPU."""
    mask = None if mixing_map.mask is None else mixing_map.mask.cpu()
    scores = mixing_map.replace(scores=mixing_map.scores.cpu().double(), mask=mask).normalized().scores
    return scores if mixing_map.has_heads else scores[:, None]


def refuse_other_heads(mixing_map: MixingMap, first: MixingMap) -> None:
    """Refuse a map whose layers or heads are not those of the first.

    Raises:
        ValueError: with both.
    """
    got, expected = (
        (each.layer_labels, each.scores.shape[1] if each.has_heads else 1) for each in (mixing_map, first)
    )
    if got != expected:
        raise ValueError(
            f"maps: expected the same layers and heads in all, got layers {got[0]} with {got[1]} heads "
            f"after layers {expected[0]} with {expected[1]}"
        )


def members(tokens: Sequence[str], group: TokenGroup) -> Bool[Tensor, " key"]:
    """Which tokens belong to a group; none may."""
    if callable(group):
        return torch.tensor([bool(group(token)) for token in tokens])
    items = [group] if isinstance(group, (int, str)) else list(group)
    for item in items:
        if isinstance(item, bool) or not isinstance(item, (int, str)):
            raise TypeError(f"groups: expected positions, tokens or a function, got {item!r}")
    places = {
        item % len(tokens) for item in items if isinstance(item, int) and -len(tokens) <= item < len(tokens)
    }
    return torch.tensor([place in places or token in items for place, token in enumerate(tokens)])
