"""Memory that is used again."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


class Workspace:
    """Buffers by name, taken once and used again: new memory can cost more than what is computed in it."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def like(self, name: str, model: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Uninitialised room of a shape, on the model tensor's device; what it held before is gone."""
        size = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size or buffer.dtype != dtype or buffer.device != model.device:
            buffer = self._buffers[name] = model.new_empty(size, dtype=dtype)
        return buffer[:size].view(shape)
