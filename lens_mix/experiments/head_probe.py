"""Test single heads as classifiers of a relation between tokens (Clark et al., 2019, section 4)."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Literal

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix.arguments import check_choice, check_items, check_whole_number
from lens_mix.experiments.heads import (
    HeadStatistic,
    TokenGroup,
    find_members,
    get_head_rows,
    iterate_heads,
    iterate_maps,
    read_group,
)
from lens_mix.maps import MixingMap

_PROBED_OFFSETS = tuple(offset for offset in range(-10, 11) if offset)


@dataclasses.dataclass(frozen=True, eq=False)
class HeadProbe:
    """Contain how often single heads find a relation between tokens, compared with fixed offsets.

    Attributes:
        accuracy: `[layer, head]`, 0 to 1: the share of pairs in which the right key gets the largest weight.
        baselines: For each relative position, the accuracy of always choosing it.
        layers: The labels of the layers.
        pairs: The number of pairs.
        visible: The share of pairs in which the right key is visible, 0 to 1. No head can be better.
    """

    accuracy: Float[Tensor, "layer head"]
    baselines: dict[int, float]
    layers: list[int]
    pairs: int
    visible: float

    @property
    def best(self) -> HeadStatistic:
        """Return the head with the highest accuracy."""
        return max(iterate_heads(self.layers, self.accuracy), key=lambda head: head.value)

    @property
    def best_offset(self) -> int:
        """Return the relative position with the highest accuracy; if several are equal, the closest."""
        return min(self.baselines, key=lambda offset: (-self.baselines[offset], abs(offset)))

    @property
    def gain(self) -> float:
        """Return the accuracy of the best head minus that of the best offset."""
        return self.best.value - self.baselines[self.best_offset]

    def to_dataframe(self) -> pd.DataFrame:
        """Return a table with one row per head, and the columns layer, head and accuracy."""
        heads = iterate_heads(self.layers, self.accuracy)
        return pd.DataFrame(heads, columns=["layer", "head", "accuracy"])

    def __repr__(self) -> str:
        best, offset = self.best, self.best_offset
        return (
            f"HeadProbe({self.pairs} pairs: layer {best.layer} head {best.head} finds "
            f"{100 * best.value:.1f} %, offset {offset:+d} finds {100 * self.baselines[offset]:.1f} %)"
        )


def probe_heads(
    maps: MixingMap | Sequence[MixingMap],
    relations: Sequence[tuple[int, int]] | Sequence[Sequence[tuple[int, int]]],
    *,
    direction: Literal["forward", "backward"] = "forward",
    ignore: TokenGroup | None = None,
    offsets: Sequence[int] = _PROBED_OFFSETS,
) -> HeadProbe:
    """Return how often each head attends most to the right token of a pair (Clark et al. 2019, section 4).

        >>> method = lm.methods.AttentionWeights(per_head=True)
        >>> m = lm.run(model, "The Eiffel Tower is in the city of", method)
        >>> lm.experiments.probe_heads(m, [(3, 2), (7, 6)]).best

    A head's answer is the key with the largest weight, not counting the query itself; if several are equal,
    it is the first. A row without weight at other keys has no answer and counts as wrong. For relations
    between words, merge the maps first (`.merge_words()`: sum over keys, mean over queries, as in the paper).
    The best head is chosen from many on these very pairs, so confirm it on other pairs.

    Args:
        maps: One map or several, with the same layers and heads.
        relations: Pairs (from, to) of positions; for several maps, one list of pairs per map. The paper's
            pairs are (dependent, syntactic head), because every word has one syntactic head.
        direction: "forward" if the query is `from` and the right key is `to`; "backward" for the reverse.
            The paper tries both.
        ignore: Tokens that cannot be an answer, as [CLS] and [SEP]; in the forms of `groups` in
            `attention_statistics`.
        offsets: The offsets of the baselines, which always answer query + offset.

    Returns:
        The accuracies of all heads and of the baselines.

    Raises:
        TypeError: `maps` contains something else than maps, or `relations` something else than pairs of whole
            numbers.
        ValueError: No maps or no pairs; the numbers of maps and of lists differ; a position that a prompt
            does not have, or whose row is not in its map; maps of different layers or heads; keys that are
            not the tokens; negative scores.
    """
    check_choice("direction", direction, ("forward", "backward"))
    listed_offsets = check_items("offsets", offsets, "whole numbers", least=1)
    offsets = [check_whole_number("offsets", offset) for offset in listed_offsets]
    ignore = None if ignore is None else read_group(ignore, "ignore")
    listed = check_items("relations", relations, "pairs (from, to), or lists of pairs")
    all_maps, lists = list(iterate_maps(maps)), [listed] if isinstance(maps, MixingMap) else listed
    if len(all_maps) != len(lists):
        raise ValueError(f"relations: expected {len(all_maps)} lists of pairs, one per map, got {len(lists)}")
    counts, offset_counts = [], Counter[int]()
    for map_index, (mixing_map, pairs) in enumerate(zip(all_maps, lists, strict=True)):
        directed = [_read_pair(pair, map_index, len(mixing_map.tokens), direction) for pair in pairs]
        if directed:
            counts.append(_count_correct(mixing_map, directed, ignore))
            offset_counts.update(key - query for query, key in directed)
    if not counts:
        raise ValueError("relations: expected at least one pair, got none")
    total, (correct, visible) = offset_counts.total(), zip(*counts, strict=True)
    baselines = {offset: offset_counts[offset] / total for offset in offsets}
    accuracy = torch.stack(correct).sum(0) / total
    return HeadProbe(accuracy, baselines, all_maps[0].layer_labels, total, sum(visible) / total)


def _count_correct(
    mixing_map: MixingMap, pairs: list[tuple[int, int]], ignore: TokenGroup | None
) -> tuple[Float[Tensor, "layer head"], float]:
    """Return the right answers per head, and the number of visible right keys (mean over layers)."""
    queries, keys = (torch.tensor(side, dtype=torch.long, device="cpu") for side in zip(*pairs, strict=True))
    row_indices = torch.tensor(
        [mixing_map.row_index(query, "relations") for query, _ in pairs], dtype=torch.long, device="cpu"
    )
    rows = get_head_rows(mixing_map)[:, :, row_indices]
    rows[:, :, torch.arange(len(queries), device="cpu"), queries] = 0.0  # the query itself is not an answer
    if ignore is not None:
        rows[..., find_members(mixing_map.tokens, ignore)] = 0.0
    best, answer = rows.max(-1)
    # `max` may return any of several equal keys; `argmax` of the comparison returns the first.
    answer = (rows == best[..., None]).to(torch.uint8).argmax(-1)
    visible = mixing_map.visible().cpu()[:, row_indices, keys].sum(-1).double().mean().item()
    return ((answer == keys) & (best > 0)).sum(-1).double(), visible


def _read_pair(pair: object, map_index: int, count: int, direction: str) -> tuple[int, int]:
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise TypeError(f"relations: expected pairs (from, to), got {pair!r} for map {map_index}")
    for position in pair:
        check_whole_number(f"relations of map {map_index}", position, 0, count - 1, "positions")
    return (pair[0], pair[1]) if direction == "forward" else (pair[1], pair[0])
