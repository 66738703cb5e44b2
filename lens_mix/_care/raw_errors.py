"""Errors of torch, transformers and TransformerLens during a run, raised again with their place."""

from __future__ import annotations

import traceback
from types import TracebackType
from typing import Any

from torch import nn

from lens_mix._care.changes import Changes
from lens_mix._care.tracebacks import find_user_code, is_out_of_memory, is_own_error
from lens_mix._classes.model_classes import TransformerLensModel, UnsupportedModelError
from lens_mix._classes.model_names import model_name

# Checks of shapes are for developers. An error that they raise is a mistake in lens_mix.
_CHECKS = frozenset({"jaxtyping", "beartype"})


class LibraryErrors:
    """A context in which a model is opened, verified or mapped.

    An error of torch, transformers or TransformerLens becomes an `UnsupportedModelError` that names the
    model, the module and the original error, which is its cause. These errors do not change: those of
    lens_mix, those of the user's code (hooks, targets, methods), and running out of memory.

    Args:
        model: The model.
    """

    def __init__(self, model: TransformerLensModel) -> None:
        self._model = model
        # An exception that a signal handler raises must not become an error of the model.
        self._signals = Changes(())

    def __enter__(self) -> None:
        self._signals.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._signals.__exit__(kind, problem, trace)
        if isinstance(problem, Exception) and _is_raw(problem):
            raise UnsupportedModelError(
                f"{model_name(self._model)}: expected a model that can be mapped, got "
                f"{type(problem).__name__} in {_find_place(self._model, problem)}: {problem}. If the model "
                "itself runs on this prompt, this module is not supported; lens_mix.support(model) lists the "
                "methods that run"
            ) from problem


def _is_raw(problem: Exception) -> bool:
    """Return whether a library below lens_mix raised the error, for another reason than memory."""
    if isinstance(problem, (UnsupportedModelError, Warning, MemoryError)) or is_out_of_memory(problem):
        return False
    if type(problem).__module__.partition(".")[0] in _CHECKS:
        return False
    return not is_own_error(problem) and find_user_code(problem) is None


def _find_place(model: Any, problem: Exception) -> str:
    """Return the name of the innermost module that was running; of the function if there was no module."""
    names: dict[int, str] = {}
    for tree in (getattr(model, "original_model", None), model):
        if isinstance(tree, nn.Module):
            # The names of the Bridge come last and replace those of the wrapped model, because users know the
            # former.
            names |= {id(module): name for name, module in tree.named_modules() if name}
    frames = [frame for frame, _ in traceback.walk_tb(problem.__traceback__)]
    # A hook of torch gets its module as an argument, and not as `self`.
    running = [frame.f_locals.get("self", frame.f_locals.get("module")) for frame in frames]
    modules = [module for module in running if id(module) in names]
    if not modules:
        return frames[-1].f_code.co_name if frames else "the model"
    name = names[id(modules[-1])].replace("._original_component", "")
    return f"{name} ({type(modules[-1]).__name__})"
