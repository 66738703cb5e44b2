"""Products of W_O and W_in (and W_gate) per head, stored between runs.

A head's values are multiplied by W_O, the linear parts of the norms, and W_in (and W_gate) to give its
contribution to the pre-activations. The product of these matrices, d_head × d_mlp per head, depends on the
weights alone. Computing it costs as much as d_model positions. Once it is stored, a run with n keys costs n.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix._algebra import weight_cache
from lens_mix._algebra.sketch import random_vectors, sketch
from lens_mix._model.anatomy import BlockAnatomy, ValuePath, through


def folded(
    anatomy: BlockAnatomy,
    path: ValuePath,
    vectors: int | None,
    dtype: torch.dtype,
    keep: bool,
    matrices: Sequence[Float[Tensor, "d_model d_mlp"]],
) -> Float[Tensor, "matrix head d_head d_mlp"] | None:
    """Return the folded matrices of all heads; None if applying both matrices to each vector costs less.

    Args:
        anatomy: The anatomy of a block whose feed-forward is plain or gated.
        path: The block's value path.
        vectors: The number of value vectors of all heads; None to return the product in any case.
        dtype: The dtype of the products.
        keep: Whether the product may be stored for the next run.
        matrices: W_in, or W_gate and W_in; a matrix of another dtype than `dtype` is copied.
    """
    if anatomy.feed_forward is None or anatomy.parallel:
        return None
    # The product is deleted with W_in as the verification has read it, which is dropped if the model's
    # weights change.
    name, kind = anatomy.feed_forward.W_in, f"folded {dtype}"
    # The product depends on the matrices and on the norms, which are probed with vectors.
    probes = [sketch(matrix.detach().to(dtype)) for matrix in (*matrices, path.W_O.flatten(0, 1))]
    probes.append(
        through(anatomy.norms_before_feed_forward, random_vectors(path.W_O.shape[-1], dtype, path.W_O.device))
    )

    def fold() -> Tensor:
        return _fold(anatomy, matrices, path.W_O.to(dtype))

    size = product_bytes(path, matrices, dtype) if keep else None
    product: Tensor | None = weight_cache.load_or_store(name, kind, probes, fold, size)
    is_worth_it = vectors is None or pays(vectors, vectors, path.W_O)
    return fold() if product is None and is_worth_it else product


def product_bytes(
    path: ValuePath, matrices: Sequence[Float[Tensor, "d_model d_mlp"]], dtype: torch.dtype
) -> int:
    """Return the size of a block's product."""
    heads, d_head = path.W_O.shape[:2]
    return heads * d_head * sum(matrix.shape[1] for matrix in matrices) * dtype.itemsize


def pays(vectors: int, values: int, W_O: Float[Tensor, "head d_head d_model"], calls: int = 1) -> bool:
    """Return whether some equal calls cost less with the product, which the first of them computes.

    Args:
        vectors: The number of vectors of size d_model that W_in is applied to without the product.
        values: The number of value vectors that the product is applied to.
        W_O: The matrices of all heads.
        calls: The number of calls.
    """
    heads, d_head, d_model = W_O.shape
    return calls * (vectors * d_model - values * d_head) > heads * d_head * d_model


def _fold(
    anatomy: BlockAnatomy,
    matrices: Sequence[Float[Tensor, "d_model d_mlp"]],
    W_O: Float[Tensor, "*head d_head d_model"],
) -> Float[Tensor, "matrix *head d_head d_mlp"]:
    read = through(anatomy.norms_before_feed_forward, W_O.detach())
    if len(matrices) == 1:
        # This is a view, because a stack would need twice the memory for a moment.
        return (read @ matrices[0].detach().to(read.dtype))[None]
    return torch.stack([read @ matrix.detach().to(read.dtype) for matrix in matrices])
