"""The contribution of each key to logits through a block's attention, without d_model numbers per pair."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lens_mix._algebra.vectors import attention_vectors
from lens_mix._model.anatomy import LinearNorm
from lens_mix._model.unembedding import Unembedding

if TYPE_CHECKING:
    from lens_mix._blocks.block import Block


def through_unembedding(
    unembedding: Unembedding,
    resid: Float[Tensor, "batch query d_model"],
    columns: Float[Tensor, "batch query d_model"],
) -> Float[Tensor, "batch query d_model"]:
    """Return directions in the residual stream whose scalar products with shares of it are logits.

    The final norm has the scale of the clean pass.

    Args:
        unembedding: The model's unembedding.
        resid: The last residual stream.
        columns: The column of W_U for each position.
    """
    dtype = torch.promote_types(resid.dtype, torch.float32)
    columns, resid = columns.to(dtype), resid.to(dtype)
    return LinearNorm(unembedding.norm, resid).transposed(columns)


def logit_shares(
    block: Block, directions: Float[Tensor, "batch query d_model"], asked: Block | None = None
) -> Float[Tensor, "batch query key"]:
    """Return the contribution of each key to each query's logit through the block's attention.

    Args:
        block: The block.
        directions: One per query, from `through_unembedding`.
        asked: The block whose rows the directions belong to; None for `block`.
    """
    vectors = attention_vectors(block).residual
    pattern, scale, heads = vectors.pairs.pattern, vectors.scale, vectors.pairs.heads
    if asked is not None and asked is not block:
        pattern, scale = asked.rows_of(pattern, axis=2), asked.rows_of(scale)
    shares = directions.new_zeros((*directions.shape[:2], pattern.shape[-1]))
    group = heads.heads // heads.value.shape[2]
    for head, matrix in enumerate(heads.after(vectors.pairs.chain)):
        # The product from the left has d_head numbers per query, while the other order has d_model per pair.
        value = heads.value[:, :, head // group]
        shares += pattern[:, head] * (directions @ matrix.T @ value.mT)
    return shares * scale


def token_directions(
    last: Block, token: int | Literal["predicted", "next"], against: int | None
) -> Float[Tensor, "batch query d_model"]:
    """Return, for each requested row, the direction whose product with a share is its token's logit.

    Args:
        last: The last block.
        token: As in `AltiLogit`.
        against: As in `AltiLogit`.

    Raises:
        ValueError: A token is not in the vocabulary.
    """
    unembedding = last.unembedding()
    columns = unembedding.W_U.T[last.rows_of(_tokens(last, unembedding, token))]
    if against is not None:
        columns = columns - unembedding.W_U.T[_checked(against, unembedding, "against")]
    final_residual = last.rows_of(last.clean.calls[len(last.stack) - 1].resid_post)
    return through_unembedding(unembedding, final_residual, columns)


def _tokens(last: Block, unembedding: Unembedding, token: int | str) -> Int[Tensor, "batch pos"]:
    if isinstance(token, int):
        return torch.full(
            last.real.shape, _checked(token, unembedding, "token"), device=last.real.device, dtype=torch.long
        )
    logits = last.continuation().logits()
    likeliest, tokens = logits.topk(2)
    # Logits are rounded: in bfloat16, the two likeliest tokens often have the same logit.
    rounding = 4 * torch.finfo(last.resid_post.dtype).eps * logits.abs().amax(-1)
    doubtful = last.real & (likeliest[..., 0] - likeliest[..., 1] <= rounding)
    predicted = logits.argmax(dim=-1)
    if token == "next":
        following = last.batch.tokens.roll(-1, dims=1)
        has_next = last.real & last.real.roll(-1, dims=1)
        # `roll` has moved the first token to the end, where no next one is known.
        has_next[:, -1] = False
        predicted = torch.where(has_next, following, predicted)
        doubtful = doubtful & ~has_next
    _note_doubtful(last, doubtful, tokens)
    return predicted


def _note_doubtful(
    last: Block, doubtful: Bool[Tensor, "batch pos"], tokens: Int[Tensor, "batch pos rank"]
) -> None:
    """Add a note with the requested positions whose predicted token depends on rounding."""
    doubtful, positions = last.rows_of(doubtful), last.rows_of(last.real.cumsum(-1) - 1)
    tokens = last.rows_of(tokens)
    for index, row in enumerate(doubtful):
        near = dict(zip(positions[index][row].tolist(), tokens[index][row].tolist(), strict=True))
        if near:
            last.warn(
                index,
                "the two likeliest logits are equal but for rounding at these positions: in another "
                f"dtype the map may explain the other one (token= chooses): {near}",
            )


def _checked(token: int, unembedding: Unembedding, name: str) -> int:
    if not 0 <= token < unembedding.W_U.shape[1]:
        raise ValueError(f"{name}: expected 0..{unembedding.W_U.shape[1] - 1}, got {token}")
    return token
