"""DecompX's rules for splitting a bias, which belongs to no token, among the tokens."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix._model.anatomy import LinearNorm

Split = Literal["absdot", "abssim", "norm", "equal", "first", "dot", "drop"]
SPLITS: tuple[str, ...] = ("absdot", "abssim", "norm", "equal", "first", "dot", "drop")


def split_bias(
    vectors: Float[Tensor, "*batch input d"],
    bias: Float[Tensor, "*batch d"] | Float[Tensor, " d"] | None,
    rule: Split,
    out: Float[Tensor, "*batch input d"] | None = None,
) -> Float[Tensor, "*batch input d"]:
    """Return the vectors plus their shares of a bias, which sum to it (Modarressi et al., 2023, eq. 8-9).

    Args:
        vectors: One vector per input token.
        bias: The bias to split; None for no bias.
        rule: Shares in proportion to |v · b| ("absdot", the paper's), |cos(v, b)| ("abssim"), ‖v‖ ("norm") or
            v · b ("dot"); equal shares for every vector that is not zero ("equal"); the whole bias for the
            first token ("first", `cls` in the released code); no shares ("drop").
        out: A tensor for the result, which may be `vectors`.
    """
    if bias is None or rule == "drop":
        return vectors
    bias = bias.to(vectors.dtype)
    weights = _weights(vectors, bias, rule)
    total = weights.sum(-1, keepdim=True)
    # If all weights are 0, all shares are 0. The released code divides by total + 1e-12 instead.
    weights = torch.where(total != 0, weights / total, torch.zeros_like(weights))
    return torch.addcmul(vectors, weights[..., None], bias[..., None, :], out=out)


def _weights(vectors: Tensor, bias: Tensor, rule: str) -> Float[Tensor, "*batch input"]:
    if rule == "first":
        weights = torch.zeros_like(vectors[..., 0])
        weights[..., 0] = 1
        return weights
    if rule in ("norm", "equal"):
        lengths: Tensor = torch.linalg.vector_norm(vectors, dim=-1)
        return lengths if rule == "norm" else (lengths != 0).to(vectors.dtype)
    product = (vectors @ bias[..., None])[..., 0]
    if rule in ("dot", "absdot"):
        return product if rule == "dot" else product.abs()
    if rule != "abssim":
        raise ValueError(f"rule: expected one of {SPLITS}, got {rule!r}")
    sizes = torch.linalg.vector_norm(vectors, dim=-1) * torch.linalg.vector_norm(bias, dim=-1, keepdim=True)
    return torch.where(sizes > 0, product.abs() / sizes, torch.zeros_like(sizes))


def through_linear(
    weight: Float[Tensor, "d d_out"],
    bias: Float[Tensor, " d_out"] | None,
    vectors: Float[Tensor, "*batch input d"],
    rule: Split,
) -> Float[Tensor, "*batch input d_out"]:
    """Return shares of `state @ weight + bias` from shares of the state; the bias is split."""
    # The product is a tensor of its own, so the bias may be added in place.
    out = vectors @ weight.to(vectors.dtype)
    return split_bias(out, bias, rule, out)


def through_linear_norm(
    norm: LinearNorm,
    vectors: Float[Tensor, "batch query input d"],
    rule: Split,
    rows: slice = slice(None),
) -> Float[Tensor, "batch query input d"]:
    """Return shares of a norm's output from shares of its input at some rows; the norm's bias is split."""
    out = norm(vectors, rows)
    return split_bias(out, norm.bias, rule, out)
