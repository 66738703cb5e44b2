"""Norms of Σ_h a_ijh w_jh for all pairs, at several stages of a block at once.

The vectors of a slab of keys are made once; their factors (`lens_mix.algebra.head_vectors`) for every stage,
and the norms of all pairs with these keys, are made from them while they are at hand.
"""

from __future__ import annotations

import threading

import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix.algebra.head_vectors import (
    PAIR_BYTES,
    SLAB_BYTES,
    Chain,
    Grams,
    HeadVectors,
    by_key,
    chunk_bytes,
    factor_norms,
    qr_factor,
    through,
)
from lens_mix.algebra.workspace import Workspace


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
        return self.heads.copied + sum(tensor.nbytes for tensor in kept if tensor is not None)

    def _found(self, results: list[Tensor | None], chain: Chain) -> Tensor:
        number = self.expect(chain)
        if results[number] is None:
            missing = [stage for stage, norms in enumerate(self._norms) if norms is None]
            # Under a memory bound nothing is made that was not asked for.
            self._sweep(missing if self.heads.room is None else [number])
        found = results[number]
        if found is None:
            raise RuntimeError(f"stage {number} was asked for and not made")
        return found

    def _own_weights(self) -> Float[Tensor, "batch key head"]:
        own = self.pattern.diagonal(dim1=2, dim2=3).transpose(1, 2)
        return own.to(self.heads.dtype).contiguous()

    def _sweep(self, numbers: list[int]) -> None:
        """Norms of some stages."""
        heads, value, queries = self.heads, self.heads.value, self.pattern.shape[2]
        (batch, keys), stages = value.shape[:2], len(numbers)
        cost = SlabCost(heads, queries, [self._chains[number] for number in numbers])
        slab = min(keys, cost.keys(batch, chunk_bytes(value.device, _half(heads.room), SLAB_BYTES)))
        rows = max(1, chunk_bytes(value.device, _half(heads.room)) // cost.factor_row)
        room = workspace(heads)
        maker = _SlabFactors(heads, cost.chains, min(rows, batch * slab), room)
        norms = value.new_empty((stages, batch, keys, queries))
        head_norms = value.new_empty((stages, batch, keys, heads.heads))
        own, own_weights = value.new_empty((batch, keys, heads.d_model)), self._own_weights()
        step = max(1, chunk_bytes(value.device, _half(heads.room), PAIR_BYTES) // (batch * cost.pair_row))
        for start in range(0, keys, slab):
            chunk = slice(start, min(start + slab, keys))
            factors, part = maker(heads.by_head(value[:, chunk]), own_weights[:, chunk].flatten(0, 1))
            own[:, chunk] = part.unflatten(0, (batch, -1))
            factors = factors.unflatten(0, (batch, -1))
            head_norms[:, :, chunk] = _head_norms(factors, heads).movedim(2, 0)
            for first in range(chunk.start, chunk.stop, step):
                some = slice(first, min(first + step, chunk.stop))
                here = factors[:, some.start - start : some.stop - start]
                norms[:, :, some] = self._pair_norms(here, some, room).movedim(2, 0)
        self._own = own
        for place, number in enumerate(numbers):
            self._norms[number], self._head_norms[number] = norms[place], head_norms[place]

    def _pair_norms(
        self, factors: Float[Tensor, "batch key stage rank head"], keys: slice, room: Workspace
    ) -> Float[Tensor, "batch key stage query"]:
        pattern = self.pattern[..., keys]
        batch, heads, queries, count = pattern.shape
        rows, products = batch * count, factors.shape[2] * factors.shape[3]
        weights = room.like("weights", pattern, (batch, count, heads, queries), torch.float64)
        weights = by_key(pattern, weights).flatten(0, 1)
        product = room.like("products", pattern, (rows, products, queries), torch.float64)
        exact = self.heads.dtype == torch.float64
        return factor_norms(factors.flatten(0, 1), weights, exact, product).unflatten(0, (batch, count))


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
        d_model = heads.d_model
        # Vectors, values and the own vector; factors, and what they are put together from.
        self.slab_row = (count * (d_model + 3 * heads.d_head) + 2 * d_model) * size
        self.slab_row += 8 * stages * 6 * count * (count + 2)
        # Decompositions copy their input; norms before the last one make copies.
        copies = 8 if exact else 2 * stages + 3 * (max(len(chain) for chain in chains) > 1)
        self.factor_row = 8 * d_model * (copies * count + 2 * stages + 2)
        self.pair_row = 8 * queries * (count * (1 + stages) + 3 * stages) + 8 * stages * count**2

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


class _Kept(threading.local):
    """Buffers that stay with a thread: to fault in fresh pages takes longer than to fill them."""

    def __init__(self) -> None:
        self.room = Workspace()


_kept = _Kept()


def workspace(heads: HeadVectors) -> Workspace:
    """Buffers that stay with the thread, but on a GPU or under a memory bound."""
    return _kept.room if heads.room is None and heads.value.device.type == "cpu" else Workspace()


class _SlabFactors:
    """Factors of one slab of keys for several chains, in memory that all slabs share."""

    def __init__(self, vectors: HeadVectors, chains: list[Chain], step: int, room: Workspace) -> None:
        self._vectors, self._chains, self._step, self._room = vectors, chains, step, room
        heads, d_model, value = vectors.heads, vectors.d_model, vectors.value
        self._groups: list[tuple[Chain, list[int], int, Grams]] = []
        if value.dtype == torch.float64:
            return
        # Stages that differ in their last norm only come from one product.
        groups: dict[tuple[int, ...], list[int]] = {}
        for number, chain in enumerate(chains):
            groups.setdefault(tuple(map(id, chain[:-1])), []).append(number)
        for numbers in groups.values():
            norms = [chains[number][-1] if chains[number] else None for number in numbers]
            lines = Grams.lines(norms, heads)
            name = f"grams {len(self._groups)}"
            memory = room.like(name, value, (lines, step, d_model), torch.float64)
            grams = Grams(norms, heads, memory)
            self._groups.append((chains[numbers[0]][:-1], numbers, lines, grams))

    def __call__(
        self, value: Float[Tensor, "head row d_head"], own_weights: Float[Tensor, "row head"]
    ) -> tuple[Float[Tensor, "row stage rank head"], Float[Tensor, "row d_model"]]:
        """The factors, and Σ_h own_weight_jh u_jh."""
        heads, rows, _ = value.shape
        d_model = self._vectors.d_model
        slab = self._room.like("slab", value, (heads, rows, d_model), value.dtype)
        torch.bmm(value, self._vectors.matrices, out=slab)
        own = self._room.like("own", value, (rows, 1, d_model), value.dtype)
        torch.bmm(own_weights[:, None], slab.transpose(0, 1), out=own)
        return (self._qr(slab) if value.dtype == torch.float64 else self._grams(slab)), own[:, 0]

    def _qr(self, slab: Float[Tensor, "head row d_model"]) -> Float[Tensor, "row stage rank head"]:
        chunks = slab.split(self._step, dim=1)
        stages = [
            torch.cat([qr_factor(through(chain, chunk).transpose(0, 1)) for chunk in chunks])
            for chain in self._chains
        ]
        return torch.stack(stages, dim=1)

    def _grams(self, slab: Float[Tensor, "head row d_model"]) -> Float[Tensor, "row stage head head_"]:
        heads, rows, _ = slab.shape
        size = (rows, len(self._chains), heads, heads)
        factors = self._room.like("factors", slab, size, torch.float64)
        for before, numbers, lines, grams in self._groups:
            found = self._room.like("found", slab, (rows, lines, heads), torch.float64)
            for start in range(0, rows, self._step):
                chunk = slab[:, start : start + self._step]
                wide = chunk if not before else through(before, chunk.double())
                grams.read(wide, found[start : start + self._step])
            for number, part in zip(numbers, grams.put_together(found), strict=True):
                factors[:, number] = part
        return factors
