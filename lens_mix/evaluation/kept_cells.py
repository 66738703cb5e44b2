"""Which cells of a map come first, and the hook that mixes values by some of them only."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lens_mix.hooks.base import AttentionHook
from lens_mix.hooks.mixing import check_mixing, mix
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
        diagonal = torch.eye(scores.shape[-1], dtype=torch.bool)
        taken = torch.stack([visible[layer] for layer in mixing.layer_labels])[:, None]
        taken = (taken & ~diagonal if keep_diagonal else taken).expand_as(scores)
        places = taken.flatten().nonzero()[:, 0]
        shuffled = places[torch.randperm(len(places), generator=torch.Generator().manual_seed(seed))]
        order = scores.cpu().flatten()[shuffled].argsort(descending=True, stable=True)
        ranks = torch.full((scores.numel(),), len(places))
        ranks[shuffled[order]] = torch.arange(len(places))
        ranks = ranks.view(scores.shape)
        ranks = ranks.masked_fill(diagonal, -1) if keep_diagonal else ranks
        return cls(dict(zip(mixing.layer_labels, ranks, strict=True)), len(places))

    def kept(self, layer: int, count: int) -> Bool[Tensor, "#head #query #key"]:
        """Which cells of a layer are among the first so many; all, where the map does not hold it."""
        return self.ranks[layer] < count if layer in self.ranks else torch.ones(1, 1, 1, dtype=torch.bool)


class KeepCells(AttentionHook):
    """z of one layer from the clean pattern with some cells kept, another set of them in each copy."""

    points = ("values", "pattern", "mixed")

    def __init__(
        self,
        layer: int,
        attention: str,
        clean: Float[Tensor, "1 head query key"],
        jobs: Sequence[Job],
        visible: Bool[Tensor, "query key"],
        operator: str,
    ) -> None:
        super().__init__(layer, attention)
        self._layer, self._clean, self._jobs, self._operator = layer, clean, jobs, operator
        self._visible = visible

    def on_mixed(self, mixed: Tensor, values: Tensor, pattern: Tensor | None) -> Tensor:
        if pattern is not None:
            check_mixing("keep_cells", mixed, pattern, values)
        length = self._visible.shape[0]
        clean, visible = self._clean[..., :length, :length], self._visible.to(self._clean)
        shape = clean.shape[1:]
        masks = torch.stack([cells.kept(self._layer, count).expand(shape) for cells, count in self._jobs])
        masks = masks.to(clean.device)
        edited = clean * masks
        if self._operator == "mean":
            removed = (clean * ~masks).sum(-1, keepdim=True)
            edited = edited + removed * (visible / visible.sum(-1, keepdim=True).clamp_min(1))
        self.calls += 1
        # What padding reads is never asked for.
        beyond = self._clean.shape[-1] - length
        return mix(torch.nn.functional.pad(edited, (0, beyond, 0, beyond)), values)
