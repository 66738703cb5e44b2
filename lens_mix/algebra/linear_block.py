"""A block held linear at its true states, for shares of what enters it (DecompX)."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal

import torch
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor

from lens_mix.algebra.activations import derivative, gated_multipliers, plain_multiplier
from lens_mix.algebra.bias_split import HeldNorm, Split, split_bias, through_linear
from lens_mix.algebra.vectors import value_path
from lens_mix.lens.anatomy import ACTIVATIONS, FeedForward

if TYPE_CHECKING:
    from lens_mix.lens.block import Block

Slope = Literal["zero_origin", "tangent", "relu"]
SLOPES: tuple[str, ...] = ("zero_origin", "tangent", "relu")
# (matrix, bias, output per input) of a hidden layer: once if it is plain, twice if it is gated.
_Slopes = tuple[tuple[Tensor, Tensor | None, Float[Tensor, "batch query d_mlp"]], ...]


@dataclasses.dataclass(frozen=True)
class DecomposedBlock:
    """Shares at the stages of one block.

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


class LinearBlock:
    """One block from the attention's output on; its norms and its activation are linear for all shares.

    Args:
        block: with "pattern", "value" and "z" recorded, and the attention's parts verified.
        slope: the line that stands for the activation, as in `DecompX`.
        alone: whether every position's whole vector is its own source; then b_V belongs to the key.

    Attributes:
        resid_pre: what enters the block, in the shares' dtype (at least float32).
    """

    def __init__(self, block: Block, slope: Slope, alone: bool) -> None:
        self._anatomy = anatomy = block.anatomy
        self._multiplier = anatomy.residual_multiplier
        x = block.resid_pre.to(torch.promote_types(block.resid_pre.dtype, torch.float32))
        self.resid_pre, self._bias = x, _attention_bias(block, alone, x.dtype)
        attention_out = value_path(block).project(block.recorded("z").to(x.dtype))
        self._attention_branch = HeldNorm(anatomy.attention_branch, attention_out)
        summed = x + self._attention_branch.output() * self._multiplier
        self._attention_residual = HeldNorm(anatomy.attention_residual, summed)
        mid = self._attention_residual.output()
        self._input = HeldNorm(anatomy.feed_forward_input, x if anatomy.parallel else mid)
        self._branch = self._residual = HeldNorm(None, mid)
        self._slopes: _Slopes = ()
        if anatomy.feed_forward is None:
            return
        read = self._input.output()
        self._slopes, self._b_hidden = _slopes(anatomy.feed_forward, read, slope)
        if anatomy.feed_forward_branch is not None or anatomy.feed_forward_residual is not None:
            self._branch = HeldNorm(anatomy.feed_forward_branch, anatomy.feed_forward(read))
            summed = mid + self._branch.output() * self._multiplier
            self._residual = HeldNorm(anatomy.feed_forward_residual, summed)

    def shares(
        self,
        entering: Float[Tensor, "batch query source d_model"],
        attention: Float[Tensor, "batch query source d_model"],
        rule: Split,
        rows: slice = slice(None),
    ) -> DecomposedBlock:
        """From shares of what enters these rows of the block, and of their attention, to its output's."""
        s, bias, parallel = self._multiplier, self._bias[:, rows], self._anatomy.parallel
        if self._attention_branch.norm is None:
            # The residual stream's shares have a claim to the bias too.
            mid = torch.add(entering, attention, alpha=s)
            mid = split_bias(mid, bias * s, rule, mid)
        else:
            branch = self._attention_branch.shares(split_bias(attention, bias, rule), rule, rows)
            mid = torch.add(entering, branch, alpha=s)
        mid = self._attention_residual.shares(mid, rule, rows)
        feed_forward = self._anatomy.feed_forward
        if feed_forward is None:
            return DecomposedBlock(attention, mid, None, mid)
        read = self._input.shares(entering if parallel else mid, rule, rows)
        (W, b, slope), *gated = self._slopes
        hidden = through_linear(W, b, read, rule).mul_(slope[:, rows, None])
        for W, b, slope in gated:
            hidden.addcmul_(through_linear(W, b, read, rule), slope[:, rows, None])
        if self._b_hidden is not None:
            hidden = split_bias(hidden, self._b_hidden[:, rows], rule, hidden)
        out = through_linear(feed_forward.W_out, feed_forward.b_out, hidden, rule)
        post = torch.add(mid, self._branch.shares(out, rule, rows), alpha=s)
        return DecomposedBlock(attention, mid, out, self._residual.shares(post, rule, rows))


def decomposed(
    block: Block,
    rule: Split,
    slope: Slope,
    shares: Float[Tensor, "batch key source *d_model"] | None,
    state: Float[Tensor, "batch key d_model"] | None,
) -> DecomposedBlock:
    """From the shares of what enters a block to those of its output, for all pairs at once.

    `shares` and `state` are X and the residual stream, entering at all positions. Without a state, each
    position's whole vector and value (b_V included) enter, and `shares` says how much of them is each
    source's; None: all is its own.
    """
    path, linear = value_path(block), LinearBlock(block, slope, alone=state is None)
    x = linear.resid_pre
    # Copies, for `decompx_logits`: autograd keeps nothing that was recorded in inference mode.
    pattern, value = (block.recorded(role).to(x.dtype, copy=True) for role in ("pattern", "value"))
    if shares is None:
        shares = torch.eye(block.real.shape[1], dtype=x.dtype, device=x.device).expand(len(x), -1, -1)
    if state is None:
        entering = block.rows_of(shares)[..., None] * x[:, :, None].clone()
        value = shares[..., None, None] * value[:, :, None]
    else:
        entering = block.rows_of(shares)
        read = HeldNorm(block.anatomy.attention_input, state).shares(shares, rule)
        # One product for all heads: `decompx_logits` goes back through it for many logits at once.
        W_V = rearrange(path.W_V.to(x.dtype), "head d_model d_head -> d_model (head d_head)")
        value = (read @ W_V).unflatten(-1, (len(path.W_V), -1))
    value = value.repeat_interleave(len(path.W_O) // len(path.W_V), dim=3)
    axes = "batch head query key, batch key source head d_head -> batch query source head d_head"
    attention = einsum(pattern, value, axes).flatten(3) @ path.W_O.to(x.dtype).flatten(0, 1)
    return linear.shares(entering, attention, rule)


def _attention_bias(block: Block, alone: bool, dtype: torch.dtype) -> Float[Tensor, "batch query d_model"]:
    """What of the attention's output is in no share: b_O, and b_V mixed by the pattern, unless `alone`."""
    path, pattern = value_path(block), block.recorded("pattern").to(dtype)
    # A pattern's rows don't sum to 1 where there are attention sinks.
    mass = pattern.sum(-1) * (not alone)  # alone, the values have b_V in them
    b_V = path.W_V.new_zeros(len(path.W_V), path.W_V.shape[2]) if path.b_V is None else path.b_V
    b_V = b_V.to(dtype).repeat_interleave(mass.shape[1] // len(b_V), dim=0)
    return path.project(einsum(mass, b_V, "batch head query, head d_head -> batch query head d_head"))


def _slopes(
    feed_forward: FeedForward, read: Float[Tensor, "batch query d_model"], slope: Slope
) -> tuple[_Slopes, Float[Tensor, "batch query d_mlp"] | None]:
    """The hidden layer's lines, and what else is added to it."""
    name, dtype = feed_forward.activation, read.dtype

    def state(W: Tensor, b: Tensor | None) -> Tensor:
        return read @ W if b is None else read @ W + b.to(dtype)

    W_in, b_in, b_hidden = feed_forward.W_in.to(dtype), feed_forward.b_in, feed_forward.b_hidden
    up = state(W_in, b_in)
    b_hidden = None if b_hidden is None else b_hidden.expand_as(up)
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
