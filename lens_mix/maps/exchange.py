"""A `MixingMap` as a file, a table, a labelled array, a graph or a line of text; most are its methods."""

from __future__ import annotations

import html
import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix.arguments import file_path, shown
from lens_mix.files import replacing
from lens_mix.maps.positions import shortened

if TYPE_CHECKING:
    import networkx
    import xarray

    from lens_mix.maps import MixingMap
    from lens_mix.tables import Table

_FORMAT = "lens_mix.MixingMap/1"
_FIELDS = "tokens method causal key_tokens parameters residual kind layers provenance notes".split()
# Written since rows can be asked for, and be meant; a file without them holds all rows.
_OPTIONAL = ("queries", "default_query")
_LONGEST_RECORD = 90_000_000  # safetensors writes longer headers, and refuses to read them


def save(mixing_map: MixingMap, path: str | os.PathLike[str]) -> None:
    """Write the map to a safetensors file; `MixingMap.load` gives back the same, to the bit.

    The tensors are written as such, and everything else as JSON in the metadata. The file is written under
    another name and moved to `path` when it is complete.

    Raises:
        TypeError: something in `parameters` or `provenance` that JSON cannot represent.
        OSError: a file that cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    place = file_path("path", path, write=True)
    record = {name: getattr(mixing_map, name) for name in (*_FIELDS, *_OPTIONAL)}
    for name in ("parameters", "provenance"):
        _require_json(record[name], name)
    tensors = {name: getattr(mixing_map, name) for name in ("scores", "mask", "residual_shares")}
    # safetensors refuses views, and tensors that share memory (the diagonal of scores as residual shares).
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None}
    if "residual_shares" in tensors:
        tensors["residual_shares"] = tensors["residual_shares"].clone()
    text = json.dumps(record)
    if len(text) > _LONGEST_RECORD:
        raise ValueError(
            f"parameters, provenance, notes: expected at most {_LONGEST_RECORD} characters as JSON to save "
            f"them, got {len(text)}"
        )
    try:
        with replacing(place) as file:
            save_file(tensors, file, metadata={"format": _FORMAT, "record": text})
    except SafetensorError as problem:
        raise OSError(f"path: expected a file that can be written, got {place}: {problem}") from problem


def _require_json(value: Any, name: str) -> None:
    if isinstance(value, (dict, list)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(value, dict) and not isinstance(key, str):
                raise TypeError(f"{name}: expected names as strings to save them, got {key!r}")
            _require_json(item, f"{name}[{key!r}]")
    elif value is not None and not isinstance(value, (str, int, float, bool)):
        raise TypeError(
            f"{name}: expected something JSON can hold to save it, got {type(value).__name__} {value!r}"
        )


def load(cls: type[MixingMap], path: str | os.PathLike[str], device: str | torch.device = "cpu") -> MixingMap:
    """Read a map that `save` wrote; the map has its own memory, whatever happens to the file.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a file without a map.
    """
    from safetensors import SafetensorError, safe_open

    place, expected = file_path("path", path), f"path: expected a map that MixingMap.save wrote ({_FORMAT!r})"
    try:
        torch.empty(0, device=device, dtype=torch.float32)
    except (RuntimeError, TypeError, AssertionError) as problem:
        raise ValueError(
            f"device: expected one that this torch can use, got {shown(device)}: {problem}"
        ) from problem
    try:
        with safe_open(place, framework="pt", device=str(device)) as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != _FORMAT:
                raise ValueError(f"{expected}, got format {metadata.get('format')!r} in {place}")
            # Below 0.8, safetensors returns tensors whose memory is that of the file, so each is copied.
            names = list(file.keys())
            fields: dict[str, Any] = {name: file.get_tensor(name).clone() for name in names}
    except SafetensorError as problem:
        raise ValueError(f"{expected}, got {place}, which is no safetensors file: {problem}") from problem
    try:
        record = json.loads(metadata.get("record", ""))
    except (ValueError, RecursionError):
        record = None
    if isinstance(record, dict):
        fields |= {name: record[name] for name in (*_FIELDS, *_OPTIONAL) if name in record}
    missing = [name for name in (*_FIELDS, "scores") if name not in fields]
    if missing:
        raise ValueError(f"{expected}, got {place}, which lacks {missing}")
    try:
        return cls(**fields)
    except (TypeError, ValueError) as problem:
        raise ValueError(f"{expected}, got {place}, which holds none: {problem}") from problem


def to_numpy(tensor: Tensor) -> Any:
    """A numpy array of the same numbers (half precision as float32, which holds them exactly)."""
    if tensor.dtype not in (torch.float32, torch.float64):
        tensor = tensor.to(torch.float32)
    return tensor.cpu().numpy()


def _axes(mixing_map: MixingMap) -> dict[str, Sequence[int]]:
    """The axes of `scores`: their names, and the label or position of each place on them."""
    heads = {"head": range(mixing_map.scores.shape[1])} if mixing_map.has_heads else {}
    rows = {"query": mixing_map.query_positions, "key": range(len(mixing_map.key_labels))}
    return {"layer": mixing_map.layer_labels, **heads, **rows}


def to_dataframe(mixing_map: MixingMap) -> Table:
    """Long form: columns layer, (head,) query, key, query_token, key_token, score.

    Scores are raw; NaN where the query could not see the key. `attrs` has the rest of the record, as JSON.
    The table's `to_csv` and `to_excel` write a token that may be misread (`NA`, `01`, `=1+1`) as a JSON
    string, which `MixingMap.from_dataframe` reads.
    """
    import numpy as np
    import pandas as pd

    from lens_mix.tables import Table

    axes = _axes(mixing_map)
    table = pd.MultiIndex.from_product(list(axes.values()), names=list(axes)).to_frame(index=False)
    for axis, tokens in (("query", mixing_map.tokens), ("key", mixing_map.key_labels)):
        # As objects, because the strings of pandas 3 can't contain one half of a surrogate pair.
        repeated = np.asarray(tokens, dtype=object)[table[axis]]
        table[f"{axis}_token"] = pd.Series(repeated, dtype=object)
    table["score"] = _seen_scores(mixing_map).ravel()
    table = Table(table)
    table.attrs = _attributes(mixing_map)
    return table


def _seen_scores(mixing_map: MixingMap) -> Any:
    """The scores, NaN where a query could not see a key: a zero there would count in means."""
    visible = mixing_map.visible()
    visible = visible[:, None] if mixing_map.has_heads else visible
    return to_numpy(mixing_map.scores.masked_fill(~visible, torch.nan))


def _attributes(mixing_map: MixingMap) -> dict[str, Any]:
    """What the axes and scores do not tell, as a file of netCDF can keep it."""
    attributes = {"method": mixing_map.method, "kind": mixing_map.kind, "causal": int(mixing_map.causal)}
    for name in ("parameters", "provenance", "notes", "residual", "tokens", "default_query"):
        attributes[name] = as_json(getattr(mixing_map, name))
    return {**attributes, "keys_are_tokens": int(mixing_map.key_tokens is None), "unit": "raw"}


def as_json(value: Any) -> str:
    """Return a value of a record as JSON; what JSON cannot represent is written as text."""
    return json.dumps(_with_text_names(value), default=str)


def _with_text_names(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _with_text_names(item) for name, item in value.items()}
    return [_with_text_names(item) for item in value] if isinstance(value, (list, tuple)) else value


def to_xarray(mixing_map: MixingMap) -> xarray.DataArray:
    """A labelled array: dimensions layer, (head,) query, key; tokens as coordinates, the rest as attrs.

    Scores are raw; NaN where the query could not see the key.
    """
    try:
        import xarray
    except ImportError as error:
        raise ImportError("to_xarray needs xarray: pip install 'lens_mix[xarray]'") from error
    import numpy as np

    axes = _axes(mixing_map)
    labels = {"query": mixing_map.query_labels, "key": mixing_map.key_labels}
    tokens = {}
    for axis, names in labels.items():
        # numpy's strings lose a NUL at their end; xarray's objects can't contain half of a surrogate pair.
        dtype = str if any("\ud800" <= c <= "\udfff" for name in names for c in name) else object
        tokens[f"{axis}_token"] = (axis, np.asarray(names, dtype=dtype))
    scores, attributes = _seen_scores(mixing_map), _attributes(mixing_map)
    return xarray.DataArray(scores, {**axes, **tokens}, list(axes), name="score", attrs=attributes)


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
    for level, (label, matrix) in enumerate(zip(mixing_map.layer_labels, matrices, strict=True)):
        for query, key, weight in _edges(matrix, threshold):
            graph.add_edge((level, key), (level + 1, query), weight=weight, layer=label)
    return graph


def _edges(matrix: Float[Tensor, "query key"], threshold: float) -> list[tuple[int, int, float]]:
    rows, keys = (matrix.abs() > threshold).nonzero(as_tuple=True)
    return list(zip(rows.tolist(), keys.tolist(), matrix[rows, keys].tolist(), strict=True))


def full_name(mixing_map: MixingMap, between: str = " ") -> str:
    """The method, and the aggregation if there was one."""
    aggregation = mixing_map.provenance.get("aggregation")
    name = aggregation.get("name", "") if isinstance(aggregation, dict) else ""
    return between.join(part for part in (mixing_map.method, name) if part)


def describe(mixing_map: MixingMap) -> str:
    """One line: method, kind, shape, dtype and the first tokens."""
    shape = " ".join(f"{name}={len(places)}" for name, places in _axes(mixing_map).items())
    tokens = mixing_map.tokens
    shown = ", ".join(repr(token) for token in tokens[:6]) + (", …" if len(tokens) > 6 else "")
    extras = [str(mixing_map.scores.dtype).removeprefix("torch.")]
    extras += ["causal"] if mixing_map.causal else []
    if mixing_map.queries is not None:
        extras.append(f"queries {shortened(mixing_map.queries)} of {len(tokens)} positions")
    extras += [f"{len(mixing_map.notes)} notes"] if mixing_map.notes else []
    details = f"{mixing_map.kind} map, {shape}, {', '.join(extras)}, tokens=[{shown}]"
    return f"MixingMap({full_name(mixing_map)}: {details})"


def describe_html(mixing_map: MixingMap) -> str:
    """The line of `describe`, and the top keys of the row that is meant, in the last layer."""
    meant = mixing_map.meant_query
    of_the_row = "the last query" if meant == len(mixing_map.tokens) - 1 else f"query {meant}"
    rows = "".join(
        f"<tr><td>{source.position}</td><td><code>{html.escape(source.token)}</code></td>"
        f"<td>{source.score:.4g}</td></tr>"
        for source in mixing_map.top(5)
    )
    return (
        f"<code>{html.escape(describe(mixing_map))}</code><table><caption>Top keys of {of_the_row}, "
        f"last layer</caption><tr><th>position</th><th>token</th><th>score (raw)</th></tr>{rows}</table>"
    )
