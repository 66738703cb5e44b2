"""Convert a `MixingMap` to a file, a table, a labeled array, a graph or a line of text.

`MixingMap` imports this file when one of its methods needs it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix.arguments import check_file_path, describe_value, write_count
from lens_mix.maps.explained import as_records
from lens_mix.maps.positions import shorten
from lens_mix.maps.tensor_files import TensorFile, read_tensors, write_tensors

if TYPE_CHECKING:
    import networkx
    import numpy
    import xarray

    from lens_mix.maps import MixingMap
    from lens_mix.tables import Table

_FORMAT = "lens_mix.MixingMap/1"
_FORMAT_OF_MAPS = "lens_mix.Maps/1"
_FIELDS = "tokens method causal key_tokens parameters residual kind layers provenance notes".split()
# Older files lack these fields; their maps have all rows.
_OPTIONAL = ("queries", "default_query", "explained", "grid")
_TENSORS = ("scores", "mask", "residual_shares", "features")
# safetensors writes longer headers, but raises an error when it reads them.
_MAX_RECORD_LENGTH = 90_000_000


def save(mixing_map: MixingMap, path: str | os.PathLike[str]) -> None:
    """Write a map to a safetensors file, as `MixingMap.save`."""
    record, tensors = _pack(mixing_map)
    _write(path, _FORMAT, record, tensors)


def save_maps(maps: Mapping[str, MixingMap], path: str | os.PathLike[str]) -> None:
    """Write several maps to one safetensors file, as `Maps.save`."""
    records: list[dict[str, Any]] = []
    tensors: dict[str, Tensor] = {}
    for index, (name, each) in enumerate(maps.items()):
        record, of_map = _pack(each)
        records.append({"name": name, "map": record})
        # Maps of one prompt share their pixels, and safetensors writes no memory twice.
        tensors |= {f"{index}.{field}": tensor.clone() for field, tensor in of_map.items()}
    _write(path, _FORMAT_OF_MAPS, {"maps": records}, tensors)


def _pack(mixing_map: MixingMap) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the fields of a map that are written as JSON, and its tensors."""
    record = {name: getattr(mixing_map, name) for name in (*_FIELDS, *_OPTIONAL)}
    record["explained"] = as_records(mixing_map.explained)
    record["grid"] = None if mixing_map.grid is None else mixing_map.grid.record()
    record["key_tokens"] = None if mixing_map.keys_are_tokens else mixing_map.key_tokens
    for name in ("parameters", "provenance"):
        _require_json(record[name], name)
    tensors = {name: getattr(mixing_map, name) for name in _TENSORS}
    # safetensors cannot write views or tensors that share memory; residual shares may be a view of scores.
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None}
    if "residual_shares" in tensors:
        tensors["residual_shares"] = tensors["residual_shares"].clone()
    return record, tensors


def _write(
    path: str | os.PathLike[str], form: str, record: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    location = check_file_path("path", path, write=True)
    text = json.dumps(record)
    if len(text) > _MAX_RECORD_LENGTH:
        raise ValueError(
            "parameters, provenance, notes: expected at most "
            f"{_MAX_RECORD_LENGTH} characters of JSON to save them, got {len(text)}"
        )
    write_tensors(location, form, text, tensors)


def _require_json(value: Any, name: str) -> None:
    """Raise a TypeError that names the first value or name that JSON cannot represent."""
    if isinstance(value, (dict, list)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(value, dict) and not isinstance(key, str):
                raise TypeError(f"{name}: expected names as strings to save them, got {key!r}")
            _require_json(item, f"{name}[{key!r}]")
    elif value is not None and not isinstance(value, (str, int, float, bool)):
        raise TypeError(
            f"{name}: expected a value that JSON can represent, to save it, got {type(value).__name__} "
            f"{value!r}"
        )


def load(cls: type[MixingMap], path: str | os.PathLike[str], device: str | torch.device = "cpu") -> MixingMap:
    """Read a map that `save` wrote, as `MixingMap.load`."""
    expected = f"path: expected a map that MixingMap.save wrote ({_FORMAT!r})"
    file = _read(path, _FORMAT, expected, device)
    return _unpack(cls, file, f"{expected}, got {os.fspath(path)}")


def load_maps(
    cls: type[MixingMap], path: str | os.PathLike[str], device: str | torch.device = "cpu"
) -> dict[str, MixingMap]:
    """Read the maps that `save_maps` wrote, as `Maps.load`."""
    expected = f"path: expected maps that Maps.save wrote ({_FORMAT_OF_MAPS!r})"
    file = _read(path, _FORMAT_OF_MAPS, expected, device)
    got = f"{expected}, got {os.fspath(path)}"
    found = {}
    records = file.record.get("maps")
    for index, entry in enumerate(records if isinstance(records, list) else []):
        start = f"{index}."
        tensors = {
            name.removeprefix(start): each for name, each in file.tensors.items() if name.startswith(start)
        }
        if isinstance(entry, dict) and isinstance(entry.get("map"), dict):
            one = TensorFile(entry["map"], tensors, file.is_unchanged)
            found[str(entry.get("name"))] = _unpack(cls, one, got)
    if not found:
        raise ValueError(f"{got}, which contains none")
    return found


def _read(path: str | os.PathLike[str], form: str, expected: str, device: str | torch.device) -> TensorFile:
    """Read a file of `_write`, on a device that must exist."""
    try:
        torch.empty(0, device=device, dtype=torch.float32)
    except (RuntimeError, TypeError, AssertionError) as problem:
        raise ValueError(
            f"device: expected a device that torch can use here, got {describe_value(device)}: {problem}"
        ) from problem
    return read_tensors(path, form, expected, device)


def _unpack(cls: type[MixingMap], file: TensorFile, got: str) -> MixingMap:
    """Return the map of a file; `got` is the beginning of errors."""
    found = {name: file.record[name] for name in (*_FIELDS, *_OPTIONAL) if name in file.record}
    fields: dict[str, Any] = {**file.tensors, **found}
    missing = [name for name in (*_FIELDS, "scores") if name not in fields]
    if missing:
        raise ValueError(f"{got}, which lacks {missing}")
    if file.is_unchanged is False:
        raise ValueError(f"{got}, which was changed after it was written")
    try:
        return cls(**fields)
    except (TypeError, ValueError) as problem:
        raise ValueError(f"{got}, which does not contain one: {problem}") from problem


def to_numpy(tensor: Tensor) -> numpy.ndarray:
    """Return a numpy array of the same numbers. Half precision becomes float32, which is exact."""
    if tensor.dtype not in (torch.float32, torch.float64):
        tensor = tensor.to(torch.float32)
    return tensor.cpu().numpy()


def _label_axes(mixing_map: MixingMap) -> dict[str, Sequence[int]]:
    """Return the labels or positions of each axis of `scores`, by the name of the axis."""
    heads = {"head": range(mixing_map.scores.shape[1])} if mixing_map.has_heads else {}
    rows = {"query": mixing_map.query_positions, "key": range(len(mixing_map.key_labels))}
    return {"layer": mixing_map.layer_labels, **heads, **rows}


def to_dataframe(mixing_map: MixingMap) -> Table:
    """Return a map as a table in long form, as `MixingMap.to_dataframe`."""
    import numpy as np
    import pandas as pd

    from lens_mix.tables import Table

    axes = _label_axes(mixing_map)
    table = pd.MultiIndex.from_product(list(axes.values()), names=list(axes)).to_frame(index=False)
    for axis, tokens in (("query", mixing_map.tokens), ("key", mixing_map.key_labels)):
        # The tokens are objects, because a string of pandas 3 cannot contain one half of a surrogate pair.
        repeated = np.asarray(tokens, dtype=object)[table[axis]]
        table[f"{axis}_token"] = pd.Series(repeated, dtype=object)
    table["score"] = _mask_scores(mixing_map).ravel()
    if mixing_map.explained is not None:
        row_of = {position: row for row, position in enumerate(mixing_map.query_positions)}
        rows = table["query"].map(row_of)
        for name in ("prediction", "probability"):
            values = np.asarray([getattr(entry, name) for entry in mixing_map.explained], dtype=object)
            table[name] = pd.Series(values[rows], dtype=object if name == "prediction" else float)
    table = Table(table)
    table.attrs = _make_attributes(mixing_map)
    return table


def _mask_scores(mixing_map: MixingMap) -> Any:
    """Return the scores with NaN on hidden keys, because a zero there would count in a mean."""
    visible = mixing_map.visible()
    visible = visible[:, None] if mixing_map.has_heads else visible
    return to_numpy(mixing_map.scores.masked_fill(~visible, torch.nan))


def _make_attributes(mixing_map: MixingMap) -> dict[str, Any]:
    """Return the fields that the axes and scores do not contain, as values that a netCDF file can store."""
    attributes = {"method": mixing_map.method, "kind": mixing_map.kind, "causal": int(mixing_map.causal)}
    for name in ("parameters", "provenance", "notes", "residual", "tokens", "default_query"):
        attributes[name] = as_json(getattr(mixing_map, name))
    # The rows of a table may be in another order, so each entry is stored under the position of its row.
    records = as_records(mixing_map.explained)
    by_position = None if records is None else dict(zip(mixing_map.query_positions, records, strict=True))
    attributes["explained"] = as_json(by_position)
    if mixing_map.grid is not None:
        attributes["grid"] = as_json(mixing_map.grid.record())
    return {**attributes, "keys_are_tokens": int(mixing_map.keys_are_tokens), "unit": "raw"}


def as_json(value: Any) -> str:
    """Return a value as JSON, with `str` of each part that JSON cannot represent."""
    return json.dumps(_convert_names(value), default=str)


def _convert_names(value: Any) -> Any:
    """Return the value with the names in all dicts as strings."""
    if isinstance(value, dict):
        return {str(name): _convert_names(item) for name, item in value.items()}
    return [_convert_names(item) for item in value] if isinstance(value, (list, tuple)) else value


def to_xarray(mixing_map: MixingMap) -> xarray.DataArray:
    """Return a map as a labeled array, as `MixingMap.to_xarray`."""
    try:
        import xarray
    except ImportError as error:
        raise ImportError("to_xarray needs xarray: pip install 'lens_mix[xarray]'") from error
    import numpy as np

    axes = _label_axes(mixing_map)
    labels = {"query": mixing_map.query_labels, "key": mixing_map.key_labels}
    tokens = {}
    for axis, names in labels.items():
        # A numpy string loses a NUL at its end, but as an object xarray cannot write half a surrogate pair.
        dtype = (
            str if any("\ud800" <= character <= "\udfff" for name in names for character in name) else object
        )
        tokens[f"{axis}_token"] = (axis, np.asarray(names, dtype=dtype))
    scores, attributes = _mask_scores(mixing_map), _make_attributes(mixing_map)
    return xarray.DataArray(scores, {**axes, **tokens}, list(axes), name="score", attrs=attributes)


def layer_graph(
    mixing_map: MixingMap, matrix: Float[Tensor, "query key"], threshold: float
) -> networkx.DiGraph:
    """Return the graph of one layer, with edges key -> query, the direction of the information."""
    import networkx as nx

    graph = nx.DiGraph(method=mixing_map.method, kind=mixing_map.kind)
    has_other_keys = not mixing_map.keys_are_tokens
    positions = mixing_map.query_positions
    if has_other_keys:
        for position, token in zip(positions, mixing_map.query_labels, strict=True):
            graph.add_node(("query", position), token=token, position=position)
    for position, token in enumerate(mixing_map.key_labels):
        node = ("key", position) if has_other_keys else position
        graph.add_node(node, token=token, position=position)
    for row, key, weight in _find_edges(matrix, threshold):
        query = positions[row]
        start, end = (("key", key), ("query", query)) if has_other_keys else (key, query)
        graph.add_edge(start, end, weight=weight)
    return graph


def stack_graph(
    mixing_map: MixingMap, matrices: Float[Tensor, "layer query key"], threshold: float
) -> networkx.DiGraph:
    """Return one graph of all layers, with nodes `(level, position)`; level 0 is the first layer's input."""
    import networkx as nx

    graph = nx.DiGraph(method=mixing_map.method, kind=mixing_map.kind)
    # A level above the first one is the output of a layer.
    for level, layer in enumerate([mixing_map.layer_labels[0] - 1, *mixing_map.layer_labels]):
        for position, token in enumerate(mixing_map.tokens):
            values = {"token": token, "position": position, "level": level, "layer": layer}
            graph.add_node((level, position), **values)
    for level, (label, matrix) in enumerate(zip(mixing_map.layer_labels, matrices, strict=True)):
        for query, key, weight in _find_edges(matrix, threshold):
            graph.add_edge((level, key), (level + 1, query), weight=weight, layer=label)
    return graph


def _find_edges(matrix: Float[Tensor, "query key"], threshold: float) -> list[tuple[int, int, float]]:
    rows, keys = (matrix.abs() > threshold).nonzero(as_tuple=True)
    return list(zip(rows.tolist(), keys.tolist(), matrix[rows, keys].tolist(), strict=True))


def full_name(mixing_map: MixingMap, between: str = " ") -> str:
    """Return the name of the method, and that of the aggregation if there was one."""
    aggregation = mixing_map.provenance.get("aggregation")
    name = aggregation.get("name", "") if isinstance(aggregation, dict) else ""
    return between.join(word for word in (mixing_map.method, name) if word)


def describe(mixing_map: MixingMap) -> str:
    """Return one line with the method, kind, shape, dtype and first tokens."""
    shape = " ".join(f"{name}={len(labels)}" for name, labels in _label_axes(mixing_map).items())
    tokens = mixing_map.tokens
    first_tokens = ", ".join(repr(token) for token in tokens[:6]) + (", …" if len(tokens) > 6 else "")
    extras = [str(mixing_map.scores.dtype).removeprefix("torch.")]
    extras += ["causal"] if mixing_map.causal else []
    if mixing_map.queries is not None:
        extras.append(f"queries {shorten(mixing_map.queries)} of {write_count(len(tokens), 'position')}")
    extras += [write_count(len(mixing_map.notes), "note")] if mixing_map.notes else []
    details = f"{mixing_map.kind} map, {shape}, {', '.join(extras)}, tokens=[{first_tokens}]"
    explanation = mixing_map.explanation()
    details += f"; {explanation}" if explanation else ""
    return f"MixingMap({full_name(mixing_map)}: {details})"
