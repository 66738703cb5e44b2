"""Value Zeroing by algebra: what intervening gives, without running the block again.

Without key j's values the attention's output at query i changes by c_ij = -Σ_h a_ijh v_jh W_O^h, as the
pattern stays. That change is carried through the block's parts; outputs are never subtracted:

    norm          a change to a change (`_NormChange`)
    W_in          folded with W_O and the norms' linear parts, applied once per key and head
    activation    per pair (`Neurons.change`)
    W_out         per pair: the one large product that is left
    distance      from the change's shares along and across the clean vector

The rows of all prompts lie in one line; a rectangle's pairs are [key, row].
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lens_mix.algebra.clean_block import CleanBlock
from lens_mix.algebra.folded_weights import folded
from lens_mix.algebra.large_product import add_product, as_right_factor
from lens_mix.algebra.value_zeroing_pairs import (
    Groups,
    Rectangle,
    Sizes,
    Spans,
    chunks,
    find_sources,
    fitting,
)
from lens_mix.algebra.vectors import value_path
from lens_mix.lens.anatomy import Norm
from lens_mix.lens.states import states_of

if TYPE_CHECKING:
    from lens_mix.lens.block import Block


def value_zeroing_maps(
    block: Block, groups: Groups, spans: Spans, metric: str, final: Norm | None
) -> Float[Tensor, "batch group query key"]:
    """One map of a verified block per group of query heads that are zeroed together (a head in one at most).

    The positions of a span are zeroed as one; without spans, each alone. `final` is the final norm, where
    its output is compared. A ValueError tells that `max_memory` does not allow the smallest step.
    """
    sizes = fitting(block, 1 if spans is None else max(map(len, spans)), _dtypes(block))
    batch, queries, keys = block.attended.shape
    scores = block.zeros(batch, len(groups), queries, keys if spans is None else len(spans))
    step = max(1, sizes.positions // keys)
    # A hundred thousand small views and products: half of what each costs outside of inference mode.
    with torch.inference_mode():
        for start in range(0, batch, step):
            prompts = slice(start, start + step)
            # Not assigned to a name, so that its copies of weights are freed before the next ones are made.
            _Maps(block, prompts, groups, spans, final, sizes).fill(metric, scores[prompts])
    return scores


def _dtypes(block: Block) -> tuple[torch.dtype, torch.dtype]:
    """The dtype of the outputs, and that of all up to the activation."""
    narrow = torch.promote_types(block.resid_pre.dtype, torch.float32)
    # Where a query loses its only key, a norm on the attention branch divides by next to nothing.
    wide = block.anatomy.attention_branch is not None and block.resid_pre.device.type != "mps"
    return narrow, torch.float64 if wide else narrow


class _Maps:
    """The maps of some prompts and one block in the making."""

    def __init__(
        self, block: Block, prompts: slice, groups: Groups, spans: Spans, final: Norm | None, sizes: Sizes
    ) -> None:
        self._sizes, (narrow, wide) = sizes, _dtypes(block)
        anatomy, path = block.anatomy, value_path(block)
        # No copy of all heads.
        self._groups = [slice(None) if len(group) == block.n_heads else group for group in groups]
        self._pattern, self._W_O = block.recorded("pattern")[prompts], path.W_O.to(wide)
        value, real = block.recorded("value")[prompts].to(wide), block.real_keys[prompts]
        self._value = value.repeat_interleave(block.n_heads // value.shape[2], dim=2)
        attended = block.attended[prompts] & block.real_queries[prompts, :, None] & real[:, None]
        self._sources = find_sources(attended, real, spans)
        # A norm on the branch comes before the multiplier (`CleanBlock.to_pre_activations`).
        self._place_sources(1.0 if anatomy.attention_branch else anatomy.residual_multiplier)
        states = states_of(block, prompts=prompts, dtype=narrow, attention_dtype=wide)
        pre, out = states.resid_pre.flatten(0, 1), states.attention_out.flatten(0, 1)
        post = block.resid_post[prompts].to(narrow).flatten(0, 1)
        pairs = sum(source.last - source.first for source in self._sources) * len(groups)
        # In a parallel block no change goes through the feed-forward.
        feed_forward = None if anatomy.parallel else anatomy.feed_forward
        matrices = [] if feed_forward is None else [x.to(wide) for x in feed_forward.input_matrices]
        product = folded(anatomy, path, None, wide, block.max_memory is None, matrices)
        self._folded = () if product is None else product
        W_out = None if feed_forward is None else feed_forward.W_out.to(narrow)
        parts = () if W_out is None else W_out.split(sizes.neurons)
        self._W_out = [as_right_factor(part, pairs) for part in parts]
        self._widths = list(map(len, parts))
        self._clean = CleanBlock(anatomy, pre, out, post, final, self._widths)

    def _place_sources(self, multiplier: float) -> None:
        """Each source's prompt and positions, and each value's factor, on the maps' device."""
        tensor = functools.partial(torch.tensor, dtype=torch.long, device=self._value.device)
        longest = max((len(source.keys) for source in self._sources), default=1)
        positions = [source.keys + [-1] * (longest - len(source.keys)) for source in self._sources]
        self._prompts, spans = tensor([source.prompt for source in self._sources]), tensor(positions)
        self._positions = spans.reshape(-1, longest).clamp_min(0)
        # Where a head sends nothing, its weight changes nothing.
        nonzero = (self._value != 0).any(-1) & (self._W_O != 0).flatten(1).any(1)
        sends = nonzero[self._prompts[:, None], self._positions] & (spans >= 0)[..., None]
        self._factors = sends.to(self._value.dtype) * -multiplier

    def fill(self, metric: str, scores: Float[Tensor, "batch group query key"]) -> None:
        """The scores of every group of heads."""
        step = self._sizes.keys
        for number, group in enumerate(self._groups):
            for start in range(0, len(self._sources), step):
                sources = self._sources[start : start + step]
                values = self._values(group, slice(start, start + step))
                for chunk in chunks(sources, self._sizes):
                    self._fill_chunk(chunk, values, metric, scores[:, number])

    def _values(self, group: slice | Sequence[int], sources: slice) -> _Values:
        """The values of some sources and heads, through the matrices."""
        positions = self._positions[sources]
        values = self._value[self._prompts[sources, None], positions][:, :, group]
        by_head = values.permute(2, 0, 1, 3).flatten(1, 2)

        def through(matrix: Tensor) -> Float[Tensor, "source rank width"]:
            of_heads: Tensor = torch.bmm(by_head, matrix).unflatten(1, positions.shape)
            # To [source, span · head, width]; a view, no copy, where each key is zeroed alone.
            return of_heads.permute(1, 2, 0, 3).flatten(1, 2)

        wide = [matrix[group].split(self._widths, dim=-1) for matrix in self._folded]
        # Some neurons at a time, because one product with all of them is slower.
        hidden = [[through(x) for x in parted] for parted in zip(*wide, strict=True)]
        head_vectors, pattern = through(self._W_O[group]), self._pattern[:, group]
        return _Values(positions, self._factors[sources, :, group], pattern, head_vectors, hidden)

    def _fill_chunk(
        self, chunk: list[Rectangle], values: _Values, metric: str, scores: Float[Tensor, "batch query key"]
    ) -> None:
        """The scores of a chunk's pairs, some neurons at a time so that these never leave the caches."""
        clean, shapes = self._clean, [rectangle.shape for rectangle in chunk]
        counts = [math.prod(shape) for shape in shapes]

        def rectangles(pairs: Float[Tensor, "pair width"]) -> Sequence[Float[Tensor, "key row width"]]:
            return [x.unflatten(0, shape) for x, shape in zip(pairs.split(counts), shapes, strict=True)]

        direction = clean.direction
        mid = direction.new_empty(sum(counts), direction.shape[1])
        # One tensor where no norm stands between the two: less memory to go through.
        added = mid if clean.added is None else torch.zeros_like(mid)
        entered, moved = [], []
        for rectangle, out in zip(chunk, rectangles(mid), strict=True):
            rows, weights = rectangle.lines(self._pattern.shape[2]), values.weights(rectangle)
            change = out if out.dtype == weights.dtype else torch.empty_like(out, dtype=weights.dtype)
            torch.bmm(weights, values.head_vectors[rectangle.sources], out=change)
            change, (scale, *scales) = clean.to_pre_activations(rows, change)
            if change is not out:
                out.copy_(change)
            moved.append(weights.any(-1))  # elsewhere no effect, not even a rounding error
            entered.append((rows, scales, weights * scale, rectangle.sources))
        factor = clean.multiplier if added is mid else 1.0  # else `CleanBlock.distance` multiplies
        for neurons, W_out, vectors in zip(clean.neurons, self._W_out, values.hidden_vectors, strict=True):
            hidden = mid.new_empty(len(mid), len(W_out))
            for (rows, scales, weights, sources), out in zip(entered, rectangles(hidden), strict=True):
                neurons.change(rows, scales, weights, [x[sources] for x in vectors], out)
            add_product(added, hidden, W_out, factor)
        for rectangle, moves, out, more in zip(chunk, moved, rectangles(mid), rectangles(added), strict=True):
            distance = clean.distance(rectangle.lines(self._pattern.shape[2]), out, more, metric)
            columns = slice(rectangle.column, rectangle.column + rectangle.shape[0])
            scores[rectangle.prompt, rectangle.rows, columns] = torch.where(moves, distance, 0.0).T


class _Values(NamedTuple):
    """The values of some sources and heads; `Rectangle.sources` count from the first of them.

    They have gone through the matrices, once per key and head: a pair costs a sum over heads.
    """

    positions: Int[Tensor, "source span"]  # a short span is filled up
    factors: Float[Tensor, "source span head"]  # 0 where a span is filled up or nothing is sent
    pattern: Float[Tensor, "batch head query key"]
    head_vectors: Float[Tensor, "source rank d_model"]  # v W_O; spans before heads
    hidden_vectors: Sequence[Sequence[Float[Tensor, "source rank neuron"]]]  # per part of neurons and matrix

    def weights(self, rectangle: Rectangle) -> Float[Tensor, "key row rank"]:
        """Factors of the values in each pair's change."""
        sources = rectangle.sources
        pattern = self.pattern[rectangle.prompt, :, rectangle.rows][..., self.positions[sources]]
        # In memory of their own order: a product of strided factors would be made one by one.
        return (pattern.permute(2, 1, 3, 0).contiguous() * self.factors[sources][:, None]).flatten(2)
