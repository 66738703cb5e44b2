"""Rotary angles that depend on the longest position of a pass (long RoPE, dynamic NTK).

transformers computes such angles in each forward pass, for all prompts of a batch together. The angles of
dynamic NTK also depend on earlier passes: the module keeps the frequencies of the longest one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from lens_mix._care.changes import Change, Undo

# These are names of buffers. They have a prefix if each kind of layer has its own angles.
_FREQUENCIES, _ORIGINAL = "inv_freq", "original_inv_freq"


def rotary_modules(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the modules that contain the frequencies of rotary angles."""
    # Every run calls this function. Most modules have no buffers, so this test excludes them quickly.
    with_buffers = (module for module in modules if module._buffers)
    return [module for module in with_buffers if any(name.endswith(_FREQUENCIES) for name in module._buffers)]


def angles_differ(module: nn.Module, shorter: int, longer: int) -> bool:
    """Return whether the angles of the first positions depend on the number of positions.

    If the module does not take the arguments of transformers' modules, its `rope_type` decides.

    Args:
        module: A rotary module.
        shorter: A number of positions.
        longer: A larger number of positions.
    """
    kinds = _kinds(module)
    try:
        return any(_differ(module, shorter, longer, [name] if name else []) for name in kinds)
    except (TypeError, ValueError, RuntimeError, IndexError, AttributeError, KeyError):
        return any(_is_dynamic(kind) or kind == "longrope" for kind in kinds.values())


def _kinds(module: nn.Module) -> Mapping[str, object]:
    """Return the `rope_type` of each kind of layer; the only kind is "" if all layers have the same type."""
    kinds = getattr(module, "rope_type", None)
    return kinds if isinstance(kinds, dict) else {"": kinds}


def _differ(module: nn.Module, shorter: int, longer: int, given: Sequence[str]) -> bool:
    frequencies = next(tensor for name, tensor in _tensors(module) if name.endswith(_FREQUENCIES))
    x, angles = frequencies.new_zeros(1, 1, 1), []
    for length in (shorter, longer):
        # A module keeps the frequencies of its longest pass, which would then be those of both lengths.
        forget_longer_passes([module])
        out = module.forward(x, torch.arange(length, device=x.device)[None], *given)
        angles.append([each[:, :shorter] for each in ([out] if torch.is_tensor(out) else out)])
    return any(not torch.equal(*each) for each in zip(*angles, strict=True))


def forget_longer_passes(modules: Sequence[nn.Module]) -> None:
    """Reset dynamic angles to their first frequencies."""
    for module in modules:
        tensors = dict(_tensors(module))
        for layers, kind in _kinds(module).items():
            prefix = f"{layers}_" if layers else ""
            if _is_dynamic(kind) and f"{prefix}{_ORIGINAL}" in tensors:
                device = tensors[f"{prefix}{_FREQUENCIES}"].device
                # The buffer needs a copy, because transformers may write into it.
                module._buffers[f"{prefix}{_FREQUENCIES}"] = tensors[f"{prefix}{_ORIGINAL}"].to(
                    device, copy=True
                )
                setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and tensors of a module's buffers and attributes; parameters are left out."""
    for name, value in {**vars(module), **module._buffers}.items():
        if torch.is_tensor(value):
            yield name, value


def _is_dynamic(kind: object) -> bool:
    return isinstance(kind, str) and "dynamic" in kind


def restore_angles(modules: Sequence[nn.Module]) -> Change:
    """Return a change that restores the state of rotary modules at its end, because passes change it."""
    rotary = rotary_modules(modules)

    def save() -> Undo:
        states = [_State(module) for module in rotary]

        def restore() -> None:
            for state in states:
                state.restore()

        return restore

    return save


class _State:
    """A copy of a module's buffers and attributes, which can be restored."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._buffers = module, dict(module._buffers)
        self._values = {name: None if b is None else b.clone() for name, b in self._buffers.items()}
        self._attributes = {name: value for name, value in vars(module).items() if self._is_own(name)}

    @staticmethod
    def _is_own(name: str) -> bool:
        return not name.startswith("_") and name != "training"

    def restore(self) -> None:
        """Set the module's buffers and attributes to the saved ones."""
        module = self._module
        for name in [name for name in vars(module) if self._is_own(name) and name not in self._attributes]:
            del vars(module)[name]
        vars(module).update(self._attributes)
        # A pass may have put another tensor in the place of a buffer, so the tensors are restored before
        # their values.
        module._buffers.clear()
        module._buffers.update(self._buffers)
        for name, value in self._values.items():
            buffer = self._buffers[name]
            if buffer is not None and value is not None and not torch.equal(buffer, value):
                buffer.copy_(value)
