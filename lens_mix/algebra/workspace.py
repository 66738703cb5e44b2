"""Memory that is used again: new memory for each chunk costs more than what is computed in it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lens_mix.lens.block import Block


class Workspace:
    """Buffers by name, taken once and used again."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def like(self, name: str, model: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Uninitialised memory of a shape, on the model tensor's device; what it held before is gone."""
        size, buffer = math.prod(shape), self._buffers.get(name)
        if buffer is None or buffer.numel() < size or (buffer.dtype, buffer.device) != (dtype, model.device):
            # What was made in inference mode could not be written to outside of it.
            with torch.inference_mode(False):
                buffer = self._buffers[name] = torch.empty(size, dtype=dtype, device=model.device)
        return buffer[:size].view(*shape)


def workspace_of(block: Block) -> Workspace:
    """The one that all blocks of a run share; one of its own under a memory bound."""
    if block.max_memory is not None:
        return Workspace()
    workspace: Workspace = block.run_cache.setdefault("workspace", Workspace())
    return workspace
