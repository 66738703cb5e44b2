"""Full precision while a model is open: no autocast, no TF32 or bfloat16 in the place of float32 products.

A verification would not hold there, and a map would be off by a hundredth though its tensors say float32.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

import torch

from lens_mix.lens.changes import Change, Changes, Undo, changing, replaced_attributes

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")

_DEVICES = ("cpu", "cuda", "mps", "xpu")
_REDUCED = frozenset({"tf32", "bf16"})


def full_precision() -> Iterator[Change]:
    """The changes that switch on full precision."""
    for device in _autocast_devices():
        yield functools.partial(_without_autocast, device)
    yield _float32_products.make_full


def in_full_precision(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """A function that computes in full precision whatever its caller has switched on."""

    @functools.wraps(function)
    def precise(*arguments: _Parameters.args, **keywords: _Parameters.kwargs) -> _Result:
        with Changes(full_precision()):
            return function(*arguments, **keywords)

    return precise


def switched_off() -> list[str]:
    """What is on at this moment, for the user's own passes, and off in those of lens_mix."""
    reductions = ["torch.autocast"] if _autocast_devices() else []
    return reductions + (["reduced float32 products"] if _float32_products.are_reduced() else [])


def _autocast_devices() -> list[str]:
    return [device for device in _DEVICES if _is_autocast(device)]


def _is_autocast(device: str) -> bool:
    with contextlib.suppress(TypeError):
        return torch.is_autocast_enabled(device)
    # Before PyTorch 2.4.
    return device == "cpu" and torch.is_autocast_cpu_enabled()


def _without_autocast(device: str) -> Undo:
    autocast = torch.autocast(device, enabled=False)
    autocast.__enter__()
    return lambda: autocast.__exit__(None, None, None)


class _Float32Products:
    """What float32 products are made in, which is one setting for all threads.

    The first thread in makes them full, the last one out puts the user's setting back.
    """

    def __init__(self) -> None:
        self._inside = 0
        self._before: list[Undo] = []

    def make_full(self) -> Undo:
        with changing:
            if self._inside == 0:
                self._before = [make_full() for make_full in _reduced()]
            self._inside += 1
        return self._leave

    def _leave(self) -> None:
        with changing:
            self._inside -= 1
            if self._inside == 0:
                for put_back in self._before:
                    put_back()

    def are_reduced(self) -> bool:
        """Whether they are for the user."""
        with changing:
            return bool(self._before if self._inside else _reduced())


_float32_products = _Float32Products()


def _reduced() -> list[Change]:
    """Per setting below full precision, what makes it full."""
    cuda, onednn = torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None)
    if not hasattr(cuda, "fp32_precision"):
        # Before PyTorch 2.9.
        return [] if torch.get_float32_matmul_precision() == "highest" else [_highest_precision]
    settings = [holder for holder in (cuda, onednn) if getattr(holder, "fp32_precision", None) in _REDUCED]
    return [replaced_attributes([(holder, "ieee")], "fp32_precision") for holder in settings]


def _highest_precision() -> Undo:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    return functools.partial(torch.set_float32_matmul_precision, before)
