"""Compute a saved map again: the same method on the same tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from lens_mix._classes.model_classes import TransformerLensModel
from lens_mix.arguments import check_instance, check_items, check_real_tensor
from lens_mix.maps import MixingMap
from lens_mix.method import Method
from lens_mix.registry import all_methods, find_recorded
from lens_mix.runner import run
from lens_mix.targets import from_record


def run_again(
    model: TransformerLensModel, mixing_map: MixingMap, method: Method | None = None, **options: Any
) -> MixingMap:
    """Compute a map of `lm.run` again from its record, for example with a new release or other weights.

        >>> lm.run(model, "The Eiffel Tower is in the city of", "attention").save("map.safetensors")
        >>> lm.run_again(model, lm.MixingMap.load("map.safetensors"))

    The record contains the method with its parameters, the tokens, the rows, the layers, the part of an
    encoder-decoder and the engine. For a map that was merged or aggregated, the result is the layer maps from
    which it was made.

    Args:
        model: The model.
        mixing_map: A map of `lm.run`, `lm.run_many` or `lm.input_map`, which may come from a file.
        method: The method to run instead of that of the record. It is needed if a parameter was a function or
            a tensor, of which a record contains only the name.
        options: Options of `lm.run`, which replace those of the record.

    Returns:
        The map.

    Raises:
        TypeError: If `mixing_map` is not a `MixingMap`.
        ValueError: If it does not come from a run, or if its record does not fully describe the method.
    """
    record = check_instance("mixing_map", mixing_map, MixingMap, "a MixingMap").provenance
    reads_tokens = "token_ids" in record
    if mixing_map.features is None and not reads_tokens:
        raise ValueError(
            "mixing_map: expected a map that lm.run made, with token_ids in its provenance, got a map of "
            f"method {mixing_map.method!r} without them; make it with lm.run(model, prompt, method)"
        )
    if "joint" in record and record.get("part") != "joint":
        raise ValueError(
            "mixing_map: expected a map of one part, got a map of lm.aggregation.joint; compute it again "
            'with lm.aggregation.joint(lm.run(..., part="all"))'
        )
    missing = sorted(set(record.get("picture_inputs", ())) - set(options))
    if missing:
        raise ValueError(
            f"mixing_map: expected {', '.join(f'{name}=' for name in missing)} beside it, because a record "
            "has no pixels, got none; give what the processor returned for the pictures"
        )
    is_aggregated = mixing_map.kind == "input" and len(mixing_map) > 1
    reads_target = record.get("part") in ("decoder", "cross", "joint")
    mapped: Any = _read_numbers(record, "token_ids") if reads_tokens else mixing_map.features
    prompt: Any = mapped
    if reads_target or "target_token_ids" in record:
        target = _read_numbers(record, "target_token_ids")
        prompt, mapped = (prompt, target), target if reads_target else mapped
    count = len(mapped) if reads_target else record.get("positions", len(mapped))
    recorded = {
        # Another number of tokens means that some were dropped or merged, so `queries` are not the prompt's.
        "queries": mixing_map.queries if len(mixing_map.tokens) == count else None,
        "layers": None if is_aggregated else mixing_map.layer_labels,
        "part": record.get("part"),
    }
    inputs = check_instance(
        'provenance["inputs"]', record.get("inputs", {}), dict, "a dict of numbers by name"
    )
    recorded |= {name: _read_numbers(inputs, name) for name in inputs}
    method = _make_method(mixing_map) if method is None else method
    if record.get("engine") in method.engines and len(method.engines) > 1:
        recorded["engine"] = record["engine"]
    remade: MixingMap = run(model, prompt, method, **{**recorded, **options})
    return remade


def _read_numbers(record: dict[str, Any], name: str) -> Tensor:
    """Return the numbers with this name in a record as a tensor.

    Raises:
        TypeError: If the record has no list of this name, or if an item is not a number.
        ValueError: If the list is empty.
    """
    try:
        numbers = check_real_tensor(
            f"provenance[{name!r}]", check_items(name, record.get(name), "numbers", least=1)
        )
    except (TypeError, ValueError) as problem:
        expected = f"mixing_map: expected a record whose {name} is a list of numbers, as lm.run writes it"
        raise type(problem)(f"{expected}; {problem}") from problem
    return numbers.to(torch.float32) if numbers.is_floating_point() else numbers


def _make_method(mixing_map: MixingMap) -> Method:
    """Return the method of a map with its parameters.

    Raises:
        ValueError: If the method does not exist, or if the map does not fully describe it.
    """
    method_class = find_recorded(mixing_map.method)
    if method_class is None:
        known = sorted(all_methods())
        raise ValueError(f"method: expected one of {known}, got {mixing_map.method!r}; give method=")
    names = {field.name for field in dataclasses.fields(method_class)}
    parameters = {name: value for name, value in mixing_map.parameters.items() if name in names}
    try:
        if isinstance(parameters.get("target"), dict):
            parameters["target"] = from_record(parameters["target"])
        return method_class(**parameters)
    except (TypeError, ValueError) as problem:
        raise ValueError(
            f"method: expected a record with all parameters of {mixing_map.method!r}, got one from which "
            f"they cannot be read ({problem}); give method="
        ) from problem
