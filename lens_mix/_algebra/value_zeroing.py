"""Value Zeroing by algebra: the result of the intervention, without running the block again.

Without key j's values, the attention's output at query i changes by c_ij = -Σ_h a_ijh v_jh W_O^h, because the
pattern is the same. This change is propagated through the block's components, and outputs are never
subtracted:

    norm          maps a change to a change (`_NormChange`)
    W_in          multiplied with W_O and the norms' linear parts, and applied once per key and head; if
                  these are few, applied to each head's or each row's vector instead
    activation    applied per pair (`Neurons.change`)
    W_out         applied per pair, the one large product
    distance      computed from the change's components along and across the clean vector

The pairs of a rectangle are [key, prompt, row]. Its products are batched over one axis of keys and prompts,
[zeroed].
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lens_mix._algebra.clean_block import CleanBlock
from lens_mix._algebra.folded_weights import folded, pays, product_bytes
from lens_mix._algebra.value_zeroing_pairs import (
    IndexGroups,
    Rectangle,
    Sizes,
    ZeroedGroup,
    chunks,
    find_zeroed_groups,
    fitting,
    in_best_order,
)
from lens_mix._algebra.weight_cache import fits
from lens_mix._blocks.states import CleanStates, states_of, value_path
from lens_mix._model.anatomy import BlockAnatomy, Norm, ValuePath, through

if TYPE_CHECKING:
    from lens_mix._blocks.block import Block


def value_zeroing_maps(
    block: Block, groups: IndexGroups, metric: str, final: Norm | None
) -> Float[Tensor, "batch group query key"]:
    """Return one map of a verified block per group of query heads that are zeroed together.

    Args:
        block: The block.
        groups: The groups of heads; a head is in one group at most.
        metric: "cosine" or "euclidean".
        final: The final norm, if its output is compared; None to compare the block's.

    Raises:
        ValueError: `max_memory` is too small for the smallest chunk.
    """
    spans, (narrow, wide) = block.key_positions, _dtypes(block)
    sizes = fitting(block, (narrow, wide))
    batch, queries, keys = block.attended.shape
    scores = block.zeros(batch, len(groups), queries, keys if spans is None else len(spans[0]))
    # Under a memory bound no product is stored, so that the memory of the map can be counted.
    layers = 0 if block.max_memory is not None else len(block.stack)
    step = max(1, sizes.positions // keys)
    # There are about a hundred thousand small views and products, and inference mode halves their overhead.
    with torch.inference_mode():
        for start in range(0, batch, step):
            prompts = slice(start, start + step)
            real, of_prompts = block.real_keys[prompts], None if spans is None else spans[prompts]
            attended = block.attended[prompts] & block.real_queries[prompts, :, None] & real[:, None]
            found = find_zeroed_groups(attended, real, of_prompts)
            zeroed = in_best_order(found, sizes)
            states = states_of(block, prompts=prompts, dtype=narrow, attention_dtype=wide)
            resid_post = block.resid_post[prompts].to(narrow)
            # It is not assigned to a name, so that its copies of weights are freed before the next are made.
            _ZeroingMaps(states, resid_post, final, groups, zeroed, sizes, layers).fill(
                metric, scores[prompts]
            )
    return scores


def _dtypes(block: Block) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtype of the outputs, and that of all states up to the activation."""
    narrow = torch.promote_types(block.resid_pre.dtype, torch.float32)
    # If a query loses its only key, a norm on the attention branch divides by almost 0.
    # The device "mps" has no float64.
    wide = block.anatomy.attention_branch is not None and block.resid_pre.device.type != "mps"
    return narrow, torch.float64 if wide else narrow


class _ZeroingMaps:
    """The maps of some prompts and one block, and the tensors to compute them from.

    Args:
        states: The states of the block.
        resid_post: The block's output.
        final: The final norm, if its output is compared.
        groups: The groups of heads.
        zeroed: The groups of keys.
        sizes: The sizes of the tensors.
        layers: The number of blocks whose products of weights may be stored; 0 to store none.
    """

    def __init__(
        self,
        states: CleanStates,
        resid_post: Float[Tensor, "batch query d_model"],
        final: Norm | None,
        groups: IndexGroups,
        zeroed: Sequence[ZeroedGroup],
        sizes: Sizes,
        layers: int,
    ) -> None:
        anatomy, path, wide = states.anatomy, value_path(states), states.attention_out.dtype
        n_heads, self._zeroed, self._sizes = len(path.W_O), zeroed, sizes
        # A slice of all heads is a view, not a copy.
        self._groups = [slice(None) if len(group) == n_heads else group for group in groups]
        self._pattern, self._W_O = states.pattern, path.W_O.to(wide)
        value = states.value.to(wide)
        self._value = value.repeat_interleave(n_heads // value.shape[2], dim=2)
        # A norm on the branch comes before the multiplier (`CleanBlock.to_pre_activations`).
        self._place_zeroed(1.0 if anatomy.attention_branch else anatomy.residual_multiplier)
        # In a parallel block, the feed-forward does not change.
        feed_forward = None if anatomy.parallel else anatomy.feed_forward
        matrices = [] if feed_forward is None else [x.to(wide) for x in feed_forward.input_matrices]
        product = self._fold(anatomy, path, matrices, layers)
        self._norms, self._is_folded = anatomy.norms_before_feed_forward, product is not None
        self._input_matrices = matrices if product is None else product
        W_out = None if feed_forward is None else feed_forward.W_out.to(resid_post.dtype)
        self._W_out = () if W_out is None else W_out.split(sizes.neurons)
        self._widths = list(map(len, self._W_out))
        self._clean = CleanBlock(states, resid_post, final, self._widths)

    def _fold(
        self,
        anatomy: BlockAnatomy,
        path: ValuePath,
        matrices: Sequence[Float[Tensor, "d_model d_mlp"]],
        layers: int,
    ) -> Float[Tensor, "matrix head d_head d_mlp"] | None:
        """Return the products of W_O and the matrices, if they pay; None otherwise."""
        # W_in is applied to a zeroed group's values or to its rows' changes, whichever are fewer.
        groups = [self._value.shape[2] if isinstance(group, slice) else len(group) for group in self._groups]
        rows = [each.last - each.first for each in self._zeroed for _ in groups]
        values = [len(each.positions) * count for each in self._zeroed for count in groups]
        is_stored = layers > 0 and fits(layers * product_bytes(path, matrices, self._value.dtype))
        # A product that cannot be stored is made anew in each call. Whether it is stored already does not
        # matter, so that equal calls have equal digits in any order.
        if not pays(sum(map(min, rows, values)), sum(values), path.W_O, calls=3 if is_stored else 1):
            return None
        return folded(anatomy, path, None, self._value.dtype, layers > 0, matrices)

    def _place_zeroed(self, multiplier: float) -> None:
        """Store each zeroed group's prompt and positions, and each value's factor, on the maps' device."""
        tensor = functools.partial(torch.tensor, dtype=torch.long, device=self._value.device)
        longest = max((len(each.positions) for each in self._zeroed), default=1)
        positions = [each.positions + [-1] * (longest - len(each.positions)) for each in self._zeroed]
        self._prompts, spans = tensor([each.prompt for each in self._zeroed]), tensor(positions)
        self._positions = spans.reshape(-1, longest).clamp_min(0)
        # If a head sends 0, zeroing its value has no effect.
        nonzero = (self._value != 0).any(-1) & (self._W_O != 0).flatten(1).any(1)
        sends = nonzero[self._prompts[:, None], self._positions] & (spans >= 0)[..., None]
        self._factors = sends.to(self._value.dtype) * -multiplier

    def fill(self, metric: str, scores: Float[Tensor, "batch group query key"]) -> None:
        """Write the scores of every group of heads."""
        step = self._sizes.keys
        for number, group in enumerate(self._groups):
            for start in range(0, len(self._zeroed), step):
                zeroed = self._zeroed[start : start + step]
                values = self._values(group, slice(start, start + step))
                for chunk in chunks(zeroed, self._sizes):
                    self._fill_chunk(chunk, values, metric, scores[:, number])

    def _values(self, group: slice | Sequence[int], zeroed: slice) -> _ZeroedValues:
        """Return the values of some zeroed groups and heads, multiplied by the matrices."""
        positions = self._positions[zeroed]
        values = self._value[self._prompts[zeroed, None], positions][:, :, group]
        by_head = values.permute(2, 0, 1, 3).flatten(1, 2)

        def by_zeroed(of_heads: Tensor) -> Float[Tensor, "zeroed rank width"]:
            # The result is [zeroed, span · head, width], which is a view if each key is zeroed alone.
            rows: Tensor = of_heads.unflatten(1, positions.shape)
            return rows.permute(1, 2, 0, 3).flatten(1, 2)

        head_vectors, pattern = by_zeroed(torch.bmm(by_head, self._W_O[group])), self._pattern[:, group]
        hidden = None
        if self._is_folded or not self._input_matrices:
            parts = self._chunks_of_inputs()
            hidden = [[by_zeroed(torch.bmm(by_head, x[group])) for x in parted] for parted in parts]
        factors, prompts = self._factors[zeroed, :, group], self._prompts[zeroed]
        return _ZeroedValues(prompts, positions, factors, pattern, head_vectors, hidden)

    def _chunks_of_inputs(self) -> Iterator[tuple[Tensor, ...]]:
        """Yield W_in (and W_gate), or the products with them, in chunks of neurons: one for all is slower."""
        return zip(*(matrix.split(self._widths, dim=-1) for matrix in self._input_matrices), strict=True)

    def _hidden_vectors(
        self,
        values: _ZeroedValues,
        zeroed: Sequence[slice],
        vectors: Sequence[Float[Tensor, "zeroed rank d_model"]],
    ) -> Iterator[list[list[Float[Tensor, "zeroed rank neuron"]]]]:
        """Yield each rectangle's vectors times each matrix, in chunks of neurons."""
        if values.hidden_vectors is not None:
            for parted in values.hidden_vectors:
                yield [[x[keys] for x in parted] for keys in zeroed]
            return
        read = through(self._norms, torch.cat([x.flatten(0, 1) for x in vectors]))
        shapes = [x.shape[:2] for x in vectors]
        counts = [shape.numel() for shape in shapes]
        for matrices in self._chunks_of_inputs():
            products = [(read @ matrix).split(counts) for matrix in matrices]
            by_rectangle = zip(shapes, *products, strict=True)
            yield [[x.unflatten(0, shape) for x in parts] for shape, *parts in by_rectangle]

    def _fill_chunk(
        self,
        chunk: list[Rectangle],
        values: _ZeroedValues,
        metric: str,
        scores: Float[Tensor, "batch query key"],
    ) -> None:
        """Write the scores of a chunk's pairs, in chunks of neurons that fit a CPU's caches."""
        clean, shapes = self._clean, [rectangle.shape for rectangle in chunk]
        counts = [rectangle.pairs for rectangle in chunk]

        def rectangles(pairs: Float[Tensor, "pair width"]) -> Sequence[Float[Tensor, "key prompt row width"]]:
            return [x.unflatten(0, shape) for x, shape in zip(pairs.split(counts), shapes, strict=True)]

        direction = clean.direction
        mid = direction.new_empty(sum(counts), direction.shape[-1])
        # Without a norm on the feed-forward's branch, one tensor has the sum of both changes.
        added = mid if clean.added is None else torch.zeros_like(mid)
        entered, moved, vectors = [], [], []
        for rectangle, out in zip(chunk, rectangles(mid), strict=True):
            weights = values.weights(rectangle)
            change = out if out.dtype == weights.dtype else torch.empty_like(out, dtype=weights.dtype)
            head_vectors = values.head_vectors[rectangle.zeroed]
            torch.bmm(weights, head_vectors, out=change.view(-1, *change.shape[2:]))
            # A pair without weight has exactly the score 0, without a rounding error.
            moved.append(weights.any(-1).unflatten(0, rectangle.shape[:2]))
            if values.hidden_vectors is None:
                weights, sent = _fewer_vectors(weights, head_vectors, change.flatten(0, 1))
                vectors.append(sent)
            change, (scale, *scales) = clean.to_pre_activations(rectangle.place, change)
            if change is not out:
                out.copy_(change)
            weights = (weights.unflatten(0, rectangle.shape[:2]) * scale).flatten(0, 1)
            entered.append((rectangle.place, scales, weights))
        # With a norm on the branch, `CleanBlock.distance` applies the multiplier.
        factor = clean.multiplier if added is mid else 1.0
        hidden_vectors = self._hidden_vectors(values, [rectangle.zeroed for rectangle in chunk], vectors)
        for neurons, W_out, by_rectangle in zip(clean.neurons, self._W_out, hidden_vectors, strict=True):
            hidden = mid.new_empty(len(mid), len(W_out))
            for entry, of_matrices, out in zip(entered, by_rectangle, rectangles(hidden), strict=True):
                neurons.change(*entry, of_matrices, out)
            added.addmm_(hidden, W_out, alpha=factor)
        for rectangle, has_moved, out, more in zip(
            chunk, moved, rectangles(mid), rectangles(added), strict=True
        ):
            distance = clean.distance(rectangle.place, out, more, metric)
            keys = slice(rectangle.key, rectangle.key + rectangle.shape[0])
            scores[(*rectangle.place, keys)] = torch.where(has_moved, distance, 0.0).permute(1, 2, 0)


class _ZeroedValues(NamedTuple):
    """The values of some zeroed groups and heads, multiplied by the matrices once per key and head.

    `Rectangle.zeroed` counts from the first of these groups. Each pair's vector is a sum over heads.

    Attributes:
        prompts: The prompt of each group.
        positions: The positions of each group; a short group is padded.
        factors: The factor of each value in the change; 0 for padding and for a head that sends 0.
        pattern: The pattern of these heads.
        head_vectors: v W_O, on an axis of positions and heads.
        hidden_vectors: v times the products with W_in, per chunk of neurons and matrix; None if W_in is
            applied to the vectors of each pair or head instead, whichever are fewer.
    """

    prompts: Int[Tensor, " zeroed"]
    positions: Int[Tensor, "zeroed span"]
    factors: Float[Tensor, "zeroed span head"]
    pattern: Float[Tensor, "batch head query key"]
    head_vectors: Float[Tensor, "zeroed rank d_model"]
    hidden_vectors: Sequence[Sequence[Float[Tensor, "zeroed rank neuron"]]] | None

    def weights(self, rectangle: Rectangle) -> Float[Tensor, "zeroed row rank"]:
        """Return the factors of the values in each pair's change."""
        zeroed = rectangle.zeroed
        pattern, positions = self.pattern[:, :, rectangle.rows], self.positions[zeroed]
        pattern = pattern[self.prompts[zeroed, None], :, :, positions]
        # A product of strided factors would be computed one by one.
        return (pattern.permute(0, 3, 1, 2).contiguous() * self.factors[zeroed][:, None]).flatten(2)


def _fewer_vectors(
    weights: Float[Tensor, "zeroed row rank"],
    head_vectors: Float[Tensor, "zeroed rank d_model"],
    change: Float[Tensor, "zeroed row d_model"],
) -> tuple[Float[Tensor, "zeroed row vector"], Float[Tensor, "zeroed vector d_model"]]:
    """Return factors and vectors whose sums are the changes: the head vectors, or the changes themselves."""
    rows = change.shape[1]
    if rows >= head_vectors.shape[1]:
        return weights, head_vectors
    alone = torch.eye(rows, dtype=weights.dtype, device=weights.device)
    # With a norm on the attention's branch or after it, the change of mid overwrites this tensor.
    return alone.expand(len(change), rows, rows), change.clone()
