"""Select and scale what a figure draws of a map: shares, words, some rows and keys, no diagonal."""

from __future__ import annotations

import dataclasses

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lens_mix.maps import MixingMap
from lens_mix.maps.spans import Span, find_positions
from lens_mix.view.labels import make_row_visible, make_visible


@dataclasses.dataclass(frozen=True)
class DrawnMap:
    """Contain the scores of a map as a figure draws them.

    Attributes:
        scores: The scores.
        visible: Which scores are drawn; the others are gray.
        rows: The labels of the rows.
        keys: The labels of the keys.
    """

    scores: Float[Tensor, "layer *head query key"]
    visible: Bool[Tensor, "layer query key"]
    rows: list[str]
    keys: list[str]

    @staticmethod
    def from_map(
        mixing_map: MixingMap,
        normalize: bool,
        words: bool = False,
        diagonal: bool = True,
        queries: Span | None = None,
        keys: Span | None = None,
    ) -> DrawnMap:
        """Return what is drawn of a map.

        Args:
            mixing_map: The map.
            normalize: Whether rows are divided by their sums, before words are merged and rows selected.
            words: Whether pieces are merged into words.
            diagonal: Whether each position's share of itself is drawn.
            queries: The positions of the rows to draw, or a text; None: all.
            keys: The positions of the keys to draw, or a text; None: all.
        """
        shown = mixing_map.normalized() if normalize else mixing_map
        shown = shown.merge_words() if words else shown
        shown = shown if queries is None else shown.select_queries(queries)
        visible = shown.visible()
        if not diagonal and shown.keys_are_tokens:
            query_positions = torch.tensor(shown.query_positions, device=visible.device, dtype=torch.long)[
                :, None
            ]
            visible = visible & (torch.arange(visible.shape[-1], device=visible.device) != query_positions)
        positions = find_positions(shown.key_labels, slice(None) if keys is None else keys, "keys")
        return DrawnMap(
            shown.scores[..., positions],
            visible[..., positions],
            [make_row_visible(label) for label in shown.row_labels],
            [make_visible(shown.key_labels[position]) for position in positions],
        )

    def rank_keys(self, how: str) -> list[int]:
        """Return the keys, the strongest first.

        Args:
            how: "sum" ranks a key by its largest column sum in a layer, "max" by its largest entry.
        """
        sizes = self.scores.abs() if self.scores.ndim == 3 else self.scores.abs().mean(1)
        sizes = sizes.masked_fill(~self.visible, 0).double()
        columns = sizes.sum(1) if how == "sum" else sizes.amax(1)
        return columns.amax(0).argsort(descending=True, stable=True).tolist()


def sum_known(pieces: Float[Tensor, "*axes piece"], axis: int) -> Float[Tensor, "*axes"]:
    """Return the sum over the pieces of a word that are not NaN; NaN if all are."""
    return pieces.nansum(axis).masked_fill(pieces.isnan().all(axis), torch.nan)
