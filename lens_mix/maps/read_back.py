"""From a table or a labelled array back to the fields of a `MixingMap`."""

from __future__ import annotations

import json
import math
import numbers
from typing import TYPE_CHECKING, Any

from lens_mix.arguments import check_columns, shown

if TYPE_CHECKING:
    import pandas
    import xarray

    from lens_mix.maps import MixingMap

_COLUMNS = ("layer", "query", "key", "query_token", "key_token", "score")
# As JSON in `attrs`; "tokens" too, since a map that holds some rows names no others.
_WRITTEN = ("parameters", "provenance", "notes", "residual", "tokens", "default_query")

_READ_AS_TEXT = (
    "pd.read_csv(path, dtype={'query_token': str, 'key_token': str}, keep_default_na=False, "
    "na_values={'score': ['']})"
)


def from_dataframe(cls: type[MixingMap], table: pandas.DataFrame, **fields: Any) -> MixingMap:
    """The map that a table of `to_dataframe` holds, in any order of its rows, read from a CSV too.

    Tokens come back as they were. If all tokens of the table are written as `to_csv` writes them, those that
    are JSON strings are read as such. The table knows tokens, layers, heads, rows and hidden keys (no
    score, NaN); what it knows besides is in its `attrs`, which a file of text loses: `fields` are the others
    of a `MixingMap` (`method="attention"`), and go before the table's.

    Raises:
        TypeError, ValueError: no such table; an entry missing or there twice; tokens that are not text;
            fields that do not fit.
    """
    from lens_mix.tables import Table, are_written, read_cell

    check_columns("table", table, _COLUMNS)
    axes = ["layer", *(["head"] if "head" in table.columns else []), "query", "key"]
    table = table.assign(**{name: _numbers(table[name], name) for name in (*axes, "score")})
    by_entry = table.set_index(axes)["score"].sort_index()
    places = {axis: sorted(set(table[axis].tolist())) for axis in axes}
    shape = [len(labels) for labels in places.values()]
    expected = math.prod(shape)
    if by_entry.index.has_duplicates or len(by_entry) != expected:
        raise ValueError(
            f"table: expected every {' x '.join(axes)} once, {expected} rows, got {len(by_entry)}"
            f"{', some of them twice' if by_entry.index.has_duplicates else ''}"
        )
    queries = _tokens(table, "query", places["query"])
    keys = _tokens(table, "key", places["key"])
    # Only tokens from a file may be written as JSON strings; a `Table` has the tokens themselves.
    if not isinstance(table, Table) and are_written([*queries.values(), *keys.values()]):
        queries = {position: read_cell(token) for position, token in queries.items()}
        keys = {position: read_cell(token) for position, token in keys.items()}
    if places["key"] != list(range(len(keys))):
        raise ValueError(f"table: expected keys 0 to {len(keys) - 1}, got {shown(places['key'])}")
    scores = by_entry.to_numpy().reshape(shape)
    return cls(**{**_fields(scores, places, queries, keys, table.attrs), **fields})


def _numbers(column: pandas.Series, name: str) -> pandas.Series:
    """A column of text (empty: NaN) or of any dtype of pandas as NumPy's numbers; ValueError: others."""
    import numpy as np
    import pandas as pd

    try:
        numbers = pd.to_numeric(column)
        plain = "float64" if name == "score" else "int64"
        return numbers if isinstance(numbers.dtype, np.dtype) else numbers.astype(plain)
    except (ValueError, TypeError) as problem:
        raise ValueError(f"table: expected numbers in {name}, got {problem}") from problem


def _tokens(table: pandas.DataFrame, axis: str, positions: list[int]) -> dict[int, str]:
    """Return the token of each position; a whole number counts as its digits."""
    first = table.drop_duplicates(axis).set_index(axis)[f"{axis}_token"]
    tokens = {position: first[position] for position in positions}
    for position, token in tokens.items():
        if isinstance(token, str):
            continue
        if isinstance(token, bool) or not isinstance(token, numbers.Integral):
            raise ValueError(
                f"table: expected text in {axis}_token, got {shown(token)} for {axis} {position}; "
                f"to read other CSV files than those of MixingMap.to_dataframe: {_READ_AS_TEXT}"
            )
        tokens[position] = str(token)
    return tokens


def from_xarray(cls: type[MixingMap], array: xarray.DataArray, **fields: Any) -> MixingMap:
    """The map that an array of `to_xarray` holds; `fields` and errors as in `from_dataframe`."""
    import xarray

    known = isinstance(array, xarray.DataArray) and {"query_token", "key_token"} <= set(array.coords)
    if not known or not {"layer", "query", "key"} <= set(array.dims) <= {"layer", "head", "query", "key"}:
        got = f"dimensions {array.dims}" if isinstance(array, xarray.DataArray) else shown(array)
        raise ValueError(f"array: expected one of MixingMap.to_xarray, with its tokens, got {got}")
    axes: list[str] = [axis for axis in ("layer", "head", "query", "key") if axis in array.dims]
    array = array.transpose(*axes)
    places = {axis: [int(place) for place in array[axis].values] for axis in axes}
    tokens = {axis: [str(token) for token in array[f"{axis}_token"].values] for axis in ("query", "key")}
    queries, keys = (dict(zip(places[axis], tokens[axis], strict=True)) for axis in ("query", "key"))
    return cls(**{**_fields(array.values, places, queries, keys, array.attrs), **fields})


def _fields(
    scores: Any, places: dict[str, list[int]], queries: dict[int, str], keys: dict[int, str], attrs: Any
) -> dict[str, Any]:
    import numpy as np

    hidden = np.isnan(scores)
    fields: dict[str, Any] = {name: attrs[name] for name in ("method", "kind") if name in attrs}
    fields |= {name: json.loads(attrs[name]) for name in _WRITTEN if name in attrs}
    fields = {name: value for name, value in fields.items() if value is not None}
    names = list(keys.values())
    alike = all(keys.get(place) == token for place, token in queries.items())
    keys_are_tokens = bool(attrs.get("keys_are_tokens", alike))
    below = np.arange(len(names)) > np.asarray(places["query"])[:, None]
    # One mask for all heads; a row of zeros is no hidden one.
    hidden = hidden[:, 0] if hidden.ndim == 4 else hidden
    triangle = bool((hidden == below).all())
    causal = keys_are_tokens and (bool(attrs["causal"]) if "causal" in attrs else triangle and len(names) > 1)
    return {
        "tokens": names if keys_are_tokens else list(queries.values()),
        **fields,
        "scores": np.where(np.isnan(scores), 0, scores),
        "layers": places["layer"],
        "key_tokens": None if keys_are_tokens else names,
        "queries": places["query"],
        "causal": causal,
        "mask": None if (causal and triangle) or not hidden.any() else ~hidden,
    }
