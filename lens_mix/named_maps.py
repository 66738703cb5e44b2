"""Compute the maps of methods by their names, `input_map` among them, for the command line and the app."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from lens_mix import registry
from lens_mix._classes.model_classes import TransformerLensModel
from lens_mix._inputs.rows import Positions, Selection
from lens_mix.maps import Maps, MixingMap
from lens_mix.method import Method
from lens_mix.recommended import find_default_row, input_map, recommended_method
from lens_mix.runner import read_methods, run
from lens_mix.targets import TargetLike, TokenLike

INPUT_MAP = "input_map"  # the name of `lens_mix.input_map`, beside the names of the methods

# The methods that the command line and the app choose if the user chooses none, the recommended one first.
DEFAULT_METHODS = (INPUT_MAP, "attention", "value_zeroing")

# A method that needs more time than this for a row, in forward passes, computes only one row by default:
# methods with a backward pass for each row do, and products of all pairs of positions do not.
_MOST_PASSES_PER_ROW = 1 / 3


def read_names(names: Sequence[str], *, per_head: bool = False) -> dict[str, Method | None]:
    """Return the methods by their names, in the order of the names; None for `input_map`.

    Args:
        names: The names.
        per_head: Whether each head has a map of its own.

    Raises:
        ValueError: If there is no name, an unknown name or a name twice; or with `per_head` a method whose
            map has no heads.
    """
    others = [name for name in names if name != INPUT_MAP]
    if len(names) - len(others) > 1:
        raise ValueError(f"methods: expected different methods, got {INPUT_MAP} twice")
    known = iter(read_methods(others)[0].items()) if others or not names else iter(())
    # A method may have several names, so the given name is not always the one that it is known by.
    methods = dict((INPUT_MAP, None) if name == INPUT_MAP else next(known) for name in names)
    if not per_head:
        return methods
    headless = [name for name, method in methods.items() if method is None or method.per_head is None]
    if headless:
        having = [name for name, method in registry.all_methods().items() if method.per_head is not None]
        raise ValueError(
            f"per_head: expected methods whose maps have heads ({', '.join(having)}), got "
            f"{', '.join(headless)}"
        )
    return {
        name: dataclasses.replace(method, **{"per_head": True}) if method else None
        for name, method in methods.items()
    }


def _has_all_rows(name: str) -> bool:
    """Return whether a method computes all rows by default, and not a single one."""
    cost = registry.describe(name).cost
    return cost is None or cost.per_row <= _MOST_PASSES_PER_ROW


def compute_maps(
    model: TransformerLensModel,
    prompt: Any,
    names: Sequence[str],
    *,
    queries: Positions | None = None,
    all_rows: bool = False,
    layers: Selection | None = None,
    per_head: bool = False,
    target: TargetLike | None = None,
    against: TokenLike | None = None,
    **options: Any,
) -> Maps:
    """Return the maps of a prompt by the names of the methods, in the order of the names.

    Methods with the same rows share one clean pass.

    Args:
        model: As in `lm.run`.
        prompt: As in `lm.run`.
        names: The names, as in `read_names`.
        queries: The positions of the rows to compute, as in `lm.run`. None: all rows, but a single one for
            methods that need passes for each row: that of `find_default_row`.
        all_rows: Whether these methods also compute all rows, if `queries` is None.
        layers: The layers, as in `lm.run`, for methods that have a map of each layer.
        per_head: Whether each head has a map of its own.
        target: What `input_map` and the methods with a target explain, as in `lm.input_map`. None: their
            defaults.
        against: The token with which that of the target is contrasted, as in `lm.input_map`.
        options: As in `lm.run`.

    Raises:
        TypeError: As in `lm.run`.
        ValueError: As in `read_names` and `lm.run`.
        UnsupportedModelError: As in `lm.run`.
    """
    methods = read_names(names, per_head=per_head)
    aim: dict[str, Any] = {"target": target, "against": against}
    aim = {name: value for name, value in aim.items() if value is not None}
    default_row = find_default_row(model, prompt, target, **options)
    groups: dict[tuple[bool, bool], list[Method]] = {}
    maps: dict[str, MixingMap] = {}
    for name, method in methods.items():
        is_one_row = queries is None and not (all_rows or _has_all_rows(name))
        if method is None:
            rows = default_row if is_one_row else queries
            maps[name] = input_map(model, prompt, queries=rows, **aim, **options)
        else:
            if aim and method.target is not None:
                method = dataclasses.replace(method, **aim)
            groups.setdefault((is_one_row, method.reads == "model"), []).append(method)
    for (is_one_row, is_of_model), group in groups.items():
        rows = default_row if is_one_row else queries
        selection = {"queries": rows, "layers": None if is_of_model else layers}
        maps |= run(model, prompt, group, **{**options, **selection})
    return Maps({name: maps[name] for name in methods})


def find_methods(model: TransformerLensModel, names: Sequence[str]) -> dict[str, Method]:
    """Return the methods by their names; for `input_map` the method that it runs on this model.

    If the same method was also given by its own name, it is left out.
    """
    found: dict[str, Method] = {}
    for name, method in sorted(read_names(names).items(), key=lambda item: item[1] is not None):
        method = recommended_method(model) if method is None else method
        if method not in found.values():
            found[name] = method
    return found
