"""Read maps, heads and groups of tokens for the statistics of heads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lens_mix.arguments import check_items, check_whole_number
from lens_mix.maps import MixingMap

TokenGroup = int | str | Iterable[int | str] | Callable[[str], bool]


class HeadStatistic(NamedTuple):
    """Describe a head and its value of a statistic.

    Attributes:
        layer: The head's layer.
        head: The head's number in its layer.
        value: The statistic of this head.
    """

    layer: int
    head: int
    value: float


def iterate_heads(layers: Sequence[int], values: Float[Tensor, "layer head"]) -> Iterator[HeadStatistic]:
    """Yield every head with its value."""
    for layer, row in zip(layers, values.tolist(), strict=True):
        yield from (HeadStatistic(layer, head, value) for head, value in enumerate(row))


def iterate_maps(maps: MixingMap | Iterable[MixingMap], *, any_keys: bool = False) -> Iterable[MixingMap]:
    """Yield the maps one after another, and check that all have the same layers and heads.

    Args:
        maps: One map or several.
        any_keys: Whether maps of cross-attention are accepted, if all are such maps. Otherwise the keys must
            be the tokens.

    Raises:
        TypeError: Something else than a map.
        ValueError: Maps with different layers, heads or kinds of keys.
    """
    if not isinstance(maps, (MixingMap, Iterable)) or isinstance(maps, (str, Mapping)):
        raise TypeError(f"maps: expected a MixingMap or several, got {type(maps).__name__}")
    expected: tuple[list[int], int] | None = None
    all_cross: bool | None = None
    for mixing_map in [maps] if isinstance(maps, MixingMap) else maps:
        if not isinstance(mixing_map, MixingMap):
            raise TypeError(f"maps: expected MixingMaps, got {type(mixing_map).__name__}")
        keys, tokens = len(mixing_map.key_labels), len(mixing_map.tokens)
        cross = not mixing_map.keys_are_tokens
        if all_cross not in (None, cross):
            raise ValueError("maps: expected the tokens as keys in all of them, or in none; got both kinds")
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


def get_head_rows(mixing_map: MixingMap) -> Float[Tensor, "layer head query key"]:
    """Return the rows of a map with a head axis: scaled to sum 1, in float64, on the CPU."""
    mask = None if mixing_map.mask is None else mixing_map.mask.cpu()
    scores = mixing_map.replace(scores=mixing_map.scores.cpu().double(), mask=mask).normalized().scores
    return scores if mixing_map.has_heads else scores[:, None]


def read_group(group: TokenGroup, argument: str = "groups") -> Callable[[str], bool] | list[int | str]:
    """Return the group in a form that can be used for several prompts, unlike an iterator.

    Raises:
        TypeError: The group contains something else than tokens and positions.
    """
    if callable(group):
        return group
    what = "tokens, a function or positions"
    items = check_items(argument, group, what, alone=True)
    return [
        item if isinstance(item, str) else check_whole_number(argument, item, what=what) for item in items
    ]


def find_members(tokens: Sequence[str], group: TokenGroup) -> Bool[Tensor, " key"]:
    """Return which tokens belong to a group; there may be none."""
    items = read_group(group)
    if callable(items):
        return torch.tensor([bool(items(token)) for token in tokens], dtype=torch.bool, device="cpu")
    count = len(tokens)
    # A group can name a token by its position from either end, or by its text.
    names = ({position, position - count, token} for position, token in enumerate(tokens))
    is_member = [not token_names.isdisjoint(items) for token_names in names]
    return torch.tensor(is_member, dtype=torch.bool, device="cpu")
