"""Assemble models by hand from heads that attend to positions and move tokens between slots."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix.models import Weights

TOKENS = 16  # It is also the number of dimensions of a head.
CONTEXT = 12
WORDS = range(1, TOKENS)  # All tokens except 0, which is first in most prompts.
_SHARP = 200.0  # A score so large that e^-200 is 0 in float32, so that other keys get no weight at all.

Look = tuple[Float[Tensor, "d_model d_head"], Float[Tensor, "d_model d_head"]]
ConstructedFeedForward = tuple[
    int, int, float
]  # relu(slot) · factor is added to another slot: (slot, other slot, factor).

# The residual stream has the token, its position, and three slots into which heads write tokens.
TOKEN, PLACE = slice(0, TOKENS), slice(TOKENS, TOKENS + CONTEXT)
_D_MODEL = 4 * TOKENS + CONTEXT


def _slice_slot(slot: int) -> slice:
    """Return the coordinates of a slot of the residual stream. -1 is the token itself."""
    start = PLACE.stop + slot * TOKENS
    return slice(start, start + TOKENS) if slot >= 0 else TOKEN


def _zeros(*shape: int) -> Float[Tensor, "*shape"]:
    return torch.zeros(shape, dtype=torch.float32, device="cpu")


def _eye(size: int) -> Float[Tensor, "size size"]:
    return torch.eye(size, dtype=torch.float32, device="cpu")


def _one_hot(tokens: Iterable[int]) -> Float[Tensor, "token token"]:
    """Return the identity on some tokens, and 0 on all others."""
    diagonal = _zeros(TOKENS)
    diagonal[list(tokens)] = 1.0
    return torch.diag(diagonal)


@dataclasses.dataclass(frozen=True)
class ConstructedHead:
    """A head that attends to certain positions and moves tokens from one slot to another.

    Attributes:
        look: The query and key weights. Scores are their product.
        source: The slot that it reads. -1: the tokens themselves.
        target: The slot that it writes to.
        moved: The tokens that it moves. All others have the value zero.
        scale: The length of the moved vector, with its sign.
    """

    look: Look
    source: int = -1
    target: int = 0
    moved: Iterable[int] = WORDS
    scale: float = 1.0

    def weights(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the query, key, value and output weights."""
        query, key = self.look
        value, output = _zeros(_D_MODEL, TOKENS), _zeros(TOKENS, _D_MODEL)
        value[_slice_slot(self.source)] = _one_hot(self.moved)
        output[:, _slice_slot(self.target)] = self.scale * _one_hot(WORDS)
        return (
            query * math.sqrt(TOKENS),
            key,
            value,
            output,
        )  # The factor cancels attention's division by √d_head.


def look_back(offset: int, first: float = 0.0) -> Look:
    """Return weights that attend to the position `offset` before the query, or to the first position.

    Args:
        offset: The distance. Queries that have no such position attend to the first one.
        first: The share of attention on the first position in any case.
    """
    query, key = _zeros(2, _D_MODEL, TOKENS)
    back = torch.arange(CONTEXT, device="cpu").sub(offset).clamp(min=0)
    query[PLACE, :CONTEXT] = _SHARP * _eye(CONTEXT)[back]
    key[PLACE, :CONTEXT] = _eye(CONTEXT)
    if first:
        query[PLACE, CONTEXT] = _SHARP + math.log(first / (1 - first))
        key[PLACE.start, CONTEXT] = 1.0
    return query, key


def look_for(tokens: Iterable[int]) -> Look:
    """Return weights that attend, from everywhere, to the positions of some tokens."""
    query, key = _zeros(2, _D_MODEL, TOKENS)
    query[PLACE, 0] = _SHARP
    key[TOKEN, 0] = _one_hot(tokens).diagonal()
    return query, key


def look_for_copies(slot: int) -> Look:
    """Return weights that attend to the positions in whose slot the query's own token was written."""
    query, key = _zeros(2, _D_MODEL, TOKENS)
    query[TOKEN], key[_slice_slot(slot)] = _SHARP * _one_hot(WORDS), _one_hot(WORDS)
    return query, key


def assemble(
    layers: Sequence[Sequence[ConstructedHead]],
    read: Iterable[int],
    feed_forward: Sequence[ConstructedFeedForward | None] | None,
    norm: Literal["LN", "RMS"] | None,
) -> Weights:
    """Assemble a model from heads. Its logits are the sum of the tokens in the slots that are read.

    Args:
        layers: For each layer its heads. Every layer has the same number.
        read: The slots that the unembedding reads.
        feed_forward: For each layer what its feed-forward does (None: nothing). None: an attention-only
            model.
        norm: The norm of the model. None: no norm. With a norm, the residual stream also has every number
            with a minus sign. So its mean is 0, centring has no effect, and the norm is a positive factor per
            position. That changes the length of a vector, and leaves zeros zero.
    """
    eye = _eye(_D_MODEL)
    jobs = feed_forward or ()
    reading, writing = _zeros(len(jobs), _D_MODEL, TOKENS), _zeros(len(jobs), TOKENS, _D_MODEL)
    for layer, job in enumerate(jobs):
        if job is not None:
            reading[layer, _slice_slot(job[0])] = _one_hot(WORDS)
            writing[layer, :, _slice_slot(job[1])] = job[2] * _one_hot(WORDS)

    by_head = [head.weights() for heads in layers for head in heads]
    query, key, value, output = (
        torch.stack(weights).unflatten(0, (len(layers), -1)) for weights in zip(*by_head, strict=True)
    )

    def duplicate(tensor: Tensor) -> Tensor:
        return tensor if norm is None else torch.cat([tensor, -tensor], dim=-1)

    def read_duplicated(tensor: Tensor) -> Tensor:
        return tensor if norm is None else torch.cat([tensor, -tensor], dim=-2) / 2

    return Weights(
        embedding=duplicate(eye[TOKEN]),
        positions=duplicate(eye[PLACE]),
        query=read_duplicated(query),
        key=read_duplicated(key),
        value=read_duplicated(value),
        output=duplicate(output),
        unembedding=read_duplicated(
            torch.stack([eye[_slice_slot(slot)] for slot in read]).sum(0).T @ _one_hot(WORDS)
        ),
        mlp_in=read_duplicated(reading) if jobs else None,
        mlp_out=duplicate(writing) if jobs else None,
        norm=norm,
    )
