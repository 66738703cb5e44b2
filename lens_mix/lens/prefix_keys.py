"""The keys and values of a prompt's tokens, for later passes in which copies of the prompt see them."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import DynamicCache
from typing_extensions import override


class PrefixKeys(DynamicCache):  # type: ignore[misc]
    """Keep the first keys and values of one pass, and put them in front of those of later passes.

    transformers has one argument for both, `past_key_values`. Its own caches also keep the keys and values of
    the later passes, in all layers, which `max_memory` does not count.

    Args:
        count: The number of tokens whose keys and values are kept.

    Attributes:
        kept: Layer -> keys and values [1, head, count, d_head].
    """

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    @override
    def update(
        self,
        key_states: Float[Tensor, "row head pos d_head"],
        value_states: Float[Tensor, "row head pos d_value"],
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """Return the keys and values that the queries of one layer may see; attention calls this."""
        if layer_idx not in self.kept:
            first = slice(self.count)
            self.kept[layer_idx] = (
                key_states[:, :, first].detach().clone(),
                value_states[:, :, first].detach().clone(),
            )
            return key_states, value_states
        keys, values = (each.expand(len(key_states), -1, -1, -1) for each in self.kept[layer_idx])
        return torch.cat([keys, key_states], dim=2), torch.cat([values, value_states], dim=2)

    def first(self, count: int) -> PrefixKeys:
        """Return the keys and values of the first `count` tokens."""
        prefix = PrefixKeys(count)
        prefix.kept = {
            layer: (keys[:, :, :count], values[:, :, :count]) for layer, (keys, values) in self.kept.items()
        }
        return prefix

    @override
    def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
        return self.count if self.kept else 0
