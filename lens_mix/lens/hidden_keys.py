"""Hide keys from every query of a stack inside its attention, so that nothing else of a pass changes.

A mask with holes given to the model itself would do more: many models count their positions by it, or by the
first token that it leaves (chunks, ALiBi).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from lens_mix.hooks import HookPair, watch_pattern
from lens_mix.hooks.mixing import visible
from lens_mix.lens.changes import Change, forward_pre_hook
from lens_mix.lens.model_classes import UnsupportedModelError
from lens_mix.lens.stacks import Stack

# What attention modules call the mask that is added to their scores; those of TransformerLens's own classes
# have both of the first two.
_MASKS = ("additive_attention_mask", "attention_mask", "mask")


def takes_masks(stack: Stack) -> bool:
    """Return whether keys can be hidden in every attention module of a stack."""
    modules = map(stack.attention_module, stack.attention_layers)
    return all(_mask_argument(module) is not None for module in modules)


def _mask_argument(module: nn.Module) -> tuple[int, str] | None:
    """Return the place of the mask among the arguments of an attention module, and its name."""
    component = getattr(module, "original_component", None)
    owner = component if isinstance(component, nn.Module) else module
    names = list(inspect.signature(type(owner).forward).parameters)[1:]
    name = next((name for name in _MASKS if name in names), None)
    return None if name is None else (names.index(name), name)


class HiddenKeys:
    """Keys of one attention module that no query sees in a pass; a row that sees no other key keeps them.

    Args:
        stack: the stack.
        layer: which block.
        hidden: which keys, for each prompt of the batch.
        dtype: the dtype of a mask, if one has to be made.

    Raises:
        UnsupportedModelError: the module takes no mask; during the pass: it does not follow its mask.
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
        self._place, self._name = argument
        self._taken: Tensor | None = None
        self.change: Change = forward_pre_hook(self._module, self._mask, with_kwargs=True)
        self.watch: HookPair = watch_pattern(layer, self._check, attention=stack.attention_template)

    def _mask(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if self._place < len(args):
            given = list(args)
            given[self._place] = self._without_keys(given[self._place])
            return tuple(given), kwargs
        return args, {**kwargs, self._name: self._without_keys(kwargs.get(self._name))}

    def _without_keys(self, mask: Tensor | None) -> Tensor:
        if mask is None:
            mask = torch.zeros(self._hidden.shape, dtype=self._dtype, device=self._hidden.device)
        if mask.ndim != 4 or mask.shape[-1] != self._hidden.shape[-1]:
            raise UnsupportedModelError(
                f"{self._where}: expected an attention mask [batch, head, query, {self._hidden.shape[-1]}], "
                f"got {list(mask.shape)}; no key can be hidden from it"
            )
        seen = mask if mask.dtype == torch.bool else visible(mask)
        self._taken = self._hidden & seen & (seen & ~self._hidden).any(-1, keepdim=True)
        lowest = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
        return torch.where(self._taken, lowest, mask)

    def _check(self, pattern: Float[Tensor, "batch head query key"]) -> None:
        taken, self._taken = self._taken, None
        leaks = taken is None
        if taken is not None:
            # A model that masks later keys in another way may leave a row only keys that are hidden here.
            others = (pattern.abs().masked_fill(taken, 0) > 0).any(-1, keepdim=True)
            leaks = bool(((pattern.abs() > 0) & taken & others).any())
        if leaks:
            raise UnsupportedModelError(
                f"{self._where}: expected its attention mask to hide a key from every query, got weight on it"
            )
