"""The vectors of the norm-based methods by definition: one vector per pair, on named axes.

    F_ij = Σ_h a_ijh v_jh W_O^h + δ_ij x_i

where a is the pattern, v the value vectors and x the residual stream. These functions are slow, and have
query × key × d_model numbers. The files of the papers' methods define their formulas by them, and tests
compare `lens_mix._algebra.vectors`, which computes no pair's vector, with them. They have all rows: query i
is position i.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from einops import einsum, repeat
from jaxtyping import Float
from torch import Tensor

from lens_mix._model.anatomy import Norm

# A linear map of vectors: a linearised norm, or a multiplier.
Linear = Callable[[Float[Tensor, "batch query key d_model"]], Float[Tensor, "batch query key d_model"]]


def head_vectors(
    value: Float[Tensor, "batch key value_head d_head"], W_O: Float[Tensor, "head d_head d_model"]
) -> Float[Tensor, "batch key head d_model"]:
    """Return v_jh W_O^h; a grouped value head belongs to several query heads."""
    group = len(W_O) // value.shape[2]
    value = repeat(value, "batch key value_head d_head -> batch key (value_head group) d_head", group=group)
    return einsum(value, W_O, "batch key head d_head, head d_head d_model -> batch key head d_model")


def head_parts(
    pattern: Float[Tensor, "batch head query key"],
    value: Float[Tensor, "batch key value_head d_head"],
    W_O: Float[Tensor, "head d_head d_model"],
) -> Float[Tensor, "batch query head key d_model"]:
    """Return a_ijh v_jh W_O^h, the vector that each head sends from each key."""
    axes = "batch head query key, batch key head d_model -> batch query head key d_model"
    return einsum(pattern, head_vectors(value, W_O), axes)


def value_vectors(
    pattern: Float[Tensor, "batch head query key"],
    value: Float[Tensor, "batch key value_head d_head"],
    W_O: Float[Tensor, "head d_head d_model"],
) -> Float[Tensor, "batch query key d_model"]:
    """Return Σ_h a_ijh v_jh W_O^h."""
    axes = "batch head query key, batch key head d_model -> batch query key d_model"
    return einsum(pattern, head_vectors(value, W_O), axes)


def residual_vectors(
    pattern: Float[Tensor, "batch head query key"],
    value: Float[Tensor, "batch key value_head d_head"],
    W_O: Float[Tensor, "head d_head d_model"],
    resid_pre: Float[Tensor, "batch query d_model"],
    branch: Linear | None = None,
) -> Float[Tensor, "batch query key d_model"]:
    """Return F_ij; `branch` is the linear map on the attention branch (a sandwich norm, a multiplier)."""
    vectors = value_vectors(pattern, value, W_O)
    same = torch.eye(len(resid_pre[0]), dtype=resid_pre.dtype, device=resid_pre.device)
    diagonal = einsum(same, resid_pre, "query key, batch query d_model -> batch query key d_model")
    return (vectors if branch is None else branch(vectors)) + diagonal


def through_norm(
    norm: Norm | None,
    vectors: Float[Tensor, "batch query key d_model"],
    state: Float[Tensor, "batch query d_model"],
) -> Float[Tensor, "batch query key d_model"]:
    """Return γ ⊙ (F_ij - mean F_ij) / s_i, with the scale s_i of the norm's input and without β.

    RMSNorm does not center.

    Args:
        norm: The norm; None for the identity.
        vectors: Shares of the norm's input.
        state: The norm's whole input, with biases.
    """
    if norm is None:
        return vectors
    centered, true = vectors, state
    if norm.kind == "layer":
        centered = vectors - vectors.mean(-1, keepdim=True)
        true = state - state.mean(-1, keepdim=True)
    scale = (true.square().mean(-1, keepdim=True) + norm.eps).sqrt()
    normed = centered / scale[:, :, None]
    return normed if norm.weight is None else normed * norm.weight


def norms(vectors: Float[Tensor, "batch query key d_model"]) -> Float[Tensor, "batch query key"]:
    """Return ‖F_ij‖."""
    return vectors.square().sum(-1).sqrt()


def mixing_ratio(vectors: Float[Tensor, "batch query key d_model"]) -> Float[Tensor, "batch query"]:
    """Return ‖Σ_{j≠i} F_ij‖ / (‖Σ_{j≠i} F_ij‖ + ‖F_ii‖) (Kobayashi et al., EMNLP 2021, eq. 13)."""
    same = torch.eye(vectors.shape[1], dtype=vectors.dtype, device=vectors.device)
    diagonal = einsum(same, vectors, "query key, batch query key d_model -> batch query d_model")
    mixed = einsum(1 - same, vectors, "query key, batch query key d_model -> batch query d_model")
    size = mixed.square().sum(-1).sqrt()
    return size / (size + diagonal.square().sum(-1).sqrt())
