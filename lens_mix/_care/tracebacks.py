"""Find what an error means, and whose code raised it: the user's, lens_mix's, or that of a library below."""

from __future__ import annotations

import dis
import sys
import sysconfig
import traceback
from types import FrameType, TracebackType

import torch

_LIBRARIES = frozenset({"lens_mix", "torch", "transformer_lens", "transformers", "transformers_modules"})
_INSTALLED = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_RAISING = frozenset(dis.opmap[name] for name in ("RAISE_VARARGS", "RERAISE"))


def find_user_code(problem: BaseException) -> str | None:
    """Return the user's function that raised an error or called what raised it; None if there is none.

    Args:
        problem: An error that lens_mix caught, so that its traceback starts in lens_mix.

    Returns:
        The name of the function with its file and line.
    """
    frames = [frame for frame, _ in traceback.walk_tb(problem.__traceback__)]
    users = [frame for frame in frames if _is_users(frame)]
    if not users:
        return None
    code = users[-1].f_code
    return f"{code.co_name} ({code.co_filename}, from line {code.co_firstlineno})"


def is_own_error(problem: BaseException) -> bool:
    """Return whether a `raise` in lens_mix raised the error, so that its message is for the user."""
    trace = problem.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and _top_package(trace.tb_frame) == "lens_mix" and _is_at_raise(trace)


def _is_at_raise(trace: TracebackType) -> bool:
    # An error that no `raise` raised, such as a missing key, is a mistake and has no message for the user.
    return trace.tb_frame.f_code.co_code[trace.tb_lasti] in _RAISING


def _top_package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _is_users(frame: FrameType) -> bool:
    package, file = _top_package(frame), frame.f_code.co_filename
    is_library = package in _LIBRARIES or package in sys.stdlib_module_names
    return not is_library and not file.startswith(("<", *_INSTALLED))


def is_out_of_memory(problem: Exception) -> bool:
    """Return whether an error means that memory ran out, which is not a fault of the model."""
    # On a CPU and on some devices, torch raises a plain RuntimeError, which only its text distinguishes.
    texts = ("out of memory", "not enough memory", "can't allocate")
    return isinstance(problem, torch.cuda.OutOfMemoryError) or any(text in str(problem) for text in texts)
