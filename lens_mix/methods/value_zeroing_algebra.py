"""Value Zeroing from the captured tensors: what intervening gives, without running the block again.

How a change goes through a block is in `zeroing.clean_block`, which pairs there are in `zeroing.pieces`. All
sizes are known before the first product of a block, so that a GPU is never waited for between its pieces.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix.lens.anatomy import Norm, ValuePath, mix
from lens_mix.lens.kinds import UnsupportedModelError
from lens_mix.lens.model import TOLERANCES
from lens_mix.lens.replay import relative_error
from lens_mix.methods.zeroing.clean_block import CleanBlock
from lens_mix.methods.zeroing.fold import folded
from lens_mix.methods.zeroing.memory import Cost, fitting
from lens_mix.methods.zeroing.pieces import CPU, GPU, Sizes, Slab, chunks, find_sources
from lens_mix.methods.zeroing.room import Workspace

if TYPE_CHECKING:
    from lens_mix.lens.block import Block


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
    real, pattern = block.real, block.recorded("pattern")
    batch, length = real.shape
    narrow, wide = _dtypes(block)
    span = 1 if spans is None else max(len(some) for some in spans)
    cost = Cost.of(block.anatomy, length, span, block.resid_pre.dtype, narrow, wide)
    sizes = fitting(sizes or (CPU if pattern.device.type == "cpu" else GPU), cost, block.max_memory)
    scores = block.zeros(batch, len(groups), length, length if spans is None else len(spans))
    step = max(1, sizes.positions // length)
    for start in range(0, batch, step):
        work = _Work(block, slice(start, start + step), groups, spans, metric, final, room, sizes)
        for begin in range(0, len(work.sources), sizes.keys):
            work.fill(scores[start : start + step], slice(begin, min(begin + sizes.keys, len(work.sources))))
    return scores


def _dtypes(block: Block) -> tuple[torch.dtype, torch.dtype]:
    """Of the computation, and up to the first matrix.

    A norm on the attention's branch divides by next to nothing where a query loses its only key: float64.
    """
    narrow = torch.promote_types(block.resid_pre.dtype, torch.float32)
    wide = block.anatomy.attention_branch is not None and block.resid_pre.device.type != "mps"
    return narrow, torch.float64 if wide else narrow


@dataclasses.dataclass(frozen=True)
class _Lot:
    """The vectors of some sources for one group of heads: Σ over rank of weights · outer is the change."""

    weights: Float[Tensor, "source query rank"]
    outer: Float[Tensor, "source rank d_model"]
    inner: Float[Tensor, "matrix source rank d_mlp"] | None


@dataclasses.dataclass(frozen=True)
class _Entered:
    """A slab in the middle of the block: its queries, its place in the chunk, and what it takes further."""

    queries: slice
    place: slice
    mid: Float[Tensor, "key row d_model"]
    weights: Float[Tensor, "key row rank"]
    alphas: list[Float[Tensor, "key row"]]
    inner: Float[Tensor, "matrix key rank d_mlp"] | None


class _Work:
    """The maps of some prompts and one block in the making."""

    def __init__(
        self,
        block: Block,
        prompts: slice,
        groups: Sequence[Sequence[int]],
        spans: Sequence[Sequence[int]] | None,
        metric: str,
        final: Norm | None,
        room: Workspace,
        sizes: Sizes,
    ) -> None:
        path = block.anatomy.value_path
        if path is None:
            raise RuntimeError(f"block {block.layer}: the algebra engine was asked for an unproven block")
        self.block, self.groups, self.metric, self.room, self.sizes = block, groups, metric, room, sizes
        self.path: ValuePath = path
        self.heads = [head for group in groups for head in group]
        self.all_heads = self.heads == list(range(block.n_heads))
        self.dtype, self.mixed = _dtypes(block)
        self.real, self.pattern = block.real[prompts], block.recorded("pattern")[prompts]
        self.sources = find_sources(
            self.pattern if self.all_heads else self.pattern[:, self.heads], self.real, spans
        )
        value = block.recorded("value")[prompts].to(self.mixed)
        attention_out = path.project(mix(self.pattern.to(self.mixed), value))
        self.value = value.repeat_interleave(block.n_heads // value.shape[2], dim=2)
        resid_post = block.resid_post[prompts].to(self.dtype)
        self.clean = CleanBlock(
            block.anatomy,
            block.resid_pre[prompts].to(self.dtype).flatten(0, 1),
            attention_out.flatten(0, 1),
            resid_post.flatten(0, 1),
            final,
        )
        self._require_rebuilt(resid_post)
        self.folded = self._fold()

    def _require_rebuilt(self, expected: Float[Tensor, "batch pos d_model"]) -> None:
        tolerance = TOLERANCES.get(self.block.resid_post.dtype, TOLERANCES[torch.float32])
        error = relative_error(self.clean.rebuilt.reshape(expected.shape), expected, self.real)
        if not error <= tolerance:
            raise UnsupportedModelError(
                f"block {self.block.layer}: expected its parts to give its output within {tolerance:.0e} on "
                f"this prompt, got a relative error of {error:.1e}; engine='hooks' needs no parts"
            )

    def _fold(self) -> Float[Tensor, "matrix head d_head d_mlp"] | None:
        if not len(self.sources):
            return None
        probe = self.value[self.sources.prompt[-1]].index_select(0, self.sources.positions[-1, :1])[0]
        keep = self.block.max_memory is None
        return folded(self.clean, self.path, self.heads, self.sources.positions.numel(), probe, keep)

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
                None if inner is None else inner[:, :, heads].flatten(2, 3),
            )
            for chunk in chunks(self.sources, lot, self.sizes):
                for slab, distance in zip(chunk, self._distances(chunk, part, lot.start), strict=True):
                    self._store(scores, slab, number, distance)

    def _vectors(
        self, lot: slice
    ) -> tuple[
        Float[Tensor, "source query head span"],
        Float[Tensor, "source head span d_model"],
        Float[Tensor, "matrix source head span d_mlp"] | None,
    ]:
        """-a (with the residual multiplier), u = v W_O, and u taken through the first matrix."""
        prompt = torch.tensor(self.sources.prompt[lot], device=self.value.device)[:, None]
        positions = self.sources.positions[lot]
        pattern = self.pattern if self.all_heads else self.pattern[:, self.heads]
        pattern = pattern.permute(0, 3, 2, 1)[prompt, positions].to(self.mixed)
        sign = -1.0 if self.clean.branch is not None else -self.block.anatomy.residual_multiplier
        factor = torch.where(self.sources.real[lot], sign, 0.0).to(self.mixed)
        weights = (pattern * factor[..., None, None]).permute(0, 2, 3, 1).contiguous()
        value = self.value if self.all_heads else self.value[:, :, self.heads]
        by_head = value[prompt, positions].permute(2, 0, 1, 3).flatten(1, 2)
        W_O = self.path.W_O if self.all_heads else self.path.W_O[self.heads]
        outer = self.room.like("outer", by_head, (*by_head.shape[:2], W_O.shape[-1]), self.mixed)
        torch.bmm(by_head, W_O.to(self.mixed), out=outer)
        inner = None
        if self.folded is not None:
            count, heads, _, d_mlp = self.folded.shape
            inner = self.room.like("inner", by_head, (count, heads, by_head.shape[1], d_mlp), self.mixed)
            for out, matrix in zip(inner, self.folded, strict=True):
                torch.bmm(by_head, matrix, out=out)
        elif self.clean.first is not None:
            inner = self.clean.first.linear(self.clean.through_norms(outer))
        shape = positions.shape
        return weights, _by_source(outer, shape), None if inner is None else _by_source(inner, shape)

    # ------------------------------------------------------------- one chunk

    def _distances(self, chunk: list[Slab], part: _Lot, offset: int) -> list[Float[Tensor, "key query"]]:
        """The distances of each slab of a chunk."""
        clean, total, d_model = self.clean, sum(slab.rows for slab in chunk), part.outer.shape[-1]
        mid = self.room.like("mid", clean.mid, (total, d_model), self.dtype)
        begin, entered = 0, []
        for slab in chunk:
            entered.append(self._enter(slab, part, offset, mid[begin : begin + slab.rows]))
            begin += slab.rows
        added = self._through_feed_forward(entered, mid)
        distances = []
        for part_way in entered:
            own = None if added is None else added[part_way.place].view(part_way.mid.shape)
            change = clean.post_change(part_way.queries, part_way.mid, own, self.room)
            distances.append(clean.distance(part_way.queries, change, self.metric, self.room))
        return distances

    def _enter(self, slab: Slab, part: _Lot, offset: int, mid: Float[Tensor, "pair d_model"]) -> _Entered:
        """A slab up to the middle of the block."""
        start = slab.prompt * self.real.shape[1]
        queries = slice(start + slab.queries.start, start + slab.queries.stop)
        sources = slice(slab.sources.start - offset, slab.sources.stop - offset)
        weights = part.weights[sources, slab.queries]
        out = mid.view(*weights.shape[:2], -1)
        change = out
        if self.mixed != self.dtype:
            change = self.room.like("change", out, out.shape, self.mixed)
        torch.bmm(weights, part.outer[sources], out=change)
        changed = self.clean.mid_change(queries, change, out, self.room)
        place = mid.storage_offset() // mid.shape[-1]
        return _Entered(
            queries,
            slice(place, place + slab.rows),
            out,
            weights if changed.beta is None else weights * changed.beta[..., None],
            changed.alphas,
            None if part.inner is None else part.inner[:, sources],
        )

    def _through_feed_forward(
        self, entered: list[_Entered], mid: Float[Tensor, "pair d_model"]
    ) -> Float[Tensor, "pair d_model"] | None:
        """The feed-forward's share, added to `mid`; by itself where a norm follows it.

        Some neurons at a time, so that what lies between the two matrices never leaves the caches.
        """
        clean = self.clean
        if clean.first is None:
            return None
        into, factor, added = mid, clean.anatomy.residual_multiplier, None
        if clean.feed_forward_branch is not None:
            added = self.room.like("added", mid, mid.shape, self.dtype).zero_()
            into, factor = added, 1.0
        d_mlp = clean.first.d_mlp
        for left in range(0, d_mlp, self.sizes.columns):
            columns = slice(left, min(left + self.sizes.columns, d_mlp))
            width = columns.stop - left
            hidden = self.room.like("hidden", mid, (len(mid), width), self.dtype)
            for slab in entered:
                self._hidden(slab, columns, hidden[slab.place].view(*slab.weights.shape[:2], width))
            into.addmm_(hidden, clean.second[columns], alpha=factor)
        return added

    def _hidden(self, slab: _Entered, columns: slice, out: Float[Tensor, "key row column"]) -> None:
        if slab.inner is None:
            raise RuntimeError("a slab without its values' way through the first matrix")
        keys, queries, width = out.shape
        step = max(1, self.sizes.tile // (queries * width))
        pieces = -(-queries * width // self.sizes.tile)
        narrow = max(16, -(-width // (16 * pieces)) * 16)
        for left in range(0, width, narrow):
            neurons = slice(columns.start + left, min(columns.start + left + narrow, columns.stop))
            for start in range(0, keys, step):
                some = slice(start, start + step)
                self.clean.hidden_change(
                    slab.queries,
                    neurons,
                    [alpha[some] for alpha in slab.alphas],
                    slab.weights[some],
                    slab.inner[:, some],
                    out[some, :, left : left + narrow],
                    self.room,
                )

    def _store(self, scores: Tensor, slab: Slab, group: int, distance: Float[Tensor, "key query"]) -> None:
        columns = self.sources.column[slab.sources]
        if columns == list(range(columns[0], columns[0] + len(columns))):
            scores[slab.prompt, group, slab.queries, columns[0] : columns[-1] + 1] = distance.T
            return
        for key, column in enumerate(columns):
            scores[slab.prompt, group, slab.queries, column] = distance[key]


def _by_source(
    vectors: Float[Tensor, "*matrix head vector width"], shape: Sequence[int]
) -> Float[Tensor, "*matrix source head span width"]:
    """Sources before heads; no copy."""
    return vectors.unflatten(-2, shape).movedim(-4, -3)
