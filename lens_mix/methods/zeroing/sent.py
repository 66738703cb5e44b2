"""What zeroed values send: u = v W_O, what the first matrix makes of it, and what a norm must know of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix.lens.anatomy import ValuePath
from lens_mix.methods.room import Workspace
from lens_mix.methods.zeroing.clean_block import CleanBlock
from lens_mix.methods.zeroing.pieces import Sources
from lens_mix.methods.zeroing.rotation import Rotation


@dataclasses.dataclass(frozen=True)
class Sent:
    """What some sources send.

    Attributes:
        weights: -a, times the residual multiplier where no norm sits on the branch; 0 where u is 0.
        outer: u, in the rotation's axes.
        inner: u through the norms' linear parts and the first matrices, by parts of the neurons.
        products: C x · u of the `lead` norm and each query of the source's prompt, as float64; None
            where it is not asked for.
    """

    weights: Float[Tensor, "source query head span"]
    outer: Float[Tensor, "source head span axis"]
    inner: list[Float[Tensor, "matrix source head span column"]]
    products: Float[Tensor, "source query head span"] | None

    def of_heads(
        self, heads: slice
    ) -> tuple[
        Float[Tensor, "source query rank"],
        Float[Tensor, "source rank axis"],
        list[Float[Tensor, "matrix source rank column"]],
        Float[Tensor, "source query rank"] | None,
    ]:
        """The same of some heads, heads and spans in one axis."""
        return (
            self.weights[..., heads, :].flatten(-2),
            self.outer[:, heads].flatten(1, 2),
            [some[:, :, heads].flatten(2, 3) for some in self.inner],
            None if self.products is None else self.products[..., heads, :].flatten(-2),
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
        prompt = torch.tensor(self.sources.prompt[lot], device=self.value.device)[:, None]
        positions = self.sources.positions[lot]
        by_head = self.value[prompt, positions].permute(2, 0, 1, 3).flatten(1, 2)
        outer = self._through_W_O(by_head, self.turned_W_O, "outer")
        factor = torch.where(self.sources.real[lot], -self.multiplier, 0.0).to(by_head.dtype)
        weights = self.pattern.permute(0, 3, 2, 1)[prompt, positions].to(by_head.dtype)
        weights = (weights * factor[..., None, None]).permute(0, 2, 3, 1).contiguous()
        sent = torch.linalg.vector_norm(outer, dim=-1, keepdim=True) != 0
        weights *= _by_source(sent, positions.shape)[:, None, ..., 0]
        inner = [_by_source(some, positions.shape) for some in self._through_first(by_head, outer)]
        products = None if self.reads is None else self._products(self.reads, lot, by_head)
        return Sent(weights, _by_source(outer, positions.shape), inner, products)

    def _products(
        self,
        reads: Float[Tensor, "head row d_head"],
        lot: slice,
        by_head: Float[Tensor, "head vector d_head"],
    ) -> Float[Tensor, "source query head span"]:
        prompts, length = self.sources.prompt[lot], self.pattern.shape[2]
        span = self.sources.positions.shape[-1]
        found = by_head.new_empty((len(prompts), length, len(by_head), span), dtype=torch.float64)
        for prompt in sorted(set(prompts)):
            own = slice(prompts.index(prompt), len(prompts) - prompts[::-1].index(prompt))
            vectors = by_head[:, own.start * span : own.stop * span]
            clean = reads[:, prompt * length : (prompt + 1) * length]
            products = torch.bmm(vectors, clean.transpose(1, 2))
            found[own] = products.unflatten(1, (-1, span)).permute(1, 3, 0, 2)
        return found

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
) -> Float[Tensor, "*matrix source head span width"]:
    """Sources before heads; no copy."""
    return vectors.unflatten(-2, shape).movedim(-4, -3)
