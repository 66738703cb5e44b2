"""Single heads as classifiers of a relation between tokens (Clark et al., BlackboxNLP 2019, section 4)."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Literal

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix.arguments import one_of, several, whole_number
from lens_mix.maps import MixingMap
from lens_mix.statistics.heads import Head, TokenGroup, each_head, each_map, members, reusable, with_heads

_PROBED_OFFSETS = tuple(offset for offset in range(-10, 11) if offset)


@dataclasses.dataclass(frozen=True, eq=False)
class HeadProbe:
    """How well single heads find a relation between tokens, against fixed offsets.

    Attributes:
        accuracy: `[layer, head]`, 0 to 1: the share of pairs whose target gets the largest weight.
        baselines: relative position to the accuracy of always choosing it.
        layers: labels of the layers.
        pairs: how many there were.
        visible: the share of pairs whose target could be seen at all, 0 to 1: no head can be better.
    """

    accuracy: Float[Tensor, "layer head"]
    baselines: dict[int, float]
    layers: list[int]
    pairs: int
    visible: float

    @property
    def best(self) -> Head:
        """The head with the highest accuracy."""
        return max(each_head(self.layers, self.accuracy), key=lambda head: head.value)

    @property
    def best_offset(self) -> int:
        """The relative position with the highest accuracy; of equals the closest."""
        return min(self.baselines, key=lambda offset: (-self.baselines[offset], abs(offset)))

    @property
    def gain(self) -> float:
        """Accuracy of the best head less that of the best offset."""
        return self.best.value - self.baselines[self.best_offset]

    def to_dataframe(self) -> pd.DataFrame:
        """One row per head: layer, head, accuracy."""
        heads = each_head(self.layers, self.accuracy)
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
    """Heads as classifiers without training: does `from` attend most to `to`? (Clark et al. 2019, section 4.)

    A head's answer is the key with the largest weight, the query itself left out; of equals the first; a row
    without weight elsewhere has no answer and counts as wrong. Where relations are between words, merge the
    maps first (`.merge_words()`: sum over keys, mean over queries, as in the paper). The best head is the
    best of many on these very pairs: confirm it on others.

    Args:
        maps: one map or several, with the same layers and heads.
        relations: pairs (from, to) of positions; for several maps one list of pairs each. In the paper's
            relations, (dependent, head): every word has one head.
        direction: "forward": from `from` to `to`; "backward": from `to` to `from`. The paper tries both.
        ignore: tokens that are no answer ([CLS] and [SEP], say): as `groups` in `attention_statistics`.
        offsets: of the baselines that always answer query + offset.

    Raises:
        TypeError: maps that are none; pairs that are no pairs of whole numbers.
        ValueError: no maps or no pairs; another number of lists than maps; a position that a prompt does not
            have, or whose row its map does not hold; maps of different layers or heads; keys that are not
            the tokens; negative scores.
    """
    one_of("direction", direction, ("forward", "backward"))
    given = several("offsets", offsets, "whole numbers", least=1)
    offsets = [whole_number("offsets", offset) for offset in given]
    ignore = None if ignore is None else reusable(ignore, "ignore")
    listed = several("relations", relations, "pairs (from, to), or lists of pairs")
    every, lists = list(each_map(maps)), [listed] if isinstance(maps, MixingMap) else listed
    if len(every) != len(lists):
        raise ValueError(f"relations: expected {len(every)} lists of pairs, one per map, got {len(lists)}")
    answers, steps = [], Counter[int]()
    for number, (mixing_map, pairs) in enumerate(zip(every, lists, strict=True)):
        asked = [_pair(pair, number, len(mixing_map.tokens), direction) for pair in pairs]
        if asked:
            answers.append(_answers(mixing_map, asked, ignore))
            steps.update(end - start for start, end in asked)
    if not answers:
        raise ValueError("relations: expected at least one pair, got none")
    total, (correct, visible) = steps.total(), zip(*answers, strict=True)
    baselines = {offset: steps[offset] / total for offset in offsets}
    accuracy = torch.stack(correct).sum(0) / total
    return HeadProbe(accuracy, baselines, every[0].layer_labels, total, sum(visible) / total)


def _answers(
    mixing_map: MixingMap, pairs: list[tuple[int, int]], ignore: TokenGroup | None
) -> tuple[Float[Tensor, "layer head"], float]:
    """Right answers per head, and how many targets could be seen (mean over layers)."""
    starts, ends = (torch.tensor(side, dtype=torch.long, device="cpu") for side in zip(*pairs, strict=True))
    places = torch.tensor(
        [mixing_map.row_index(start, "relations") for start, _ in pairs], dtype=torch.long, device="cpu"
    )
    rows = with_heads(mixing_map)[:, :, places]
    rows[:, :, torch.arange(len(starts), device="cpu"), starts] = 0.0  # the query itself is no answer
    if ignore is not None:
        rows[..., members(mixing_map.tokens, ignore)] = 0.0
    best, answer = rows.max(-1)
    # Of equals the first: `max` promises none in particular.
    answer = (rows == best[..., None]).to(torch.uint8).argmax(-1)
    visible = mixing_map.visible().cpu()[:, places, ends].sum(-1).double().mean().item()
    return ((answer == ends) & (best > 0)).sum(-1).double(), visible


def _pair(pair: object, number: int, count: int, direction: str) -> tuple[int, int]:
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise TypeError(f"relations: expected pairs (from, to), got {pair!r} for map {number}")
    for position in pair:
        whole_number(f"relations of map {number}", position, 0, count - 1, "positions")
    return (pair[0], pair[1]) if direction == "forward" else (pair[1], pair[0])
