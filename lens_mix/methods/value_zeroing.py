"""Value Zeroing."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from lens_mix.methods.base import Method


@dataclasses.dataclass(frozen=True)
class ValueZeroing(Method):
    """Value Zeroing (Mohebbi et al., EACL 2023)."""

    name: ClassVar[str] = "value_zeroing"
    residual: ClassVar[float] = 0.0
