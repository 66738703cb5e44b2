"""A `MixingMap` as a file, a table, a labelled array, a graph or a line of text."""

from __future__ import annotations

import html
import json
import os
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix.maps.positions import shortened

if TYPE_CHECKING:
    import networkx
    import pandas
    import xarray

    from lens_mix.maps import MixingMap

FORMAT = "lens_mix.MixingMap/1"
_FIELDS = (
    *("tokens", "method", "causal", "key_tokens", "parameters"),
    *("residual", "kind", "layers", "provenance", "notes"),
)
# Written since rows can be asked for; a file without it holds all rows.
_OPTIONAL = ("queries",)


def save_map(mixing_map: MixingMap, path: str | os.PathLike[str]) -> None:
    """Write `scores` and `mask` as safetensors, everything else as JSON in the file's metadata.

    Raises:
        TypeError: an entry of `parameters` or `provenance` that JSON cannot hold, by its name.
    """
    from safetensors.torch import save_file

    record = {name: getattr(mixing_map, name) for name in (*_FIELDS, *_OPTIONAL)}
    for name in ("parameters", "provenance"):
        _refuse_beyond_json(record[name], name)
    tensors = {"scores": mixing_map.scores.contiguous()}
    if mixing_map.mask is not None:
        tensors["mask"] = mixing_map.mask.contiguous()
    save_file(tensors, os.fspath(path), metadata={"format": FORMAT, "record": json.dumps(record)})


def _refuse_beyond_json(value: Any, name: str) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{name}: expected names as strings to save them, got {key!r}")
            _refuse_beyond_json(item, f"{name}[{key!r}]")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _refuse_beyond_json(item, f"{name}[{index}]")
    elif value is not None and not isinstance(value, (str, int, float, bool)):
        raise TypeError(
            f"{name}: expected something JSON can hold to save it, got {type(value).__name__} {value!r}"
        )


def load_map(path: str | os.PathLike[str], device: str | torch.device = "cpu") -> dict[str, Any]:
    """The fields of a map written by `save_map`.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a file that holds no map, or one of another format, or a damaged one.
    """
    from safetensors import SafetensorError, safe_open

    place, expected = os.fspath(path), f"path: expected a map that MixingMap.save wrote ({FORMAT!r})"
    if os.path.isdir(place):
        raise ValueError(f"{expected}, got the folder {place}")
    try:
        with safe_open(place, framework="pt", device=str(device)) as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise ValueError(f"{expected}, got format {metadata.get('format')!r} in {place}")
            fields: dict[str, Any] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except SafetensorError as problem:
        raise ValueError(f"{expected}, got {place}, which is no safetensors file: {problem}") from problem
    record = _record(metadata.get("record"))
    missing = [name for name in _FIELDS if name not in record]
    missing += [] if "scores" in fields else ["scores"]
    if missing:
        raise ValueError(f"{expected}, got {place}, which lacks {missing}")
    fields.update({name: record.get(name) for name in (*_FIELDS, *_OPTIONAL)})
    fields["notes"] = tuple(fields["notes"])
    return fields


def _record(text: str | None) -> dict[str, Any]:
    try:
        record = json.loads(text or "")
    except json.JSONDecodeError:
        return {}
    return record if isinstance(record, dict) else {}


def to_numpy(tensor: Tensor) -> Any:
    """A numpy array of the same numbers (half precision as float32, which holds them exactly)."""
    if tensor.dtype not in (torch.float32, torch.float64):
        tensor = tensor.to(torch.float32)
    return tensor.cpu().numpy()


def map_dataframe(mixing_map: MixingMap) -> pandas.DataFrame:
    """Long form: one row per layer, (head,) query and key."""
    import numpy as np
    import pandas as pd

    scores = to_numpy(mixing_map.scores)
    axes = [axis.ravel() for axis in np.indices(scores.shape)]
    columns = {"layer": np.asarray(mixing_map.layer_labels)[axes[0]]}
    if mixing_map.has_heads:
        columns["head"] = axes[1]
    columns["query"], columns["key"] = np.asarray(mixing_map.query_positions)[axes[-2]], axes[-1]
    columns["query_token"] = np.asarray(mixing_map.query_labels, dtype=object)[axes[-2]]
    columns["key_token"] = np.asarray(mixing_map.key_labels, dtype=object)[axes[-1]]
    columns["score"] = scores.ravel()
    return pd.DataFrame(columns)


def map_xarray(mixing_map: MixingMap) -> xarray.DataArray:
    """A labelled array with the record's other fields as attributes (nested ones as JSON)."""
    try:
        import xarray
    except ImportError as error:
        raise ImportError("to_xarray needs xarray: pip install 'lens_mix[xarray]'") from error

    dims = ("layer", "head", "query", "key") if mixing_map.has_heads else ("layer", "query", "key")
    coordinates: dict[str, Any] = {
        "layer": mixing_map.layer_labels,
        "query": mixing_map.query_positions,
        "key": range(len(mixing_map.key_labels)),
        "query_token": ("query", mixing_map.query_labels),
        "key_token": ("key", mixing_map.key_labels),
    }
    if mixing_map.has_heads:
        coordinates["head"] = range(mixing_map.scores.shape[1])
    attributes = {
        "method": mixing_map.method,
        "kind": mixing_map.kind,
        "causal": int(mixing_map.causal),
        "parameters": json.dumps(mixing_map.parameters, default=str),
        "provenance": json.dumps(mixing_map.provenance, default=str),
        "notes": json.dumps(mixing_map.notes),
    }
    return xarray.DataArray(
        to_numpy(mixing_map.scores), dims=dims, coords=coordinates, name="score", attrs=attributes
    )


def layer_graph(
    mixing_map: MixingMap, matrix: Float[Tensor, "query key"], threshold: float
) -> networkx.DiGraph:
    """One map as a graph: an edge key -> query, the way the information went."""
    import networkx as nx

    graph = nx.DiGraph(method=mixing_map.method, kind=mixing_map.kind)
    cross = mixing_map.key_tokens is not None
    positions = mixing_map.query_positions
    if cross:
        for position, token in zip(positions, mixing_map.query_labels, strict=True):
            graph.add_node(("query", position), token=token, position=position)
    for position, token in enumerate(mixing_map.key_labels):
        graph.add_node(("key", position) if cross else position, token=token, position=position)
    for row, key, weight in _edges(matrix, threshold):
        query = positions[row]
        start, end = (("key", key), ("query", query)) if cross else (key, query)
        graph.add_edge(start, end, weight=weight)
    return graph


def stack_graph(
    mixing_map: MixingMap, matrices: Float[Tensor, "layer query key"], threshold: float
) -> networkx.DiGraph:
    """All layers as one graph: node `(level, position)`, level 0 the first layer's input."""
    import networkx as nx

    graph = nx.DiGraph(method=mixing_map.method, kind=mixing_map.kind)
    for level in range(len(matrices) + 1):
        for position, token in enumerate(mixing_map.tokens):
            graph.add_node((level, position), token=token, position=position, level=level)
    for level, matrix in enumerate(matrices):
        label = mixing_map.layer_labels[level]
        for query, key, weight in _edges(matrix, threshold):
            graph.add_edge((level, key), (level + 1, query), weight=weight, layer=label)
    return graph


def _edges(matrix: Float[Tensor, "query key"], threshold: float) -> list[tuple[int, int, float]]:
    chosen = (matrix.abs() > threshold).nonzero()
    weights = matrix[chosen[:, 0], chosen[:, 1]].tolist()
    return [(query, key, weight) for (query, key), weight in zip(chosen.tolist(), weights, strict=True)]


def describe(mixing_map: MixingMap) -> str:
    """One line: method, kind, shape, dtype and the first tokens."""
    names = ("layer", "head", "query", "key") if mixing_map.has_heads else ("layer", "query", "key")
    shape = " ".join(f"{name}={size}" for name, size in zip(names, mixing_map.scores.shape, strict=True))
    tokens = mixing_map.tokens
    shown = ", ".join(repr(token) for token in tokens[:6]) + (", …" if len(tokens) > 6 else "")
    aggregation = mixing_map.provenance.get("aggregation")
    name = mixing_map.method
    if isinstance(aggregation, dict):
        name = f"{name} {aggregation.get('name', '')}".strip()
    extras = [str(mixing_map.scores.dtype).removeprefix("torch.")]
    extras += ["causal"] if mixing_map.causal else []
    if mixing_map.queries is not None:
        extras.append(f"queries {shortened(mixing_map.queries)} of {len(tokens)} positions")
    extras += [f"{len(mixing_map.notes)} notes"] if mixing_map.notes else []
    return f"MixingMap({name}: {mixing_map.kind} map, {shape}, {', '.join(extras)}, tokens=[{shown}])"


def describe_html(mixing_map: MixingMap) -> str:
    """The line of `describe` and a small table of the last row's top keys in the last layer."""
    last = max(mixing_map.query_positions)
    of_the_last = "the last query" if last == len(mixing_map.tokens) - 1 else f"query {last}"
    rows = "".join(
        f"<tr><td>{source.position}</td><td><code>{html.escape(source.token)}</code></td>"
        f"<td>{source.score:.4g}</td></tr>"
        for source in mixing_map.top(5, query=last)
    )
    return (
        f"<code>{html.escape(describe(mixing_map))}</code><table><caption>Top keys of {of_the_last}, "
        f"last layer</caption><tr><th>position</th><th>token</th><th>score</th></tr>{rows}</table>"
    )
