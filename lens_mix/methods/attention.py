"""Compute attention weights, alone and averaged with the identity for the residual connection."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

import torch
from einops import reduce
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from lens_mix._algebra.budget import budget_beside
from lens_mix.method import Method, MethodGroup

if TYPE_CHECKING:
    from lens_mix._blocks.block import Block


@dataclasses.dataclass(frozen=True)
class AttentionWeights(Method):
    """Return attention weights as a map (Clark et al., BlackboxNLP 2019).

        score[l, i, j] = mean_h a_ijh

    a_ijh is the attention weight of key j at query i in head h, after the softmax.

    Shape [layer, query, key], or [layer, head, query, key] with `per_head`. Values are in 0..1, and rows sum
    to 1. On models with attention sinks that are not tokens they sum to less, and a note says so.

    A weight measures how much a query attends to a key, not how much it receives: a key with a small value
    vector can have most of the weight (Kobayashi et al., EMNLP 2020).

        >>> method = lm.methods.AttentionWeights(per_head=True)
        >>> lm.run(model, "The Eiffel Tower is in the city of", method).top(3)

    Args:
        per_head: Whether each head has a map of its own.
    """

    name: ClassVar[str] = "attention"
    group: ClassVar[MethodGroup] = "Attention weights"
    description: ClassVar[str] = "how much a position attends to each token"
    place_in_list: ClassVar[int] = 1
    residual: ClassVar[float] = 0.5
    has_unit_rows: ClassVar[bool] = True
    parts: ClassVar[frozenset[str]] = Method.parts | {"cross"}
    engines: ClassVar[tuple[str, ...]] = ("recorded",)
    records: ClassVar[frozenset[str]] = frozenset({"pattern"})
    citation: ClassVar[str] = "clark-etal-2019-bert"

    per_head: bool = False

    @override
    def __call__(self, block: Block) -> Float[Tensor, "batch *head query key"]:
        pattern = block.recorded("pattern")
        pattern = pattern.to(block.zeros().dtype)
        return pattern if self.per_head else pattern.mean(dim=1)


@dataclasses.dataclass(frozen=True)
class AttnResWeights(Method):
    """Average attention weights and the identity, AttnRes-W.

        score[l, i, j] = 0.5 Ā_ij + 0.5 δ_ij

    Ā is the mean over heads, and δ_ij is 1 for the position itself (Abnar and Zuidema, ACL 2020). This is the
    counterpart by weights in Kobayashi et al. (EMNLP 2021, section 4).

    Shape [layer, query, key], values in 0..1, and rows sum to 1. On models with attention sinks that are not
    tokens they sum to less.

        >>> lm.run(model, "The Eiffel Tower is in the city of", lm.methods.AttnResWeights()).top(3)
    """

    name: ClassVar[str] = "attn_res_w"
    group: ClassVar[MethodGroup] = "Attention weights"
    description: ClassVar[str] = "half the attention weight, and half for the position itself"
    place_in_list: ClassVar[int] = 2
    residual: ClassVar[float] = 0.0
    includes_residual: ClassVar[bool] = True
    has_unit_rows: ClassVar[bool] = True
    engines: ClassVar[tuple[str, ...]] = ("recorded",)
    records: ClassVar[frozenset[str]] = frozenset({"pattern"})
    citation: ClassVar[str] = "kobayashi-etal-2021-incorporating"

    @override
    def __call__(self, block: Block) -> Float[Tensor, "batch query key"]:
        pattern = block.recorded("pattern")
        copied = pattern.shape[1] if pattern.dtype != block.zeros().dtype else 0
        pairs = pattern[:, 0].numel() * block.zeros().dtype.itemsize
        # The map is computed at once, so none of its memory depends on the size of a chunk.
        budget_beside(block, (5 + copied) * pairs, 0, "attn_res_w")
        weights = 0.5 * pattern.to(block.zeros().dtype).mean(dim=1)
        half = weights.new_full((1, 1, 1), 0.5)
        return weights.scatter_add_(2, block.queries[..., None], half.expand(*weights.shape[:2], 1))


def attention_weights(pattern: Float[Tensor, "batch head query key"]) -> Float[Tensor, "batch query key"]:
    """Return Ā_ij, the mean of the weights over heads, as the paper defines it."""
    return reduce(pattern, "batch head query key -> batch query key", "mean")


def attn_res_w(pattern: Float[Tensor, "batch head query key"]) -> Float[Tensor, "batch query key"]:
    """Return 0.5 Ā_ij + 0.5 δ_ij, as the paper defines it."""
    same = torch.eye(pattern.shape[-1], dtype=pattern.dtype, device=pattern.device)
    return 0.5 * attention_weights(pattern) + 0.5 * same
