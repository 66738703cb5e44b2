"""Check jaxtyping's shapes, and no other annotations, while the tests run.

pyproject.toml names this type checker (`--jaxtyping-packages=lens_mix,tests.shape_checks.shapes`). mypy
checks the other annotations. jaxtyping would wrap every function. Functions without a shape are not wrapped
here (`only_with_shapes`), because most calls are of these: test_rows, test_decompx and the tests of Value
Zeroing took 97 s with all functions wrapped, 62 s with these, and 59 s with none.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable
from typing import Any

import jaxtyping
from beartype import beartype
from jaxtyping import AbstractArray

# These constructors accept lists and arrays, and convert them to the annotated tensors.
CONVERTING = {"lens_mix.maps.record.MixingMap.__init__"}


def shapes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Check the annotations of `function` that contain a shape.

    jaxtyping passes two substitutes for each function of lens_mix. It calls the first one with the arguments
    before the function runs, and the second one with the arguments and the result afterwards. Only the second
    one is checked. So a function raises its own errors for wrong arguments, and no check is made twice.
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
    """Return whether an annotation contains a shape, as in `tuple[Float[Tensor, "query key"], ...]`."""
    if inspect.isclass(hint) and issubclass(hint, AbstractArray):
        return True
    return any(holds_a_shape(part) for part in typing.get_args(hint))


def only_with_shapes(decorate: Callable[..., Any], target: Any = None, **options: Any) -> Any:
    """Apply jaxtyping's decorator to a class, or to a function whose annotations contain a shape."""
    if target is None:
        return functools.partial(only_with_shapes, decorate, **options)
    if inspect.isfunction(target) and options and not any(map(holds_a_shape, _hints(target))):
        return target
    return decorate(target, **options)


def _hints(function: Callable[..., Any]) -> list[Any]:
    """Return the evaluated annotations that are known when the function is defined."""
    hints = []
    for hint in function.__annotations__.values():
        try:
            hints.append(eval(hint, function.__globals__) if isinstance(hint, str) else hint)
        except (NameError, AttributeError, TypeError, ValueError):  # Some names exist only for type checkers.
            continue
    return hints


# This comes before lens_mix is imported, because its instrumented files use the decorator by this name.
jaxtyping.jaxtyped = functools.partial(only_with_shapes, jaxtyping.jaxtyped)


def _gets_the_result(stand_in: Callable[..., Any]) -> bool:
    """Return whether this is the substitute that takes the function's result as a keyword argument."""
    keyword_only = [p for p in inspect.signature(stand_in).parameters.values() if p.kind is p.KEYWORD_ONLY]
    return bool(keyword_only) and keyword_only[-1].name.startswith("ret")
