"""Compute the norms of the value-weighted vectors that keys send to queries."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from lens_mix._algebra.budget import budget_beside, vector_bytes
from lens_mix._algebra.definitions import norms, value_vectors
from lens_mix._algebra.vectors import attention_vectors, head_vectors
from lens_mix.method import Method, MethodGroup

if TYPE_CHECKING:
    from lens_mix._blocks.block import Block


@dataclasses.dataclass(frozen=True)
class VectorMethod(Method):
    """Provide what the methods on vectors of keys share: the algebra engine and its recorded tensors.

    Base class.
    """

    group: ClassVar[MethodGroup] = "What each layer takes from each token"
    engines: ClassVar[tuple[str, ...]] = ("algebra",)
    records: ClassVar[frozenset[str]] = frozenset({"pattern", "value", "resid_pre"})
    # The vectors up to the feed-forward need only these components, so experts need no verification.
    needs: ClassVar[frozenset[str]] = frozenset({"projection", "residual"})


@dataclasses.dataclass(frozen=True)
class ValueNorms(VectorMethod):
    """Compute the norms of the value-weighted vectors, AttnN (Kobayashi et al., EMNLP 2020, eq. 3).

        score[l, i, j] = ‖Σ_h a_ijh u_jh‖
        u_jh = v_jh W_O^h

    A score is the norm of what the attention of block l adds to query i from key j. These are the vectors
    u_jh, weighted by the pattern a. v includes b_V, and u does not include b_O. With `per_head` the scores
    are ‖a_ijh u_jh‖ = a_ijh ‖u_jh‖.

    Shape [layer, query, key], or [layer, head, query, key] with `per_head`. Scores are at least 0, in the
    units of the attention's output, before any norm or multiplier on the attention branch. The sums of rows
    have no meaning.

    The map does not contain the residual stream (that of `attn_res` does), so rollouts mix in half an
    identity. Folding b_V into b_O (`fold_value_biases`) changes the map, because b_V is then in no vector.
    `value_biases` in the record says where it is.

        >>> lm.run(model, "The Eiffel Tower is in the city of", lm.methods.ValueNorms(per_head=True)).top(3)

    Args:
        per_head: Whether each head has a map of its own.
    """

    name: ClassVar[str] = "value_norm"
    description: ClassVar[str] = "the size of what attention alone adds from each token"
    place_in_list: ClassVar[int] = 4
    residual: ClassVar[float] = 0.5
    parts: ClassVar[frozenset[str]] = Method.parts | {"cross"}
    citation: ClassVar[str] = "kobayashi-etal-2020-attention"

    per_head: bool = False

    @override
    def __call__(self, block: Block) -> Float[Tensor, "batch *head query key"]:
        if not self.per_head:
            return attention_vectors(block).pairs.norms
        heads, pattern = head_vectors(block), block.recorded("pattern").detach()
        fixed = heads.copied + (0 if pattern.dtype == heads.dtype else pattern.numel() * heads.dtype.itemsize)
        # By head, no vector of a pair is needed, so only the vectors of keys take memory.
        least = 2 * len(pattern) * vector_bytes(heads)
        heads.budget = budget_beside(block, fixed, least, "value_norm, by head")
        head_norms = attention_vectors(block, heads).pairs.head_norms
        return pattern.to(heads.dtype) * head_norms.transpose(1, 2)[:, :, None]


def value_norms(
    pattern: Float[Tensor, "batch head query key"],
    value: Float[Tensor, "batch key value_head d_head"],
    W_O: Float[Tensor, "head d_head d_model"],
) -> Float[Tensor, "batch query key"]:
    """Return ‖Σ_h a_ijh v_jh W_O^h‖, as the paper defines it.

    `definitions.head_parts` returns the vectors whose norms are the map with `per_head`.

    Args:
        pattern: The attention weights a.
        value: The values v, with their bias.
        W_O: The output weights of the heads.
    """
    return norms(value_vectors(pattern, value, W_O))
