"""Value Zeroing by algebra: what intervening gives, without running the block again.

Without key j's values the attention's output at query i changes by c_ij = -Σ_h a_ijh v_jh W_O^h, as the
pattern stays. That change is carried through the block's parts; outputs are never subtracted:

    norm          a change to a change (`NormChange`)
    W_in          folded with W_O and the norms' linear parts, applied once per key and head
    activation    per pair (`FeedForwardChange`)
    W_out         per pair: the one large product that is left
    distance      from the change's shares along and across the clean vector

Where each key reaches few of the rows that are asked for, a pair's values of all heads go through W_O and its
change through W_in instead. The rows of all prompts lie in one line; a rectangle's pairs are [key, row].
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lens_mix.algebra.clean_block import CleanBlock
from lens_mix.algebra.folded_weights import folded
from lens_mix.algebra.large_product import add_product
from lens_mix.algebra.value_zeroing_pairs import CPU, GPU, Rectangle, Sizes, chunks, find_sources, fitting
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
) -> Float[Tensor, "batch group query key"]:
    """One map of a proven block per group of query heads that are zeroed together (a head in one at most).

    The positions of a span are zeroed as one; without spans, each alone. `final` is the final norm, where
    its output is compared. A ValueError tells that `max_memory` does not allow the smallest step.
    """
    path = block.anatomy.value_path
    if path is None:
        raise RuntimeError(f"block {block.layer}: the algebra engine was asked for an unproven block")
    span = 1 if spans is None else max(map(len, spans))
    sizes = CPU if block.resid_pre.device.type == "cpu" else GPU
    sizes = fitting(sizes, block, path, span, len(groups), _dtypes(block))
    batch, queries, keys = block.attended.shape
    scores = block.zeros(batch, len(groups), queries, keys if spans is None else len(spans))
    step = max(1, sizes.positions // keys)
    # A hundred thousand small views and products: half of what each costs outside of inference mode.
    with torch.inference_mode():
        for start in range(0, batch, step):
            prompts = slice(start, start + step)
            _Maps(block, path, prompts, groups, spans, metric, final, sizes).fill(scores[prompts])
    return scores


def _dtypes(block: Block) -> tuple[torch.dtype, torch.dtype]:
    """Of the computation, and up to the activation: float64 where a norm meets a query without any key."""
    narrow = torch.promote_types(block.resid_pre.dtype, torch.float32)
    wide = block.anatomy.attention_branch is not None and block.resid_pre.device.type != "mps"
    return narrow, torch.float64 if wide else narrow


class _Maps:
    """The maps of some prompts and one block in the making."""

    def __init__(
        self,
        block: Block,
        path: ValuePath,
        prompts: slice,
        groups: Sequence[Sequence[int]],
        spans: Sequence[Sequence[int]] | None,
        metric: str,
        final: Norm | None,
        sizes: Sizes,
    ) -> None:
        self._metric, self._sizes, (narrow, wide) = metric, sizes, _dtypes(block)
        heads = [head for group in groups for head in group]
        ends = list(itertools.accumulate(map(len, groups)))
        self._groups = [slice(end - len(group), end) for group, end in zip(groups, ends, strict=True)]
        chosen = slice(None) if heads == list(range(block.n_heads)) else heads
        pattern, value = block.recorded("pattern")[prompts], block.recorded("value")[prompts].to(wide)
        self._pattern, self._W_O = pattern[:, chosen], path.W_O[chosen].to(wide)
        self._value = value.repeat_interleave(block.n_heads // value.shape[2], dim=2)[:, :, chosen]
        real, real_queries = block.real[prompts], block.real_queries[prompts]
        attended = block.attended[prompts] if chosen == slice(None) else (self._pattern != 0).any(1)
        self._sources = find_sources(attended & real_queries[:, :, None] & real[:, None], real, spans)
        self._place_sources(1.0 if block.anatomy.attention_branch else block.anatomy.residual_multiplier)
        pairs = sum(source.last - source.first for source in self._sources) * len(groups)
        self._folded = self._fold(block, path, heads, pairs)
        out, folds = path.project(mix(pattern, value)).flatten(0, 1), self._folded is not None
        pre, post = (x[prompts].to(narrow).flatten(0, 1) for x in (block.resid_pre, block.resid_post))
        self._clean = CleanBlock(block.anatomy, pre, out, post, final, sizes.columns, folds, pairs)

    def _place_sources(self, multiplier: float) -> None:
        """Each source's prompt and positions, and each value's factor, on the maps' device."""
        device, sources = self._value.device, self._sources
        longest = max((len(source.keys) for source in sources), default=1)
        positions = [source.keys + [-1] * (longest - len(source.keys)) for source in sources]
        self._prompts = torch.tensor([source.prompt for source in sources], device=device, dtype=torch.long)
        spans = torch.tensor(positions, device=device, dtype=torch.long).reshape(-1, longest)
        self._positions = spans.clamp_min(0)
        # No weight, or nothing sent: no effect, not even a rounding error.
        sent = (self._value != 0).any(-1) & (self._W_O != 0).flatten(1).any(1)
        sends = sent[self._prompts[:, None], self._positions] & (spans >= 0)[..., None]
        self._factors = sends.to(self._value.dtype) * -multiplier

    def _fold(
        self, block: Block, path: ValuePath, heads: list[int], pairs: int
    ) -> Sequence[Float[Tensor, "head d_head d_mlp"]] | None:
        """W_O, norms and first matrices as one matrix per head, none where nothing goes through them.

        None instead where it costs less to apply W_O and the first matrices to each pair.
        """
        feed_forward, keep = block.anatomy.feed_forward, block.max_memory is None
        changes, vectors = feed_forward is not None and not block.anatomy.parallel, self._positions.numel()
        # In rows that go through W_O and the first matrices; a fold costs one per row of W_O.
        if pairs <= vectors + (self._W_O.shape[:2].numel() if changes and not keep else 0):
            return None
        if feed_forward is None or not changes:
            return []
        matrices = (feed_forward.W_gate, feed_forward.W_in)
        wide = [matrix.to(self._W_O.dtype) for matrix in matrices if matrix is not None]
        product = folded(block.anatomy, path, heads, vectors, self._W_O.dtype, keep, wide)
        return None if product is None else list(product)

    def fill(self, scores: Float[Tensor, "batch group query key"]) -> None:
        """The scores of every group of heads."""
        # Of values that are not folded with any matrix, more can be held.
        step = self._sizes.chunk if self._folded is None else self._sizes.keys
        for number, group in enumerate(self._groups):
            for start in range(0, len(self._sources), step):
                sources = self._sources[start : start + step]
                values = self._values(group, slice(start, start + step))
                for chunk in chunks(sources, self._sizes):
                    self._fill_chunk(chunk, values, scores[:, number])

    def _values(self, group: slice, sources: slice) -> _Values:
        """The values of some sources and heads."""
        positions, W_O, hidden = self._positions[sources], self._W_O[group], self._clean.hidden
        vectors = self._value[self._prompts[sources, None], positions][:, :, group]
        common = positions, self._factors[sources, :, group], self._pattern[:, group]
        if self._folded is None:
            return _Values(*common, vectors, W_O, [] if hidden is None else hidden.matrices)
        by_head = vectors.permute(2, 0, 1, 3).flatten(1, 2)
        # Sources first again, then spans before heads: no copy where each key is zeroed alone.
        outer, *inner = (
            torch.bmm(by_head, matrix).unflatten(1, positions.shape).permute(1, 2, 0, 3).flatten(1, 2)
            for matrix in (W_O, *(matrix[group] for matrix in self._folded))
        )
        return _Values(*common, outer, None, inner)

    def _fill_chunk(
        self, chunk: Sequence[Rectangle], values: _Values, scores: Float[Tensor, "batch query key"]
    ) -> None:
        """The scores of a chunk's pairs, some neurons at a time so that these never leave the caches."""
        clean, ends = self._clean, [*itertools.accumulate(math.prod(part.shape) for part in chunk)]
        mid = clean.direction.new_empty((ends[-1], clean.direction.shape[1]))
        # One tensor where no norm stands between the two: less memory to go through.
        added = mid if clean.added is None else torch.zeros_like(mid)
        entered = []
        for rectangle, begin, end in zip(chunk, [0, *ends], ends, strict=False):
            first = rectangle.prompt * self._pattern.shape[2]
            rows = slice(first + rectangle.rows.start, first + rectangle.rows.stop)
            place = slice(begin, end)
            out, weights = mid[place].unflatten(0, rectangle.shape), values.weights(rectangle)
            moved = weights.flatten(2).any(-1)
            change = values.change(rectangle.sources, weights, out)
            change, read, (scale, *factors) = clean.to_first(rows, change)
            if change is not out:
                out.copy_(change)
            weights = weights * scale[..., None]
            add_first = functools.partial(values.add_first, rectangle.sources, weights, read)
            entered.append((rectangle, rows, place, moved, factors, add_first))
        if clean.hidden is not None:
            for neurons in clean.hidden.parts:
                hidden = mid.new_empty((len(mid), len(neurons.W_out)))
                for rectangle, rows, place, _, factors, add_first in entered:
                    pairs = hidden[place].unflatten(0, rectangle.shape)
                    clean.hidden.change(neurons, rows, factors, add_first, pairs)
                add_product(added, hidden, neurons.W_out, clean.multiplier if added is mid else 1.0)
        for rectangle, rows, place, moved, _, _ in entered:
            pairs, more = (x[place].unflatten(0, rectangle.shape) for x in (mid, added))
            distance = clean.distance(rows, pairs, more, self._metric)
            columns = slice(rectangle.column, rectangle.column + rectangle.shape[0])
            scores[rectangle.prompt, rectangle.rows, columns] = torch.where(moved, distance, 0.0).T


class _Values(NamedTuple):
    """The values of some sources and heads; `Rectangle.sources` count from the first of them.

    Folded ones have gone through the matrices, once per key and head, and a pair costs a sum over heads. Of
    plain ones each pair's sum goes through the matrices: less work where keys reach few rows.
    """

    positions: Int[Tensor, "source span"]  # a short span is filled up
    factors: Float[Tensor, "source span head"]  # 0 where a span is filled up or nothing is sent
    pattern: Float[Tensor, "batch head query key"]
    # v; folded, v W_O (spans before heads).
    vectors: Float[Tensor, "source span head d_head"] | Float[Tensor, "source rank d_model"]
    W_O: Float[Tensor, "head d_head d_model"] | None  # None where folded
    # The first matrices, W_gate before W_in; folded, what they make of the values.
    first: Sequence[Float[Tensor, "source rank d_mlp"]] | Sequence[Float[Tensor, "d_model d_mlp"]]

    def weights(self, rectangle: Rectangle) -> Float[Tensor, "key row span head"]:
        """Factors of the values in each pair's change."""
        sources = rectangle.sources
        pattern = self.pattern[rectangle.prompt, :, rectangle.rows][..., self.positions[sources]]
        # In memory of their own order: a product of strided factors would be made one by one.
        return pattern.permute(2, 1, 3, 0).contiguous() * self.factors[sources][:, None]

    def change(
        self,
        sources: slice,
        weights: Float[Tensor, "key row span head"],
        out: Float[Tensor, "key row d_model"],
    ) -> Float[Tensor, "key row d_model"]:
        """The change of the attention's output; in `out` where that has its dtype."""
        vectors = self.vectors[sources]
        out = out if out.dtype == vectors.dtype else torch.empty_like(out, dtype=vectors.dtype)
        if self.W_O is None:
            return torch.bmm(weights.flatten(2), vectors, out=out)
        total = (weights[..., None] * vectors[:, None]).sum(2)
        torch.mm(total.flatten(0, 1).flatten(1), self.W_O.flatten(0, 1), out=out.flatten(0, 1))
        return out

    def add_first(
        self,
        sources: slice,
        weights: Float[Tensor, "key row span head"],
        read: Float[Tensor, "key row d_model"],
        matrix: int,
        columns: slice,
        into: Float[Tensor, "key row column"],
    ) -> None:
        """Add to some neurons' pre-activations what folded values change, or what of plain ones is `read`."""
        if self.W_O is None:
            torch.baddbmm(into, weights.flatten(2), self.first[matrix][sources, :, columns], out=into)
        else:
            add_product(into.flatten(0, 1), read.flatten(0, 1).to(into.dtype), self.first[matrix][:, columns])
