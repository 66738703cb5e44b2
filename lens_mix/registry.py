"""Register methods of other authors, and load those that are installed as plugins.

A package provides a method with an entry point of the group `lens_mix.methods` in its pyproject.toml:

    [project.entry-points."lens_mix.methods"]
    largest_weight = "their_package.module:LargestWeight"
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib.metadata
import inspect
import re
import warnings
from collections.abc import Iterable, Mapping
from typing import TypeVar, get_args

from lens_mix._blocks.components import UNEMBEDDING, VALUE
from lens_mix._blocks.cost import COSTS
from lens_mix._blocks.verification_record import ALGEBRA_COMPONENTS
from lens_mix.arguments import describe_value
from lens_mix.hooks.recording import ATTENTION_ROLES, RESID_PRE
from lens_mix.method import Method, MethodGroup, Reads
from lens_mix.method_list import PLUGINS, Description
from lens_mix.methods import METHODS

# The groups in the order in which lists have them.
_GROUPS = get_args(MethodGroup)
# The values that a class attribute of a method may have: one of these, or several.
_ONE_OF = {"group": _GROUPS, "reads": get_args(Reads)}
_SEVERAL_OF = {
    "engines": ("recorded", "hooks", "algebra"),
    "parts": ("encoder", "decoder", "cross", "joint"),
    "records": (*ATTENTION_ROLES, RESID_PRE),
    "needs": (*ALGEBRA_COMPONENTS, VALUE, UNEMBEDDING, "gradients", "causal", "position_ids"),
}
_REQUIRED = {
    "name": ("the name to pass to lm.run", '"largest_weight"'),
    "residual": ("the residual weight that rollout uses, 0 to 1", "0.5"),
    "engines": ("the ways it can be computed", '("recorded",)'),
}

# Names of functions that users try as the name of a method, and what to write.
_CALLS = {
    "flow": "lm.flow(lm.run(model, prompt, method))",
    "gradient_rollout": "lm.gradient_rollout(lm.run(model, prompt, method))",
    "input_map": "lm.input_map(model, prompt)",
    "joint": 'lm.run(model, prompt, method, part="joint")',
    "layer_mean": "lm.layer_mean(lm.run(model, prompt, method))",
    "rollout": "lm.rollout(lm.run(model, prompt, method))",
}

# Saved maps and traces may have the name that a method had before it was renamed.
_FORMER_NAMES = {"attribution_patching": "token_patching"}

_registered: dict[str, type[Method]] = {}

M = TypeVar("M", bound=type[Method])


# `lm.input_map` runs one of several methods, so no class describes it.
_INPUT_MAP = Description(
    "Recommended",
    "how much the answer depends on each input token; the best-tested method for the model",
    COSTS.get("input_map"),
)


def register(method: M) -> M:
    """Register a method, so that `lm.run`, `lm.support` and `lm.citation` accept its name.

        >>> @lm.register
        ... class LargestWeight(lm.Method):
        ...     name, residual = "largest_weight", 0.5
        ...     engines, records = ("recorded",), frozenset({"pattern"})
        ...
        ...     def __call__(self, block):
        ...         return block.recorded("pattern").amax(dim=1)
        >>> lm.run(model, "The Eiffel Tower is in the city of", "largest_weight").top(3)

    The function can be used as a decorator. The name is registered for the rest of the process. If a class is
    registered again (a cell of a notebook that runs twice), the new class replaces the old one. The class
    attribute `citation` is a key of the bibliography of the library, or the BibTeX itself.

    Args:
        method: The class of the method.

    Returns:
        The class.

    Raises:
        TypeError: If `method` is not a class of a method.
        ValueError: If a class attribute is missing or wrong, or if another class has the name.
    """
    check_class(method)
    known = all_methods().get(method.name)
    # A notebook's cell that runs twice makes another class of the same name, so the names are compared.
    if known is not None and (known.__module__, known.__qualname__) != (
        method.__module__,
        method.__qualname__,
    ):
        raise ValueError(
            f"{method.__name__}: expected a name that no other method has, got {method.name!r}, the name of "
            f"{known.__module__}.{known.__qualname__}; change the class attribute `name`"
        )
    if method.name not in METHODS:
        _registered[method.name] = method
    return method


def all_methods() -> dict[str, type[Method]]:
    """Return all methods by name: those of the library, of plugins, and those that were registered."""
    return {**METHODS, **_plugins(), **_registered}


def find_recorded(name: str) -> type[Method] | None:
    """Return the class of a method by its name in a saved record; None if there is none of this name."""
    known = all_methods()
    return known.get(name) or known.get(_FORMER_NAMES.get(name, ""))


def describe(name: str) -> Description:
    """Return the group, the plain line and the cost of a method, or of `input_map`.

    The line is the class attribute `description`; without one, the first line of the docstring. For an
    unknown name, as in a map made by hand, it is empty.
    """
    if name == "input_map":
        return _INPUT_MAP
    method = find_recorded(name)
    if method is None:
        return Description("Other methods", "")
    return Description(method.group, method.description or _read_first_line(method), method.default_cost())


def _read_first_line(method: type[Method]) -> str:
    """Return the first line of a method's docstring, without a period; "" if its author wrote none."""
    documented = inspect.cleandoc(method.__doc__ or "")
    # Python writes the docstring of a dataclass that has none: its name and its parameters.
    is_written = not documented.startswith(f"{method.__name__}(")
    return documented.partition("\n")[0].rstrip(".") if is_written else ""


def find_method(name: str, argument: str = "methods") -> type[Method]:
    """Return the class of a method by its name in strings ("value_zeroing") or its class ("ValueZeroing").

    Case, spaces, hyphens and underscores are ignored, so "value-zeroing" is the same name.

    Args:
        name: The name.
        argument: The name of the argument, for errors.

    Raises:
        ValueError: If the method does not exist. The error names the closest one first.
    """
    known = all_methods()
    if name in known:
        return known[name]
    wanted = _simplify(name)
    for method in known.values():
        if wanted in (_simplify(method.name), _simplify(method.__name__)):
            return method
    raise ValueError(f"{argument}: {_suggest(name, known)}expected one of {sorted(known)}, got {name!r}")


def _find_closest(name: str, known: Mapping[str, type[Method]]) -> type[Method] | None:
    """Return the method whose name, class or initials are the closest to a name; None if none is close."""
    wanted = _simplify(name)
    for method in known.values():
        if wanted and wanted == "".join(word[0] for word in method.name.split("_")):
            return method
    names = {_simplify(each): method for method in known.values() for each in (method.__name__, method.name)}
    close = difflib.get_close_matches(wanted, names, 1)
    return names[close[0]] if close else None


def _suggest(name: str, known: Mapping[str, type[Method]]) -> str:
    """Return what to write instead of an unknown name, for the beginning of an error."""
    if name in _CALLS:
        return f"{name} is not a method, write {_CALLS[name]}; "
    if name in _FORMER_NAMES:
        return f"{name} is called {_FORMER_NAMES[name]!r} now; "
    close = _find_closest(name, known)
    return "" if close is None else f"did you mean {close.name!r}? "


def _simplify(name: str) -> str:
    return re.sub(r"[\s_-]", "", name).casefold()


@functools.cache
def _plugins() -> dict[str, type[Method]]:
    """Return the methods of installed packages. A method that cannot be loaded is left out with a warning."""
    methods: dict[str, type[Method]] = {}
    for entry in importlib.metadata.entry_points(group=PLUGINS):
        try:
            method = entry.load()
            check_class(method)
            if method.name in METHODS or method.name in methods:
                raise ValueError(f"another method has the name {method.name!r}")
            methods[method.name] = method
        except Exception as problem:
            warnings.warn(
                f"entry point {entry.name} = {entry.value} does not provide a method: {problem}",
                stacklevel=2,
            )
    return methods


def check_class(method: object, argument: str = "method") -> None:
    """Raise an error unless this is a class of a method that can run by its name alone, with its defaults.

    Args:
        method: The class.
        argument: The name of the argument, for errors.

    Raises:
        TypeError: If it is not a class of a method.
        ValueError: If a class attribute is missing or wrong, or if a parameter has no default.
    """
    checked = check_attributes(method, argument)
    declared = set(dir(Method)) - {"target", "per_head"}
    annotated = [name for name in vars(checked).get("__annotations__", {}) if name not in declared]
    parameters = [name for name in annotated if "ClassVar" not in str(checked.__annotations__[name])]
    if parameters and "__dataclass_fields__" not in vars(checked):
        raise ValueError(
            f"{checked.__name__}: expected a dataclass, because it has the parameters {parameters}, got a "
            "plain class; write @dataclasses.dataclass(frozen=True) above it"
        )
    for field in dataclasses.fields(checked):
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ValueError(
                f"{checked.__name__}.{field.name}: expected a default, so that the method can be used by its "
                "name alone, got none"
            )


def check_attributes(method: object, argument: str = "method") -> type[Method]:
    """Return the class of a method, if it can run.

    Args:
        method: The class.
        argument: The name of the argument, for errors.

    Raises:
        TypeError: If it is not a class of a method.
        ValueError: If a class attribute is missing or wrong.
    """
    if not isinstance(method, type) or not issubclass(method, Method) or method is Method:
        raise TypeError(
            f"{argument}: expected a class derived from lens_mix.Method, got {describe_value(method)}"
        )
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
    for name, allowed in (_ONE_OF | _SEVERAL_OF).items():
        _check_words(f"{where}.{name}", getattr(method, name), allowed, alone=name in _ONE_OF)
    _check_reads(method)
    return method


def _check_reads(method: type[Method]) -> None:
    """Raise a ValueError unless a method defines the function that its `reads` needs."""
    where = method.__name__
    has_of_blocks = method.of_blocks is not Method.of_blocks
    if method.reads != "block" and not has_of_blocks:
        raise ValueError(
            f"{where}: expected an of_blocks(self, blocks) that returns the maps of several blocks, because "
            f"reads is {method.reads!r}, got none"
        )
    if method.reads == "block" and has_of_blocks:
        raise ValueError(
            f"{where}.reads: expected 'above', 'below' or 'model', because it defines of_blocks, got 'block'"
        )
    if method.layers_add_up and method.reads != "below":
        raise ValueError(
            f"{where}.layers_add_up: expected False, because it is for input maps of several layers "
            f"(reads = 'below'), got {method.layers_add_up!r} with reads = {method.reads!r}"
        )
    if method.reads == "block" and method.__call__ is Method.__call__:
        raise ValueError(f"{where}: expected a __call__(self, block) that returns the block's map, got none")


def _check_words(attribute: str, value: object, allowed: tuple[str, ...], alone: bool) -> None:
    """Raise a ValueError unless an attribute has an allowed word, or several if not `alone`."""
    is_several = isinstance(value, Iterable) and not isinstance(value, str)
    if is_several == alone:
        raise ValueError(
            f"{attribute}: expected {'one' if alone else 'several'} of {list(allowed)}, got {value!r}"
        )
    words = list(value) if isinstance(value, Iterable) and is_several else [value]
    for word in words:
        if word not in allowed:
            close = difflib.get_close_matches(str(word), allowed, 1)
            suggestion = f"; did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"{attribute}: expected some of {list(allowed)}, got {word!r}{suggestion}")
    if not words and attribute.endswith("engines"):
        raise ValueError(f"{attribute}: expected at least one of {list(allowed)}, got none")


def list_names() -> list[str]:
    """Return the names of `input_map` and of all methods, by their groups and their places within these."""

    def place(name: str) -> tuple[int, int]:
        return _GROUPS.index(known[name].group), known[name].place_in_list

    known = all_methods()
    return ["input_map", *sorted(known, key=place)]
