"""One paper, one file: each method is a small frozen dataclass with one call.

`METHODS` contains every method that a module of this package defines, so a new method needs a file alone. The
classes are also names of this package: `lm.methods.ValueZeroing(metric="euclidean")`.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
from typing import NoReturn

from lens_mix.method import Method


class _MethodTable(dict[str, type[Method]]):
    """The methods by their names; `lm.METHODS` contains those of the library.

    A method is given to `lm.run` by its name ("value_zeroing"), or as its class with parameters
    (`lm.methods.ValueZeroing(metric="euclidean")`). `print(lm.METHODS)` shows the name and the class of each.
    """

    def __repr__(self) -> str:
        """Return one line per method: its name, its class and the first line of its documentation."""
        rows = [
            (name, f"lm.methods.{method.__name__}", (inspect.getdoc(method) or "").partition("\n")[0])
            for name, method in self.items()
        ]
        widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:2]]
        return "\n".join(
            f"{name:<{widths[0]}}  {written:<{widths[1]}}  {line}".rstrip() for name, written, line in rows
        )


def _find_methods() -> _MethodTable:
    """Return the methods that the modules of this package define, by their names in strings.

    A base class of several methods has no `name`, and is left out.
    """
    methods = _MethodTable()
    for found in pkgutil.iter_modules(__path__, f"{__name__}."):
        module = importlib.import_module(found.name)
        for kind in vars(module).values():
            # A module also has the classes that it imports, which are those of other files.
            defined_here = inspect.isclass(kind) and kind.__module__ == found.name
            if defined_here and issubclass(kind, Method) and hasattr(kind, "name"):
                methods[kind.name] = kind
    return methods


METHODS = _find_methods()
"""The classes of the library's methods by their names; `print(lm.METHODS)` lists them."""

# `__init__.pyi` has these names for type checkers.
_CLASSES = {method.__name__: method for method in METHODS.values()}
globals().update(_CLASSES)
__all__ = ["METHODS", *sorted(_CLASSES)]


def __getattr__(name: str) -> NoReturn:
    """Raise an AttributeError that names the closest class, such as one whose name has changed."""
    close = difflib.get_close_matches(name, _CLASSES, 1)
    suggestion = f"; did you mean lens_mix.methods.{close[0]}?" if close else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{suggestion}", name=name)


def __dir__() -> list[str]:
    return __all__
