"""One paper, one file: each method is a small frozen dataclass with one call.

`METHODS` contains every method that a module of this package defines, so a new method needs a file alone.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil

from lens_mix.method import Method


def _find_methods() -> dict[str, type[Method]]:
    """Return the methods that the modules of this package define, by their names in strings.

    A base class of several methods has no `name`, and is left out.
    """
    methods: dict[str, type[Method]] = {}
    for found in pkgutil.iter_modules(__path__, f"{__name__}."):
        module = importlib.import_module(found.name)
        for kind in vars(module).values():
            defined_here = inspect.isclass(kind) and kind.__module__ == found.name
            if defined_here and issubclass(kind, Method) and hasattr(kind, "name"):
                methods[kind.name] = kind
    return methods


METHODS: dict[str, type[Method]] = _find_methods()
