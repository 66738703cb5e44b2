"""What the statistics of heads share: maps read one after the other, heads, groups of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lens_mix.arguments import several, whole_number
from lens_mix.maps import MixingMap

TokenGroup = int | str | Iterable[int | str] | Callable[[str], bool]


class Head(NamedTuple):
    """A head and a number that it was found by."""

    layer: int
    head: int
    value: float


def each_head(layers: Sequence[int], values: Float[Tensor, "layer head"]) -> Iterator[Head]:
    """Every head with its value."""
    for layer, row in zip(layers, values.tolist(), strict=True):
        yield from (Head(layer, head, value) for head, value in enumerate(row))


def each_map(maps: MixingMap | Iterable[MixingMap], *, any_keys: bool = False) -> Iterable[MixingMap]:
    """The maps one after the other, all with the same layers and heads, and with the tokens as keys.

    `any_keys`: other keys will do, those of cross-attention; all have them, or none.
    """
    if not isinstance(maps, (MixingMap, Iterable)) or isinstance(maps, (str, Mapping)):
        raise TypeError(f"maps: expected a MixingMap or several, got {type(maps).__name__}")
    expected: tuple[list[int], int] | None = None
    all_cross: bool | None = None
    for mixing_map in [maps] if isinstance(maps, MixingMap) else maps:
        if not isinstance(mixing_map, MixingMap):
            raise TypeError(f"maps: expected MixingMaps, got {type(mixing_map).__name__}")
        keys, tokens = len(mixing_map.key_labels), len(mixing_map.tokens)
        cross = mixing_map.key_tokens is not None
        if all_cross not in (None, cross):
            raise ValueError("maps: expected the tokens as keys in all of them, or in none; got some of each")
        all_cross = cross
        if cross and not any_keys:
            raise ValueError(f"maps: expected the tokens as keys, got {keys} other keys for {tokens} tokens")
        got = mixing_map.layer_labels, mixing_map.scores.shape[1] if mixing_map.has_heads else 1
        expected = expected or got
        if got != expected:
            raise ValueError(
                f"maps: expected the same layers and heads in all, got layers {got[0]} with {got[1]} heads "
                f"after layers {expected[0]} with {expected[1]}"
            )
        yield mixing_map


def with_heads(mixing_map: MixingMap) -> Float[Tensor, "layer head query key"]:
    """Rows that sum to 1, float64, on the CPU."""
    mask = None if mixing_map.mask is None else mixing_map.mask.cpu()
    scores = mixing_map.replace(scores=mixing_map.scores.cpu().double(), mask=mask).normalized().scores
    return scores if mixing_map.has_heads else scores[:, None]


def reusable(group: TokenGroup, argument: str = "groups") -> Callable[[str], bool] | list[int | str]:
    """The group for several prompts, checked: an iterator is used up after the first."""
    if callable(group):
        return group
    what = "tokens, a function or positions"
    items = several(argument, group, what, alone=True)
    return [item if isinstance(item, str) else whole_number(argument, item, what=what) for item in items]


def members(tokens: Sequence[str], group: TokenGroup) -> Bool[Tensor, " key"]:
    """Which tokens belong to a group; none may."""
    items = reusable(group)
    if callable(items):
        return torch.tensor([bool(items(token)) for token in tokens], dtype=torch.bool, device="cpu")
    count = len(tokens)
    # what an item may call a token by: its position from either end, or the token itself
    names = ({place, place - count, token} for place, token in enumerate(tokens))
    return torch.tensor([not each.isdisjoint(items) for each in names], dtype=torch.bool, device="cpu")
