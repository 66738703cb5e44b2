"""The feed-forward's second matrix, cut for the one large product of every pair."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from lens_mix.algebra.large_product import add_product, as_right_factor, by_onednn
from lens_mix.algebra.value_zeroing_old.rotation import Rotation


class _Piece(NamedTuple):
    """Some neurons of a part, and the axes that they reach: the first ones."""

    neurons: slice
    matrix: Float[Tensor, "neuron axis"]


class SecondMatrix:
    """The second matrix, by parts of the neurons.

    Args:
        matrix: W_out.
        parts: neurons that are held at once.
        rotation: other axes, in which a corner of it is zero.
        pairs: how many will go through.
    """

    def __init__(
        self,
        matrix: Float[Tensor, "d_mlp d_model"],
        parts: Sequence[slice],
        rotation: Rotation | None,
        pairs: int,
    ) -> None:
        self._parts = [self._cut(matrix, part, rotation, pairs) for part in parts]

    @staticmethod
    def _cut(matrix: Tensor, part: slice, rotation: Rotation | None, pairs: int) -> list[_Piece]:
        if rotation is None:
            return [_Piece(slice(None), as_right_factor(matrix[part], pairs))]
        if by_onednn(matrix):
            # Pieces in memory of their own: one per part.
            reached = rotation.second[part, : rotation.reach(part)]
            return [_Piece(slice(None), as_right_factor(reached, pairs))]
        return [
            _Piece(
                slice(neurons.start - part.start, neurons.stop - part.start), rotation.second[neurons, :width]
            )
            for neurons, width in rotation.steps(part)
        ]

    def add_product(
        self,
        number: int,
        into: Float[Tensor, "pair axis"],
        hidden: Float[Tensor, "pair neuron"],
        factor: float,
    ) -> None:
        """Add what a part of the neurons gives, times a factor.

        Args:
            number: of the part.
            into: where to.
            hidden: these neurons.
            factor: of what is added.
        """
        for neurons, matrix in self._parts[number]:
            add_product(into[:, : matrix.shape[1]], hidden[:, neurons], matrix, factor)
