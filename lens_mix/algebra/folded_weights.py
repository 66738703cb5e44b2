"""Products of matrices, kept between runs: W_O and W_in (and W_gate) per head, W_out in axes of its own.

What a head sends reaches the pre-activations through W_O, the linear parts of the norms and W_in (and
W_gate). Their product, d_head × d_mlp per head, depends on the weights alone. Made anew it costs as much as
d_model positions; kept, a run with n keys pays for n.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix.algebra import weight_cache
from lens_mix.algebra.head_vectors import through
from lens_mix.lens.anatomy import BlockAnatomy, Norm, ValuePath
from lens_mix.lens.verification.sketch import random_vectors, sketch

_PAIRS_PER_AXIS = 8  # for fewer pairs it would take many runs to earn the decomposition back
_STEP = 96  # neurons of the triangle that are done at once, all with the axes of the last one


def folded(
    anatomy: BlockAnatomy,
    path: ValuePath,
    vectors: int | None,
    dtype: torch.dtype,
    keep: bool,
    matrices: Sequence[Float[Tensor, "d_model d_mlp"]],
) -> Float[Tensor, "matrix head d_head d_mlp"] | None:
    """The folded matrices of all heads; None where applying both to each vector costs less.

    Args:
        anatomy: the block, its feed-forward plain or gated; a gated one has two matrices, the gate's first.
        path: its value path.
        vectors: how many value vectors will go through; None: folded in any case.
        dtype: of the products.
        keep: whether they may stay for the next run.
        matrices: W_in, or W_gate and W_in; in `dtype` already, or a copy of each is made.
    """
    if anatomy.feed_forward is None or anatomy.parallel:
        return None
    name, kind = anatomy.feed_forward.W_in, f"folded {dtype}"
    # What the product is made of: the matrices, and the norms by what they do to vectors.
    probes = [sketch(matrix.detach().to(dtype)) for matrix in (*matrices, path.W_O.flatten(0, 1))]
    probes.append(through(_norms(anatomy), random_vectors(path.W_O.shape[-1], dtype, path.W_O.device)))
    product: Tensor | None = weight_cache.recall(name, kind, probes)
    if product is not None:
        return product
    heads, d_head = path.W_O.shape[:2]
    size = heads * d_head * name.shape[1] * len(matrices) * dtype.itemsize
    if keep and weight_cache.fits(name, kind, size):
        product = _fold(anatomy, matrices, path.W_O.to(dtype))
        weight_cache.keep(name, kind, probes, product)
        return product
    worth = vectors is None or pays(vectors, heads, d_head)
    return _fold(anatomy, matrices, path.W_O.to(dtype)) if worth else None


def pays(vectors: int, heads: int, d_head: int) -> bool:
    """Whether folding anew costs less than both matrices for each vector."""
    return vectors * heads > heads * d_head + vectors


def _fold(
    anatomy: BlockAnatomy,
    matrices: Sequence[Float[Tensor, "d_model d_mlp"]],
    W_O: Float[Tensor, "*head d_head d_model"],
) -> Float[Tensor, "matrix *head d_head d_mlp"]:
    read = through(_norms(anatomy), W_O.detach())
    if len(matrices) == 1:
        # As a view: a stack would hold the product twice for a moment.
        return (read @ matrices[0].detach().to(read.dtype))[None]
    return torch.stack([read @ matrix.detach().to(read.dtype) for matrix in matrices])


def _norms(anatomy: BlockAnatomy) -> tuple[Norm, ...]:
    """Between W_O and W_in (and W_gate)."""
    norms = (anatomy.attention_branch, anatomy.attention_residual, anatomy.feed_forward_input)
    return tuple(norm for norm in norms if norm is not None)


def rotated(
    anatomy: BlockAnatomy, path: ValuePath, dtype: torch.dtype, pairs: int
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Axes in which W_out is triangular, and W_O and W_out in them; None where that doesn't pay.

    With W_out[:d_model]ᵀ = Q R, neuron r writes, in the axes Q, to the first r + 1 of them. Distances are the
    same in any axes, and so is what the feed-forward's input norm divides by; where another norm reads what
    is rotated there are none. Without them Value Zeroing and `atb_ff*` take 1.08 to 1.14 times as long.
    """
    feed_forward, norm = anatomy.feed_forward, anatomy.attention_branch or anatomy.attention_residual
    norm = norm or anatomy.feed_forward_branch or anatomy.feed_forward_residual
    if feed_forward is None or anatomy.parallel or norm or feed_forward.W_out.device.type != "cpu":
        return None
    weight, W_O, kind = feed_forward.W_out, path.W_O.flatten(0, 1), f"rotated {dtype}"
    width, sizes = weight.shape[1], [weight.shape[1], len(W_O), len(weight)]
    size = sum(sizes) * width * dtype.itemsize
    if pairs < _PAIRS_PER_AXIS * width or not weight_cache.fits(weight, kind, size):
        return None
    probes = [sketch(matrix.to(dtype)) for matrix in (weight, W_O)]
    product: Tensor | None = weight_cache.recall(weight, kind, probes)
    if product is None:
        # "complete": all axes, also where the hidden layer is the narrower one.
        axes = torch.linalg.qr(weight[:width].double().T, mode="complete")[0].to(dtype)
        product = torch.cat((axes, torch.cat((W_O, weight)).to(dtype) @ axes))
        weight_cache.keep(weight, kind, probes, product)
    axes, W_O, W_out = product.split(sizes)
    return axes, W_O.view_as(path.W_O), W_out


def in_steps(W_out: Tensor, neurons: int, rotated: bool) -> Iterator[list[Float[Tensor, "neuron axis"]]]:
    """W_out in parts of so many neurons, each in steps; a step has the axes up to its last neuron's own."""
    for first in range(0, len(W_out), neurons):
        part, step = W_out[first : first + neurons], _STEP if rotated and first < W_out.shape[1] else neurons
        ends = range(step, len(part) + step, step)
        yield [part[end - step : end, : first + end if rotated else None] for end in ends]
