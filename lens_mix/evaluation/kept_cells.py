"""Rank the cells of a map, and make patterns in which only some cells are kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lens_mix.evaluation.intervention_passes import falling
from lens_mix.maps import MixingMap

# For each layer, the keys that each query may see.
Visible = Mapping[int, Tensor]
# The ranked cells of a map, and how many of them are kept.
CellJob = tuple["RankedCells", int]


@dataclasses.dataclass(frozen=True)
class RankedCells:
    """The order of a map's cells.

    Attributes:
        ranks: For each layer of the map, [head or 1, query, key]: 0 for the first cell, -1 for cells that are
            always kept, and `count` for cells that the mask hides.
        count: The number of ranked cells.
    """

    ranks: Mapping[int, Int[Tensor, "head query key"]]
    count: int

    @classmethod
    def of(cls, mixing: MixingMap, visible: Visible, keep_diagonal: bool, seed: int) -> RankedCells:
        """Rank the visible cells of a map.

        Args:
            mixing: The map.
            visible: For each layer, the keys that each query may see.
            keep_diagonal: Whether cells (q, q) are always kept and not ranked.
            seed: The seed that orders ties.
        """
        scores = mixing.scores if mixing.has_heads else mixing.scores[:, None]
        always = torch.eye(scores.shape[-1], dtype=torch.bool, device="cpu") & keep_diagonal
        cells = torch.stack([visible[layer] for layer in mixing.layer_labels])[:, None]
        ranked_indices = (cells & ~always).expand_as(scores).flatten().nonzero()[:, 0]
        ranks = torch.full((scores.numel(),), len(ranked_indices), dtype=torch.long, device="cpu")
        order = falling(scores.cpu().flatten()[ranked_indices], seed)
        ranks[ranked_indices[order]] = torch.arange(len(ranked_indices), device="cpu")
        ranks = ranks.view(scores.shape).masked_fill(always, -1)
        return cls(dict(zip(mixing.layer_labels, ranks, strict=True)), len(ranked_indices))

    def select_kept(self, layer: int, count: int) -> Bool[Tensor, "#head #query #key"]:
        """Return which cells of a layer are among the first `count`, or all if the map lacks the layer."""
        if layer in self.ranks:
            return self.ranks[layer] < count
        return torch.ones(1, 1, 1, dtype=torch.bool, device="cpu")


def kept_pattern(
    clean: Float[Tensor, "1 head query key"],
    layer: int,
    jobs: Sequence[CellJob],
    visible: Bool[Tensor, "query key"],
    operator: str,
    padding: int,
) -> Float[Tensor, "copy head pos pos"]:
    """Return a layer's clean pattern with some cells kept, a different set in each copy.

    With the operator "mean", the removed weight of a row is distributed evenly over the keys that it sees.

    Args:
        clean: The clean pattern of the prompt.
        layer: The number of the block.
        jobs: For each copy, ranked cells and how many of them are kept.
        visible: The keys that each query may see.
        operator: "zero" or "mean".
        padding: The number of positions that are added at the end, without weight. Nothing reads them.
    """
    visible = visible.to(clean)
    masks = torch.stack([cells.select_kept(layer, count).expand(clean.shape[1:]) for cells, count in jobs])
    masks = masks.to(clean.device)
    changed = clean * masks
    if operator == "mean":
        removed = (clean * ~masks).sum(-1, keepdim=True)
        changed = changed + removed * (visible / visible.sum(-1, keepdim=True).clamp_min(1))
    return torch.nn.functional.pad(changed, (0, padding, 0, padding))
