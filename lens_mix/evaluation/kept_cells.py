"""Which cells of a map come first, and patterns of some of them only."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lens_mix.evaluation.intervention_passes import falling
from lens_mix.maps import MixingMap

# By layer, the keys that each query may see.
Visible = Mapping[int, Tensor]
# A map's cells, and how many of them are kept.
Job = tuple["RankedCells", int]


@dataclasses.dataclass(frozen=True)
class RankedCells:
    """Which cells of a map come first.

    Attributes:
        ranks: per layer that the map holds, [head or 1, query, key]: 0 for the first cell, -1 for what is
            always kept, `count` for what the mask hides.
        count: how many cells are ranked.
    """

    ranks: Mapping[int, Int[Tensor, "head query key"]]
    count: int

    @classmethod
    def of(cls, mixing: MixingMap, visible: Visible, keep_diagonal: bool, seed: int) -> RankedCells:
        scores = mixing.scores if mixing.has_heads else mixing.scores[:, None]
        always = torch.eye(scores.shape[-1], dtype=torch.bool, device="cpu") & keep_diagonal
        cells = torch.stack([visible[layer] for layer in mixing.layer_labels])[:, None]
        places = (cells & ~always).expand_as(scores).flatten().nonzero()[:, 0]
        ranks = torch.full((scores.numel(),), len(places), dtype=torch.long, device="cpu")
        ranks[places[falling(scores.cpu().flatten()[places], seed)]] = torch.arange(len(places), device="cpu")
        ranks = ranks.view(scores.shape).masked_fill(always, -1)
        return cls(dict(zip(mixing.layer_labels, ranks, strict=True)), len(places))

    def kept(self, layer: int, count: int) -> Bool[Tensor, "#head #query #key"]:
        """Which cells of a layer are among the first so many; all, where the map does not hold it."""
        if layer in self.ranks:
            return self.ranks[layer] < count
        return torch.ones(1, 1, 1, dtype=torch.bool, device="cpu")


def kept_pattern(
    clean: Float[Tensor, "1 head query key"],
    layer: int,
    jobs: Sequence[Job],
    visible: Bool[Tensor, "query key"],
    operator: str,
    padding: int,
) -> Float[Tensor, "copy head pos pos"]:
    """A layer's clean pattern with some cells kept, another set of them in each copy.

    With the operator "mean" what is removed of a row is spread evenly over the keys that it sees. `padding`
    positions follow, with no weight: what these read is never asked for.
    """
    visible = visible.to(clean)
    masks = torch.stack([cells.kept(layer, count).expand(clean.shape[1:]) for cells, count in jobs])
    masks = masks.to(clean.device)
    edited = clean * masks
    if operator == "mean":
        removed = (clean * ~masks).sum(-1, keepdim=True)
        edited = edited + removed * (visible / visible.sum(-1, keepdim=True).clamp_min(1))
    return torch.nn.functional.pad(edited, (0, padding, 0, padding))
