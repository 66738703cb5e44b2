"""What DecompX's shares make of the logits; read backwards from a logit where no bias is handed out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from lens_mix.algebra.bias_split import HeldNorm, Split, through_linear
from lens_mix.algebra.decomposition import HIDDEN_ELEMENTS, carried, hidden_width
from lens_mix.algebra.linear_block import decomposed
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
    if not block.is_last:
        raise ValueError(f"head: expected the last block, got block {block.layer}")
    head = block.unembedding()
    read = HeldNorm(head.norm, block.resid_post.to(shares.dtype)).shares(shares, biases)
    W_U, b_U = head.W_U, head.b_U
    if tokens is not None:
        W_U, b_U = W_U[:, tokens], None if b_U is None else b_U[tokens]
    return through_linear(W_U, b_U, read, biases)


def input_shares_of_logits(
    method: DecompX, blocks: Sequence[Block], tokens: Int[Tensor, " token"]
) -> Float[Tensor, "batch query source token"]:
    """Every input token's share of some logits, at the last block's rows: `logit_shares` of the last shares.

    `DecompX("drop")` is linear in the shares, so a logit's are read backwards from it: one pass back through
    the blocks, for a few times the cost of a forward pass, and no query × source × d_model numbers
    (`max_memory` is not asked). The other rules hand a bias out by the shares themselves, which are carried
    up through all blocks, as for the map.

    Args:
        method: the rule for biases and the line for the activation.
        blocks: all blocks of the stack; all but the last with all rows.
        tokens: vocabulary numbers.

    Raises:
        ValueError, UnsupportedModelError: as in `logit_shares`.
    """
    if method.biases == "drop":
        with torch.inference_mode(False), torch.enable_grad():
            return _backwards(method, blocks, tokens)
    *_, (_, shares) = carried(blocks, method.biases, method.slope)
    return logit_shares(blocks[-1], shares, tokens, method.biases)


def _backwards(
    method: DecompX, blocks: Sequence[Block], tokens: Int[Tensor, " token"]
) -> Float[Tensor, "batch query source token"]:
    """Without biases: the gradient of each logit by how much of each source's vector enters.

    Block by block from above, for each is linear at its own recorded states.
    """
    last, (batch, queries) = blocks[-1], blocks[-1].queries.shape
    dtype = torch.promote_types(last.resid_post.dtype, torch.float32)
    entering = [None, *(block.resid_post.to(dtype) for block in blocks[:-1])]
    ones = torch.eye(queries * len(tokens), dtype=dtype, device=tokens.device)
    ones = ones.view(-1, 1, queries, 1, len(tokens)).expand(-1, batch, -1, -1, -1)
    out = []
    for gradient in ones.split(_at_once(last)):
        shares = last.resid_post.to(dtype)[:, :, None].clone().requires_grad_()
        gradient = _pulled_back(logit_shares(last, shares, tokens, "drop"), shares, gradient)
        for block, state in zip(reversed(blocks), reversed(entering), strict=True):
            # One source: all that enters.
            shares = ones.new_ones(*block.real.shape, 1) if state is None else state[:, :, None].clone()
            stages = decomposed(block, method.biases, method.slope, shares.requires_grad_(), state)
            gradient = _pulled_back(stages.output, shares, gradient)
        out.append(gradient[..., 0])
    axes = "(query token) batch source -> batch query source token"
    return rearrange(torch.cat(out), axes, query=queries) * last.real_queries[:, :, None, None]


def _pulled_back(output: Tensor, shares: Tensor, gradient: Tensor) -> Tensor:
    """Gradients by what was put out -> by the shares it was made of, [logit, *shares]."""
    return torch.autograd.grad(output, shares, gradient, is_grads_batched=True)[0]


def _at_once(block: Block) -> int:
    """So many logits share the states a block is held linear at; their hidden layers take 64 MB each."""
    return max(1, 16 * HIDDEN_ELEMENTS // (block.real.numel() * hidden_width(block)))
