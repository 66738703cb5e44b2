"""Offloaded weights: accelerate keeps them on the CPU or on disk and loads them for each call of a module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

# accelerate sets this attribute of the modules whose weights it loads.
_HOOK = "_hf_hook"


def execution_device(model: nn.Module) -> torch.device | None:
    """Return the device on which accelerate runs a model; None if accelerate does not run it."""
    devices = (hook.execution_device for module in model.modules() for hook in _hooks(module))
    device = next((device for device in devices if device is not None), None)
    # accelerate may name a GPU by its number, which torch.device accepts too.
    return None if device is None else torch.device(device)


def load_offloaded(module: nn.Module, name: str) -> Tensor | None:
    """Return an offloaded weight of a module, on the device that runs it; None if it is not offloaded."""
    for hook in _hooks(module):
        if hook.weights_map is not None and name in dict(module.named_parameters(recurse=False)):
            weight: Tensor = hook.weights_map[name].to(hook.execution_device)
            return weight
    return None


def is_offloaded(module: nn.Module) -> bool:
    """Return whether any weight of a module or of its submodules is offloaded."""
    return any(parameter.is_meta for parameter in module.parameters())


def _hooks(module: nn.Module) -> Iterator[Any]:
    """Yield the hooks that load a module's weights; a SequentialHook may contain them."""
    pending = [vars(module).get(_HOOK)]
    while pending:
        hook = pending.pop(0)
        pending += getattr(hook, "hooks", ())
        if hasattr(hook, "weights_map") and hasattr(hook, "execution_device"):
            yield hook
