"""Value-weighted norms: how long the vector is that a key sends to a query."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

from jaxtyping import Float
from torch import Tensor

from lens_mix.algebra.budget import budget_beside, vector_bytes
from lens_mix.algebra.definitions import norms, value_vectors
from lens_mix.algebra.vectors import attention_vectors, head_vectors
from lens_mix.method import Method

if TYPE_CHECKING:
    from lens_mix.lens.block import Block


@dataclasses.dataclass(frozen=True)
class VectorMethod(Method):
    """Base of the methods on the vectors that keys send, which algebra makes of values and weights."""

    engines: ClassVar[tuple[str, ...]] = ("algebra",)
    records: ClassVar[frozenset[str]] = frozenset({"pattern", "value", "z", "resid_pre"})
    # What the vectors before the feed-forward are made of; a mixture's experts need no verification for them.
    needs: ClassVar[frozenset[str]] = frozenset({"projection", "residual"})


@dataclasses.dataclass(frozen=True)
class ValueNorms(VectorMethod):
    """Norms of the value-weighted vectors, AttnN (Kobayashi et al., EMNLP 2020, eq. 3).

    score[l, i, j] = ‖Σ_h a_ijh u_jh‖ with u_jh = v_jh W_O^h, b_V in and b_O out: what the attention of
    block l adds to query i from key j. Shape [layer, query, key], or with `per_head` [layer, head, query,
    key] with ‖a_ijh u_jh‖ = a_ijh ‖u_jh‖. From 0 up, rows sum to anything. In the units of the attention's
    output, before any norm or multiplier that some blocks put on the branch.

    The residual stream is not in it (`attn_res` is with it), so roll-outs mix in half an identity.
    Folding b_V into b_O (`fold_value_biases`) changes the map: then b_V is in no vector; the record says
    which under `value_biases`.

    Args:
        per_head: keep the heads apart.
    """

    name: ClassVar[str] = "value_norm"
    residual: ClassVar[float] = 0.5
    parts: ClassVar[frozenset[str]] = Method.parts | {"cross"}
    citation: ClassVar[str] = "kobayashi-etal-2020-attention"

    per_head: bool = False

    def __call__(self, block: Block) -> Float[Tensor, "batch *head query key"]:
        if not self.per_head:
            return attention_vectors(block).pairs.norms
        heads, pattern = head_vectors(block), block.recorded("pattern").detach()
        fixed = heads.copied + (0 if pattern.dtype == heads.dtype else pattern.numel() * heads.dtype.itemsize)
        least = 2 * len(pattern) * vector_bytes(heads)
        heads.budget = budget_beside(block, fixed, least, "value_norm, by head")
        head_norms = attention_vectors(block, heads).pairs.head_norms
        return pattern.to(heads.dtype) * head_norms.transpose(1, 2)[:, :, None]


def value_norms(
    pattern: Float[Tensor, "batch head query key"],
    value: Float[Tensor, "batch key value_head d_head"],
    W_O: Float[Tensor, "head d_head d_model"],
) -> Float[Tensor, "batch query key"]:
    """The definition: ‖Σ_h a_ijh v_jh W_O^h‖; `per_head` has the norms of `definitions.head_parts`."""
    return norms(value_vectors(pattern, value, W_O))
