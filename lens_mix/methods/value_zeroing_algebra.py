"""Value Zeroing from the captured tensors: what intervening gives, without running the block again.

What changes, and how the change goes through the block, is in `value_zeroing_parts`. Here: which pairs of
query and key there are at all, and in what pieces they are computed. A key's zeroed value reaches only the
queries that give it weight, so a causal map costs its triangle. Queries are cut into windows; a slab is some
keys by one window, small enough for a processor's cache; slabs are gathered into chunks for the one large
matrix product. All sizes are known before the first product, so that a GPU is never waited for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lens_mix.lens.anatomy import Norm, ValuePath, mix
from lens_mix.lens.kinds import UnsupportedModelError
from lens_mix.lens.model import TOLERANCES
from lens_mix.lens.replay import relative_error
from lens_mix.methods.value_zeroing_fold import folded
from lens_mix.methods.value_zeroing_parts import CleanBlock, Workspace

if TYPE_CHECKING:
    from lens_mix.lens.block import Block


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How much is done at once.

    Attributes:
        window: queries of one slab.
        slab: rows (pairs) of one slab.
        hidden: rows that go through the activation at once.
        chunk: rows of one product with the second matrix.
        keys: keys whose vectors are held at once.
        ragged: whether slabs end where a key's queries end; else at the window (fewer, larger pieces).
    """

    window: int
    slab: int
    hidden: int
    chunk: int
    keys: int
    ragged: bool


CPU = Sizes(window=32, slab=128, hidden=32, chunk=1536, keys=256, ragged=True)
GPU = Sizes(window=128, slab=16384, hidden=16384, chunk=16384, keys=1024, ragged=False)


@dataclasses.dataclass(frozen=True)
class Slab:
    """Some sources by a window of one prompt's queries."""

    prompt: int
    sources: slice
    queries: slice

    @property
    def keys(self) -> int:
        """How many keys."""
        return self.sources.stop - self.sources.start

    @property
    def rows(self) -> int:
        """How many pairs."""
        return self.keys * (self.queries.stop - self.queries.start)


@dataclasses.dataclass(frozen=True)
class Sources:
    """What is zeroed as one: a key, or a span of keys, of one prompt.

    Attributes:
        prompt: of which prompt, per source.
        column: the map's key axis.
        positions: the zeroed positions; shorter spans are filled up.
        real: which positions are no filling.
        first, last: the queries that give any of them weight lie in first..last - 1.
    """

    prompt: list[int]
    column: list[int]
    positions: Int[Tensor, "source span"]
    real: Bool[Tensor, "source span"]
    first: list[int]
    last: list[int]

    def __len__(self) -> int:
        return len(self.prompt)


def value_zeroing_maps(
    block: Block,
    groups: Sequence[Sequence[int]],
    spans: Sequence[Sequence[int]] | None,
    metric: str,
    final: Norm | None,
    room: Workspace,
    sizes: Sizes | None = None,
) -> Float[Tensor, "batch group query key"]:
    """One map per group of query heads that are zeroed together.

    Args:
        block: a block whose anatomy is proven; needs "pattern" and "value".
        groups: query heads, each in one group at most.
        spans: positions of a prompt that are zeroed as one; None: each alone.
        metric: "cosine" or "euclidean".
        final: the final norm, where its output is compared.
        room: buffers, which the next block can use again.
        sizes: how much is done at once; by default what suits the device.

    Raises:
        UnsupportedModelError: the block's parts do not give its output for this prompt.
        ValueError: the memory bound does not allow the smallest step.
    """
    pattern, real = block.recorded("pattern"), block.real
    heads = [head for group in groups for head in group]
    sources = _sources(pattern[:, heads], real, spans)
    columns = real.shape[1] if spans is None else len(spans)
    scores = block.zeros(len(real), len(groups), real.shape[1], columns)
    sizes = sizes or (CPU if pattern.device.type == "cpu" else GPU)
    work = _Work(block, groups, sources, metric, final, room, sizes)
    for start in range(0, len(sources), sizes.keys):
        work.fill(scores, slice(start, min(start + sizes.keys, len(sources))))
    return scores


def _sources(
    pattern: Float[Tensor, "batch head query key"],
    real: Bool[Tensor, "batch pos"],
    spans: Sequence[Sequence[int]] | None,
) -> Sources:
    """Every source of every prompt, and which queries it reaches (the one look at the GPU's numbers)."""
    seen = (pattern != 0).any(1) & real[:, :, None] & real[:, None, :]
    positions = seen.shape[1]
    first = torch.where(seen.any(1), seen.int().argmax(1), positions)
    last = positions - torch.where(seen.any(1), seen.flip(1).int().argmax(1), positions)
    first_of, last_of, real_of = (x.tolist() for x in (first, last, real))
    found: list[tuple[int, int, list[int], int, int]] = []
    for prompt, own in enumerate([p for p, is_real in enumerate(row) if is_real] for row in real_of):
        members = [[p] for p in own] if spans is None else [[own[p] for p in span] for span in spans]
        for number, keys in enumerate(members):
            column = keys[0] if spans is None else number
            begin, end = min(first_of[prompt][k] for k in keys), max(last_of[prompt][k] for k in keys)
            if begin < end:
                found.append((prompt, column, keys, begin, end))
    longest = max((len(keys) for _, _, keys, _, _ in found), default=1)
    filled = [keys + [keys[0]] * (longest - len(keys)) for _, _, keys, _, _ in found]
    no_filling = [[i < len(keys) for i in range(longest)] for _, _, keys, _, _ in found]
    device = pattern.device
    return Sources(
        [prompt for prompt, *_ in found],
        [column for _, column, *_ in found],
        torch.tensor(filled, device=device).reshape(-1, longest),
        torch.tensor(no_filling, device=device, dtype=torch.bool).reshape(-1, longest),
        [begin for *_, begin, _ in found],
        [end for *_, end in found],
    )


class _Work:
    """One block's maps in the making."""

    def __init__(
        self,
        block: Block,
        groups: Sequence[Sequence[int]],
        sources: Sources,
        metric: str,
        final: Norm | None,
        room: Workspace,
        sizes: Sizes,
    ) -> None:
        anatomy = block.anatomy
        if anatomy.value_path is None:
            raise RuntimeError(f"block {block.layer}: the algebra engine was asked for an unproven block")
        self.block, self.groups, self.sources, self.metric = block, groups, sources, metric
        self.room, self.sizes = room, sizes
        self.heads = [head for group in groups for head in group]
        self.all_heads = self.heads == list(range(block.n_heads))
        self.path: ValuePath = anatomy.value_path
        self.dtype = torch.promote_types(block.resid_pre.dtype, torch.float32)
        wide = anatomy.attention_branch is not None and block.resid_pre.device.type != "mps"
        self.mixed = torch.float64 if wide else self.dtype
        value = block.recorded("value").to(self.mixed)
        self.value = value.repeat_interleave(block.n_heads // value.shape[2], dim=2)
        attention_out = self.path.project(mix(block.recorded("pattern").to(self.mixed), value))
        self.clean = CleanBlock(
            anatomy,
            block.resid_pre.to(self.dtype).flatten(0, 1),
            attention_out.flatten(0, 1),
            block.resid_post.flatten(0, 1),
            final,
        )
        self._require_rebuilt()
        self.folded = self._fold()

    def _fold(self) -> Float[Tensor, "head d_head width"] | None:
        if not len(self.sources):
            return None
        probe = self.value[self.sources.prompt[-1]].index_select(0, self.sources.positions[-1, :1])[0]
        keep = self.block.max_memory is None
        return folded(self.clean, self.path, self.heads, self.sources.positions.numel(), probe, keep)

    def _require_rebuilt(self) -> None:
        tolerance = TOLERANCES.get(self.block.resid_post.dtype, TOLERANCES[torch.float32])
        expected = self.block.resid_post.to(self.dtype)
        error = relative_error(self.clean.rebuilt.reshape(expected.shape), expected, self.block.real)
        if not error <= tolerance:
            raise UnsupportedModelError(
                f"block {self.block.layer}: expected its parts to give its output within {tolerance:.0e} on "
                f"this prompt, got a relative error of {error:.1e}; engine='hooks' needs no parts"
            )

    # ------------------------------------------------------------- one lot of keys

    def fill(self, scores: Float[Tensor, "batch group query key"], lot: slice) -> None:
        """The scores of some sources."""
        weights, outer, inner = self._vectors(lot)
        begin = 0
        for number, group in enumerate(self.groups):
            heads = slice(begin, begin + len(group))
            begin = heads.stop
            part = _Lot(
                weights[..., heads, :].flatten(-2),
                outer[:, heads].flatten(1, 2),
                None if inner is None else inner[:, heads].flatten(1, 2),
            )
            for chunk in self._chunks(lot):
                for slab, distance in zip(chunk, self._distances(chunk, part, lot.start), strict=True):
                    self._store(scores, slab, number, distance)

    def _vectors(
        self, lot: slice
    ) -> tuple[
        Float[Tensor, "source query head span"],
        Float[Tensor, "source head span d_model"],
        Float[Tensor, "source head span width"] | None,
    ]:
        """-a (with the residual multiplier), u = v W_O, and u taken through the first matrix."""
        prompt = torch.tensor(self.sources.prompt[lot], device=self.value.device)[:, None]
        positions = self.sources.positions[lot]
        pattern = self.block.recorded("pattern")
        pattern = pattern if self.all_heads else pattern[:, self.heads]
        pattern = pattern.permute(0, 3, 2, 1)[prompt, positions]
        sign = -1.0 if self.clean.branch is not None else -self.block.anatomy.residual_multiplier
        factor = torch.where(self.sources.real[lot], sign, 0.0).to(self.mixed)
        weights = (pattern.to(self.mixed) * factor[..., None, None]).permute(0, 2, 3, 1).contiguous()
        value = self.value if self.all_heads else self.value[:, :, self.heads]
        by_head = value[prompt, positions].permute(2, 0, 1, 3).flatten(1, 2)
        W_O = self.path.W_O if self.all_heads else self.path.W_O[self.heads]
        outer = self._products("outer", by_head, W_O.to(self.mixed))
        inner = None
        if self.folded is not None:
            inner = self._products("inner", by_head, self.folded)
        elif self.clean.first is not None:
            inner = self.clean.first.linear(self.clean.through_norms(outer))
        shape = positions.shape
        return weights, _by_source(outer, shape), None if inner is None else _by_source(inner, shape)

    def _products(
        self, name: str, left: Float[Tensor, "head vector d_head"], right: Float[Tensor, "head d_head width"]
    ) -> Float[Tensor, "head vector width"]:
        out = self.room.like(name, left, (*left.shape[:2], right.shape[-1]), left.dtype)
        return torch.bmm(left, right, out=out)

    # ------------------------------------------------------------- slabs and chunks

    def _chunks(self, lot: slice) -> Iterator[list[Slab]]:
        """The slabs of some sources, gathered."""
        chunk: list[Slab] = []
        rows = 0
        for slab in self._slabs(lot):
            if chunk and rows + slab.rows > self.sizes.chunk:
                yield chunk
                chunk, rows = [], 0
            chunk.append(slab)
            rows += slab.rows
        if chunk:
            yield chunk

    def _slabs(self, lot: slice) -> Iterator[Slab]:
        """Window by window, the neighbouring sources that reach the same queries of it."""
        sources, window = self.sources, self.sizes.window
        numbers = range(lot.start, lot.stop)
        for prompt in sorted({sources.prompt[n] for n in numbers}):
            own = [n for n in numbers if sources.prompt[n] == prompt]
            end = max(sources.last[n] for n in own)
            for start in range(min(sources.first[n] for n in own), end, window):
                stop = min(start + window, end)
                reach = [
                    (n, max(start, sources.first[n]), min(stop, sources.last[n]))
                    for n in own
                    if sources.first[n] < stop and sources.last[n] > start
                ]
                if not self.sizes.ragged:
                    reach = [(n, start, stop) for n, _, _ in reach]
                yield from self._grouped(prompt, reach)

    def _grouped(self, prompt: int, reach: list[tuple[int, int, int]]) -> Iterator[Slab]:
        begin = 0
        while begin < len(reach):
            number, start, stop = reach[begin]
            most = max(1, self.sizes.slab // (stop - start))
            end = begin + 1
            while (
                end < len(reach) and end - begin < most and reach[end] == (number + end - begin, start, stop)
            ):
                end += 1
            yield Slab(prompt, slice(number, number + end - begin), slice(start, stop))
            begin = end

    # ------------------------------------------------------------- one chunk

    def _distances(self, chunk: list[Slab], part: _Lot, offset: int) -> list[Float[Tensor, "key query"]]:
        """The distances of each slab of a chunk."""
        clean, total, d_model = self.clean, sum(slab.rows for slab in chunk), part.outer.shape[-1]
        mid = self.room.like("mid", clean.mid, (total, d_model), self.dtype)
        hidden = None
        if clean.first is not None:
            hidden = self.room.like("hidden", mid, (total, clean.first.d_mlp), self.dtype)
        begin = 0
        for slab in chunk:
            rows = slice(begin, begin + slab.rows)
            begin = rows.stop
            out = None if hidden is None else hidden[rows]
            self._enter(slab, part, offset, mid[rows], out)
        added = None
        if hidden is not None:
            if clean.feed_forward_branch is None:
                mid.addmm_(hidden, clean.second, alpha=clean.anatomy.residual_multiplier)
            else:
                added = torch.mm(
                    hidden, clean.second, out=self.room.like("added", mid, mid.shape, self.dtype)
                )
        distances, begin = [], 0
        for slab in chunk:
            rows = slice(begin, begin + slab.rows)
            begin = rows.stop
            shape = (slab.keys, -1, d_model)
            queries = self._rows(slab)
            own = None if added is None else added[rows].view(shape)
            change = clean.post_change(queries, mid[rows].view(shape), own, self.room)
            distances.append(clean.distance(queries, change, self.metric, self.room))
        return distances

    def _enter(
        self,
        slab: Slab,
        part: _Lot,
        offset: int,
        mid: Float[Tensor, "pair d_model"],
        hidden: Float[Tensor, "pair d_mlp"] | None,
    ) -> None:
        """A slab up to the second matrix."""
        clean, queries = self.clean, self._rows(slab)
        sources = slice(slab.sources.start - offset, slab.sources.stop - offset)
        weights = part.weights[sources, slab.queries]
        out = mid.view(*weights.shape[:2], -1)
        change = out
        if self.mixed != self.dtype:
            change = self.room.like("change", out, out.shape, self.mixed)
        changed = clean.mid_change(
            queries, torch.bmm(weights, part.outer[sources], out=change), out, self.room
        )
        if hidden is None or part.inner is None:
            return
        if changed.beta is not None:
            weights = weights * changed.beta[..., None]
        step = max(1, self.sizes.hidden // weights.shape[1])
        into, inner = hidden.view(*weights.shape[:2], -1), part.inner[sources]
        for start in range(0, slab.keys, step):
            some = slice(start, start + step)
            alphas = [alpha[some] for alpha in changed.alphas]
            clean.hidden_change(queries, alphas, weights[some], inner[some], into[some], self.room)

    def _rows(self, slab: Slab) -> slice:
        """The slab's queries among the rows of all prompts."""
        start = slab.prompt * self.block.real.shape[1]
        return slice(start + slab.queries.start, start + slab.queries.stop)

    def _store(self, scores: Tensor, slab: Slab, group: int, distance: Float[Tensor, "key query"]) -> None:
        columns = self.sources.column[slab.sources]
        if columns == list(range(columns[0], columns[0] + len(columns))):
            scores[slab.prompt, group, slab.queries, columns[0] : columns[-1] + 1] = distance.T
            return
        for key, column in enumerate(columns):
            scores[slab.prompt, group, slab.queries, column] = distance[key]


def _by_source(
    vectors: Float[Tensor, "head vector width"], shape: Sequence[int]
) -> Float[Tensor, "source head span width"]:
    """Sources first; no copy where every source is one position."""
    return vectors.unflatten(1, shape).movedim(0, 1)


@dataclasses.dataclass(frozen=True)
class _Lot:
    """The vectors of some sources for one group of heads: Σ over rank of weights · outer is the change."""

    weights: Float[Tensor, "source query rank"]
    outer: Float[Tensor, "source rank d_model"]
    inner: Float[Tensor, "source rank width"] | None
