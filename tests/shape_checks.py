"""The type checker of the suite: jaxtyping's shapes, and nothing else, are checked while the tests run.

pyproject.toml names it (`--jaxtyping-packages=lens_mix,tests.shape_checks.shapes`); mypy checks the other
annotations, without running anything.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from typing import Any

from beartype import beartype
from jaxtyping import AbstractArray

# Constructors that turn lists and arrays into the tensors that their fields say.
CONVERTING = {"lens_mix.maps.record.MixingMap.__init__"}


def shapes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Check the annotations of `function` that hold a shape.

    jaxtyping hands over two stand-ins for each function of lens_mix: one that it calls with the arguments
    before the function runs, and one that it calls with the arguments and the result afterwards. Only the
    second one is checked: what a function refuses in its own words stays refused in these words, and no check
    is made twice.
    """
    annotations = {
        argument: hint for argument, hint in function.__annotations__.items() if holds_a_shape(hint)
    }
    name = f"{function.__module__}.{function.__qualname__}"
    if not annotations or not _gets_the_result(function) or name in CONVERTING:
        return function
    function.__annotations__ = annotations
    return beartype(function)


def holds_a_shape(hint: Any) -> bool:
    """`Float[Tensor, "query key"]`, and what is made of it: `tuple[...]`, `... | None`."""
    if inspect.isclass(hint) and issubclass(hint, AbstractArray):
        return True
    return any(holds_a_shape(part) for part in typing.get_args(hint))


def _gets_the_result(stand_in: Callable[..., Any]) -> bool:
    """jaxtyping gives the result as one more argument, by keyword; this stand-in returns it."""
    keyword_only = [p for p in inspect.signature(stand_in).parameters.values() if p.kind is p.KEYWORD_ONLY]
    return bool(keyword_only) and keyword_only[-1].name.startswith("ret")
