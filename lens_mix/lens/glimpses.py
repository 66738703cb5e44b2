"""What the clean pass keeps of every pattern: which keys it gave weight, and some queries to check by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor


def spread_places(real: Bool[Tensor, "batch pos"], count: int) -> Int[Tensor, "batch place"]:
    """As many positions of each prompt, evenly; each at least once where it has fewer."""
    own = [row.nonzero()[:, 0] for row in real]
    return torch.stack(
        [at[torch.linspace(0, len(at) - 1, count, device=at.device).round().long()] for at in own]
    )


def see_keys_of(
    layer: int, seen: dict[int, Tensor], places: Int[Tensor, "batch place"], glimpses: dict[int, Tensor]
) -> Callable[..., None]:
    """A hook on a pattern: which keys got any weight, and the pattern of the queries at the places.

    Args:
        layer: of which block.
        seen, glimpses: the dicts to fill.
        places: positions of each prompt.
    """
    rows = torch.arange(len(places), device=places.device)[:, None]
    in_order = torch.equal(places, torch.arange(places.shape[1], device=places.device).expand_as(places))

    def see(tensor: Tensor, hook: Any) -> None:
        # A quarter of the time that `(tensor != 0).any(dim=1)` takes.
        seen[layer] = (tensor.amax(dim=1) != 0) | (tensor.amin(dim=1) != 0)
        if tensor.shape[0] == len(places) and tensor.shape[2] > int(places.max()):
            whole = in_order and tensor.shape[2] == places.shape[1]
            # Of all positions no second copy: the method has recorded the pattern too.
            glimpses[layer] = tensor.detach() if whole else tensor.detach()[rows, :, places].transpose(1, 2)

    return see
