"""From a map to what of it is drawn: rows as shares, words, a crop, without the diagonal."""

from __future__ import annotations

import dataclasses

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
        shown = shown if queries is None else shown.select_queries(queries)
        visible = shown.visible()
        if not diagonal and shown.key_tokens is None:
            query_positions = torch.tensor(shown.query_positions, device=visible.device, dtype=torch.long)[
                :, None
            ]
            visible = visible & (torch.arange(visible.shape[-1], device=visible.device) != query_positions)
        places = as_positions(slice(None) if keys is None else keys, visible.shape[-1], "keys")
        return Drawn(
            shown.scores[..., places],
            visible[..., places],
            [visible_token(token) for token in shown.query_labels],
            [visible_token(shown.key_labels[place]) for place in places],
        )

    def strongest(self, how: str) -> list[int]:
        """Keys from the strongest: by the largest column of a layer ("sum"), or the largest entry ("max")."""
        sizes = self.scores.abs() if self.scores.ndim == 3 else self.scores.abs().mean(1)
        sizes = sizes.masked_fill(~self.visible, 0).double()
        columns = sizes.sum(1) if how == "sum" else sizes.amax(1)
        return columns.amax(0).argsort(descending=True, stable=True).tolist()


def sum_of_known(pieces: Float[Tensor, "*axes piece"], axis: int) -> Float[Tensor, "*axes"]:
    """The sum over the pieces that are not NaN; NaN where all are."""
    return pieces.nansum(axis).masked_fill(pieces.isnan().all(axis), torch.nan)
