"""Shares of all input tokens, carried through a block in chunks of queries (the machinery of DecompX).

The share X_is of input token s in the residual stream at position i has d_model numbers for every pair. So
little is kept whole: the shares themselves, overwritten block by block, and what they make of the values, for
every query reads those of many keys. All else is made for a chunk of queries, and only for the sources that
reach any of them: in a causal model half of the pairs cost nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

import torch
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor

from lens_mix.algebra.activations import derivative, gated_multipliers, plain_multiplier
from lens_mix.algebra.bias_split import Split, split_bias, through_linear, through_norm
from lens_mix.algebra.budget import budget_beside
from lens_mix.algebra.vectors import value_path
from lens_mix.lens.anatomy import ACTIVATIONS, BlockAnatomy, FeedForward

if TYPE_CHECKING:
    from lens_mix.lens.block import Block

Slope = Literal["zero_origin", "tangent", "relu"]
SLOPES: tuple[str, ...] = ("zero_origin", "tangent", "relu")
# (matrix, bias, output per input) of a hidden layer: once if it is plain, twice if it is gated.
Slopes = tuple[tuple[Tensor, Tensor | None, Float[Tensor, "batch query d_mlp"]], ...]

# Numbers in the hidden layer of one chunk: enough rows for matrix products at full speed.
HIDDEN_ELEMENTS = 1 << 20


@dataclasses.dataclass(frozen=True)
class DecomposedBlock:
    """Shares at the stages of one block, [batch, query, source, d_model].

    Attributes:
        attention: of the attention's output, without biases.
        mid: of the residual stream after attention (and after the norm on it, in post-norm blocks).
        feed_forward: of the feed-forward's output; None where there is none.
        output: of the block's output.
    """

    attention: Float[Tensor, "batch query source d_model"]
    mid: Float[Tensor, "batch query source d_model"]
    feed_forward: Float[Tensor, "batch query source d_model"] | None
    output: Float[Tensor, "batch query source d_model"]


@dataclasses.dataclass(frozen=True)
class Shares:
    """Every source's share of the residual stream at all positions.

    Attributes:
        vectors: the shares.
        state: the residual stream itself.
        stops: per position, one more than the last source that has a share in it, in any prompt.
    """

    vectors: Float[Tensor, "batch pos source d_model"]
    state: Float[Tensor, "batch pos d_model"]
    stops: list[int]


@dataclasses.dataclass(frozen=True)
class LinearBlock:
    """One block from the attention's output on, held linear at the true states of its rows.

    Attributes:
        anatomy: the block's.
        resid_pre, attention_out, summed: what enters the block, what the attention gives, and their sum.
        read_from: what the norm before the feed-forward reads.
        slopes, b_hidden: the hidden layer, and what else is added to it.
        feed_forward_out, feed_forward_summed: what the two norms behind the feed-forward read, if any.
    """

    anatomy: BlockAnatomy
    resid_pre: Float[Tensor, "batch query d_model"]
    attention_out: Float[Tensor, "batch query d_model"]
    summed: Float[Tensor, "batch query d_model"]
    read_from: Float[Tensor, "batch query d_model"]
    slopes: Slopes = ()
    b_hidden: Float[Tensor, "batch query d_mlp"] | None = None
    feed_forward_out: Float[Tensor, "batch query d_model"] | None = None
    feed_forward_summed: Float[Tensor, "batch query d_model"] | None = None

    def carry(
        self,
        entering: Float[Tensor, "batch query source d_model"],
        attention: Float[Tensor, "batch query source d_model"],
        bias: Float[Tensor, "batch query d_model"],
        rule: Split,
        rows: slice = slice(None),
    ) -> DecomposedBlock:
        """Shares of the block's output.

        Args:
            entering: shares of the residual stream entering the block.
            attention: shares of the attention's output.
            bias: what of the attention's output is in no share.
            rule: how biases are handed out.
            rows: which of the block's rows these are.
        """
        anatomy, s = self.anatomy, self.anatomy.residual_multiplier
        if anatomy.attention_branch is None:
            mid = torch.add(entering, attention, alpha=s)
            mid = split_bias(mid, bias * s, rule, mid)
        else:
            branch = split_bias(attention, bias, rule)
            branch = through_norm(anatomy.attention_branch, branch, self.attention_out[:, rows], rule)
            mid = torch.add(entering, branch, alpha=s)
        mid = through_norm(anatomy.attention_residual, mid, self.summed[:, rows], rule)
        if anatomy.feed_forward is None:
            return DecomposedBlock(attention, mid, None, mid)
        feed_forward = self._feed_forward(
            anatomy.feed_forward, entering if anatomy.parallel else mid, rule, rows
        )
        branch = feed_forward
        if self.feed_forward_out is not None:
            state = self.feed_forward_out[:, rows]
            branch = through_norm(anatomy.feed_forward_branch, branch, state, rule)
        output = torch.add(mid, branch, alpha=s)
        if self.feed_forward_summed is not None:
            state = self.feed_forward_summed[:, rows]
            output = through_norm(anatomy.feed_forward_residual, output, state, rule)
        return DecomposedBlock(attention, mid, feed_forward, output)

    def _feed_forward(
        self,
        feed_forward: FeedForward,
        shares: Float[Tensor, "batch query source d_model"],
        rule: Split,
        rows: slice,
    ) -> Float[Tensor, "batch query source d_model"]:
        read = through_norm(self.anatomy.feed_forward_input, shares, self.read_from[:, rows], rule)
        (W, b, slope), *gated = self.slopes
        hidden = through_linear(W, b, read, rule).mul_(slope[:, rows, None])
        for W, b, slope in gated:
            hidden.addcmul_(through_linear(W, b, read, rule), slope[:, rows, None])
        if self.b_hidden is not None:
            hidden = split_bias(hidden, self.b_hidden[:, rows], rule, hidden)
        return through_linear(feed_forward.W_out, feed_forward.b_out, hidden, rule)


def linear_block(block: Block, slope: Slope) -> LinearBlock:
    """The block held linear; needs "pattern", "value" and "z", and the attention's parts proven.

    Args:
        block: the block.
        slope: the line that stands for the activation, as in `DecompX`.
    """
    anatomy, x = block.anatomy, resid_pre(block)
    attention_out = value_path(block).project(block.recorded("z").to(x.dtype))
    branch = attention_out if anatomy.attention_branch is None else anatomy.attention_branch(attention_out)
    summed = x + branch * anatomy.residual_multiplier
    mid = summed if anatomy.attention_residual is None else anatomy.attention_residual(summed)
    read_from = x if anatomy.parallel else mid
    linear = LinearBlock(anatomy, x, attention_out, summed, read_from)
    if anatomy.feed_forward is None:
        return linear
    read = anatomy.feed_forward_in(x, mid)
    slopes, b_hidden = _slopes(anatomy.feed_forward, read, slope)
    linear = dataclasses.replace(linear, slopes=slopes, b_hidden=b_hidden)
    if anatomy.feed_forward_branch is None and anatomy.feed_forward_residual is None:
        return linear
    out = anatomy.feed_forward(read)
    branch = out if anatomy.feed_forward_branch is None else anatomy.feed_forward_branch(out)
    summed = mid + branch * anatomy.residual_multiplier
    return dataclasses.replace(linear, feed_forward_out=out, feed_forward_summed=summed)


def resid_pre(block: Block) -> Float[Tensor, "batch query d_model"]:
    """The residual stream entering the block, in the shares' dtype: at least float32."""
    return block.resid_pre.to(torch.promote_types(block.resid_pre.dtype, torch.float32))


def _slopes(
    feed_forward: FeedForward, read: Float[Tensor, "batch query d_model"], slope: Slope
) -> tuple[Slopes, Tensor | None]:
    """`LinearBlock.slopes` and `LinearBlock.b_hidden`."""
    name, dtype, b_hidden = feed_forward.activation, read.dtype, feed_forward.b_hidden

    def state(W: Tensor, b: Tensor | None) -> Tensor:
        return read @ W if b is None else read @ W + b.to(dtype)

    W_in, b_in = feed_forward.W_in.to(dtype), feed_forward.b_in
    up = state(W_in, b_in)
    b_hidden = None if b_hidden is None else b_hidden.to(dtype).expand_as(up)
    if feed_forward.W_gate is not None:
        W_gate, b_gate = feed_forward.W_gate.to(dtype), feed_forward.b_gate
        m_gate, m_up = gated_multipliers(name, state(W_gate, b_gate).double(), None, up.double(), None)
        return ((W_gate, b_gate, m_gate.to(dtype)), (W_in, b_in, m_up.to(dtype))), b_hidden
    if slope == "tangent":
        activation = ACTIVATIONS[name]
        tangent = derivative(activation, up)
        return ((W_in, b_in, tangent),), activation(up) - tangent * up
    m = up > 0 if slope == "relu" else plain_multiplier(name, up.double(), None)
    return ((W_in, b_in, m.to(dtype)),), b_hidden


def attention_bias(block: Block, alone: bool) -> Float[Tensor, "batch query d_model"]:
    """What of the attention's output is in no share: b_O, and b_V where the shares went through W_V.

    Args:
        block: the block.
        alone: whether every position's whole vector is its own; then b_V belongs to the key.
    """
    path, bias = value_path(block), torch.zeros_like(resid_pre(block))
    if path.b_O is not None:
        bias += path.b_O.to(bias.dtype)
    if alone or path.b_V is None:
        return bias
    # A pattern's rows don't sum to 1 where there are attention sinks.
    mass = block.recorded("pattern").to(bias.dtype).sum(-1)
    b_V = path.b_V.to(bias.dtype).repeat_interleave(mass.shape[1] // len(path.b_V), dim=0)
    by_head = einsum(b_V, path.W_O.to(bias.dtype), "head d_head, head d_head d_model -> head d_model")
    return bias + einsum(mass, by_head, "batch head query, head d_model -> batch query d_model")


class Decomposition:
    """One block's step, in chunks of queries.

    Args:
        block: the block.
        entering: shares of the residual stream entering it; None: every position's whole vector is its own.
        biases, slope: as in `DecompX`.
        whole: how many tensors of the shares' size there are meanwhile, those entering included.

    Attributes:
        stops: per row, one more than the last source that reaches it in any prompt.

    Raises:
        ValueError: the smallest chunk doesn't fit into the block's `max_memory`.
    """

    def __init__(
        self, block: Block, entering: Shares | None, biases: Split, slope: Slope, whole: int = 1
    ) -> None:
        self._block, self._entering, self._rule = block, entering, biases
        self._pairs = _chunk_pairs(block, whole) // len(block.real)
        self._linear = linear_block(block, slope)
        self._bias = attention_bias(block, alone=entering is None)
        self._values = self._own_values() if entering is None else self._read_values(entering)
        seen = (block.seen & block.real_queries[:, :, None]).any(0)
        stops = torch.arange(1, seen.shape[1] + 1) if entering is None else torch.tensor(entering.stops)
        stops = stops.to(seen.device)
        self.stops: list[int] = torch.maximum((seen * stops).amax(1), stops[block.queries].amax(0)).tolist()

    def chunks(self) -> Iterator[tuple[slice, int, DecomposedBlock]]:
        """Rows, how many sources reach any of them, and the shares of these sources in these rows.

        A chunk reads the entering shares of its own rows only, so its result may take their place.
        """
        padding = None if bool(self._block.real_queries.all()) else ~self._block.real_queries
        for rows, stop in _cut(self.stops, self._pairs):
            attention = self._attention(rows, stop)
            stages = self._linear.carry(
                self._own(rows, stop), attention, self._bias[:, rows], self._rule, rows
            )
            if padding is not None:
                for stage in vars(stages).values():
                    if stage is not None:
                        stage.masked_fill_(padding[:, rows, None, None], 0)
            yield rows, stop, stages

    def lengths(
        self, shares: Float[Tensor, "batch query source d_model"] | None = None
    ) -> Float[Tensor, "batch query source"]:
        """‖X_is‖ at the block's output; the shares themselves are written to `shares`, if it is given."""
        out = self._block.zeros(*self._block.queries.shape, self._block.real.shape[1])
        for rows, stop, stages in self.chunks():
            out[:, rows, :stop] = torch.linalg.vector_norm(stages.output, dim=-1)
            if shares is not None:
                shares[:, rows, :stop] = stages.output
        return out

    def _own_values(self) -> Float[Tensor, "batch key head d_model"]:
        """What each position's own vector, b_V included, gives to a query by way of each head."""
        value = self._block.recorded("value").to(self._bias.dtype)
        W_O = value_path(self._block).W_O.to(value.dtype)
        value = value.repeat_interleave(len(W_O) // value.shape[2], dim=2)
        return einsum(value, W_O, "batch key head d_head, head d_head d_model -> batch key head d_model")

    def _read_values(self, entering: Shares) -> Float[Tensor, "batch value_head key source d_head"]:
        """What the entering shares make of the values, without b_V."""
        vectors, W_V = entering.vectors, value_path(self._block).W_V.to(self._bias.dtype)
        of_heads = rearrange(W_V, "head d_model d_head -> d_model (head d_head)")
        out = vectors.new_zeros(len(vectors), len(W_V), *vectors.shape[1:3], W_V.shape[2])
        norm = self._block.anatomy.attention_input
        axes = "batch key source (head d_head) -> batch head key source d_head"
        for keys, stop in _cut(entering.stops, self._pairs):
            read = through_norm(norm, vectors[:, keys, :stop], entering.state[:, keys], self._rule)
            out[:, :, keys, :stop] = rearrange(read @ of_heads, axes, head=len(W_V))
        return out

    def _own(self, rows: slice, stop: int) -> Float[Tensor, "batch query source d_model"]:
        """The entering shares of some rows."""
        queries = self._block.queries[:, rows]
        batch = torch.arange(len(queries), device=queries.device)[:, None]
        if self._entering is not None:
            vectors = self._entering.vectors
            return (
                vectors[:, rows, :stop] if self._block.every_query else vectors[batch, queries][:, :, :stop]
            )
        x = self._linear.resid_pre[:, rows]
        own = x.new_zeros(*queries.shape, stop, x.shape[-1])
        own[batch, torch.arange(queries.shape[1], device=queries.device), queries] = x
        return own

    def _attention(self, rows: slice, stop: int) -> Float[Tensor, "batch query source d_model"]:
        """Shares of the attention's output: what each row got of each source by way of all keys."""
        pattern = self._block.recorded("pattern")[:, :, rows, :stop].to(self._values.dtype)
        if self._entering is None:
            axes = "batch head query key, batch key head d_model -> batch query key d_model"
            return einsum(pattern, self._values[:, :stop], axes).contiguous()
        values = self._values[:, :, :stop, :stop]
        # One product for all heads that share their values.
        axes = "batch (head group) query key -> batch head (group query) key"
        mixed = rearrange(pattern, axes, head=values.shape[1]) @ values.flatten(3)
        axes = "batch head (group query) (source d_head) -> batch query source (head group d_head)"
        mixed = rearrange(mixed, axes, query=pattern.shape[2], source=stop)
        return mixed @ value_path(self._block).W_O.to(mixed.dtype).flatten(0, 1)


def decomposed_block(
    block: Block, entering: Shares | None, biases: Split, slope: Slope
) -> tuple[DecomposedBlock, list[int]]:
    """One block's shares at all stages, whole, and `Shares.stops` of its output."""
    # Four stages, and what enters.
    step = Decomposition(block, entering, biases, slope, whole=5)
    shape = (*block.queries.shape, block.real.shape[1], block.resid_pre.shape[-1])
    attention, mid, output = block.zeros(*shape), block.zeros(*shape), block.zeros(*shape)
    feed_forward = None if block.anatomy.feed_forward is None else block.zeros(*shape)
    whole = DecomposedBlock(attention, mid, feed_forward, output)
    for rows, stop, stages in step.chunks():
        for name, stage in vars(stages).items():
            if stage is not None:
                getattr(whole, name)[:, rows, :stop] = stage
    return whole, step.stops


def carried(
    blocks: Sequence[Block], biases: Split, slope: Slope
) -> Iterator[tuple[Float[Tensor, "batch query source"], Float[Tensor, "batch query source d_model"]]]:
    """After each block the lengths of all shares, and the shares, which the next block overwrites.

    Args:
        blocks: from the first one up; all but the last with all rows.
        biases, slope: as in `DecompX`.

    Raises:
        ValueError: the smallest chunk doesn't fit into a block's `max_memory`.
    """
    entering: Shares | None = None
    for block in blocks:
        lengths, entering = _after(block, entering, biases, slope)
        yield lengths, entering.vectors


def _after(
    block: Block, entering: Shares | None, biases: Split, slope: Slope
) -> tuple[Float[Tensor, "batch query source"], Shares]:
    """The lengths of the shares after a block, and the shares, in the place of those entering if they fit."""
    step = Decomposition(block, entering, biases, slope)
    if entering is not None and block.every_query:
        vectors = entering.vectors
    else:
        vectors = block.zeros(*block.queries.shape, block.real.shape[1], block.resid_pre.shape[-1])
    lengths = step.lengths(vectors)
    return lengths, Shares(vectors, block.resid_post.to(vectors.dtype), step.stops)


def _cut(stops: list[int], pairs: int) -> Iterator[tuple[slice, int]]:
    """Chunks of at most as many pairs of row and source (or one row), each with its largest stop."""
    start, stop = 0, 0
    for row, reached in enumerate(stops):
        if row > start and max(stop, reached) * (row + 1 - start) > pairs:
            yield slice(start, row), stop
            start, stop = row, 0
        stop = max(stop, reached)
    yield slice(start, len(stops)), stop


def _chunk_pairs(block: Block, whole: int) -> int:
    """How many pairs of query and source a chunk may have, those of all prompts together.

    Raises:
        ValueError: `max_memory` doesn't hold one query's.
    """
    fixed, pair = _bytes(block, whole)
    room = budget_beside(block, fixed, block.real.numel() * pair, "DecompX")
    feed_forward = block.anatomy.feed_forward
    pairs = HIDDEN_ELEMENTS // (
        block.resid_pre.shape[-1] if feed_forward is None else len(feed_forward.W_out)
    )
    return pairs if room is None else min(pairs, room // pair)


def _bytes(block: Block, whole: int) -> tuple[int, int]:
    """Bytes of a block's step beside its chunks, and of each pair of query and source in a chunk.

    Args:
        block: the block.
        whole: how many tensors of the shares' size there are.
    """
    (batch, queries, d_model), positions = block.resid_pre.shape, block.real.shape[1]
    path, feed_forward, size = value_path(block), block.anatomy.feed_forward, resid_pre(block).dtype.itemsize
    (value_heads, _, d_head), heads = path.W_V.shape, len(path.W_O)
    # Where no shares are kept, none are read.
    read_values = positions * value_heads * d_head if whole else 0
    values = max(read_values, heads * d_model + 2 * heads * d_head)
    shares = batch * positions * (positions * whole * d_model + values) * size
    states = batch * queries * (12 * d_model + 3 * heads * d_head + 3 * positions) * size
    weights, pair = 2 * heads * d_head * d_model, 9 * d_model + 2 * heads * d_head
    if feed_forward is not None:
        d_mlp, matrices = len(feed_forward.W_out), 1 if feed_forward.W_gate is None else 2
        states += batch * queries * matrices * d_mlp * (6 * 8 + 3 * size)
        weights += 0 if feed_forward.W_in.dtype.itemsize == size else (matrices + 1) * d_model * d_mlp
        pair += (matrices + 1) * d_mlp
    return shares + states + weights * size, pair * size
