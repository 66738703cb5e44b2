"""Attention weights."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from lens_mix.methods.base import Method


@dataclasses.dataclass(frozen=True)
class AttentionWeights(Method):
    """Attention weights as a mixing map (Clark et al., BlackboxNLP 2019)."""

    name: ClassVar[str] = "attention"
    residual: ClassVar[float] = 0.5

    per_head: bool = False
