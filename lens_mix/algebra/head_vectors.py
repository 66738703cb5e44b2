"""The vectors that the heads send, u_jh = v_jh W_O^h, and what norms make of them.

A norm's linear part acts on the rows of W_O as on the vectors that they make, so vectors after norms are
value vectors times other matrices.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lens_mix.algebra.budget import chunk_size, chunks, vector_bytes
from lens_mix.lens.anatomy import Norm, ValuePath

Chain = tuple[Norm, ...]  # norms whose linear parts vectors have gone through, the first one first


def through(chain: Chain, vectors: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
    """The linear parts of several norms, one after another."""
    for norm in chain:
        vectors = norm.linear_part(vectors)
    return vectors


class HeadVectors:
    """u_jh = v_jh W_O^h, one vector per key and head (b_V in, b_O never), made a few keys at a time.

    Args:
        path: the block's value path; W_O has one matrix per query head.
        value: value vectors, with as many heads as the value hook has (fewer when grouped).
        budget: bytes for the temporaries of one chunk, where memory is bound.
    """

    def __init__(
        self,
        path: ValuePath,
        value: Float[Tensor, "batch key value_head d_head"],
        budget: int | None = None,
    ) -> None:
        self.matrices: Float[Tensor, "head d_head d_model"] = path.W_O.detach().to(value.dtype)
        # Bytes, for budgets: weights of another dtype are copied.
        self.copied = 0 if path.W_O.dtype == value.dtype else self.matrices.nbytes
        self.heads, self.d_head, self.d_model = self.matrices.shape
        self.value, self.budget = value.detach(), budget

    @property
    def dtype(self) -> torch.dtype:
        """Of the vectors; at least float32."""
        return self.value.dtype

    def after(self, chain: Chain) -> Float[Tensor, "head d_head d_model"]:
        """W_O after norms: times the values, it gives the vectors w after these norms."""
        return through(chain, self.matrices)

    def times(
        self, matrices: Float[Tensor, "head d_head width"], keys: slice = slice(None)
    ) -> Float[Tensor, "batch key head width"]:
        """Values times one matrix per head; with `after(chain)`, the vectors w of these keys."""
        value = self._of_query_heads(self.value[:, keys])
        # One product per head; einsum would make it one per head and key.
        rows = value.movedim(2, 0).flatten(1, 2)
        by_head: Tensor = torch.bmm(rows, matrices).unflatten(1, value.shape[:2])
        return by_head.movedim(0, 2)

    def weighted(
        self, weights: Float[Tensor, "batch query key head"], keys: slice = slice(None)
    ) -> Float[Tensor, "batch query key d_model"]:
        """Σ_h weights_ijh u_jh, one row per pair: the definition, with the sum inside one product."""
        value = self._of_query_heads(self.value[:, keys])
        return (weights[..., None] * value[:, None]).flatten(3) @ self.matrices.flatten(0, 1)

    def mixed(
        self, weights: Float[Tensor, "batch query head"], keys: Int[Tensor, "batch query"] | None
    ) -> Float[Tensor, "batch query d_model"]:
        """Σ_h weights_ih u_kh with one key k per query; None: each position's own."""
        value = self.value
        if keys is not None:
            value = value[torch.arange(len(value), device=value.device)[:, None], keys]
        value = self._of_query_heads(value)
        return (value * weights[..., None]).flatten(2) @ self.matrices.flatten(0, 1)

    def norms(self) -> Float[Tensor, "batch key head"]:
        """‖u_jh‖."""
        batch, keys = self.value.shape[:2]
        norms = self.value.new_empty((batch, keys, self.heads))
        size = chunk_size(batch * vector_bytes(self), self.value.device, self.budget)
        for chunk in chunks(0, keys, size):
            norms[:, chunk] = torch.linalg.vector_norm(self.times(self.matrices, chunk), dim=-1)
        return norms

    def _of_query_heads(self, value: Tensor) -> Tensor:
        group = self.heads // value.shape[2]
        return value if group == 1 else value.repeat_interleave(group, dim=2)
