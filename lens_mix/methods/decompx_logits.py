"""What DecompX's shares make of the logits; read backwards from a logit where no bias is handed out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from einops import einsum, rearrange, reduce
from jaxtyping import Float, Int
from torch import Tensor

from lens_mix.algebra.bias_split import HeldNorm, Split, through_linear
from lens_mix.algebra.decomposition import HIDDEN_ELEMENTS, carried, hidden_width
from lens_mix.algebra.linear_block import LinearBlock, Slope
from lens_mix.algebra.vectors import value_path
from lens_mix.lens.head import Head
from lens_mix.methods.decompx import DecompX

if TYPE_CHECKING:
    from lens_mix.lens.block import Block


def logit_shares(
    block: Block,
    shares: Float[Tensor, "batch query source d_model"],
    tokens: Int[Tensor, " token"] | None = None,
    biases: Split = "absdot",
) -> Float[Tensor, "batch query source token"]:
    """Every input token's share of the logits; with the biases handed out they add up to the logits.

    Args:
        block: the last block.
        shares: of its output, `DecomposedBlock.output`.
        tokens: vocabulary numbers; None for the whole vocabulary (query × source × vocabulary numbers).
        biases: how the final norm's β and the unembedding's bias are handed out.

    Raises:
        ValueError: another block than the last.
        UnsupportedModelError: the logits are not final norm, then unembedding.
    """
    head = _head(block)
    read = HeldNorm(head.norm, block.resid_post.to(shares.dtype)).shares(shares, biases)
    W_U, b_U = head.W_U, head.b_U
    if tokens is not None:
        W_U, b_U = W_U[:, tokens], None if b_U is None else b_U[tokens]
    return through_linear(W_U, b_U, read, biases)


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
        ValueError, UnsupportedModelError: as in `logit_shares`.
    """
    if method.biases == "drop":
        return _backwards(blocks, tokens, method.slope)
    *_, (_, shares) = carried(blocks, method.biases, method.slope)
    return logit_shares(blocks[-1], shares, tokens, method.biases)


def _head(block: Block) -> Head:
    if not block.is_last:
        raise ValueError(f"head: expected the last block, got block {block.layer}")
    return block.head()


def _backwards(
    blocks: Sequence[Block], tokens: Int[Tensor, " token"], slope: Slope
) -> Float[Tensor, "batch query source token"]:
    """Without biases: (gradient of the logit at a source) · (what entered there)."""
    last, head, count = blocks[-1], _head(blocks[-1]), len(tokens)
    states = [
        block.resid_post.to(torch.promote_types(block.resid_post.dtype, torch.float32)) for block in blocks
    ]
    columns = head.W_U.to(states[-1].dtype)[:, tokens].T
    out = []
    for logits in torch.arange(last.queries.shape[1] * count, device=columns.device).split(_at_once(last)):
        gradient = columns.new_zeros(len(last.queries), len(logits), *states[-1].shape[1:])
        gradient[:, torch.arange(len(logits)), logits // count] = columns[logits % count]
        gradient = HeldNorm(head.norm, states[-1]).backwards(gradient)
        for block, state in zip(reversed(blocks), [*states[-2::-1], None], strict=True):
            gradient = _through_block(block, state, gradient, slope)
        out.append(gradient)
    axes = "batch (query token) source -> batch query source token"
    shares = rearrange(torch.cat(out, dim=1), axes, token=count)
    return shares.masked_fill_(~last.real_queries[:, :, None, None], 0)


def _through_block(
    block: Block,
    state: Float[Tensor, "batch key d_model"] | None,
    gradient: Float[Tensor, "batch logit query d_model"],
    slope: Slope,
) -> Float[Tensor, "batch logit key *d_model"]:
    """Gradients at a block's output -> at its input, the `state` at all positions.

    Without a state, at the first block: their products with what enters, its value with b_V included.
    """
    path, linear = value_path(block), LinearBlock(block, slope, alone=state is None)
    to_rows, to_attention = linear.backwards(gradient)
    pattern, W_O = block.recorded("pattern").to(gradient.dtype), path.W_O.to(gradient.dtype)
    axes = "batch logit query d_model, head d_head d_model -> batch logit query head d_head"
    to_z = einsum(to_attention, W_O, axes)
    axes = "batch head query key, batch logit query head d_head -> batch logit key head d_head"
    to_values = einsum(pattern, to_z, axes)
    axes = "batch logit key (head group) d_head -> batch logit key head d_head"
    to_values = reduce(to_values, axes, "sum", head=len(path.W_V))
    if state is None:
        value = block.recorded("value").to(gradient.dtype)
        axes = "batch logit key head d_head, batch key head d_head -> batch logit key"
        out, to_rows = einsum(to_values, value, axes), (to_rows * linear.resid_pre[:, None]).sum(-1)
    else:
        axes = "batch logit key head d_head, head d_model d_head -> batch logit key d_model"
        to_read = einsum(to_values, path.W_V.to(gradient.dtype), axes)
        out = HeldNorm(block.anatomy.attention_input, state).backwards(to_read)
    # The rows' own gradients join those of their positions.
    index = block.queries[:, None].reshape(len(out), 1, -1, *[1] * (out.ndim - 3))
    return out.scatter_add_(2, index.expand_as(to_rows), to_rows)


def _at_once(block: Block) -> int:
    """So many logits share the states a block is held linear at; their hidden layers take 64 MB each."""
    return max(1, 16 * HIDDEN_ELEMENTS // (block.real.numel() * hidden_width(block)))
