"""What models are built of by hand: a residual stream of one-hot parts, and heads that look and move."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix.lens.from_weights import Norm, Weights

TOKENS = 16  # and so many dimensions of a head
CONTEXT = 12
WORDS = range(1, TOKENS)  # all tokens but 0, which stands first in most prompts
_SHARP = 200.0  # a score; e^-200 is 0 in float32, so that the other keys get nothing at all

Look = tuple[Float[Tensor, "d_model d_head"], Float[Tensor, "d_model d_head"]]
FeedForward = tuple[int, int, float]  # relu(one scratch part) · factor is added to another

# The residual stream: the token, its position, and three scratch parts that heads write tokens to.
TOKEN, PLACE = slice(0, TOKENS), slice(TOKENS, TOKENS + CONTEXT)
_D_MODEL = 4 * TOKENS + CONTEXT


def _scratch(part: int) -> slice:
    """Where a scratch part stands in the stream; -1: the token itself."""
    start = PLACE.stop + part * TOKENS
    return slice(start, start + TOKENS) if part >= 0 else TOKEN


def _zeros(*shape: int) -> Float[Tensor, "*shape"]:
    return torch.zeros(shape, dtype=torch.float32, device="cpu")


def _eye(size: int) -> Float[Tensor, "size size"]:
    return torch.eye(size, dtype=torch.float32, device="cpu")


def _one_hot(tokens: Iterable[int]) -> Float[Tensor, "token token"]:
    """The identity on some tokens, 0 on all others."""
    diagonal = _zeros(TOKENS)
    diagonal[list(tokens)] = 1.0
    return torch.diag(diagonal)


@dataclasses.dataclass(frozen=True)
class Head:
    """Where a head looks, and from which part of the stream it moves tokens to which scratch part.

    Attributes:
        look: query and key weights; scores are the product of both.
        source, target: scratch parts; source -1: the tokens themselves.
        moved: the tokens that it moves; all others have the value zero.
        scale: how long the moved vector is, with its sign.
    """

    look: Look
    source: int = -1
    target: int = 0
    moved: Iterable[int] = WORDS
    scale: float = 1.0

    def weights(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Query, key, value and output."""
        query, key = self.look
        value, output = _zeros(_D_MODEL, TOKENS), _zeros(TOKENS, _D_MODEL)
        value[_scratch(self.source)] = _one_hot(self.moved)
        output[:, _scratch(self.target)] = self.scale * _one_hot(WORDS)
        return query * math.sqrt(TOKENS), key, value, output  # attention divides by √d_head


def look_back(offset: int, first: float = 0.0) -> Look:
    """Look `offset` positions back, or at the first position where there are none.

    Args:
        offset: how far.
        first: the share of attention that goes to the first position all the same.
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
    """Look, from everywhere, at the positions where one of these tokens stands."""
    query, key = _zeros(2, _D_MODEL, TOKENS)
    query[PLACE, 0] = _SHARP
    key[TOKEN, 0] = _one_hot(tokens).diagonal()
    return query, key


def look_for_copies(part: int) -> Look:
    """Look at the positions in whose scratch part the query's own token was written."""
    query, key = _zeros(2, _D_MODEL, TOKENS)
    query[TOKEN], key[_scratch(part)] = _SHARP * _one_hot(WORDS), _one_hot(WORDS)
    return query, key


def assemble(
    layers: Sequence[Sequence[Head]],
    read: Iterable[int],
    feed_forward: Sequence[FeedForward | None] | None,
    norm: Norm | None,
) -> Weights:
    """A model of these heads; its logits are the tokens in the scratch parts that are read, summed.

    Args:
        layers: per layer its heads, as many in each.
        read: the scratch parts that the unembedding reads.
        feed_forward: per layer what its feed-forward does (None: nothing); None: an attention-only model.
        norm: None, or the model under a norm. Each number then stands in the stream once more with a minus
            sign: its mean is 0, LayerNorm takes nothing away, and what either norm does is a positive factor
            per position. That changes how long a vector is, and no zero.
    """
    eye = _eye(_D_MODEL)
    jobs = feed_forward or ()
    reading, writing = _zeros(len(jobs), _D_MODEL, TOKENS), _zeros(len(jobs), TOKENS, _D_MODEL)
    for layer, job in enumerate(jobs):
        if job is not None:
            reading[layer, _scratch(job[0])] = _one_hot(WORDS)
            writing[layer, :, _scratch(job[1])] = job[2] * _one_hot(WORDS)

    by_head = [head.weights() for heads in layers for head in heads]
    query, key, value, output = (
        torch.stack(weights).unflatten(0, (len(layers), -1)) for weights in zip(*by_head, strict=True)
    )

    def written(tensor: Tensor) -> Tensor:
        return tensor if norm is None else torch.cat([tensor, -tensor], dim=-1)

    def readable(tensor: Tensor) -> Tensor:
        return tensor if norm is None else torch.cat([tensor, -tensor], dim=-2) / 2

    return Weights(
        embedding=written(eye[TOKEN]),
        positions=written(eye[PLACE]),
        query=readable(query),
        key=readable(key),
        value=readable(value),
        output=written(output),
        unembedding=readable(torch.stack([eye[_scratch(part)] for part in read]).sum(0).T @ _one_hot(WORDS)),
        mlp_in=readable(reading) if jobs else None,
        mlp_out=written(writing) if jobs else None,
        norm=norm,
    )
