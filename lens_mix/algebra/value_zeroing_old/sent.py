"""What zeroed values send: u = v W_O, what the first matrix makes of it, and what a norm must know of it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lens_mix.algebra.value_zeroing_old.clean_block import CleanBlock
from lens_mix.algebra.value_zeroing_old.pieces import Sources
from lens_mix.algebra.value_zeroing_old.rotation import Rotation
from lens_mix.algebra.workspace import Workspace
from lens_mix.lens.anatomy import ValuePath


@dataclasses.dataclass(frozen=True)
class Sent:
    """What some sources send.

    Weights lie query by query in memory, as the pattern's columns are wide apart and products take any order.

    Attributes:
        weights: -a, times the residual multiplier where no norm sits on the branch; 0 where u is 0.
        outer: u, in the rotation's axes.
        inner: u through the norms' linear parts and the first matrices, by parts of the neurons.
        products: C x · u of the `lead` norm and each query of the source's prompt, as float64; None
            where it is not asked for.
    """

    weights: Float[Tensor, "source span head query"]
    outer: Float[Tensor, "source span head axis"]
    inner: list[Float[Tensor, "matrix source span head column"]]
    products: Float[Tensor, "source span head query"] | None

    def of_heads(
        self, heads: slice
    ) -> tuple[
        Float[Tensor, "source rank query"],
        Float[Tensor, "source rank axis"],
        list[Float[Tensor, "matrix source rank column"]],
        Float[Tensor, "source rank query"] | None,
    ]:
        """The same of some heads, spans and heads in one axis."""
        return (
            self.weights[:, :, heads].flatten(1, 2),
            self.outer[:, :, heads].flatten(1, 2),
            [some[:, :, :, heads].flatten(2, 3) for some in self.inner],
            None if self.products is None else self.products[:, :, heads].flatten(1, 2),
        )


class Senders:
    """Values of some heads on their way.

    Args:
        clean: the block.
        path: its value path.
        heads: which query heads.
        value: of every query head of the model.
        pattern: likewise.
        sources: what is zeroed.
        folded: W_O, norms and first matrix as one, of these heads.
        rotation: the block's output in other axes.
        few: whether the first norm's change is found from factors.
        room: what the vectors of some sources lie in.
    """

    def __init__(
        self,
        clean: CleanBlock,
        path: ValuePath,
        heads: Sequence[int],
        value: Float[Tensor, "batch key head d_head"],
        pattern: Float[Tensor, "batch head query key"],
        sources: Sources,
        folded: Float[Tensor, "matrix head d_head d_mlp"] | None,
        rotation: Rotation | None,
        few: bool,
        room: Workspace,
    ) -> None:
        self.clean, self.sources, self.folded, self.room = clean, sources, folded, room
        chosen = slice(None) if list(heads) == list(range(value.shape[2])) else list(heads)
        self.W_O, self.value, self.pattern = path.W_O[chosen], value[:, :, chosen], pattern[:, chosen]
        self.turned_W_O = self.W_O if rotation is None else rotation.W_O[chosen]
        self.multiplier = 1.0 if clean.branch is not None else clean.anatomy.residual_multiplier
        self.reads = self._reads() if few else None

    def _reads(self) -> Float[Tensor, "head row d_head"] | None:
        """C x of the first norm through W_Oᵀ: its scalar products with v are those of C x with u."""
        lead = self.clean.lead
        if lead is None:
            return None
        reads = lead.centred @ self.W_O.to(lead.centred.dtype).flatten(0, 1).T
        return reads.unflatten(-1, self.W_O.shape[:2]).transpose(0, 1)

    def of(self, lot: slice) -> Sent:
        """What some sources send."""
        positions = self.sources.positions[lot]
        by_head = self.value[self.sources.prompts[lot, None], positions].permute(2, 0, 1, 3).flatten(1, 2)
        outer = self._through_W_O(by_head, self.turned_W_O, "outer")
        sent = torch.linalg.vector_norm(outer, dim=-1, keepdim=True) != 0
        factor = torch.where(self.sources.real[lot], -self.multiplier, 0.0).to(by_head.dtype)
        weights = self._weights(lot, by_head.dtype)
        weights *= _by_source(sent, positions.shape) * factor[..., None, None]
        inner = [_by_source(some, positions.shape) for some in self._through_first(by_head, outer)]
        products = None if self.reads is None else self._products(self.reads, lot, by_head)
        return Sent(weights, _by_source(outer, positions.shape), inner, products)

    def _by_prompt(self, lot: slice) -> Iterator[tuple[int, slice]]:
        """Each prompt, and which of the lot's sources are its own."""
        begin = 0
        for prompt, own in itertools.groupby(self.sources.prompt[lot]):
            end = begin + len(list(own))
            yield prompt, slice(begin, end)
            begin = end

    def _weights(self, lot: slice, dtype: torch.dtype) -> Float[Tensor, "source span head query"]:
        """The pattern's columns, each in one line."""
        positions = self.sources.positions[lot]
        found = self._of_queries("weights", positions, dtype)
        for prompt, own in self._by_prompt(lot):
            rows, keys = self.pattern[prompt].flatten(0, 1), positions[own].flatten()
            columns = self.room.like("columns", rows, (len(rows), len(keys)), rows.dtype)
            torch.index_select(rows, 1, keys, out=columns)
            found[own].view(columns.shape[::-1]).copy_(columns.T)
        return found

    def _products(
        self,
        reads: Float[Tensor, "head row d_head"],
        lot: slice,
        by_head: Float[Tensor, "head vector d_head"],
    ) -> Float[Tensor, "source span head query"]:
        positions, length = self.sources.positions[lot], self.pattern.shape[2]
        span = positions.shape[1]
        found = self._of_queries("products", positions, torch.float64)
        for prompt, own in self._by_prompt(lot):
            vectors = by_head[:, own.start * span : own.stop * span]
            clean = reads[:, prompt * length : (prompt + 1) * length]
            found[own] = _by_source(torch.bmm(vectors, clean.transpose(1, 2)), positions[own].shape)
        return found

    def _of_queries(
        self, name: str, positions: Int[Tensor, "source span"], dtype: torch.dtype
    ) -> Float[Tensor, "source span head query"]:
        shape = (*positions.shape, *self.pattern.shape[1:3])
        return self.room.like(name, self.pattern, shape, dtype)

    def _through_first(
        self, by_head: Float[Tensor, "head vector d_head"], outer: Float[Tensor, "head vector axis"]
    ) -> list[Float[Tensor, "matrix head vector column"]]:
        """Through W_O, norms and the first matrix, by parts of the neurons."""
        first, parts = self.clean.first, [part.columns for part in self.clean.neurons]
        if first is None:
            return []
        if self.folded is None:
            turned = self.turned_W_O is not self.W_O
            u = self._through_W_O(by_head, self.W_O, "unfolded") if turned else outer
            found = first.linear(self.clean.through_norms(u))
            return [found[..., columns] for columns in parts]
        inner = []
        for number, columns in enumerate(parts):
            folded = self.folded[..., columns]
            shape = (len(folded), *by_head.shape[:2], folded.shape[-1])
            inner.append(self.room.like(f"inner {number}", by_head, shape, by_head.dtype))
            for out, matrix in zip(inner[-1], folded, strict=True):
                torch.bmm(by_head, matrix, out=out)
        return inner

    def _through_W_O(
        self, by_head: Float[Tensor, "head vector d_head"], W_O: Float[Tensor, "head d_head width"], name: str
    ) -> Float[Tensor, "head vector width"]:
        out = self.room.like(name, by_head, (*by_head.shape[:2], W_O.shape[-1]), by_head.dtype)
        return torch.bmm(by_head, W_O.to(by_head.dtype), out=out)


def _by_source(
    vectors: Float[Tensor, "*matrix head vector width"], shape: Sequence[int]
) -> Float[Tensor, "*matrix source span head width"]:
    """Sources before heads; no copy."""
    return vectors.unflatten(-2, shape).movedim(-4, -2)
