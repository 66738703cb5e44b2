"""The unembedding at one position per row, where nothing else of the logits is read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn


def row_at(tensor: Tensor, positions: Tensor) -> Tensor:
    """One position of each row of [row pos ...], as [row 1 ...]."""
    return tensor[torch.arange(len(tensor), device=tensor.device), positions.to(tensor.device)][:, None]


@contextlib.contextmanager
def unembedding_at(model: Any, positions: Tensor | None) -> Iterator[list[bool]]:
    """The unembedding sees one position per row; the list is filled if it ran at all."""
    narrowed: list[bool] = []
    unembed = getattr(model, "unembed", None)
    if positions is None or not isinstance(unembed, nn.Module):
        yield narrowed
        return

    def narrow(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        narrowed.append(True)
        return (row_at(args[0], positions), *args[1:])

    handle = unembed.register_forward_pre_hook(narrow)
    try:
        yield narrowed
    finally:
        handle.remove()
