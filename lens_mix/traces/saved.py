"""Write traces to files and read them back."""

from __future__ import annotations

import dataclasses
import json
import os
from typing import TYPE_CHECKING, Any

import torch

from lens_mix._classes.model_classes import TransformerLensModel, UnsupportedModelError
from lens_mix._inputs.batches import Prompt
from lens_mix._inputs.pictures import Picture
from lens_mix.arguments import check_file_path
from lens_mix.maps.explained import as_explained, as_records
from lens_mix.maps.grid import Grid
from lens_mix.maps.tensor_files import read_tensors, write_tensors
from lens_mix.registry import find_recorded
from lens_mix.traces.attribution import Explainer, find_aggregation, read_written
from lens_mix.traces.documents import Section
from lens_mix.traces.reading import Reading
from lens_mix.traces.sources import UNITS, PlacedText, TextSource

if TYPE_CHECKING:
    from lens_mix.traces.trace import Trace

_FORMAT = "lens_mix.Trace/1"
# The fields of a prompt that are tensors by name.
_INPUTS = ("inputs", "picture_inputs")
_IN_NOISE = "losses in noise"
# Log probabilities of one model differ by less, in nats, on other machines and in half precision.
ON_OTHER_MACHINES = 0.25


def save(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write a trace; see `Trace.save`."""
    location = check_file_path("path", path, write=True)
    reading = trace.reading
    tensors = {"tokens": reading.prompt.tokens, "log_probabilities": trace.log_probabilities}
    if reading.prompt.target is not None:
        tensors["target"] = reading.prompt.target
    if reading.prompt.features is not None:
        tensors["features"] = reading.prompt.features
    for kind in _INPUTS:
        tensors |= {f"{kind} {name}": value for name, value in getattr(reading.prompt, kind).items()}
    sources: dict[str, Any] = {}
    names: list[Any] = []
    for unit in dict.fromkeys((*UNITS, trace.unit)):
        try:
            sources[unit] = [dataclasses.asdict(source) for source in trace.sources(unit)]
        except ValueError:
            # This trace has no such unit.
            continue
    for key, value in trace._computed.items():
        if isinstance(value, torch.Tensor):
            tensors[f"scores {len(names)}"] = value
            names.append(list(key) if isinstance(key, tuple) else key)
    losses, losses_in_noise = (
        [
            [*key[1:], [[positions, loss] for positions, loss in value.items()]]
            for key, value in trace._computed.items()
            if isinstance(value, dict) and key[0] == kind
        ]
        for kind in ("losses", _IN_NOISE)
    )
    record = {
        "computed": names,
        "losses": losses,
        _IN_NOISE: losses_in_noise,
        "sources": sources,
        "strings": reading.tokens,
        "pictures": [picture.record() for picture in reading.prompt.pictures],
        "grid": None if reading.sound_grid is None else reading.sound_grid.record(),
        "n_source": reading.n_source,
        "n_prompt": reading.n_prompt,
        "prompt_text": _to_record(reading.prompt_text),
        "written_text": _to_record(reading.written_text),
        "explained": as_records(trace.explained),
        **{name: getattr(trace, name) for name in ("unit", "method_name", "hops", "notes")},
        "parameters": dict(trace.parameters),
        "provenance": dict(trace.provenance),
    }
    kept = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    write_tensors(location, _FORMAT, json.dumps(record), kept)


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the fields of a saved trace by name, without its model; see `Trace.load`.

    The digest of the file shows that it is complete, so its fields are not checked one by one.
    """
    expected = "path: expected a trace that Trace.save wrote"
    file = read_tensors(path, _FORMAT, expected)
    if not file.is_unchanged:
        raise ValueError(f"{expected}, got {os.fspath(path)}, which was changed after it was written")
    return _read_fields(file.record, file.tensors)


def _read_fields(record: dict[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    computed: dict[Any, Any] = {
        tuple(key) if isinstance(key, list) else key: tensors[f"scores {index}"]
        for index, key in enumerate(record["computed"])
    }
    for unit, listed in record["sources"].items():
        computed["sources", unit] = [
            TextSource(**{**each, "positions": tuple(each["positions"])}) for each in listed
        ]
    for kind in ("losses", _IN_NOISE):
        for start, stop, measured in record.get(kind, []):
            computed[kind, start, stop] = {tuple(positions): loss for positions, loss in measured}
    inputs: dict[str, Any] = {
        kind: {
            name.removeprefix(f"{kind} "): value
            for name, value in tensors.items()
            if name.startswith(f"{kind} ")
        }
        for kind in _INPUTS
    }
    pictures = tuple(Picture.from_record(each) for each in record["pictures"])
    sound: dict[str, Any] = {}
    if "features" in tensors:
        # The first positions are the frames.
        labels = tuple(record["strings"][: record["n_source"]])
        sound = {"features": tensors["features"], "grid": Grid(**record["grid"]), "labels": labels}
    reading = Reading(
        Prompt(tensors["tokens"], tensors.get("target"), pictures=pictures, **inputs, **sound),
        record["n_source"],
        record["n_prompt"],
        record["strings"],
        _from_record(record["prompt_text"]),
        _from_record(record["written_text"]),
    )
    return {
        "reading": reading,
        "log_probabilities": tensors["log_probabilities"],
        "explained": as_explained(record["explained"], reading.n_written) or (),
        "notes": tuple(record["notes"]),
        "_computed": computed,
        **{name: record[name] for name in ("unit", "method_name", "hops", "parameters", "provenance")},
    }


def require_same_model(model: TransformerLensModel, trace: Trace, allowed: float, advice: str) -> None:
    """Raise a ValueError unless the written tokens have the trace's log probabilities in this model.

    Args:
        model: The model.
        trace: The trace.
        allowed: The largest difference of a log probability, in nats.
        advice: What to do if it is larger, for the error.
    """
    try:
        found = read_written(model, trace.reading).log_probabilities
    except UnsupportedModelError as problem:
        raise ValueError(
            f"model: expected the model of the trace, got one that fails: {problem}"
        ) from problem
    difference = float((found - trace.log_probabilities.to(found)).abs().max())
    if not difference <= allowed:
        raise ValueError(
            f"model: expected the model of the trace, got one whose log probabilities of the written tokens "
            f"differ by up to {difference:.3g} nats; {advice}"
        )


def make_explainer(model: TransformerLensModel, trace: Trace) -> Explainer | None:
    """Return what computes further scores; None if the method or the aggregation was the user's own."""
    name, _, aggregation = trace.method_name.partition(", ")
    method_class = find_recorded(name)
    if method_class is None:
        return None
    try:
        method = method_class(**trace.parameters).explain_next_tokens()
        aggregated = find_aggregation(aggregation) if aggregation else None
    except (TypeError, ValueError):
        return None
    return Explainer(model, trace.reading, method, aggregated, {})


def _to_record(text: PlacedText | None) -> dict[str, Any] | None:
    if text is None:
        return None
    return {**text._asdict(), "sections": [list(section) for section in text.sections]}


def _from_record(record: dict[str, Any] | None) -> PlacedText | None:
    if record is None:
        return None
    sections = [Section(*section) for section in record["sections"]]
    offsets = [tuple(each) for each in record["offsets"]]
    return PlacedText(record["text"], sections, record["first"], offsets)
