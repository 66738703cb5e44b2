"""A block linearised at its clean states, for shares of its input (DecompX)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor

from lens_mix._algebra.activations import derivative, path_multipliers
from lens_mix._algebra.bias_split import Split, split_bias, through_linear, through_linear_norm
from lens_mix._blocks.states import BlockStates, CleanStates, states_of, value_path
from lens_mix._classes.model_classes import UnsupportedModelError
from lens_mix._model.anatomy import ACTIVATIONS, FeedForward, ValuePath

if TYPE_CHECKING:
    from lens_mix._blocks.block import Block

Slope = Literal["zero_origin", "tangent", "relu"]
SLOPES: tuple[str, ...] = ("zero_origin", "tangent", "relu")
# (matrix, bias, slope) of a hidden layer's pre-activations: one entry if it is plain, two if it is gated.
_Slopes = tuple[tuple[Tensor, Tensor | None, Float[Tensor, "batch query d_mlp"]], ...]


@dataclasses.dataclass(frozen=True)
class DecomposedBlock:
    """Shares at the stages of one block.

    Attributes:
        attention: The shares of the attention's output, without biases.
        mid: Those of the residual stream after attention (and, in post-norm blocks, after its norm).
        feed_forward: Those of the feed-forward's output; None without a feed-forward.
        output: Those of the block's output.
    """

    attention: Float[Tensor, "batch query input d_model"]
    mid: Float[Tensor, "batch query input d_model"]
    feed_forward: Float[Tensor, "batch query input d_model"] | None
    output: Float[Tensor, "batch query input d_model"]


class LinearBlock:
    """One block from the attention's output on, with its norms and its activation linearised.

    Args:
        block: A block with "pattern" and "value" recorded, and its attention verified.
        slope: The linearisation of the activation, as in `DecompX`.
        alone: Whether every position's vector is its own share; b_V belongs to the key then.

    Attributes:
        states: The states at which the block is linearised; the shares have their dtype.
    """

    def __init__(self, block: Block, slope: Slope, alone: bool) -> None:
        self._anatomy, self.states = block.anatomy, states_of(block)
        self._begins_with_a_token = bool(block.real[:, 0].all())
        self._multiplier = block.anatomy.residual_multiplier
        self._bias = _attention_bias(value_path(block), self.states, alone)
        self._slopes: _Slopes = ()
        if block.anatomy.feed_forward is not None:
            self._slopes, self._b_hidden = _slopes(block.anatomy.feed_forward, self.states, slope)

    def shares(
        self,
        entering: Float[Tensor, "batch query input d_model"],
        attention: Float[Tensor, "batch query input d_model"],
        rule: Split,
        rows: slice = slice(None),
    ) -> DecomposedBlock:
        """Return shares of some rows of the block's output, from those of its input and its attention.

        Raises:
            UnsupportedModelError: The rule gives biases to the first position, and that is padding.
        """
        if rule == "first" and not self._begins_with_a_token:
            raise UnsupportedModelError(
                "padding_side: expected 'right', because biases='first' gives every bias to the first "
                "position, got padding there"
            )
        s, bias, parallel = self._multiplier, self._bias[:, rows], self._anatomy.parallel
        states = self.states
        if states.attention_branch.norm is None:
            # The bias is split after the sum, because the residual stream's shares get a part of it too.
            mid = torch.add(entering, attention, alpha=s)
            mid = split_bias(mid, bias * s, rule, mid)
        else:
            branch = through_linear_norm(
                states.attention_branch, split_bias(attention, bias, rule), rule, rows
            )
            mid = torch.add(entering, branch, alpha=s)
        mid = through_linear_norm(states.attention_residual, mid, rule, rows)
        feed_forward = self._anatomy.feed_forward
        if feed_forward is None:
            return DecomposedBlock(attention, mid, None, mid)
        read = through_linear_norm(states.feed_forward_input, entering if parallel else mid, rule, rows)
        (W, b, slope), *gated = self._slopes
        hidden = through_linear(W, b, read, rule).mul_(slope[:, rows, None])
        for W, b, slope in gated:
            hidden.addcmul_(through_linear(W, b, read, rule), slope[:, rows, None])
        if self._b_hidden is not None:
            hidden = split_bias(hidden, self._b_hidden[:, rows], rule, hidden)
        out = through_linear(feed_forward.W_out, feed_forward.b_out, hidden, rule)
        post = torch.add(mid, through_linear_norm(states.feed_forward_branch, out, rule, rows), alpha=s)
        post = through_linear_norm(states.feed_forward_residual, post, rule, rows)
        return DecomposedBlock(attention, mid, out, post)


def decomposed(
    block: Block,
    rule: Split,
    slope: Slope,
    shares: Float[Tensor, "batch key input *d_model"] | None,
    *,
    alone: bool,
) -> DecomposedBlock:
    """Return the shares at the stages of a block from those of its input, for all pairs at once.

    Args:
        block: As in `LinearBlock`.
        rule: The rule for biases (`split_bias`).
        slope: As in `LinearBlock`.
        shares: The shares of the block's input at all positions. If `alone`, the fraction of each position's
            vector and value (with b_V) that is each input token's; None if a position's vector is its own
            share.
        alone: As in `LinearBlock`.
    """
    path, linear = value_path(block), LinearBlock(block, slope, alone=alone)
    x = linear.states.resid_pre
    # `decompx_logits` needs copies, because autograd can't use tensors that were recorded in inference mode.
    pattern, value = (each.to(x.dtype, copy=True) for each in (linear.states.pattern, linear.states.value))
    if shares is None:
        shares = torch.eye(block.real.shape[1], dtype=x.dtype, device=x.device).expand(len(x), -1, -1)
    if alone:
        entering = block.rows_of(shares)[..., None] * x[:, :, None].clone()
        value = shares[..., None, None] * value[:, :, None]
    else:
        entering = block.rows_of(shares)
        read = through_linear_norm(linear.states.attention_input, shares, rule)
        # This is one product for all heads, because `decompx_logits` differentiates it for many logits.
        W_V = rearrange(path.W_V.to(x.dtype), "head d_model d_head -> d_model (head d_head)")
        value = (read @ W_V).unflatten(-1, (len(path.W_V), -1))
    value = value.repeat_interleave(len(path.W_O) // len(path.W_V), dim=3)
    axes = "batch head query key, batch key input head d_head -> batch query input head d_head"
    attention = einsum(pattern, value, axes).flatten(3) @ path.W_O.to(x.dtype).flatten(0, 1)
    return linear.shares(entering, attention, rule)


def _attention_bias(
    path: ValuePath, states: CleanStates, alone: bool
) -> Float[Tensor, "batch query d_model"]:
    """Return the bias of the attention's output: b_O and, unless `alone`, b_V mixed by the pattern."""
    dtype = states.resid_pre.dtype
    # A pattern's rows do not sum to 1 with attention sinks. If `alone`, the values include b_V.
    mass = states.pattern.to(dtype).sum(-1) * (not alone)
    b_V = path.W_V.new_zeros(len(path.W_V), path.W_V.shape[2]) if path.b_V is None else path.b_V
    b_V = b_V.to(dtype).repeat_interleave(mass.shape[1] // len(b_V), dim=0)
    return path.project(einsum(mass, b_V, "batch head query, head d_head -> batch query head d_head"))


def _slopes(
    feed_forward: FeedForward, states: BlockStates, slope: Slope
) -> tuple[_Slopes, Float[Tensor, "batch query d_mlp"] | None]:
    """Return the linearisation of the hidden layer's pre-activations, and the constant that is added."""
    dtype, activation, pre_activations = states.read.dtype, feed_forward.activation, states.pre_activations
    gated, b_hidden = feed_forward.W_gate is not None, feed_forward.b_hidden
    biases = (feed_forward.b_gate, feed_forward.b_in) if gated else (feed_forward.b_in,)
    added = None if b_hidden is None else b_hidden.expand_as(pre_activations[0])
    if slope == "tangent" and not gated:
        function, (pre,) = ACTIVATIONS[activation], pre_activations
        slopes: Sequence[Tensor] = [derivative(function, pre)]
        # The tangent need not pass through zero, so the rest is a constant, which is split like a bias.
        added = function(pre) - slopes[0] * pre
    elif slope == "relu" and not gated:
        slopes = [x > 0 for x in pre_activations]
    else:
        slopes = path_multipliers(activation, [x.double() for x in pre_activations])
    matrices = (W.to(dtype) for W in feed_forward.input_matrices)
    lines = zip(matrices, biases, slopes, strict=True)
    return tuple((W, bias, m.to(dtype)) for W, bias, m in lines), added
