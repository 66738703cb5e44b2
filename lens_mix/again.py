"""A map that was kept, made again: the same method on the same tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from lens_mix.arguments import instance, real_tensor, several
from lens_mix.lens.model_classes import TransformerLensModel
from lens_mix.maps import MixingMap
from lens_mix.method import Method
from lens_mix.registry import all_methods
from lens_mix.runner import run
from lens_mix.targets import from_record


def run_again(
    model: TransformerLensModel, mixing_map: MixingMap, method: Method | None = None, **options: Any
) -> MixingMap:
    """Make the map that `lm.run` made once more, from its record: on a new release, on other weights.

    The record holds the method with its parameters, the tokens, the rows, the layers, the stack and the
    engine. Of a map that was merged or aggregated afterwards, the layer maps underneath come back.

    Args:
        model: the model to map.
        mixing_map: of `lm.run`, `lm.run_many` or `lm.input_map`, loaded from a file maybe.
        method: what to run instead of what the record says; needed where a parameter was a function or a
            tensor, of which records keep the name only.
        options: as in `lm.run`, in place of the record's.

    Raises:
        TypeError: no map. ValueError: a map that no run made; a method that its record does not hold whole.
    """
    record = instance("mixing_map", mixing_map, MixingMap, "a MixingMap").provenance
    if "token_ids" not in record:
        raise ValueError(
            "mixing_map: expected a map that lm.run made (its provenance holds token_ids), got one of "
            f"method {mixing_map.method!r} without; run it with lm.run(model, prompt, method)"
        )
    if "joint" in record and record.get("part") != "joint":
        raise ValueError(
            "mixing_map: expected a map of one part, got a joint one; make it again with lm.joint of "
            'lm.run(..., part="all")'
        )
    # Rows and layers keep their names as long as no token is dropped or merged.
    whole = mixing_map.kind == "input" and len(mixing_map) > 1
    reads_target = record.get("part") in ("decoder", "cross", "joint")
    mapped = _numbers(record, "token_ids")
    prompt: Any = mapped
    if reads_target or "target_token_ids" in record:
        target = _numbers(record, "target_token_ids")
        prompt, mapped = (prompt, target), target if reads_target else mapped
    asked = {
        "queries": mixing_map.queries if len(mixing_map.tokens) == len(mapped) else None,
        "layers": None if whole else mixing_map.layer_labels,
        "part": record.get("part"),
    }
    inputs = instance('provenance["inputs"]', record.get("inputs", {}), dict, "a dict of numbers by name")
    asked |= {name: _numbers(inputs, name) for name in inputs}
    again = _method(mixing_map) if method is None else method
    if record.get("engine") in again.engines and len(again.engines) > 1:
        asked["engine"] = record["engine"]
    return run(model, prompt, again, **{**asked, **options})


def _numbers(record: dict[str, Any], name: str) -> Tensor:
    """Return a record's numbers as a tensor; raise TypeError or ValueError if it has none of that name."""
    try:
        numbers = real_tensor(f"provenance[{name!r}]", several(name, record.get(name), "numbers", least=1))
    except (TypeError, ValueError) as problem:
        expected = f"mixing_map: expected a record whose {name} is a list of numbers, as lm.run writes it"
        raise type(problem)(f"{expected}; {problem}") from problem
    return numbers.to(torch.float32) if numbers.is_floating_point() else numbers


def _method(mixing_map: MixingMap) -> Method:
    """The method of a record; ValueError where it does not hold it whole."""
    known = all_methods()
    if mixing_map.method not in known:
        raise ValueError(f"method: expected one of {sorted(known)}, got {mixing_map.method!r}; give method=")
    kind = known[mixing_map.method]
    names = {field.name for field in dataclasses.fields(kind)}
    parameters = {name: value for name, value in mixing_map.parameters.items() if name in names}
    try:
        if isinstance(parameters.get("target"), dict):
            parameters["target"] = from_record(parameters["target"])
        return kind(**parameters)
    except (TypeError, ValueError) as problem:
        raise ValueError(
            f"method: the record does not hold {mixing_map.method!r} whole, give it as method=: {problem}"
        ) from problem
