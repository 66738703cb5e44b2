"""Scalar products of the vectors that the heads send, accumulated in float64, and norms from them.

The norm of Σ_h a_h w_h needs an H × H factor of the vectors w_h, not the sum: ‖R a‖ with R from a QR
decomposition, or sqrt(aᵀ G a) with G the Gram matrix. The factor is R for float64 vectors and G, accumulated
in float64, for all others. A Gram matrix in float32 is off by half where heads cancel.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix.algebra.workspace import Workspace, even
from lens_mix.lens.anatomy import Norm, ValuePath

# Norms whose linear parts vectors have gone through, the first one first.
Chain = tuple[Norm, ...]

# Bytes of float64 temporaries: on a processor they stay in the second-level cache.
CACHED_BYTES = 1 << 21
# The same for weights times factors.
PAIR_BYTES = 1 << 20
# Bytes of the vectors that one product with W_O makes; they are read in smaller chunks.
SLAB_BYTES = 16 << 20
GPU_BYTES = 1 << 28
# Queries whose weights stay in the first-level cache while they are turned round.
_QUERIES = 64


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
    norm: Norm | None, vectors: Float[Tensor, "*batch d_model"], out: Tensor | None = None
) -> Float[Tensor, "*batch d_model"]:
    """What a norm does to a share of its input, before the division: centring (LayerNorm) and γ, no β.

    Args:
        norm: None for none.
        vectors: the shares.
        out: memory for the result, where anything is done.
    """
    if norm is None:
        return vectors
    weight = None if norm.weight is None else norm.weight.detach().to(vectors.dtype)
    if norm.kind == "layer":
        centred = torch.sub(vectors, vectors.mean(-1, keepdim=True), out=out)
        return centred if weight is None else centred.mul_(weight)
    return vectors if weight is None else torch.mul(vectors, weight, out=out)


def by_key(
    pattern: Float[Tensor, "batch head query key"], out: Float[Tensor, "batch key head query"]
) -> Float[Tensor, "batch key head query"]:
    """The pattern with its key first, into `out`; some queries at a time, five times as fast on a CPU."""
    queries = pattern.shape[2]
    for some in even(0, queries, _QUERIES if pattern.device.type == "cpu" else queries):
        out[..., some].copy_(pattern[:, :, some].permute(0, 3, 1, 2))
    return out


def qr_factor(vectors: Float[Tensor, "*batch head d_model"]) -> Float[Tensor, "*batch rank head"]:
    """R with ‖R a‖ = ‖Σ_h a_h vector_h‖ for any a, in float64: 2e-13 even where the heads cancel."""
    return torch.linalg.qr(vectors.double().transpose(-1, -2), mode="r").R


def gram(vectors: Float[Tensor, "*batch head d_model"]) -> Float[Tensor, "*batch head head_"]:
    """All scalar products of the vectors, accumulated in float64 (6e-8 for float32 vectors)."""
    wide = vectors.double()
    return wide @ wide.transpose(-1, -2)


class Grams:
    """`gram` of float64 vectors at several stages, from one product: as they are, and after norms.

    No centred copy is made. With P the scalar products under the metric γ², m the means and
    p_h = Σ_d γ_d² w_hd the products after a norm are P_hg - m_h p_g - p_h m_g + m_h m_g Σ_d γ_d². So the
    left side holds the vectors, then for each norm γ² ⊙ vectors, and γ² and the mean's weights where it
    centres (on the left, for a product with few columns is faster than one with few rows).

    Args:
        norms: one per stage; None for the vectors as they are.
        heads: how many vectors each row has.
        memory: for the left side.
    """

    def __init__(
        self, norms: Sequence[Norm | None], heads: int, memory: Float[Tensor, "line row d_model"]
    ) -> None:
        self._left, self._heads = memory, heads
        self._stages: list[tuple[int, Tensor | None, Tensor | None]] = []
        first = heads
        for norm in norms:
            if norm is None:
                self._stages.append((0, None, None))
                continue
            metric = memory.new_ones(memory.shape[-1])
            if norm.weight is not None:
                metric = norm.weight.detach().double().square()
            centred = norm.kind == "layer"
            self._stages.append((first, metric, metric.sum() if centred else None))
            first += self._heads
            if centred:
                memory[first] = metric
                memory[first + 1] = 1 / memory.shape[-1]
                first += 2

    @staticmethod
    def lines(norms: Sequence[Norm | None], heads: int) -> int:
        """Lines of the left side, and of the product."""
        sizes = [0 if norm is None else heads + 2 * (norm.kind == "layer") for norm in norms]
        return heads + sum(sizes)

    def read(self, vectors: Float[Tensor, "head row d_model"], out: Float[Tensor, "row line head"]) -> None:
        """The product for some vectors, heads first."""
        left = self._left[:, : vectors.shape[1]]
        wide = left[: self._heads].copy_(vectors)
        for first, metric, _ in self._stages:
            if metric is not None:
                torch.mul(wide, metric, out=left[first : first + self._heads])
        torch.bmm(left.transpose(0, 1), wide.permute(1, 2, 0), out=out)

    def put_together(self, found: Float[Tensor, "row line head"]) -> list[Float[Tensor, "row head head_"]]:
        """The Gram matrices of all stages, of what `read` gave."""
        grams = []
        for first, _, total in self._stages:
            last = first + self._heads
            products = found[:, first:last]
            if total is not None:
                p, m = found[:, last], found[:, last + 1]
                shift = m[..., :, None] * (p - m * (total / 2))[..., None, :]
                products = products - shift - shift.transpose(-1, -2)
            grams.append(products)
        return grams


def factor_norms(
    factors: Float[Tensor, "row stage rank head"],
    weights: Float[Tensor, "row head query"],
    exact: bool,
    memory: Float[Tensor, "row stage_rank query"] | None = None,
) -> Float[Tensor, "row stage query"]:
    """‖Σ_h weights_h vectors_h‖ without the sums, in float64.

    Args:
        factors: `qr_factor` of the vectors (`exact`) or `gram`, at several stages.
        weights: any number of weights per head, float64; in one piece they are not copied.
        exact: which of the two it is.
        memory: for the products.
    """
    product = torch.bmm(factors.flatten(1, 2), weights, out=memory).unflatten(1, factors.shape[1:3])
    if exact:
        return torch.linalg.vector_norm(product, dim=-2)
    return product.mul_(weights[:, None]).sum(-2).clamp_min_(0).sqrt_()


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
        self.copied = 0 if path.W_O.dtype == value.dtype else self.matrices.nbytes
        self.heads, self.d_head, self.d_model = self.matrices.shape
        self.value, self.room = value.detach(), room

    @property
    def dtype(self) -> torch.dtype:
        """Of the vectors; at least float32."""
        return self.value.dtype

    def row_bytes(self, queries: int) -> int:
        """Bytes that each key of one prompt needs while its vectors and weights are made."""
        vectors = 3 * self.heads * (self.d_model + self.d_head)
        return (vectors + 2 * queries * self.heads) * self.dtype.itemsize

    def of(self, chain: Chain, keys: slice) -> Float[Tensor, "batch key head d_model"]:
        """The vectors of some keys after the linear parts of some norms."""
        value = self.value[:, keys]
        out = torch.bmm(self.by_head(value), self.matrices)
        return through(chain, out.unflatten(1, value.shape[:2]).movedim(0, 2))

    def lying_in(
        self, memory: Workspace, name: str, matrices: Float[Tensor, "head d_head width"], keys: slice
    ) -> Float[Tensor, "batch key head width"]:
        """Values of some keys times a matrix per head, in memory that is used again.

        With `matrices_after(chain)` these are the vectors after some norms.
        """
        value = self.value[:, keys]
        rows = self.by_head(value)
        out = memory.like(name, rows, (*rows.shape[:2], matrices.shape[-1]), self.dtype)
        return torch.bmm(rows, matrices, out=out).unflatten(1, value.shape[:2]).movedim(0, 2)

    def matrices_after(self, chain: Chain, memory: Workspace) -> Float[Tensor, "head d_head d_model"]:
        """W_O of each head after some norms: a linear part acts on its rows as on the vectors they make."""
        out = memory.like("matrices", self.matrices, self.matrices.shape, self.dtype)
        return through(chain, self.matrices, out)

    def by_head(
        self, value: Float[Tensor, "batch key value_head d_head"]
    ) -> Float[Tensor, "head row d_head"]:
        """Values as one matrix per head, to be multiplied by `matrices`.

        One product per head is to follow; einsum would make it one per head and key.
        """
        return self._of_query_heads(value).movedim(2, 0).flatten(1, 2)

    def weighted(self, weights: Float[Tensor, "batch key head"]) -> Float[Tensor, "batch key d_model"]:
        """Σ_h weights_jh u_jh."""
        value = self._of_query_heads(self.value)
        return (value * weights.to(value.dtype)[..., None]).flatten(2) @ self.matrices.flatten(0, 1)

    def _of_query_heads(self, value: Tensor) -> Tensor:
        group = self.heads // value.shape[2]
        return value if group == 1 else value.repeat_interleave(group, dim=2)


def through(
    chain: Chain, vectors: Float[Tensor, "*batch d_model"], out: Tensor | None = None
) -> Float[Tensor, "*batch d_model"]:
    """The linear parts of several norms, one after another; `out` as in `linear_part`."""
    for norm in chain:
        vectors = linear_part(norm, vectors, out)
    return vectors
