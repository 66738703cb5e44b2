"""Products of matrices, kept between runs: W_O and W_in (and W_gate), per head.

What a head sends reaches the pre-activations through W_O, the linear parts of the norms and W_in (and
W_gate). Their product, d_head × d_mlp per head, depends on the weights alone. Made anew it costs as much as
d_model positions; kept, a run with n keys pays for n.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix.algebra import weight_cache
from lens_mix.algebra.head_vectors import through
from lens_mix.lens.anatomy import BlockAnatomy, Norm, ValuePath
from lens_mix.lens.sketch import random_vectors, sketch


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
