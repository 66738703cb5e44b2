"""Compute the norm-based family by definition: every vector of every pair, in float64, step by step.

This is slow on purpose, and independent of the library's factors. It uses only a block's anatomy (its weights
and its wiring), its input and its pattern. The last column of every tensor [query, key + 1, d_model] is for
no token: it is the sum of the biases' effects. So the columns of each stage must add up to the true state,
which the tests compare with the model's own. Integrated gradients are integrated numerically.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lens_mix._model.anatomy import ACTIVATIONS, Norm

NODES = 64


@dataclasses.dataclass(frozen=True)
class Oracle:
    """One block of one prompt, [query, key + 1, d_model] for each stage; see `lens_mix._model.anatomy`."""

    attention: Tensor
    residual: Tensor
    normed: Tensor
    feed_forward: Tensor | None
    feed_forward_residual: Tensor
    output: Tensor
    mid: Tensor


def oracle(block: Any, biases: str = "on_path", feed_forward: bool = True) -> Oracle:
    """Return all stages of a block of a batch with one prompt.

    Args:
        block: A `lens_mix._blocks.block.Block` with a recorded pattern.
        biases: "on_path" (A) or "fixed" (B).
        feed_forward: Whether the feed-forward and later stages are computed.
    """
    anatomy = block.anatomy
    x, pattern = block.resid_pre[0].double(), block.recorded("pattern")[0].double()
    attention = _attention(anatomy, x, pattern)
    branch = _normed(anatomy.attention_branch, attention) * anatomy.residual_multiplier
    residual = branch.clone()
    for position in range(len(x)):
        residual[position, position] += x[position]
    normed = _normed(anatomy.attention_residual, residual)
    mid = normed.sum(1)
    if anatomy.feed_forward is None or not feed_forward:
        return Oracle(attention, residual, normed, None, normed, normed, mid)
    own = torch.zeros_like(residual)
    for position in range(len(x)):
        own[position, position] = x[position]
    reading = _normed(anatomy.feed_forward_input, own if anatomy.parallel else normed)
    shares = _feed_forward(anatomy.feed_forward, reading, biases)
    branch = _normed(anatomy.feed_forward_branch, shares) * anatomy.residual_multiplier
    summed = normed + branch
    output = _normed(anatomy.feed_forward_residual, summed)
    return Oracle(attention, residual, normed, shares, summed, output, mid)


def norms(vectors: Tensor) -> Tensor:
    """Return the norms of the tokens' vectors, [query, key]."""
    return vectors[:, :-1].norm(dim=-1)


def mixing_ratio(vectors: Tensor) -> Tensor:
    """Return the mixing ratio of each query, computed from the vectors."""
    out = []
    for query in range(len(vectors)):
        kept = vectors[query, query]
        mixed = sum(vectors[query, key] for key in range(len(vectors)) if key != query)
        size = float(torch.as_tensor(mixed).norm())
        out.append(size / (size + float(kept.norm())))
    return torch.tensor(out, dtype=torch.float64)


def through_norm(norm: Norm | None, vectors: Tensor, state: Tensor) -> Tensor:
    """Return vectors [query, column, d_model] after a norm, linearised at the given state, without β."""
    if norm is None:
        return vectors
    center = norm.kind == "layer"
    spread = state - state.mean(-1, keepdim=True) if center else state
    size = (spread.pow(2).mean(-1) + norm.eps).sqrt()
    moved = vectors - vectors.mean(-1, keepdim=True) if center else vectors
    moved = moved / size[:, None, None]
    return moved if norm.weight is None else moved * norm.weight.double()


def _normed(norm: Norm | None, vectors: Tensor) -> Tensor:
    if norm is None:
        return vectors
    out = through_norm(norm, vectors, vectors.sum(1)).clone()
    if norm.bias is not None:
        out[:, -1] += norm.bias.double()
    return out


def _attention(anatomy: Any, x: Tensor, pattern: Tensor) -> Tensor:
    path = anatomy.value_path
    read = x if anatomy.attention_input is None else anatomy.attention_input(x)
    out = torch.zeros(len(x), len(x) + 1, x.shape[-1], dtype=torch.float64)
    for head in range(len(path.W_O)):
        group = head // (len(path.W_O) // len(path.W_V))
        value = read @ path.W_V[group].double()
        if path.b_V is not None:
            value = value + path.b_V[group].double()
        out[:, :-1] += pattern[head][:, :, None] * (value @ path.W_O[head].double())[None]
    if path.b_O is not None:
        out[:, -1] += path.b_O.double()
    return out


def _feed_forward(feed_forward: Any, reading: Tensor, biases: str) -> Tensor:
    """Return the shares of the output: integrated gradients of the hidden layer, times W_out."""
    activation = ACTIVATIONS[feed_forward.activation]
    matrices = [(feed_forward.W_in, feed_forward.b_in)]
    if feed_forward.W_gate is not None:
        matrices.insert(0, (feed_forward.W_gate, feed_forward.b_gate))
    shares = [reading @ W.double() for W, _ in matrices]
    for share, (_, bias) in zip(shares, matrices, strict=True):
        if bias is not None:
            share[:, -1] += bias.double()

    def hidden(*pre: Tensor) -> Tensor:
        return activation(pre[0]) if len(pre) == 1 else activation(pre[0]) * pre[1]

    starts = [share[:, -1] if biases == "fixed" else torch.zeros_like(share[:, -1]) for share in shares]
    ends = [share.sum(1) for share in shares]
    # The derivative of ReLU jumps where the first path crosses zero, so each side is integrated separately.
    change = ends[0] - starts[0]
    kink = torch.where(change != 0, -starts[0] / change, torch.zeros_like(change)).clamp(0, 1)
    total = torch.zeros_like(shares[0])
    nodes, weights = np.polynomial.legendre.leggauss(NODES)
    for low, high in ((torch.zeros_like(kink), kink), (kink, torch.ones_like(kink))):
        for node, weight in zip(nodes, weights, strict=True):
            t = low + (high - low) * float((node + 1) / 2)
            point = [(a + t * (b - a)).requires_grad_(True) for a, b in zip(starts, ends, strict=True)]
            with torch.enable_grad():
                slopes = torch.autograd.grad(hidden(*point).sum(), point)
            for slope, share in zip(slopes, shares, strict=True):
                total = total + (float(weight / 2) * (high - low) * slope)[:, None] * share
    if biases == "fixed":
        total[:, -1] = hidden(*starts)
    if feed_forward.b_hidden is not None:
        total[:, -1] += feed_forward.b_hidden.double()
    out = total @ feed_forward.W_out.double()
    if feed_forward.b_out is not None:
        out[:, -1] += feed_forward.b_out.double()
    return out
