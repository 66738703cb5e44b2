"""DecompX's shares of a logit alone, read backwards from the logit where no bias is handed out."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from einops import einsum, rearrange, reduce
from jaxtyping import Float, Int
from torch import Tensor

from lens_mix.algebra.decomposition import (
    HIDDEN_ELEMENTS,
    LinearBlock,
    Slope,
    carried,
    linear_block,
    resid_pre,
)
from lens_mix.algebra.vectors import value_path
from lens_mix.lens.anatomy import Norm
from lens_mix.methods.decompx import DecompX, logit_shares

if TYPE_CHECKING:
    from lens_mix.lens.block import Block


def input_shares_of_logits(
    method: DecompX, blocks: Sequence[Block], tokens: Int[Tensor, " token"]
) -> Float[Tensor, "batch query source token"]:
    """Every input token's share of some logits, at the last block's rows: `logit_shares` of the last shares.

    Only `DecompX("drop")` is linear in the shares, so that a logit's can be read backwards from it: one pass
    back through the blocks, for a few times the cost of a forward pass, and no query × source × d_model
    numbers (`max_memory` is not asked). The other rules hand a bias out by the shares themselves, which are
    carried up through all blocks, as for the map.

    Args:
        method: the rule for biases and the line for the activation.
        blocks: all blocks of the stack; all but the last with all rows.
        tokens: vocabulary numbers.

    Raises:
        ValueError: the last one is not the model's last block.
        UnsupportedModelError: the logits are not final norm, then unembedding.
    """
    if method.biases == "drop":
        return _backwards(blocks, tokens, method.slope)
    *_, (_, shares) = carried(blocks, method.biases, method.slope)
    return logit_shares(blocks[-1], shares, tokens, method.biases)


def _backwards(
    blocks: Sequence[Block], tokens: Int[Tensor, " token"], slope: Slope
) -> Float[Tensor, "batch query source token"]:
    """Without biases: (gradient of the logit at a source) · (what entered there)."""
    first, last, count = blocks[0], blocks[-1], len(tokens)
    head, state = last.head(), last.resid_post.to(resid_pre(last).dtype)
    columns = head.W_U.to(state.dtype)[:, tokens].T
    out = []
    for logits in torch.arange(last.queries.shape[1] * count, device=state.device).split(_at_once(first)):
        gradient = state.new_zeros(len(state), len(logits), *state.shape[1:])
        gradient[:, torch.arange(len(logits)), logits // count] = columns[logits % count]
        gradient = _through_norm(head.norm, gradient, state)
        for below, block in reversed(list(itertools.pairwise(blocks))):
            gradient = _through_block(block, below.resid_post.to(state.dtype), gradient, slope)
        out.append(_shares_of_inputs(first, gradient, slope))
    axes = "batch (query token) source -> batch query source token"
    shares = rearrange(torch.cat(out, dim=1), axes, token=count)
    return shares.masked_fill_(~last.real_queries[:, :, None, None], 0)


def _through_block(
    block: Block,
    state: Float[Tensor, "batch key d_model"],
    gradient: Float[Tensor, "batch logit query d_model"],
    slope: Slope,
) -> Float[Tensor, "batch logit key d_model"]:
    """Gradients at a block's output -> at its input, the `state` at all positions."""
    to_rows, to_values = _to_branches(block, linear_block(block, slope), gradient)
    W_V = value_path(block).W_V.to(gradient.dtype)
    to_read = einsum(to_values, W_V, "batch logit key head d_head, head d d_head -> batch logit key d")
    out = _through_norm(block.anatomy.attention_input, to_read, state)
    return out.scatter_add_(2, block.queries[:, None, :, None].expand_as(to_rows), to_rows)


def _shares_of_inputs(
    block: Block, gradient: Float[Tensor, "batch logit query d_model"], slope: Slope
) -> Float[Tensor, "batch logit source"]:
    """Gradients at the first block's output -> the logits' shares; b_V is the key's own there."""
    linear = linear_block(block, slope)
    to_rows, to_values = _to_branches(block, linear, gradient)
    value = block.recorded("value").to(gradient.dtype)
    out = einsum(to_values, value, "batch logit key head d_head, batch key head d_head -> batch logit key")
    of_rows = einsum(to_rows, linear.resid_pre, "batch logit query d, batch query d -> batch logit query")
    return out.scatter_add_(2, block.queries[:, None].expand_as(of_rows), of_rows)


def _to_branches(
    block: Block, linear: LinearBlock, gradient: Float[Tensor, "batch logit query d_model"]
) -> tuple[Float[Tensor, "batch logit query d_model"], Float[Tensor, "batch logit key head d_head"]]:
    """`LinearBlock.carry` and the attention backwards: gradients at the block's rows, and at the values."""
    anatomy, s = block.anatomy, block.anatomy.residual_multiplier
    to_mid = _through_norm(anatomy.feed_forward_residual, gradient, linear.feed_forward_summed)
    to_read = torch.zeros_like(to_mid)
    if anatomy.feed_forward is not None:
        to_output = _through_norm(anatomy.feed_forward_branch, to_mid * s, linear.feed_forward_out)
        to_hidden = to_output @ anatomy.feed_forward.W_out.to(to_output.dtype).T
        for W, _, slope in linear.slopes:
            to_read += (to_hidden * slope[:, None]) @ W.T
        to_read = _through_norm(anatomy.feed_forward_input, to_read, linear.read_from)
    to_mid = to_mid if anatomy.parallel else to_mid + to_read
    to_summed = _through_norm(anatomy.attention_residual, to_mid, linear.summed)
    to_rows = to_summed + to_read if anatomy.parallel else to_summed
    to_attention = _through_norm(anatomy.attention_branch, to_summed * s, linear.attention_out)
    path, pattern = value_path(block), block.recorded("pattern").to(gradient.dtype)
    W_O = path.W_O.to(gradient.dtype)
    to_z = einsum(to_attention, W_O, "batch logit query d, head d_head d -> batch logit query head d_head")
    axes = "batch head query key, batch logit query head d_head -> batch logit key head d_head"
    to_values = einsum(pattern, to_z, axes)
    axes = "batch logit key (head group) d_head -> batch logit key head d_head"
    return to_rows, reduce(to_values, axes, "sum", head=len(path.W_V))


def _through_norm(
    norm: Norm | None,
    gradient: Float[Tensor, "batch logit query d_model"],
    state: Float[Tensor, "batch query d_model"] | None,
) -> Float[Tensor, "batch logit query d_model"]:
    """Gradients at a norm's output -> at its input, the norm held at the scale of its true state."""
    if norm is None or state is None:
        return gradient
    gradient = gradient / norm.scale(state)[:, None]
    gradient = gradient if norm.weight is None else gradient * norm.weight.to(gradient.dtype)
    return gradient - gradient.mean(-1, keepdim=True) if norm.kind == "layer" else gradient


def _at_once(block: Block) -> int:
    """So many logits share the states a block is held linear at; their hidden layers take 64 MB each."""
    feed_forward = block.anatomy.feed_forward
    width = block.resid_pre.shape[-1] if feed_forward is None else len(feed_forward.W_out)
    return max(1, 16 * HIDDEN_ELEMENTS // (block.real.numel() * width))
