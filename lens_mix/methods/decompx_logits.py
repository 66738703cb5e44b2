"""DecompX's shares of a logit alone, read backwards from the logit where no bias is handed out."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from einops import einsum, rearrange
from jaxtyping import Float, Int
from torch import Tensor

from lens_mix.algebra.bias_split import through_norm
from lens_mix.algebra.decomposition import HIDDEN_ELEMENTS, Slope, carried, resid_pre
from lens_mix.methods.decompx import DecompX, decompose, from_values, logit_shares

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
    """Without biases: (gradient of the logit at a source) · (what entered there).

    Every block is linear in the shares, so that it needs the gradients at its output only. Several logits go
    back together, in the place of the sources.
    """
    first, last, count = blocks[0], blocks[-1], len(tokens)
    x, head, state = resid_pre(first), last.head(), last.resid_post.to(resid_pre(first).dtype)
    columns = head.W_U.to(x.dtype)[:, tokens].T
    out = []
    for logits in torch.arange(last.queries.shape[1] * count, device=x.device).split(_logits_at_once(first)):
        gradient = state.new_zeros(*state.shape[:2], len(logits), state.shape[2])
        gradient[:, logits // count, torch.arange(len(logits))] = columns[logits % count]
        (gradient,) = _back(
            lambda shares: through_norm(head.norm, shares, state, "drop"), gradient, gradient.shape
        )
        for below, block in reversed(list(itertools.pairwise(blocks))):
            gradient = _back_through_block(block, below.resid_post.to(x.dtype), gradient, slope)
        out.append(_shares_of_inputs(first, gradient, slope))
    shares = rearrange(
        torch.cat(out, dim=2), "batch source (query token) -> batch query source token", token=count
    )
    return shares.masked_fill_(~last.real_queries[:, :, None, None], 0)


def _back_through_block(
    block: Block, state: Float[Tensor, "batch key d_model"], gradient: Tensor, slope: Slope
) -> Float[Tensor, "batch key logit d_model"]:
    """Gradients at a block's output [batch query logit d_model] -> at its input, at all positions."""

    def step(shares: Tensor) -> Tensor:
        return decompose(block, shares, state, "drop", slope).output

    return _back(step, gradient, (*state.shape[:2], *gradient.shape[2:]))[0]


def _shares_of_inputs(first: Block, gradient: Tensor, slope: Slope) -> Float[Tensor, "batch source logit"]:
    """Gradients at the first block's output [batch query logit d_model] -> the logits' shares."""
    x, value = resid_pre(first), first.recorded("value").to(gradient.dtype)
    bias = torch.zeros_like(x)

    def step(entering: Tensor, value: Tensor) -> Tensor:
        return from_values(first, entering, value, bias, "drop", slope).output

    batch, positions, *of_value = value.shape
    to_x, to_value = _back(step, gradient, gradient.shape, (batch, positions, gradient.shape[2], *of_value))
    shares = einsum(to_value, value, "batch key logit head d, batch key head d -> batch key logit")
    of_x = einsum(to_x, x, "batch query logit d, batch query d -> batch query logit")
    return shares.scatter_add_(1, first.queries[..., None].expand_as(of_x), of_x)


def _back(function: Callable[..., Tensor], gradient: Tensor, *shapes: Sequence[int]) -> tuple[Tensor, ...]:
    """Gradients at the output of a linear function -> at its inputs of these shapes."""
    with torch.inference_mode(False), torch.enable_grad():
        inputs = [torch.zeros(shape).to(gradient).requires_grad_() for shape in shapes]
        return torch.autograd.grad(function(*inputs), inputs, gradient.clone())


def _logits_at_once(block: Block) -> int:
    """So many that they share the states a block is held linear at; their hidden layers take 64 MB each."""
    feed_forward = block.anatomy.feed_forward
    width = block.resid_pre.shape[-1] if feed_forward is None else len(feed_forward.W_out)
    return max(1, 16 * HIDDEN_ELEMENTS // (block.real.numel() * width))
