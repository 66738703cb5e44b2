"""One paper, one file: each method is a small frozen dataclass with one call.

`METHODS` contains every method that a module of this package defines, so a new method needs a file alone. The
classes are also names of this package: `lm.methods.ValueZeroing(metric="euclidean")`. `print(lm.methods)`
lists them by the question that their maps answer.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
import sys
import types
from typing import NoReturn, get_args

from lens_mix.method import Method, MethodGroup


class _MethodTable(dict[str, type[Method]]):
    """The methods by their names; `lm.METHODS` contains those of the library.

    A method is given to `lm.run` by its name ("value_zeroing"), or as its class with parameters
    (`lm.methods.ValueZeroing(metric="euclidean")`). `print(lm.METHODS)` and `print(lm.methods)` list
    both, and what the scores are, by the question that a map answers.

        >>> print(lm.METHODS)
        >>> lm.METHODS["value_zeroing"]
    """

    def __repr__(self) -> str:
        """Return each group of methods, with one line per method: its name, its class and what a score is."""
        methods = sorted(self.values(), key=lambda method: method.place_in_list)
        widths = [max(map(len, names), default=0) for names in (self, [each.__name__ for each in methods])]
        groups = []
        for group in get_args(MethodGroup):
            lines = [
                f"  {each.name:<{widths[0]}}  lm.methods.{each.__name__:<{widths[1]}}  {each.description}"
                for each in methods
                if each.group == group
            ]
            groups += ["\n".join([group, *lines])] if lines else []
        return "\n\n".join(groups)


class _MethodsModule(types.ModuleType):
    """This module, which prints what `lm.METHODS` prints."""

    def __repr__(self) -> str:
        return repr(METHODS)


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


# `print(lm.methods)` calls the `__repr__` of the class of this module.
sys.modules[__name__].__class__ = _MethodsModule
