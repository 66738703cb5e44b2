"""Attention weights."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

from jaxtyping import Float
from torch import Tensor

from lens_mix.method import CrossKeys, Method

if TYPE_CHECKING:
    from lens_mix.lens.block import Block


@dataclasses.dataclass(frozen=True)
class AttentionWeights(Method):
    """Attention weights as a mixing map (Clark et al., BlackboxNLP 2019).

    Shape [layer, query, key], the mean over heads, or [layer, head, query, key] with `per_head`; in 0..1,
    rows sum to 1 (less on models with attention sinks that are no token).

    The weights say where a query looked, not how much came of it: a key with a small value vector can
    take most of the weight (Kobayashi et al., EMNLP 2020).

    Args:
        per_head: keep the heads apart.
    """

    name: ClassVar[str] = "attention"
    residual: ClassVar[float] = 0.5
    cross: ClassVar[CrossKeys | None] = "source"
    engines: ClassVar[tuple[str, ...]] = ("recorded",)
    records: ClassVar[frozenset[str]] = frozenset({"pattern"})
    citation: ClassVar[str] = "clark-etal-2019-bert"

    per_head: bool = False

    def __call__(self, block: Block) -> Float[Tensor, "batch *head query key"]:
        pattern = block.recorded("pattern")
        pattern = pattern.to(block.zeros().dtype)
        return pattern if self.per_head else pattern.mean(dim=1)
