"""Value Zeroing by algebra: what intervening gives, without running the block again.

Without key j's values the attention's output at query i changes by c_ij = -Σ_h a_ijh v_jh W_O^h, as the pattern
stays. That change is carried through the block's parts; outputs are never subtracted:

    norm          a change to a change (`NormChange`)
    W_in          linear, so W_O, the norms' linear parts and W_in are applied once per key and head, folded into
                  one matrix per head; a pair then costs a sum over heads
    activation    per pair (`FeedForwardChange`)
    W_out         per pair: the one large product that is left
    distance      from the change's shares along and across the clean vector

Where each key reaches few of the rows that are asked for, a pair's values of all heads go through W_O and its
change through W_in instead. The rows of all prompts lie in one line; the pairs of a rectangle are
[key, row] (`value_zeroing_pairs`).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lens_mix.algebra.clean_block import CleanBlock
from lens_mix.algebra.feed_forward_change import AddChange
from lens_mix.algebra.folded_weights import folded
from lens_mix.algebra.large_product import add_product
from lens_mix.algebra.value_zeroing_pairs import CPU, GPU, Rectangle, Sizes, chunks, find_sources
from lens_mix.algebra.zeroed_values import FoldedValues, PlainValues, ZeroedValues
from lens_mix.hooks.mixing import mix
from lens_mix.lens.anatomy import Norm, ValuePath

if TYPE_CHECKING:
    from lens_mix.lens.block import Block


def value_zeroing_maps(
    block: Block,
    groups: Sequence[Sequence[int]],
    spans: Sequence[Sequence[int]] | None,
    metric: str,
    final: Norm | None,
    sizes: Sizes | None = None,
) -> Float[Tensor, "batch group query key"]:
    """One map per group of query heads that are zeroed together.

    Args:
        block: a block whose anatomy is proven; needs "pattern" and "value".
        groups: query heads, each in one group at most.
        spans: positions of a prompt that are zeroed as one; None: each alone.
        metric: "cosine" or "euclidean".
        final: the final norm, where its output is compared.
        sizes: how much is done at once; by default what suits the device.

    Raises:
        ValueError: the memory bound does not allow the smallest step.
    """
    if sizes is None:
        sizes = CPU if block.resid_pre.device.type == "cpu" else GPU
    batch, queries, keys = block.seen.shape
    scores = block.zeros(batch, len(groups), queries, keys if spans is None else len(spans))
    step = max(1, sizes.positions // keys)
    # A hundred thousand small views and products: half of what each costs outside of inference mode.
    with torch.inference_mode():
        for start in range(0, batch, step):
            prompts = slice(start, start + step)
            _Maps(block, prompts, groups, spans, metric, final, sizes).fill(scores[prompts])
    return scores


def _dtypes(block: Block) -> tuple[torch.dtype, torch.dtype]:
    """Of the computation, and up to the activation.

    A norm on the attention's branch divides by next to nothing where a query loses its only key: float64.
    """
    narrow = torch.promote_types(block.resid_pre.dtype, torch.float32)
    wide = block.anatomy.attention_branch is not None and block.resid_pre.device.type != "mps"
    return narrow, torch.float64 if wide else narrow


@dataclasses.dataclass(frozen=True)
class _Entered:
    """The pairs of a rectangle in the middle of the block.

    Attributes:
        rows: their clean rows.
        place: where they lie in the chunk.
        shape: keys and rows.
        moved: which pairs have a change at all.
        factors: of the norms' numerators in what the first matrices read.
        add_first: adds the values' share of the pre-activations.
    """

    rows: slice
    place: slice
    shape: tuple[int, int]
    moved: Bool[Tensor, "key row"]
    factors: list[Float[Tensor, "key row 1"]]
    add_first: AddChange

    def of(self, vectors: Float[Tensor, "pair width"]) -> Float[Tensor, "key row width"]:
        """The rectangle's own vectors."""
        return vectors[self.place].unflatten(0, self.shape)


class _Maps:
    """The maps of some prompts and one block in the making."""

    def __init__(
        self,
        block: Block,
        prompts: slice,
        groups: Sequence[Sequence[int]],
        spans: Sequence[Sequence[int]] | None,
        metric: str,
        final: Norm | None,
        sizes: Sizes,
    ) -> None:
        path = block.anatomy.value_path
        if path is None:
            raise RuntimeError(f"block {block.layer}: the algebra engine was asked for an unproven block")
        self._block, self._metric, self._sizes = block, metric, sizes
        narrow, self._wide = _dtypes(block)
        heads = [head for group in groups for head in group]
        chosen = slice(None) if heads == list(range(block.n_heads)) else heads
        pattern, value = block.recorded("pattern")[prompts], block.recorded("value")[prompts].to(self._wide)
        self._heads, self._pattern, self._W_O = heads, pattern[:, chosen], path.W_O[chosen].to(self._wide)
        self._value = value.repeat_interleave(block.n_heads // value.shape[2], dim=2)[:, :, chosen]
        ends = list(itertools.accumulate(len(group) for group in groups))
        self._groups = [slice(end - len(group), end) for group, end in zip(groups, ends, strict=True)]
        seen = block.seen[prompts] if chosen == slice(None) else (self._pattern != 0).any(1)
        self._sources = find_sources(seen, block.real[prompts], block.real_queries[prompts], spans)
        self._place_sources()
        pairs = sum(source.rows for source in self._sources) * len(groups)
        self._folded = self._fold(path, pairs)
        self._clean = CleanBlock(
            block.anatomy,
            block.resid_pre[prompts].to(narrow).flatten(0, 1),
            path.project(mix(pattern.to(self._wide), value)).flatten(0, 1),
            block.resid_post[prompts].to(narrow).flatten(0, 1),
            final,
            sizes.columns,
            self._folded is not None,
            pairs,
        )

    def _place_sources(self) -> None:
        """The sources' prompts, positions and factors, on the maps' device."""
        device, sources = self._value.device, self._sources
        longest = max((len(source.keys) for source in sources), default=1)
        positions = [source.keys + [source.keys[0]] * (longest - len(source.keys)) for source in sources]
        filled = [[place < len(source.keys) for place in range(longest)] for source in sources]
        self._prompts = torch.tensor([source.prompt for source in sources], device=device, dtype=torch.long)
        self._positions = torch.tensor(positions, device=device, dtype=torch.long).reshape(-1, longest)
        # Behind a norm on the branch the multiplier follows that norm.
        anatomy = self._block.anatomy
        multiplier = 1.0 if anatomy.attention_branch is not None else anatomy.residual_multiplier
        filled_up = torch.tensor(filled, device=device, dtype=self._wide).reshape(-1, longest)
        self._factors = filled_up * -multiplier

    def _fold(
        self, path: ValuePath, pairs: int
    ) -> Float[Tensor, "matrix head d_head d_mlp"] | Sequence[Tensor] | None:
        """W_O, norms and first matrices as one matrix per head, none where there are no first matrices.

        None instead where it costs less to apply W_O and the first matrices to each pair.
        """
        anatomy, keep = self._block.anatomy, self._block.max_memory is None
        feed_forward, vectors = anatomy.feed_forward, self._positions.numel()
        changes = feed_forward is not None and not anatomy.parallel
        # In rows that W_O and the first matrices are applied to; folding takes as long as one per row of W_O.
        cost = vectors if keep or not changes else vectors + self._W_O.shape[:2].numel()
        if pairs <= cost:
            return None
        if feed_forward is None or anatomy.parallel:
            return []
        gate = [] if feed_forward.W_gate is None else [feed_forward.W_gate]
        matrices = [matrix.to(self._wide) for matrix in (*gate, feed_forward.W_in)]
        return folded(anatomy, path, self._heads, vectors, self._wide, keep, matrices)

    def fill(self, scores: Float[Tensor, "batch group query key"]) -> None:
        """The scores of every group of heads."""
        count = len(self._sources)
        # Of values that are not folded with any matrix, more can be held.
        step = self._sizes.chunk if self._folded is None else self._sizes.keys
        for number, group in enumerate(self._groups):
            for start in range(0, count, step):
                numbers = range(start, min(start + step, count))
                values = self._values(group, slice(start, numbers.stop))
                for chunk in chunks(self._sources, numbers, self._sizes):
                    for rectangle, distance in zip(chunk, self._distances(chunk, values), strict=True):
                        column = self._sources[rectangle.sources.start].column
                        columns = slice(column, column + rectangle.shape[0])
                        scores[rectangle.prompt, number, rectangle.rows, columns] = distance.T.to(scores.dtype)

    def _values(self, group: slice, sources: slice) -> ZeroedValues:
        """The values of some sources and heads."""
        positions = self._positions[sources]
        vectors = self._value[self._prompts[sources, None], positions][:, :, group]
        common = (sources.start, positions, self._factors[sources], self._pattern[:, group], vectors)
        hidden = self._clean.hidden
        if self._folded is None:
            W_O = self._W_O[group].flatten(0, 1)
            return PlainValues(*common, W_O, [] if hidden is None else hidden.matrices)
        by_head = vectors.permute(2, 0, 1, 3).flatten(1, 2)
        matrices = [self._W_O[group], *(matrix[group] for matrix in self._folded)]
        outer, *inner = (_by_source(torch.bmm(by_head, matrix), positions.shape) for matrix in matrices)
        return FoldedValues(*common, outer, inner)

    def _distances(
        self, chunk: Sequence[Rectangle], values: ZeroedValues
    ) -> list[Float[Tensor, "key row"]]:
        """How far the outputs of a chunk's pairs move."""
        clean, ends = self._clean, list(itertools.accumulate(rectangle.pairs for rectangle in chunk))
        mid = clean.direction.new_empty((ends[-1], clean.direction.shape[1]))
        entered = [
            self._enter(rectangle, values, mid, slice(end - rectangle.pairs, end))
            for rectangle, end in zip(chunk, ends, strict=True)
        ]
        added = self._through_feed_forward(entered, mid)
        distances = []
        for some in entered:
            change = clean.to_end(some.rows, some.of(mid), None if added is None else some.of(added))
            # No weight, no effect: not even a rounding error.
            distance = clean.distance(some.rows, change, self._metric)
            distances.append(torch.where(some.moved, distance, 0.0))
        return distances

    def _enter(
        self, rectangle: Rectangle, values: ZeroedValues, mid: Float[Tensor, "pair d_model"], place: slice
    ) -> _Entered:
        """The pairs of a rectangle up to the first matrices; what changes in the middle of the block goes to `mid`."""
        first_row = rectangle.prompt * self._pattern.shape[2]
        rows = slice(first_row + rectangle.rows.start, first_row + rectangle.rows.stop)
        weights = values.weights(rectangle)
        change = values.change(rectangle, weights)
        moved = torch.linalg.vector_norm(change, dim=-1) != 0
        first = self._clean.to_first(rows, change, self._folded is not None)
        mid[place] = first.mid.flatten(0, 1)
        if torch.is_tensor(first.scale):
            weights = weights * first.scale[..., None]
        return _Entered(
            rows, place, rectangle.shape, moved, first.factors, values.add_first(rectangle, weights, first.read)
        )

    def _through_feed_forward(
        self, entered: Sequence[_Entered], mid: Float[Tensor, "pair d_model"]
    ) -> Float[Tensor, "pair d_model"] | None:
        """The feed-forward's share, added to `mid`; by itself where a norm follows it.

        Some neurons at a time, so that what lies between the two matrices never leaves the caches.
        """
        clean = self._clean
        if clean.hidden is None:
            return None
        added = None if clean.feed_forward_branch is None else torch.zeros_like(mid)
        into, factor = (mid, clean.multiplier) if added is None else (added, 1.0)
        for neurons in clean.hidden.parts:
            hidden = mid.new_empty((len(mid), len(neurons.W_out)))
            for some in entered:
                clean.hidden.change(neurons, some.rows, some.factors, some.add_first, some.of(hidden))
            add_product(into, hidden, neurons.W_out, factor)
        return added


def _by_source(
    vectors: Float[Tensor, "head vector width"], shape: Sequence[int]
) -> Float[Tensor, "source rank width"]:
    """Sources first, then spans before heads; no copy where each key is zeroed alone."""
    return vectors.unflatten(1, shape).permute(1, 2, 0, 3).flatten(1, 2)
