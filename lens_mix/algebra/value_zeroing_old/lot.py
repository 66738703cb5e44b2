"""The vectors of some sources, and a slab's pairs among them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix.algebra.value_zeroing_old.pieces import Slab, Stairs
from lens_mix.algebra.workspace import Rows, Windows, Workspace


@dataclasses.dataclass(frozen=True)
class Lot:
    """The vectors of some sources for one group of heads, and what is found for their pairs.

    Attributes:
        offset: number of the first source.
        weights, outer: Σ over rank of weights · outer is the change that goes into `CleanBlock.mid_change`.
        inner_weights, inner: the same for the first matrices, by parts of the neurons.
        drift: of the clean block's `lead` norm, where it was found from factors.
        along, across: of each pair's change, as they are found.
    """

    offset: int
    weights: Float[Tensor, "source rank query"]
    outer: Float[Tensor, "source rank d_model"]
    inner_weights: Float[Tensor, "source rank query"]
    inner: Sequence[Float[Tensor, "matrix source rank column"]]
    drift: Float[Tensor, "source query"] | None
    along: Float[Tensor, "source query"]
    across: Float[Tensor, "source query"]


class Pairs:
    """A slab's pairs in the tensors of a lot; of stairs, the whole slab's up to `keep`, then the pairs only.

    Args:
        piece: the pairs.
        lot: whose sources they are of.
        length: positions of one prompt.

    Attributes:
        rows: the slab's queries.
        slab_shape: its tiles (where there are several), sources and queries.
        kept_rows: the query of each pair.
        shape: of what is found for each pair.
    """

    def __init__(self, piece: Slab | Stairs, lot: Lot, length: int) -> None:
        slab = piece if isinstance(piece, Slab) else piece.slab
        start = slab.prompt * length
        self.tiles, self.step, self.slab_shape = slab.tiles, slab.step, slab.shape
        self.sources = slice(slab.sources.start - lot.offset, slab.sources.stop - lot.offset)
        self.queries = slab.queries
        window = slice(start + slab.queries.start, start + slab.queries.stop)
        self.rows: Rows = window if slab.tiles == 1 else Windows(window, slab.tiles, slab.step)
        self.kept_rows = self.rows
        self.shape: tuple[int, ...] = self.slab_shape
        self.kept: Tensor | None = None
        if isinstance(piece, Slab):
            return
        self.kept = torch.tensor(piece.places(), device=lot.weights.device)
        number = self.kept // slab.width
        moved = number // slab.keys * slab.step
        source = number % slab.keys + moved + self.sources.start
        query = self.kept % slab.width + moved + slab.queries.start
        self.kept_rows, self.shape = query + start, (piece.rows,)
        self.index = (source, query)

    def of(self, x: Float[Tensor, "source query"]) -> Float[Tensor, "*tile key row"]:
        """The slab's numbers, in the tensor's own memory."""
        first = x[self.sources, self.queries]
        return first if self.tiles == 1 else self._tiled(first, sum(x.stride()))

    def factors(self, weights: Float[Tensor, "source rank query"]) -> Float[Tensor, "*tile key row rank"]:
        """The slab's weights, as the left side of a product."""
        first = weights[self.sources, :, self.queries].transpose(1, 2)
        source, _, query = weights.stride()
        return first if self.tiles == 1 else self._tiled(first, source + query).contiguous()

    def vectors(self, x: Float[Tensor, "source rank width"]) -> Float[Tensor, "*tile key rank width"]:
        """The vectors of its sources."""
        first = x[self.sources]
        return first if self.tiles == 1 else self._tiled(first, x.stride(0))

    def _tiled(self, first: Float[Tensor, "*pair"], step: int) -> Float[Tensor, "*tile_pair"]:
        """All tiles' numbers like the first one's, in memory that lies `step` numbers further per step."""
        shape, strides = (self.tiles, *first.shape), (self.step * step, *first.stride())
        return first.as_strided(shape, strides, first.storage_offset())

    def store(self, x: Float[Tensor, "source query"], found: Float[Tensor, "*pair"]) -> None:
        """Put these pairs' numbers where they belong."""
        if self.kept is None:
            self.of(x).copy_(found)
        else:
            x[self.index] = found

    def slab(
        self, name: str, out: Float[Tensor, "row width"], room: Workspace
    ) -> Float[Tensor, "*tile key row width"]:
        """Where the slab is computed: in `out`, the pairs' own place, if that is all of it."""
        shape = (*self.slab_shape, out.shape[-1])
        return out.view(shape) if self.kept is None else room.like(name, out, shape, out.dtype)

    def keep(self, slab: Float[Tensor, "*tile key row width"], out: Float[Tensor, "row width"]) -> None:
        """The pairs of the slab, to their own place."""
        if self.kept is not None:
            torch.index_select(slab.flatten(0, -2), 0, self.kept, out=out)
