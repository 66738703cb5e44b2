"""Compute DecompX's shares of the logits, by a backward pass from the logit if no bias is distributed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from lens_mix._algebra.bias_split import Split, through_linear, through_linear_norm
from lens_mix._algebra.decomposition import HIDDEN_ELEMENTS, carried, hidden_width
from lens_mix._algebra.linear_block import decomposed
from lens_mix._model.anatomy import LinearNorm
from lens_mix.methods.decompx import DecompX

if TYPE_CHECKING:
    from lens_mix._blocks.block import Block


def logit_shares(
    block: Block,
    shares: Float[Tensor, "batch query source d_model"],
    tokens: Int[Tensor, " token"] | None = None,
    biases: Split = "absdot",
) -> Float[Tensor, "batch query source token"]:
    """Return the share of every input token in the logits.

    If the biases are distributed, the shares sum to the logits.

    Args:
        block: The last block.
        shares: The shares of its output, `DecomposedBlock.output`.
        tokens: The vocabulary numbers of the logits. None: the whole vocabulary, for which the result has
            query × source × vocabulary numbers.
        biases: The rule that distributes the final norm's β and the bias of the unembedding.

    Raises:
        ValueError: The block is not the last one.
        UnsupportedModelError: The logits are not the final norm followed by the unembedding.
    """
    if not block.is_last:
        raise ValueError(f"block: expected the last block, got block {block.layer}")
    head = block.unembedding()
    read = through_linear_norm(LinearNorm(head.norm, block.resid_post.to(shares.dtype)), shares, biases)
    W_U, b_U = head.W_U, head.b_U
    if tokens is not None:
        W_U, b_U = W_U[:, tokens], None if b_U is None else b_U[tokens]
    return through_linear(W_U, b_U, read, biases)


def input_shares_of_logits(
    method: DecompX, blocks: Sequence[Block], tokens: Int[Tensor, " token"]
) -> Float[Tensor, "batch query source token"]:
    """Return the share of every input token in some logits, at the rows of the last block.

    The shares are those that `logit_shares` returns. `DecompX("drop")` is linear in the shares, so they are
    computed backwards from each logit. That takes the time of a few forward passes, and needs no query ×
    source × d_model numbers. It does not respect `max_memory`. The other rules distribute a bias according to
    the shares themselves, so these are propagated up through all blocks, as for the map.

    Args:
        method: The rule for biases and the line that replaces the activation.
        blocks: All blocks of the mapped part. All but the last have all rows.
        tokens: The vocabulary numbers of the logits.

    Raises:
        ValueError: As in `logit_shares`.
        UnsupportedModelError: As in `logit_shares`.
    """
    if method.biases == "drop":
        # A run is without gradients, and the caller may be in inference mode, in which no autograd graph is
        # built.
        with torch.inference_mode(False), torch.enable_grad():
            return _propagate_backwards(method, blocks, tokens)
    *_, (_, shares) = carried(blocks, method.biases, method.slope)
    return logit_shares(blocks[-1], shares, tokens, method.biases)


def _propagate_backwards(
    method: DecompX, blocks: Sequence[Block], tokens: Int[Tensor, " token"]
) -> Float[Tensor, "batch query source token"]:
    """Return the shares by differentiating each logit with respect to the factor of each source's vector.

    Without biases each block is linear at its own recorded states, so the gradient is propagated from one
    block to the one below.
    """
    last, (batch, queries) = blocks[-1], blocks[-1].queries.shape
    dtype = torch.promote_types(last.resid_post.dtype, torch.float32)
    ones = torch.eye(queries * len(tokens), dtype=dtype, device=tokens.device)
    ones = ones.view(-1, 1, queries, 1, len(tokens)).expand(-1, batch, -1, -1, -1)
    out = []
    for gradient in ones.split(_count_logits_per_chunk(last)):
        shares = last.resid_post.to(dtype)[:, :, None].clone().requires_grad_()
        gradient = _pull_back(logit_shares(last, shares, tokens, "drop"), shares, gradient)
        for block in reversed(blocks):
            # At the input, each token's vector is the whole of what enters: one source with a factor of 1.
            alone, entering = block is blocks[0], block.whole_resid_pre.to(dtype)[:, :, None]
            shares = ones.new_ones(*block.real.shape, 1) if alone else entering.clone()
            stages = decomposed(block, method.biases, method.slope, shares.requires_grad_(), alone=alone)
            gradient = _pull_back(stages.output, shares, gradient)
        out.append(gradient[..., 0])
    axes = "(query token) batch source -> batch query source token"
    return rearrange(torch.cat(out), axes, query=queries) * last.real_queries[:, :, None, None]


def _pull_back(output: Tensor, shares: Tensor, gradient: Tensor) -> Tensor:
    """Return the gradients with respect to `shares`, [logit, *shares], from those of the output."""
    return torch.autograd.grad(output, shares, gradient, is_grads_batched=True)[0]


def _count_logits_per_chunk(block: Block) -> int:
    """Return how many logits share the states of one backward pass. Their hidden layers take 64 MB each."""
    return max(1, 16 * HIDDEN_ELEMENTS // (block.real.numel() * hidden_width(block)))
