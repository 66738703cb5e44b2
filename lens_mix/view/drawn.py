"""From a map to what of it is drawn: rows as shares, words, a crop, without the diagonal."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lens_mix.maps import MixingMap
from lens_mix.maps.positions import Queries, as_positions
from lens_mix.view.labels import visible_token


@dataclasses.dataclass(frozen=True)
class Drawn:
    """Scores as they are drawn, which of them are visible, and the labels of their rows and keys."""

    scores: Float[Tensor, "layer *head query key"]
    visible: Bool[Tensor, "layer query key"]
    rows: list[str]
    keys: list[str]

    @staticmethod
    def of(
        mixing_map: MixingMap,
        normalize: bool,
        words: bool = False,
        diagonal: bool = True,
        queries: Queries | None = None,
        keys: Queries | None = None,
    ) -> Drawn:
        """A map, its rows divided by their sums before anything is merged or cut away."""
        shown = mixing_map.normalized() if normalize else mixing_map
        shown = shown.merge_words() if words else shown
        visible = shown.visible()
        if not diagonal and shown.key_tokens is None:
            query_positions = torch.tensor(shown.query_positions, device=visible.device)[:, None]
            visible = visible & (torch.arange(visible.shape[-1], device=visible.device) != query_positions)
        rows, places = list(range(visible.shape[1])), list(range(visible.shape[2]))
        if queries is not None:
            rows = [
                shown.row_index(position, "queries") for position in as_positions(queries, len(shown.tokens))
            ]
        if keys is not None:
            places = as_positions(keys, len(places), "keys")
        labels, key_labels = shown.query_labels, shown.key_labels
        return Drawn(
            shown.scores[..., rows, :][..., places],
            visible[:, rows][..., places],
            [visible_token(labels[row]) for row in rows],
            [visible_token(key_labels[place]) for place in places],
        )

    def strongest(self, how: str) -> list[int]:
        """Keys from the strongest: by the largest column of a layer ("sum"), or the largest entry ("max")."""
        sizes = self.scores.abs() if self.scores.ndim == 3 else self.scores.abs().mean(1)
        sizes = sizes.masked_fill(~self.visible, 0).double()
        columns = sizes.sum(1) if how == "sum" else sizes.amax(1)
        return columns.amax(0).argsort(descending=True, stable=True).tolist()


def by_words(
    vectors: dict[str, Float[Tensor, " key"]], groups: Sequence[Sequence[int]]
) -> dict[str, Float[Tensor, " word"]]:
    """Rows over words: sums over their pieces; NaN where all of these are."""
    return {
        name: torch.stack([_sum(vector[list(group)]) for group in groups]) for name, vector in vectors.items()
    }


def _sum(pieces: Tensor) -> Any:
    return pieces.nansum() if not bool(pieces.isnan().all()) else pieces[0]
