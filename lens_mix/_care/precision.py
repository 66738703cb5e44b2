"""Full precision during the passes of lens_mix, and the error of one tensor relative to another.

Full precision means no autocast, and no TF32 or bfloat16 products in float32.

In reduced precision a verification fails, and a map has errors of about 1 % although its dtype is float32.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix._care.changes import Change, Undo, changing, replace_attributes

_DEVICES = ("cpu", "cuda", "mps", "xpu")
_REDUCED = frozenset({"tf32", "bf16"})


def full_precision() -> Iterator[Change]:
    """Yield the changes that switch on full precision."""
    for device in _autocast_devices():
        yield functools.partial(_without_autocast, device)
    yield _float32_products.set_full


def switched_off() -> list[str]:
    """Return the reductions of precision that are on in the user's passes, and off in those of lens_mix."""
    reductions = ["torch.autocast"] if _autocast_devices() else []
    return reductions + (["reduced float32 products"] if _float32_products.is_reduced() else [])


def _autocast_devices() -> list[str]:
    return [device for device in _DEVICES if _is_autocast(device)]


def _is_autocast(device: str) -> bool:
    with contextlib.suppress(TypeError):
        return torch.is_autocast_enabled(device)
    # Before PyTorch 2.4, the function takes no device and reads the CPU's state elsewhere.
    return device == "cpu" and torch.is_autocast_cpu_enabled()


def _without_autocast(device: str) -> Undo:
    autocast = torch.autocast(device, enabled=False)
    autocast.__enter__()
    return lambda: autocast.__exit__(None, None, None)


class _Float32Products:
    """The precision of float32 products, which is one setting for all threads.

    The first thread that enters sets full precision. The last one that leaves restores the user's setting.
    """

    def __init__(self) -> None:
        self._n_inside = 0
        self._restorations: list[Undo] = []

    def set_full(self) -> Undo:
        """Set full precision, and return the function that leaves it."""
        with changing:
            if self._n_inside == 0:
                self._restorations = [set_full() for set_full in _find_reductions()]
            self._n_inside += 1
        return self._leave

    def _leave(self) -> None:
        with changing:
            self._n_inside -= 1
            if self._n_inside == 0:
                for restore in self._restorations:
                    restore()

    def is_reduced(self) -> bool:
        """Return whether the user's setting reduces the precision."""
        with changing:
            return bool(self._restorations if self._n_inside else _find_reductions())


_float32_products = _Float32Products()


def _find_reductions() -> list[Change]:
    """Return for each setting with reduced precision the change that sets full precision."""
    cuda, onednn = torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None)
    if not hasattr(cuda, "fp32_precision"):
        # Before PyTorch 2.9, there is only one setting for all backends.
        return [] if torch.get_float32_matmul_precision() == "highest" else [_set_highest_precision]
    backends = [backend for backend in (cuda, onednn) if getattr(backend, "fp32_precision", None) in _REDUCED]
    return [replace_attributes([(backend, "ieee")], "fp32_precision") for backend in backends]


def _set_highest_precision() -> Undo:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    return functools.partial(torch.set_float32_matmul_precision, before)


def relative_error(
    got: Float[Tensor, "*batch d"], expected: Float[Tensor, "*batch d"], counted: Tensor | None = None
) -> float:
    """Return the largest error of a position, relative to the norm of its own vector.

    The norm is that of the position, because a large vector elsewhere would otherwise hide the error of a
    small one. The result is NaN if a compared position has a NaN.

    Args:
        got: The vectors to compare.
        expected: The vectors to compare them with.
        counted: The mask of the positions to compare, over all axes but the last; None for all.
    """
    wide = torch.float64 if expected.dtype == torch.float64 else torch.float32
    difference = torch.linalg.vector_norm((got.to(wide) - expected.to(wide)), dim=-1)
    size = torch.linalg.vector_norm(expected.to(wide), dim=-1)
    ratio = (difference / size).masked_fill_(difference == 0, 0)
    # A selection of the counted positions would take as long as all the other steps.
    ratio = ratio if counted is None else ratio.masked_fill_(~counted, 0)
    return float(ratio.max()) if ratio.numel() else 0.0
