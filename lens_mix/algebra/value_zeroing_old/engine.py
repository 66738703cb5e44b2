"""Value Zeroing from the captured tensors: what intervening gives, without running the block again.

How a change goes through a block is in `zeroing.clean_block`, which pairs there are in `zeroing.pieces`. All
sizes are known before the first product of a block, so that a GPU is never waited for between its pieces.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lens_mix.algebra.folded_weights import folded
from lens_mix.algebra.value_zeroing_old.clean_block import CleanBlock, product
from lens_mix.algebra.value_zeroing_old.lot import Lot, Pairs
from lens_mix.algebra.value_zeroing_old.memory import Cost, fitting
from lens_mix.algebra.value_zeroing_old.pieces import CPU, GPU, Sizes, Sources, chunks, find_sources
from lens_mix.algebra.value_zeroing_old.rotation import Rotation, rotated
from lens_mix.algebra.value_zeroing_old.second_matrix import SecondMatrix
from lens_mix.algebra.value_zeroing_old.sent import Senders
from lens_mix.algebra.workspace import Workspace
from lens_mix.hooks.mixing import TOLERANCES, mix
from lens_mix.lens.anatomy import Norm, ValuePath
from lens_mix.lens.model_classes import UnsupportedModelError as NotRebuiltError
from lens_mix.lens.proof.sketch import sketch

if TYPE_CHECKING:
    from lens_mix.lens.block import Block


def value_zeroing_maps(
    block: Block,
    groups: Sequence[Sequence[int]],
    spans: Sequence[Sequence[int]] | None,
    metric: str,
    final: Norm | None,
    shared: Shared,
    sizes: Sizes | None = None,
) -> Float[Tensor, "batch group query key"]:
    """One map per group of query heads that are zeroed together.

    Args:
        block: a block whose anatomy is proven; needs "pattern" and "value".
        groups: query heads, each in one group at most.
        spans: positions of a prompt that are zeroed as one; None: each alone.
        metric: "cosine" or "euclidean".
        final: the final norm, where its output is compared.
        shared: what the blocks of one batch use again.
        sizes: how much is done at once; by default what suits the device.

    Raises:
        NotRebuiltError: the block's parts do not give its output for this prompt.
        ValueError: the memory bound does not allow the smallest step.
    """
    real, pattern = block.real, block.recorded("pattern")
    batch, length = real.shape
    narrow, wide = _dtypes(block)
    span = 1 if spans is None else max(len(some) for some in spans)
    cost = Cost.of(block.anatomy, length, span, block.resid_pre.dtype, narrow, wide)
    if sizes is None:
        sizes = CPU.for_threads(torch.get_num_threads()) if pattern.device.type == "cpu" else GPU
    sizes = fitting(sizes, cost, block.max_memory)
    scores = block.zeros(batch, len(groups), length, length if spans is None else len(spans))
    step = max(1, sizes.positions // length)
    for start in range(0, batch, step):
        prompts = slice(start, start + step)
        # Under no name of its own: it goes before the next one makes copies of the same weights.
        _fill(scores[prompts], _Work(block, prompts, groups, spans, metric, final, shared, sizes))
    return scores


def _fill(scores: Float[Tensor, "batch group query key"], work: _Work) -> None:
    # A hundred thousand small views and products: half of what each costs outside of inference mode.
    with torch.inference_mode():
        for lot in work.lots():
            work.fill(scores, lot)


def _dtypes(block: Block) -> tuple[torch.dtype, torch.dtype]:
    """Of the computation, and up to the first matrix.

    A norm on the attention's branch divides by next to nothing where a query loses its only key: float64.
    """
    narrow = torch.promote_types(block.resid_pre.dtype, torch.float32)
    wide = block.anatomy.attention_branch is not None and block.resid_pre.device.type != "mps"
    return narrow, torch.float64 if wide else narrow


# Above this many vectors per source, scalar products between them cost more than their sums.
_MOST_FACTORS = 64


@dataclasses.dataclass(frozen=True)
class _Entered:
    """Pairs in the middle of the block: their place in the chunk, and what they take further."""

    pairs: Pairs
    place: slice
    mid: Float[Tensor, "*pair d_model"]
    factors: Float[Tensor, "*tile key row rank"]
    alphas: list[Float[Tensor, "*tile key row 1"]]


class Shared:
    """What one block leaves for the next: buffers, and which keys reach which queries."""

    def __init__(self) -> None:
        self.room = Workspace()
        self._sources: dict[int, tuple[Tensor, Sources]] = {}

    def sources(
        self,
        first: int,
        seen: Bool[Tensor, "batch query key"],
        real: Bool[Tensor, "batch pos"],
        spans: Sequence[Sequence[int]] | None,
        bounded: bool,
    ) -> Sources:
        """The last block's, where prompts from `first` on see the same keys; spans are always the same.

        Where memory is bounded, of the last prompts alone: the bound counts one mask, however many prompts.
        """
        old = self._sources.get(first)
        if old is None or not torch.equal(old[0], seen):
            if bounded:
                self._sources.clear()
            old = self._sources[first] = seen, find_sources(seen, real, spans)
        return old[1]


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
        shared: Shared,
        sizes: Sizes,
    ) -> None:
        path = block.anatomy.value_path
        if path is None:
            raise RuntimeError(f"block {block.layer}: the algebra engine was asked for an unproven block")
        self.block, self.groups, self.metric, self.sizes = block, groups, metric, sizes
        self.room = shared.room
        self.path: ValuePath = path
        self.heads = [head for group in groups for head in group]
        self.all_heads = self.heads == list(range(block.n_heads))
        self.dtype, self.mixed = _dtypes(block)
        self.real, self.pattern = block.real[prompts], block.recorded("pattern")[prompts]
        seen = block.seen[prompts] if self.all_heads else _seen(self.pattern[:, self.heads])
        bounded = block.max_memory is not None
        self.sources = shared.sources(prompts.start, seen, self.real, spans, bounded)
        value = block.recorded("value")[prompts].to(self.mixed)
        attention_out = path.project(mix(self.pattern.to(self.mixed), value))
        resid_post = block.resid_post[prompts].to(self.dtype)
        self.clean = CleanBlock(
            block.anatomy,
            block.resid_pre[prompts].to(self.dtype).flatten(0, 1),
            attention_out.flatten(0, 1),
            resid_post.flatten(0, 1),
            final,
            self._pre_activations(prompts),
            sizes.columns,
            self.room,
        )
        self._require_rebuilt(resid_post.flatten(0, 1))
        self.W_O_sketch = sketch(path.W_O.flatten(0, 1).to(self.mixed))
        few = self._few_factors() and value.device.type != "mps"
        self.rotation = self._rotate(few)
        parts = [neurons.columns for neurons in self.clean.neurons]
        self.second = SecondMatrix(self.clean.second, parts, self.rotation, self._pairs) if parts else None
        by_head = value.repeat_interleave(block.n_heads // value.shape[2], dim=2)
        self.senders = Senders(
            self.clean,
            path,
            self.heads,
            by_head,
            self.pattern,
            self.sources,
            self._fold(),
            self.rotation,
            few,
            self.room,
        )

    def _pre_activations(self, prompts: slice) -> list[Float[Tensor, "row d_mlp"]]:
        """What the model itself has recorded of them, per first matrix; nothing where it has not."""
        feed_forward = self.block.anatomy.feed_forward
        if feed_forward is None:
            return []
        roles = ("pre",) if feed_forward.W_gate is None else ("pre", "pre_linear")
        found = [self.block.recorded_if_any(role) for role in roles]
        shape = (*self.block.real.shape, feed_forward.W_in.shape[1])
        usable = [
            some.reshape(shape)[prompts].flatten(0, 1)
            for some in found
            # Rounded to less they would round the scores too.
            if some is not None and some.numel() == math.prod(shape) and some.dtype == self.mixed
        ]
        return usable if len(usable) == len(roles) else []

    def _require_rebuilt(self, expected: Float[Tensor, "row d_model"]) -> None:
        tolerance = TOLERANCES.get(self.block.resid_post.dtype, TOLERANCES[torch.float32])
        error = self.clean.misses(expected, self.real.flatten())
        if not error <= tolerance:
            raise NotRebuiltError(
                f"block {self.block.layer}: expected its parts to give its output within {tolerance:.0e} on "
                f"this prompt, got a relative error of {error:.1e}; engine='hooks' needs no parts"
            )

    def _fold(self) -> Float[Tensor, "matrix head d_head d_mlp"] | None:
        if not len(self.sources) or self.clean.first is None:
            return None
        keep, vectors = self.block.max_memory is None, self.sources.positions.numel()
        first = self.clean.first
        sketches = [*first.sketches, self.W_O_sketch]
        return folded(
            self.block.anatomy, self.path, self.heads, vectors, self.mixed, keep, first.matrices, sketches
        )

    @property
    def _pairs(self) -> int:
        """How many pairs of a source and a query there are, for every group of heads."""
        return (sum(self.sources.last) - sum(self.sources.first)) * len(self.groups)

    def _few_factors(self) -> bool:
        """Whether scalar products between a source's vectors cost less than their sums."""
        most = max((len(group) for group in self.groups), default=0) * self.sources.positions.shape[-1]
        return most <= _MOST_FACTORS

    def _rotate(self, few: bool) -> Rotation | None:
        """Other axes for what no norm reads any more: the first one's change is found from factors then."""
        if self.block.max_memory is not None or (self.clean.lead is not None and not few):
            return None
        found = rotated(self.clean, self.path, self.W_O_sketch, self._pairs)
        if found is not None:
            self.clean.direction = self.clean.direction @ found.axes
        return found

    # ------------------------------------------------------------- one lot of keys

    def lots(self) -> Iterator[slice]:
        """The sources, as many at a time as may be held at once."""
        count, step = len(self.sources), self.sizes.keys
        return (slice(begin, min(begin + step, count)) for begin in range(0, count, step))

    def fill(self, scores: Float[Tensor, "batch group query key"], lot: slice) -> None:
        """The scores of some sources."""
        sent = self.senders.of(lot)
        begin = 0
        for number, group in enumerate(self.groups):
            heads = slice(begin, begin + len(group))
            begin = heads.stop
            part = self._lot(lot, *sent.of_heads(heads))
            for chunk in chunks(self.sources, lot, self.sizes):
                self._measure([Pairs(piece, part, self.real.shape[1]) for piece in chunk], part)
            self._store(scores[:, number], lot, part)

    def _lot(
        self,
        lot: slice,
        weights: Float[Tensor, "source rank query"],
        outer: Float[Tensor, "source rank axis"],
        inner: Sequence[Float[Tensor, "matrix source rank column"]],
        products: Float[Tensor, "source rank query"] | None,
    ) -> Lot:
        """With the change of the first norm's size, where the vectors of a source are few."""
        clean, found = self.clean, weights.new_zeros((2, *weights.shape[::2]), dtype=self.dtype)
        lead, inner_weights, drift = clean.lead, weights, None
        if lead is not None and products is not None:
            ones = outer.new_ones(clean.mid.shape[-1])
            ones = ones if self.rotation is None else ones @ self.rotation.axes
            prompts = self.sources.prompts[lot]
            inverse, drift = lead.from_factors(weights, outer, products, ones, prompts, self.room)
            inner_weights = self.room.like("inner weights", weights, weights.shape, weights.dtype)
            torch.mul(weights, inverse[:, None], out=inner_weights)
            if lead is clean.residual:
                weights, outer = inner_weights, lead.linear(outer)
        return Lot(lot.start, weights, outer, inner_weights, inner, drift, found[0], found[1])

    def _store(self, scores: Float[Tensor, "batch query key"], lot: slice, part: Lot) -> None:
        """The distances of some sources into their maps' columns."""
        prompt, column = self.sources.prompts[lot], self.sources.columns[lot]
        distance = part.across
        if self.metric == "cosine":
            sizes = self.clean.size.view(self.real.shape)[prompt]
            distance = self.clean.cosine_distance(part.along, part.across, sizes)
        # No weight, no effect: not even a rounding error.
        distance = torch.where(part.weights.abs().amax(1) != 0, distance, 0.0)
        scores[prompt, :, column] = distance.to(scores.dtype)

    # ------------------------------------------------------------- one chunk

    def _measure(self, chunk: list[Pairs], part: Lot) -> None:
        """How far the outputs of a chunk's pairs move."""
        clean, rows = self.clean, [math.prod(pairs.shape) for pairs in chunk]
        queries = [pairs.kept_rows for pairs in chunk]
        mid = self.room.like("mid", clean.mid, (sum(rows), part.outer.shape[-1]), self.dtype)
        begin, entered = 0, []
        for pairs, count in zip(chunk, rows, strict=True):
            entered.append(self._enter(pairs, part, mid, slice(begin, begin + count)))
            begin += count
        added = self._through_feed_forward(entered, part, mid)
        for some in entered:
            own = None if added is None else added[some.place].view(some.mid.shape)
            clean.post_change(some.pairs.kept_rows, some.mid, own, self.room)
        if self.metric == "euclidean":
            found = [(part.across, torch.linalg.vector_norm(mid, dim=-1))]
        else:
            changes = [some.mid for some in entered]
            along, across = clean.along_and_across(queries, mid, changes, self.room)
            found = [(part.along, along), (part.across, across)]
        for some in entered:
            for kept, numbers in found:
                some.pairs.store(kept, numbers[some.place].view(some.pairs.shape))

    def _enter(self, pairs: Pairs, part: Lot, mid: Float[Tensor, "pair d_model"], place: slice) -> _Entered:
        """Some pairs up to the middle of the block."""
        out = pairs.slab("slab mid", mid[place], self.room)
        change = out
        if self.mixed != self.dtype:
            change = self.room.like("change", out, out.shape, self.mixed)
        product(pairs.factors(part.weights), pairs.vectors(part.outer), change, add=False)
        drift = None if part.drift is None else pairs.of(part.drift)
        changed = self.clean.mid_change(pairs.rows, change, out, drift, self.room)
        pairs.keep(out, mid[place])
        weights = pairs.factors(part.inner_weights)
        if changed.beta is not None:
            weights = weights * changed.beta[..., None]
        alphas = [alpha[..., None] for alpha in changed.alphas]
        return _Entered(pairs, place, mid[place].view(*pairs.shape, -1), weights, alphas)

    def _through_feed_forward(
        self, entered: list[_Entered], part: Lot, mid: Float[Tensor, "pair d_model"]
    ) -> Float[Tensor, "pair d_model"] | None:
        """The feed-forward's share, added to `mid`; by itself where a norm follows it.

        Some neurons at a time, so that what lies between the two matrices never leaves the caches.
        """
        clean = self.clean
        if self.second is None:
            return None
        into, factor, added = mid, clean.anatomy.residual_multiplier, None
        if clean.feed_forward_branch is not None:
            added = self.room.like("added", mid, mid.shape, self.dtype).zero_()
            into, factor = added, 1.0
        for number, (neurons, values) in enumerate(zip(clean.neurons, part.inner, strict=True)):
            columns = neurons.columns
            hidden = self.room.like("hidden", mid, (len(mid), columns.stop - columns.start), self.dtype)
            for some in entered:
                pairs, out = some.pairs, hidden[some.place]
                slab = pairs.slab("slab hidden", out, self.room)
                own = [pairs.vectors(matrix) for matrix in values]
                clean.hidden_change(pairs.rows, neurons, some.alphas, some.factors, own, slab, self.room)
                pairs.keep(slab, out)
            self.second.add_product(number, into, hidden, factor)
        return added


def _seen(pattern: Float[Tensor, "batch head query key"]) -> Bool[Tensor, "batch query key"]:
    """Which keys get weight from any head; head by head, as a mask of all is a quarter of the pattern."""
    seen = torch.zeros_like(pattern[:, 0], dtype=torch.bool)
    for head in pattern.unbind(1):
        seen |= head != 0
    return seen
