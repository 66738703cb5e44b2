"""Hide keys from all other positions, as an attention mask would."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lens_mix.hooks._arguments import Chosen, Position, as_position, position_mask
from lens_mix.hooks.base import DEFAULT_ATTENTION, AttentionHook, HookPair
from lens_mix.hooks.mixing import check_mixing, mix, sink


def mask_keys(
    layer: int,
    position: Position | None = None,
    *,
    positions: Sequence[int] | None = None,
    attention: str = DEFAULT_ATTENTION,
) -> HookPair:
    """No position attends to the chosen ones in one layer: their weight goes to the other keys.

    What an attention mask does, p_ik / (1 - Σ_j p_ij) for the keys k that stay, with the pattern of the
    running pass; positions do not move up. A row that has no other key goes on seeing what it saw. What a row
    gives to no key (an attention sink's) counts as a key that stays.

    Args:
        layer, position, positions, attention: as in `zero_values`.

    Raises:
        TypeError, ValueError: as `zero_values`.
        RuntimeError: in the pass: no pattern fired before `hook_z` (where a TransformerBridge leaves
            attention to transformers: give the model an attention mask instead), or `hook_z` is not
            pattern @ values.

    Example:
        ```python
        from lens_mix.hooks import mask_keys

        hidden = model.run_with_hooks(tokens, fwd_hooks=[mask_keys(0, 2), mask_keys(1, 2)])
        ```
    """
    return _MaskKeys(layer, attention, as_position(position, positions))._pair()


class _MaskKeys(AttentionHook):
    points = ("values", "pattern", "mixed")

    def __init__(self, layer: int, attention: str, position: Chosen) -> None:
        super().__init__(layer, attention)
        self._position = position

    def on_mixed(self, mixed: Tensor, values: Tensor, pattern: Tensor | None) -> Tensor:
        if pattern is None:
            raise RuntimeError(
                f"position: expected {self.module}.hook_pattern to fire before hook_z, as its weights are to "
                "be shared out anew; this model leaves attention to transformers: use its attention mask"
            )
        check_mixing("position", mixed, pattern, values)
        weights = pattern.masked_fill(position_mask(self._position, values)[:, None, None], 0)
        # Summed, not 1 minus what is hidden, which has few digits left beside a sink.
        to_no_key = sink(pattern)
        left = weights.sum(-1, keepdim=True, dtype=to_no_key.dtype) + to_no_key
        self.calls += 1
        return mix(torch.where(left > 0, weights / left, pattern).to(pattern.dtype), values)
