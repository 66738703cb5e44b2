"""What every method is: a small frozen dataclass (its parameters) with one call."""

from __future__ import annotations

import dataclasses
from typing import ClassVar


@dataclasses.dataclass(frozen=True)
class Method:
    """Base of all methods.

    Class attributes:
        name: the method's name in strings (`lm.run(model, prompt, name)`).
        residual: the residual weight that the method's own paper mixes in when maps
            are rolled out: 0.5 where the map holds the attention branch only, 0 where
            it already holds the residual.
    """

    name: ClassVar[str]
    residual: ClassVar[float]

    def parameters(self) -> dict[str, object]:
        """The parameters by name, as the record keeps them."""
        return dataclasses.asdict(self)
