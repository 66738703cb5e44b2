"""The vectors that the heads send, u_jh = v_jh W_O^h, before and after norms.

A norm's linear part can be applied to the rows of W_O instead of to the vectors u. So vectors after norms are
value vectors times other matrices.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lens_mix._algebra.budget import chunk_size, chunks, vector_bytes
from lens_mix._model.anatomy import Chain, ValuePath, through


class HeadVectors:
    """The vectors u_jh = v_jh W_O^h, one per key and head (with b_V, without b_O), in chunks of keys.

    Args:
        path: The block's value path; W_O has one matrix per query head.
        value: The value vectors, with as many heads as the value hook has (fewer if grouped).
        budget: The bytes for the temporaries of one chunk; None if memory is not bound.
    """

    def __init__(
        self,
        path: ValuePath,
        value: Float[Tensor, "batch key value_head d_head"],
        budget: int | None = None,
    ) -> None:
        self.matrices: Float[Tensor, "head d_head d_model"] = path.W_O.detach().to(value.dtype)
        # Budgets count the bytes of a copy, which weights of another dtype need.
        self.copied = 0 if path.W_O.dtype == value.dtype else self.matrices.nbytes
        self.heads, self.d_head, self.d_model = self.matrices.shape
        self.value, self.budget = value.detach(), budget

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the vectors, at least float32."""
        return self.value.dtype

    def after(self, chain: Chain) -> Float[Tensor, "head d_head d_model"]:
        """Return W_O after norms; values times it are the vectors w after these norms."""
        return through(chain, self.matrices)

    def times(
        self, matrices: Float[Tensor, "head d_head width"], keys: slice = slice(None)
    ) -> Float[Tensor, "batch key head width"]:
        """Return values times one matrix per head; with `after(chain)`, the vectors w of these keys."""
        value = self._of_query_heads(self.value[:, keys])
        # This is one product per head, while einsum would compute one per head and key.
        rows = value.movedim(2, 0).flatten(1, 2)
        by_head: Tensor = torch.bmm(rows, matrices).unflatten(1, value.shape[:2])
        return by_head.movedim(0, 2)

    def weighted(
        self, weights: Float[Tensor, "batch query key head"], keys: slice = slice(None)
    ) -> Float[Tensor, "batch query key d_model"]:
        """Return Σ_h weights_ijh u_jh, one vector per pair, by one product that includes the sum."""
        value = self._of_query_heads(self.value[:, keys])
        return (weights[..., None] * value[:, None]).flatten(3) @ self.matrices.flatten(0, 1)

    def mixed(
        self, weights: Float[Tensor, "batch query head"], keys: Int[Tensor, "batch query"] | None
    ) -> Float[Tensor, "batch query d_model"]:
        """Return Σ_h weights_ih u_kh with one key k per query; None for each position's own."""
        value = self.value
        if keys is not None:
            value = value[torch.arange(len(value), device=value.device)[:, None], keys]
        value = self._of_query_heads(value)
        return (value * weights[..., None]).flatten(2) @ self.matrices.flatten(0, 1)

    def norms(self) -> Float[Tensor, "batch key head"]:
        """Return ‖u_jh‖."""
        batch, keys = self.value.shape[:2]
        norms = self.value.new_empty((batch, keys, self.heads))
        size = chunk_size(batch * vector_bytes(self), self.value.device, self.budget)
        for chunk in chunks(0, keys, size):
            norms[:, chunk] = torch.linalg.vector_norm(self.times(self.matrices, chunk), dim=-1)
        return norms

    def _of_query_heads(self, value: Tensor) -> Tensor:
        group = self.heads // value.shape[2]
        return value if group == 1 else value.repeat_interleave(group, dim=2)
