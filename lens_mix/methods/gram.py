"""Scalar products of the vectors that the heads send, accumulated in float64, and norms from them.

The norm of Σ_h a_h w_h needs an H × H factor of the vectors w_h, not the sum: ‖R a‖ with R from a QR
decomposition, or sqrt(aᵀ G a) with G the Gram matrix. The factor is R for float64 vectors and G, accumulated
in float64, for all others. A Gram matrix in float32 is off by half where heads cancel.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix.lens.anatomy import Norm, ValuePath

# Norms whose linear parts vectors have gone through, the first one first.
Chain = tuple[Norm, ...]

# Bytes of float64 temporaries: on a processor they stay in the second-level cache.
CACHED_BYTES = 1 << 21
# The same for weights times factors.
PAIR_BYTES = 3 << 18
# Bytes of the vectors that one product with W_O makes; they are read in smaller chunks.
SLAB_BYTES = 8 << 20
GPU_BYTES = 1 << 28


def chunk_bytes(device: torch.device, room: int | None, cached: int = CACHED_BYTES) -> int:
    """Bytes for the temporaries of one chunk.

    Args:
        device: where it is computed.
        room: what a memory bound leaves for them; None for no bound.
        cached: what suits a processor's caches.
    """
    suits = cached if device.type == "cpu" else GPU_BYTES
    return suits if room is None else min(suits, room)


def linear_part(
    norm: Norm | None, vectors: Float[Tensor, "*batch d_model"]
) -> Float[Tensor, "*batch d_model"]:
    """What a norm does to a share of its input, before the division: centring (LayerNorm) and γ, no β."""
    if norm is None:
        return vectors
    if norm.kind == "layer":
        vectors = vectors - vectors.mean(-1, keepdim=True)
    return vectors if norm.weight is None else vectors * norm.weight.detach().to(vectors.dtype)


def qr_factor(vectors: Float[Tensor, "*batch head d_model"]) -> Float[Tensor, "*batch rank head"]:
    """R with ‖R a‖ = ‖Σ_h a_h vector_h‖ for any a, in float64: 2e-13 even where the heads cancel."""
    return torch.linalg.qr(vectors.double().transpose(-1, -2), mode="r").R


def gram(vectors: Float[Tensor, "*batch head d_model"]) -> Float[Tensor, "*batch head head_"]:
    """All scalar products of the vectors, accumulated in float64 (6e-8 for float32 vectors)."""
    wide = vectors.double()
    return wide @ wide.transpose(-1, -2)


class GramAfter:
    """`gram` of `linear_part(norm, vectors)`, for float64 vectors: no centred copy is made.

    With P the scalar products under the metric γ², m the means and p_h = Σ_d γ_d² w_hd the products are
    P_hg - m_h p_g - p_h m_g + m_h m_g Σ_d γ_d².

    Args:
        norm: the norm.
        other: memory for γ² ⊙ vectors, γ² and the mean's weights, [head + 2, row, d_model].
    """

    def __init__(self, norm: Norm, other: Float[Tensor, "head_and_2 row d_model"]) -> None:
        self._centred = norm.kind == "layer"
        self._metric = other.new_ones(other.shape[-1])
        if norm.weight is not None:
            self._metric = norm.weight.detach().double().square()
        self._total = self._metric.sum()
        self._other = other if self._centred else other[:-2]
        if self._centred:
            self._other[-2] = self._metric
            self._other[-1] = 1 / other.shape[-1]

    def read(self, vectors: Float[Tensor, "head row d_model"]) -> Float[Tensor, "row head product"]:
        """The products of some vectors, heads first, before they are put together."""
        other = self._other[:, : vectors.shape[1]]
        torch.mul(vectors, self._metric, out=other[: len(vectors)])
        return torch.bmm(vectors.transpose(0, 1), other.permute(1, 2, 0))

    def put_together(self, found: Float[Tensor, "row head product"]) -> Float[Tensor, "row head head_"]:
        """The Gram matrices of what `read` gave."""
        if not self._centred:
            return found
        products, p, m = found[..., :-2], found[..., -2], found[..., -1]
        shift = m[..., :, None] * (p - m * (self._total / 2))[..., None, :]
        return products - shift - shift.transpose(-1, -2)


def gram_after(norm: Norm, vectors: Float[Tensor, "row head d_model"]) -> Float[Tensor, "row head head_"]:
    """`gram` of `linear_part(norm, vectors)`, for float64 vectors."""
    rows, heads, d_model = vectors.shape
    after = GramAfter(norm, vectors.new_empty((heads + 2, rows, d_model)))
    return after.put_together(after.read(vectors.transpose(0, 1)))


def factor_norms(
    factors: Float[Tensor, "*batch stage rank head"],
    weights: Float[Tensor, "*batch head query"],
    exact: bool,
) -> Float[Tensor, "*batch stage query"]:
    """‖Σ_h weights_h vectors_h‖ without the sums, in float64.

    Args:
        factors: `qr_factor` of the vectors (`exact`) or `gram`, at several stages.
        weights: any number of weights per head.
        exact: which of the two it is.
    """
    # In one piece: products copy matrices that lie across memory one by one.
    wide = weights.to(torch.float64, memory_format=torch.contiguous_format)
    product = (factors.flatten(-3, -2) @ wide).unflatten(-2, factors.shape[-3:-1])
    if exact:
        return torch.linalg.vector_norm(product, dim=-2)
    return product.mul_(wide.unsqueeze(-3)).sum(-2).clamp_min_(0).sqrt_()


class HeadVectors:
    """u_jh = v_jh W_O^h, one vector per key and head (b_V in, b_O never), made a few keys at a time.

    Args:
        path: the block's value path; W_O has one matrix per query head.
        value: value vectors, with as many heads as the value hook has (fewer when grouped).
        room: bytes for the temporaries of one chunk, where memory is bound.
    """

    def __init__(
        self,
        path: ValuePath,
        value: Float[Tensor, "batch key value_head d_head"],
        room: int | None = None,
    ) -> None:
        self.matrices: Float[Tensor, "head d_head d_model"] = path.W_O.detach().to(value.dtype)
        self.heads, self.d_head, self.d_model = self.matrices.shape
        self.value, self.room = value.detach(), room

    @property
    def dtype(self) -> torch.dtype:
        """Of the vectors; at least float32."""
        return self.value.dtype

    @property
    def row_bytes(self) -> int:
        """Bytes that each key of one prompt needs while its vectors are made and go through norms."""
        return 3 * self.heads * (self.d_model + self.d_head) * self.dtype.itemsize

    def of(self, chain: Chain, keys: slice) -> Float[Tensor, "batch key head d_model"]:
        """The vectors of some keys after the linear parts of some norms."""
        value = self.value[:, keys]
        out = torch.bmm(self.by_head(value), self.matrices)
        return through(chain, out.unflatten(1, value.shape[:2]).movedim(0, 2))

    def by_head(
        self, value: Float[Tensor, "batch key value_head d_head"]
    ) -> Float[Tensor, "head row d_head"]:
        """Values as one matrix per head, to be multiplied by `matrices`.

        One product per head is to follow; einsum would make it one per head and key.
        """
        return value.repeat_interleave(self.heads // value.shape[2], dim=2).movedim(2, 0).flatten(1, 2)

    def weighted(self, weights: Float[Tensor, "batch key head"]) -> Float[Tensor, "batch key d_model"]:
        """Σ_h weights_jh u_jh."""
        value = self.value.repeat_interleave(self.heads // self.value.shape[2], dim=2)
        return (value * weights.to(value.dtype)[..., None]).flatten(2) @ self.matrices.flatten(0, 1)


def through(chain: Chain, vectors: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
    """The linear parts of several norms, one after another."""
    for norm in chain:
        vectors = linear_part(norm, vectors)
    return vectors
