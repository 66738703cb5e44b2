"""Hide keys from every query inside the attention modules of a stack, and change nothing else in a pass.

An attention mask with gaps, as an input of the model, would also change positions: many models number them by
the mask, or by its first token (ALiBi, for example).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from lens_mix._care.changes import Change, forward_pre_hook
from lens_mix._classes.model_classes import UnsupportedModelError
from lens_mix._model.stacks import Stack
from lens_mix.hooks.base import HookPair
from lens_mix.hooks.mixing import visible
from lens_mix.hooks.recording import watch_pattern

# Attention modules have different names for the mask that is added to the scores. The order matters:
# TransformerLens's own classes have both of the first two names.
_MASKS = ("additive_attention_mask", "attention_mask", "mask")


def _mask_argument(module: nn.Module) -> tuple[int, str] | None:
    """Return the index and the name of the mask among an attention module's arguments; None without one."""
    component = getattr(module, "original_component", None)
    owner = component if isinstance(component, nn.Module) else module
    names = list(inspect.signature(type(owner).forward).parameters)[1:]
    name = next((name for name in _MASKS if name in names), None)
    return None if name is None else (names.index(name), name)


class HiddenKeys:
    """Keys of one attention module that are hidden from every query in a pass.

    A query that sees only hidden keys keeps them, because it needs at least one key.

    Args:
        stack: The stack of the block.
        layer: The layer of the block.
        hidden: Which keys are hidden, for each prompt of the batch.
        dtype: The dtype of the mask if the model passes none to the module.

    Attributes:
        change: The change that replaces the mask during a pass.
        watch: The hook that checks that no hidden key gets weight.

    Raises:
        UnsupportedModelError: If the module takes no mask. During the pass: if it ignores the mask.
    """

    def __init__(
        self, stack: Stack, layer: int, hidden: Bool[Tensor, "batch key"], dtype: torch.dtype
    ) -> None:
        self._module = stack.attention_module(layer)
        self._where = stack.attention_template.format(layer=layer)
        self._hidden, self._dtype = hidden[:, None, None], dtype
        argument = _mask_argument(self._module)
        if argument is None:
            raise UnsupportedModelError(
                f"{self._where}: expected attention that takes a mask ({', '.join(_MASKS)}), got none in its "
                "forward; no key can be hidden from it"
            )
        self._mask_index, self._mask_name = argument
        self._hidden_pairs: Tensor | None = None
        self.change: Change = forward_pre_hook(self._module, self._mask, with_kwargs=True)
        self.watch: HookPair = watch_pattern(layer, self._check, attention=stack.attention_template)

    def _mask(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if self._mask_index < len(args):
            given = list(args)
            given[self._mask_index] = self._hide_keys(given[self._mask_index])
            return tuple(given), kwargs
        return args, {**kwargs, self._mask_name: self._hide_keys(kwargs.get(self._mask_name))}

    def _hide_keys(self, mask: Tensor | None) -> Tensor:
        """Return the module's mask, in which the hidden keys are masked too."""
        if mask is None:
            mask = torch.zeros(self._hidden.shape, dtype=self._dtype, device=self._hidden.device)
        if mask.ndim != 4 or mask.shape[-1] != self._hidden.shape[-1]:
            raise UnsupportedModelError(
                f"{self._where}: expected an attention mask [batch, head, query, {self._hidden.shape[-1]}], "
                f"got {list(mask.shape)}; no key can be hidden from it"
            )
        seen = mask if mask.dtype == torch.bool else visible(mask)
        self._hidden_pairs = self._hidden & seen & (seen & ~self._hidden).any(-1, keepdim=True)
        lowest = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
        return torch.where(self._hidden_pairs, lowest, mask)

    def _check(self, pattern: Float[Tensor, "batch head query key"]) -> None:
        """Raise an error if a hidden key has weight in a row that sees other keys."""
        hidden, self._hidden_pairs = self._hidden_pairs, None
        leaks = hidden is None
        if hidden is not None:
            # If a model masks later keys in another way, a row may see only keys that are hidden here.
            others = (pattern.abs().masked_fill(hidden, 0) > 0).any(-1, keepdim=True)
            leaks = bool(((pattern.abs() > 0) & hidden & others).any())
        if leaks:
            raise UnsupportedModelError(
                f"{self._where}: expected its attention mask to hide a key from every query, got weight on it"
            )
