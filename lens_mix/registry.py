"""Methods of other authors: registered in a program, or installed beside lens_mix as a plugin.

A package offers its methods by an entry point of the group `lens_mix.methods`; in its pyproject.toml:

    [project.entry-points."lens_mix.methods"]
    largest_weight = "their_package.module:LargestWeight"
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib.metadata
import warnings
from collections.abc import Iterable
from typing import TypeVar, get_args

from lens_mix.arguments import shown
from lens_mix.hooks.record import ATTENTION_ROLES, RESID_PRE
from lens_mix.lens.verification_record import ALGEBRA_COMPONENTS, UNEMBEDDING, VALUE
from lens_mix.method import Method, Scope
from lens_mix.methods import METHODS

_GROUP = "lens_mix.methods"
# The values that class attributes of a method may have, one or several.
_ALLOWED = {
    "engines": ("recorded", "hooks", "algebra"),
    "scope": get_args(Scope),
    "parts": ("encoder", "decoder", "cross", "joint"),
    "records": (*ATTENTION_ROLES, RESID_PRE),
    "needs": (*ALGEBRA_COMPONENTS, VALUE, UNEMBEDDING, "gradients", "causal", "position_ids"),
}
_REQUIRED = {
    "name": ("its name in strings", '"largest_weight"'),
    "residual": ("what rollout mixes in of the identity, 0 to 1", "0.5"),
    "engines": ("the ways it can be computed", '("recorded",)'),
}

_registered: dict[str, type[Method]] = {}

M = TypeVar("M", bound=type[Method])


def register(method: M) -> M:
    """Make a method's name work wherever names do: `lm.run`, `lm.support`, `lm.citation`. Also a decorator.

    The name holds for the rest of the process; registering a class again (a notebook's cell, run twice)
    replaces it. A class attribute `citation` is a key of `references.bib` or the BibTeX itself.

    Raises:
        TypeError: no class of a method. ValueError: a class attribute that is missing or none; a name that
            another class has.
    """
    check_class(method)
    known = all_methods().get(method.name)
    # By its name: a notebook's cell that is run twice makes the class anew.
    if known is not None and (known.__module__, known.__qualname__) != (
        method.__module__,
        method.__qualname__,
    ):
        raise ValueError(
            f"{method.__name__}: expected a name of its own, got {method.name!r}, which is "
            f"{known.__module__}.{known.__qualname__}; change its class attribute `name`"
        )
    if method.name not in METHODS:
        _registered[method.name] = method
    return method


def all_methods() -> dict[str, type[Method]]:
    """The library's methods, plugins' and those that were registered, by name."""
    return {**METHODS, **_plugins(), **_registered}


@functools.cache
def _plugins() -> dict[str, type[Method]]:
    """Those of installed packages; one that can't be loaded is left out, with a warning."""
    methods: dict[str, type[Method]] = {}
    for entry in importlib.metadata.entry_points(group=_GROUP):
        try:
            method = entry.load()
            check_class(method)
            if method.name in METHODS or method.name in methods:
                raise ValueError(f"the name {method.name!r} is taken")
            methods[method.name] = method
        except Exception as problem:
            warnings.warn(
                f"entry point {entry.name} = {entry.value} gives no method: {problem}", stacklevel=2
            )
    return methods


def check_class(method: object) -> None:
    """Refuse what can't be a method by its name alone, with what to change (TypeError, ValueError)."""
    made = check_attributes(method)
    annotated = [name for name in vars(made).get("__annotations__", {}) if not hasattr(Method, name)]
    options = [name for name in annotated if "ClassVar" not in str(made.__annotations__[name])]
    if options and "__dataclass_fields__" not in vars(made):
        raise ValueError(
            f"{made.__name__}: expected a dataclass, since it has the parameters {options}; write "
            "@dataclasses.dataclass(frozen=True) above it"
        )
    for field in dataclasses.fields(made):
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ValueError(
                f"{made.__name__}.{field.name}: expected a default, so that the name alone gives a method"
            )


def check_attributes(method: object) -> type[Method]:
    """The class of a method, if it is one that can run; errors as `check_class`."""
    if not isinstance(method, type) or not issubclass(method, Method) or method is Method:
        raise TypeError(f"method: expected a class derived from lens_mix.Method, got {shown(method)}")
    where = method.__name__
    for name, (what, example) in _REQUIRED.items():
        if not hasattr(method, name):
            raise ValueError(
                f"{where}: expected a class attribute `{name}`, {what}, got none; write "
                f"{name}: ClassVar[...] = {example}"
            )
    if not isinstance(method.name, str) or not method.name.isidentifier():
        raise ValueError(f"{where}.name: expected a word such as 'largest_weight', got {method.name!r}")
    if isinstance(method.residual, bool) or not isinstance(method.residual, (int, float)):
        raise ValueError(f"{where}.residual: expected a number from 0 to 1, got {method.residual!r}")
    for name, allowed in _ALLOWED.items():
        _check_words(f"{where}.{name}", getattr(method, name), allowed, alone=name == "scope")
    if method.__call__ is Method.__call__ and method.of_stack is Method.of_stack:
        raise ValueError(f"{where}: expected a __call__(self, block) that gives a block's map, found none")
    return method


def _check_words(what: str, given: object, allowed: tuple[str, ...], alone: bool) -> None:
    """Some of the words that are known; what looks like one of them is named."""
    several = isinstance(given, Iterable) and not isinstance(given, str)
    if several == alone:
        raise ValueError(
            f"{what}: expected {'one' if alone else 'several'} of {list(allowed)}, got {given!r}"
        )
    words = list(given) if isinstance(given, Iterable) and several else [given]
    for word in words:
        if word not in allowed:
            near = difflib.get_close_matches(str(word), allowed, 1)
            meant = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{what}: expected some of {list(allowed)}, got {word!r}{meant}")
    if not words and what.endswith("engines"):
        raise ValueError(f"{what}: expected at least one of {list(allowed)}, got none")
