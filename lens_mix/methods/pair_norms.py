"""Norms of Σ_h a_ijh w_jh for all pairs, at several stages of a block at once.

The vectors of a slab of keys are made once; their factors (`lens_mix.methods.gram`) for every stage, and the
norms of all pairs with these keys, are made from them while they are at hand.
"""

from __future__ import annotations

import threading

import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix.methods.gram import (
    PAIR_BYTES,
    SLAB_BYTES,
    Chain,
    GramAfter,
    HeadVectors,
    chunk_bytes,
    factor_norms,
    gram,
    qr_factor,
    through,
)


class PairNorms:
    """Norms of all pairs of one block, by stage; made for all stages together when first asked for.

    Args:
        pattern: a.
        heads: u, one vector per key and head.
    """

    def __init__(self, pattern: Float[Tensor, "batch head query key"], heads: HeadVectors) -> None:
        self.pattern, self.heads = pattern, heads
        self._chains: list[Chain] = []
        self._norms: list[Tensor | None] = []
        self._head_norms: list[Tensor | None] = []
        self._own: Tensor | None = None
        self._weights: Tensor | None = None

    @property
    def weights(self) -> Float[Tensor, "batch key query head"]:
        """The pattern with the key first and the heads last, in one piece: what products need."""
        if self._weights is None:
            self._weights = self.pattern.permute(0, 3, 2, 1).to(self.heads.dtype).contiguous()
        return self._weights

    def release(self) -> None:
        """Forget the weights, which are soon made again."""
        self._weights = None

    def expect(self, chain: Chain) -> int:
        """The number of a stage: the norms that u has gone through."""
        for number, known in enumerate(self._chains):
            if len(known) == len(chain) and all(a is b for a, b in zip(known, chain, strict=True)):
                return number
        self._chains.append(chain)
        self._norms.append(None)
        self._head_norms.append(None)
        return len(self._chains) - 1

    def norms(self, chain: Chain) -> Float[Tensor, "batch query key"]:
        """‖Σ_h a_ijh w_jh‖."""
        return self._found(self._norms, chain).transpose(1, 2)

    def head_norms(self, chain: Chain) -> Float[Tensor, "batch key head"]:
        """‖w_jh‖."""
        return self._found(self._head_norms, chain)

    def own(self) -> Float[Tensor, "batch query d_model"]:
        """Σ_h a_iih u_ih, what each position gets from itself; the norms give it too."""
        if self._own is None:
            self._own = self.heads.weighted(self._own_weights())
        return self._own

    @property
    def nbytes(self) -> int:
        """Of what is kept."""
        kept = (*self._norms, *self._head_norms, self._own)
        return sum(tensor.nbytes for tensor in kept if tensor is not None)

    def _found(self, results: list[Tensor | None], chain: Chain) -> Tensor:
        number = self.expect(chain)
        if results[number] is None:
            self._sweep([stage for stage, norms in enumerate(self._norms) if norms is None])
        found = results[number]
        if found is None:
            raise ValueError(f"chain: expected one of {len(self._chains)} stages, got {number}")
        return found

    def _own_weights(self) -> Float[Tensor, "batch key head"]:
        own = self.pattern.diagonal(dim1=2, dim2=3).transpose(1, 2)
        return own.to(self.heads.dtype, memory_format=torch.contiguous_format)

    def _sweep(self, numbers: list[int]) -> None:
        """Norms of some stages."""
        heads, value = self.heads, self.heads.value
        (batch, keys), queries = value.shape[:2], self.pattern.shape[2]
        cost = SlabCost(heads, queries, [self._chains[number] for number in numbers])
        slab = min(keys, cost.keys(batch, chunk_bytes(value.device, _half(heads.room), SLAB_BYTES)))
        rows = max(1, chunk_bytes(value.device, _half(heads.room)) // cost.factor_row)
        maker = _SlabFactors(heads, cost.chains, batch * slab, min(rows, batch * slab))
        norms = value.new_empty((len(numbers), batch, keys, queries))
        head_norms = value.new_empty((len(numbers), batch, keys, heads.heads))
        own, own_weights = value.new_empty((batch, keys, heads.d_model)), self._own_weights()
        step = max(1, chunk_bytes(value.device, _half(heads.room), PAIR_BYTES) // (batch * cost.pair_row))
        for start in range(0, keys, slab):
            chunk = slice(start, start + slab)
            factors, part = maker(heads.by_head(value[:, chunk]), own_weights[:, chunk].flatten(0, 1))
            own[:, chunk] = part.unflatten(0, (batch, -1))
            factor = torch.stack(factors, dim=1).unflatten(0, (batch, -1))
            head_norms[:, :, chunk] = _head_norms(factor, heads).movedim(2, 0)
            for first in range(start, min(start + slab, keys), step):
                some = slice(first, min(first + step, start + slab, keys))
                weights = self.pattern[..., some].permute(0, 3, 1, 2)
                here = factor[:, some.start - start : some.stop - start]
                found = factor_norms(here, weights, heads.dtype == torch.float64)
                norms[:, :, some] = found.movedim(2, 0)
        self._own = own
        for place, number in enumerate(numbers):
            self._norms[number], self._head_norms[number] = norms[place], head_norms[place]


def _half(room: int | None) -> int | None:
    return None if room is None else room // 2


class SlabCost:
    """Bytes that `PairNorms` takes while it works, beside what it gives.

    Args:
        heads: the vectors.
        queries: how many there are.
        chains: the stages.
    """

    def __init__(self, heads: HeadVectors, queries: int, chains: list[Chain]) -> None:
        self.chains, size, count, stages = chains, heads.dtype.itemsize, heads.heads, len(chains)
        exact = heads.dtype == torch.float64
        # Vectors and values; factors, and what they are put together from.
        self.slab_row = count * (heads.d_model + 3 * heads.d_head) * size + 8 * stages * 6 * count * (
            count + 2
        )
        # Decompositions copy their input; norms before the last one make copies.
        copies = 8 if exact else 1 + sum(map(bool, chains)) + 2 * (max(len(chain) for chain in chains) > 1)
        self.factor_row = 8 * heads.d_model * (copies * count + 2 * stages)
        self.pair_row = 8 * queries * (count * (2 + 2 * stages) + 2 * stages)

    def keys(self, batch: int, room: int) -> int:
        """Keys of a slab that `room` is enough for; at least one."""
        return max(1, room // (batch * self.slab_row))

    def least(self, batch: int) -> int:
        """The smallest room that is enough."""
        return 2 * max(batch * self.slab_row, self.factor_row, batch * self.pair_row)


def _head_norms(
    factor: Float[Tensor, "batch key stage rank head"], heads: HeadVectors
) -> Float[Tensor, "batch key stage head"]:
    if heads.dtype == torch.float64:
        return torch.linalg.vector_norm(factor, dim=-2)
    return factor.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt()


class _Buffers(threading.local):
    """Memory that stays with a thread: to fault in fresh pages takes longer than to fill them."""

    def __init__(self) -> None:
        self._kept: dict[torch.dtype, Tensor] = {}

    def take(self, like: Tensor, numbers: int, dtype: torch.dtype) -> Tensor:
        """Memory for some numbers, until the next call with this type."""
        if like.device.type != "cpu":
            return like.new_empty(numbers, dtype=dtype)
        kept = self._kept.get(dtype)
        if kept is None or len(kept) < numbers:
            kept = self._kept[dtype] = torch.empty(numbers, dtype=dtype)
        return kept[:numbers]


_buffers = _Buffers()


class _SlabFactors:
    """Factors of one slab of keys for several chains, in memory that all slabs share."""

    def __init__(self, vectors: HeadVectors, chains: list[Chain], rows: int, step: int) -> None:
        self._vectors, self._chains, self._step = vectors, chains, step
        heads, d_model, value = vectors.heads, vectors.d_model, vectors.value
        take = _buffers.take if vectors.room is None else _fresh
        self._slab = take(value, heads * rows * d_model, value.dtype)
        if value.dtype == torch.float64:
            return
        afters = sum(bool(chain) for chain in chains)
        wide = take(value, (heads + afters * (heads + 2)) * step * d_model, torch.float64)
        wide = wide.view(-1, step, d_model)
        self._wide, others = wide[:heads], iter(wide[heads:].split(heads + 2))
        self._after = [GramAfter(chain[-1], next(others)) if chain else None for chain in chains]

    def __call__(
        self, value: Float[Tensor, "head row d_head"], own_weights: Float[Tensor, "row head"]
    ) -> tuple[list[Float[Tensor, "row rank head"]], Float[Tensor, "row d_model"]]:
        """The factors, and Σ_h own_weight_jh u_jh."""
        heads, rows, _ = value.shape
        d_model = self._vectors.d_model
        slab = self._slab[: heads * rows * d_model].view(heads, rows, d_model)
        torch.bmm(value, self._vectors.matrices, out=slab)
        own = torch.bmm(own_weights[:, None], slab.transpose(0, 1))[:, 0]
        read: list[list[Tensor]] = [[] for _ in self._chains]
        for start in range(0, rows, self._step):
            for part, found in zip(read, self._read(slab[:, start : start + self._step]), strict=True):
                part.append(found)
        whole = [torch.cat(part) for part in read]
        if self._vectors.dtype == torch.float64:
            return whole, own
        return [
            part if after is None else after.put_together(part)
            for part, after in zip(whole, self._after, strict=True)
        ], own

    def _read(self, chunk: Float[Tensor, "head row d_model"]) -> list[Tensor]:
        if self._vectors.dtype == torch.float64:
            return [qr_factor(through(chain, chunk).transpose(0, 1)) for chain in self._chains]
        wide = self._wide[:, : chunk.shape[1]].copy_(chunk)
        return [
            gram(wide.transpose(0, 1)) if after is None else after.read(through(chain[:-1], wide))
            for chain, after in zip(self._chains, self._after, strict=True)
        ]


def _fresh(like: Tensor, numbers: int, dtype: torch.dtype) -> Tensor:
    return like.new_empty(numbers, dtype=dtype)
