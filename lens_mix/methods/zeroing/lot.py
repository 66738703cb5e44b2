"""The vectors of some sources, and a slab's pairs among them."""

from __future__ import annotations

import dataclasses

import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix.methods.room import Rows, Workspace
from lens_mix.methods.zeroing.pieces import Runs, Slab


@dataclasses.dataclass(frozen=True)
class Lot:
    """The vectors of some sources for one group of heads, and what is found for their pairs.

    Attributes:
        offset: number of the first source.
        weights, outer: Σ over rank of weights · outer is the change that goes into `CleanBlock.mid_change`.
        inner_weights, inner: the same for the first matrices.
        drift: of the clean block's `lead` norm, where it was found from factors.
        along, across: of each pair's change, as they are found.
    """

    offset: int
    weights: Float[Tensor, "source query rank"]
    outer: Float[Tensor, "source rank d_model"]
    inner_weights: Float[Tensor, "source query rank"]
    inner: Float[Tensor, "matrix source rank d_mlp"] | None
    drift: Float[Tensor, "source query"] | None
    along: Float[Tensor, "source query"]
    across: Float[Tensor, "source query"]


class Pairs:
    """A slab's pairs in the tensors of a lot: some keys by a window of queries, or run after run.

    Args:
        slab: the pairs.
        lot: whose sources they are of.
        length: positions of one prompt.
    """

    def __init__(self, slab: Slab | Runs, lot: Lot, length: int) -> None:
        self.rows: Rows
        self.index: tuple[slice | Tensor, slice | Tensor]
        self.shape: tuple[int, ...]
        self.gaps: Tensor | None = None
        if isinstance(slab, Slab):
            start = slab.prompt * length
            self.rows = slice(start + slab.queries.start, start + slab.queries.stop)
            self.sources: slice | Tensor = slice(
                slab.sources.start - lot.offset, slab.sources.stop - lot.offset
            )
            self.index = (self.sources, slab.queries)
            self.shape = (slab.keys, slab.rows // slab.keys)
            return
        device = lot.weights.device
        numbers, queries = torch.tensor(slab.numbers()) - lot.offset, torch.tensor(slab.queries())
        self.index = (numbers.to(device), queries.to(device))
        self.rows = (torch.tensor(slab.prompts()) * length + queries).to(device)
        self.shape = (slab.rows,)
        # Products are made of runs of one length: where each pair lies among them.
        self.longest = max(part.rows for part in slab.parts)
        first = [part.sources.start - lot.offset for part in slab.parts]
        gaps = [n * self.longest + row for n, part in enumerate(slab.parts) for row in range(part.rows)]
        self.gaps = torch.tensor(gaps, device=device)
        consecutive = first == list(range(first[0], first[0] + len(first)))
        self.sources = slice(first[0], first[-1] + 1) if consecutive else torch.tensor(first, device=device)
        self.runs = len(first)

    def of(self, x: Float[Tensor, "source query *width"]) -> Float[Tensor, "*pair *width"]:
        """These pairs' numbers."""
        return x[self.index]

    def store(self, x: Float[Tensor, "source query"], found: Float[Tensor, "*pair"]) -> None:
        """Put these pairs' numbers where they belong."""
        x[self.index] = found

    def factors(self, weights: Float[Tensor, "*pair rank"]) -> Float[Tensor, "key row rank"]:
        """Weights as `product` takes them, runs filled up with zeros."""
        if self.gaps is None:
            return weights
        spread = weights.new_zeros(self.runs * self.longest, weights.shape[-1])
        return spread.index_copy_(0, self.gaps, weights).view(self.runs, self.longest, -1)

    def product(
        self,
        factors: Float[Tensor, "key row rank"],
        vectors: Float[Tensor, "source rank width"],
        out: Float[Tensor, "*pair width"],
        beta: int,
        room: Workspace,
    ) -> None:
        """Σ over rank of factors · vectors, plus beta times what is there."""
        some = vectors[self.sources]
        if self.gaps is None:
            torch.baddbmm(out, factors, some, beta=beta, out=out)
            return
        found = room.like("runs", out, (*factors.shape[:2], out.shape[-1]), out.dtype)
        found = torch.bmm(factors, some, out=found).flatten(0, 1)
        if beta:
            found = torch.index_select(
                found, 0, self.gaps, out=room.like("of runs", out, out.shape, out.dtype)
            )
            out.add_(found)
        else:
            torch.index_select(found, 0, self.gaps, out=out)
