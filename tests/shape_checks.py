"""The type checker of the suite: jaxtyping's shapes, and nothing else, are checked while the tests run.

pyproject.toml names it (`--jaxtyping-packages=lens_mix,tests.shape_checks.shapes`); mypy checks the other
annotations, without running anything. jaxtyping would put a layer on every function; those without a shape
are left as they are (`only_with_shapes`), as most calls are theirs: test_rows, test_decompx and Value
Zeroing's tests took 97 s with all layers, 62 s with these, and 59 s with none.
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


def only_with_shapes(decorate: Callable[..., Any], target: Any = None, **options: Any) -> Any:
    """jaxtyping's decorator, for functions whose annotations hold a shape, and for classes; others stay."""
    if target is None:
        return functools.partial(only_with_shapes, decorate, **options)
    if inspect.isfunction(target) and options and not any(map(holds_a_shape, _hints(target))):
        return target
    return decorate(target, **options)


def _hints(function: Callable[..., Any]) -> list[Any]:
    """What the annotations stand for, as far as jaxtyping can tell when the function is made."""
    hints = []
    for hint in function.__annotations__.values():
        try:
            hints.append(eval(hint, function.__globals__) if isinstance(hint, str) else hint)
        except (NameError, AttributeError, TypeError, ValueError):  # imported for type checkers alone
            continue
    return hints


# Before lens_mix is imported: its instrumented files look the decorator up by this name.
jaxtyping.jaxtyped = functools.partial(only_with_shapes, jaxtyping.jaxtyped)


def _gets_the_result(stand_in: Callable[..., Any]) -> bool:
    """jaxtyping gives the result as one more argument, by keyword; this stand-in returns it."""
    keyword_only = [p for p in inspect.signature(stand_in).parameters.values() if p.kind is p.KEYWORD_ONLY]
    return bool(keyword_only) and keyword_only[-1].name.startswith("ret")
