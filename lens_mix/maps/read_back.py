"""Convert a table or a labeled array back to a `MixingMap`, for two of its methods."""

from __future__ import annotations

import json
import math
import numbers
from typing import TYPE_CHECKING, Any

from lens_mix.arguments import check_columns, check_instance, check_whole_number, describe_value

if TYPE_CHECKING:
    import pandas
    import xarray

    from lens_mix.maps import MixingMap

_COLUMNS = ("layer", "query", "key", "query_token", "key_token", "score")
# The fields that `attrs` contains as JSON, with "tokens" because a table of some rows lacks the others.
_JSON_FIELDS = (
    *("parameters", "provenance", "notes", "residual", "tokens", "default_query", "explained", "grid"),
)

_READ_AS_TEXT = (
    "pd.read_csv(path, dtype={'query_token': str, 'key_token': str}, keep_default_na=False, "
    "na_values={'score': ['']})"
)


def from_dataframe(cls: type[MixingMap], /, table: pandas.DataFrame, **fields: Any) -> MixingMap:
    """Return the map of a table, as `MixingMap.from_dataframe`."""
    from lens_mix.tables import Table, are_written, read_cell

    check_columns("table", table, _COLUMNS)
    axes = ["layer", *(["head"] if "head" in table.columns else []), "query", "key"]
    table = table.assign(**{name: _to_numbers(table[name], name) for name in (*axes, "score")})
    by_entry = table.set_index(axes)["score"].sort_index()
    labels = {axis: sorted(set(table[axis].tolist())) for axis in axes}
    shape = [len(axis_labels) for axis_labels in labels.values()]
    expected = math.prod(shape)
    if by_entry.index.has_duplicates or len(by_entry) != expected:
        raise ValueError(
            f"table: expected every {' x '.join(axes)} once, {expected} rows, got {len(by_entry)}"
            f"{', some of them twice' if by_entry.index.has_duplicates else ''}"
        )
    queries = _read_tokens(table, "query", labels["query"])
    keys = _read_tokens(table, "key", labels["key"])
    # A `Table` has the tokens themselves; only tokens from a file may be written as JSON strings.
    if not isinstance(table, Table) and are_written([*queries.values(), *keys.values()]):
        queries = {position: read_cell(token) for position, token in queries.items()}
        keys = {position: read_cell(token) for position, token in keys.items()}
    if labels["key"] != list(range(len(keys))):
        raise ValueError(f"table: expected keys 0 to {len(keys) - 1}, got {describe_value(labels['key'])}")
    scores = by_entry.to_numpy().reshape(shape)
    made = _make_fields(scores, labels, queries, keys, table.attrs)
    if "explained" not in made and {"prediction", "probability"} <= set(table.columns):
        made["explained"] = _read_predictions(table, labels["query"])
    return cls(**{**made, **fields})


def _read_predictions(table: pandas.DataFrame, positions: list[int]) -> list[dict[str, Any]]:
    """Return the prediction of each row, which a CSV file has in columns."""
    from lens_mix.tables import read_cell

    first = table.drop_duplicates("query").set_index("query")
    found = first.loc[positions, ["prediction", "probability"]].to_dict("records")
    return [
        {"prediction": read_cell(entry["prediction"]), "probability": float(entry["probability"])}
        if isinstance(entry["prediction"], str)
        else {}
        for entry in found
    ]


def _to_numbers(column: pandas.Series, name: str) -> pandas.Series:
    """Return a column of text or of any pandas dtype as numpy numbers; empty text becomes NaN."""
    import numpy as np
    import pandas as pd

    try:
        numbers = pd.to_numeric(column)
        if name == "score":
            numbers = numbers if isinstance(numbers.dtype, np.dtype) else numbers.astype("float64")
            return numbers if numbers.dtype.kind in "iuf" else numbers.astype("float64")
        # A column of whole numbers with a missing one is read as floats.
        whole = numbers.astype("int64")
    except (ValueError, TypeError, OverflowError) as problem:
        raise ValueError(f"table: expected numbers in {name}, got {problem}") from problem
    wrong = (whole != numbers).to_numpy(dtype=bool, na_value=True)
    if wrong.any():
        raise ValueError(f"table: expected whole numbers in {name}, got {numbers[wrong].iloc[0]!r}")
    return whole


def _read_tokens(table: pandas.DataFrame, axis: str, positions: list[int]) -> dict[int, str]:
    """Return the token of each position; a whole number is read as the text of its digits."""
    first = table.drop_duplicates(axis).set_index(axis)[f"{axis}_token"]
    tokens = {position: first[position] for position in positions}
    for position, token in tokens.items():
        if isinstance(token, str):
            continue
        if isinstance(token, bool) or not isinstance(token, numbers.Integral):
            raise ValueError(
                f"table: expected text in {axis}_token, got {describe_value(token)} for {axis} {position}; "
                f"to read other CSV files than those of MixingMap.to_dataframe: {_READ_AS_TEXT}"
            )
        tokens[position] = str(token)
    return tokens


def from_xarray(cls: type[MixingMap], /, array: xarray.DataArray, **fields: Any) -> MixingMap:
    """Return the map of an array, as `MixingMap.from_xarray`."""
    import xarray

    has_tokens = isinstance(array, xarray.DataArray) and {"query_token", "key_token"} <= set(array.coords)
    if not has_tokens or not {"layer", "query", "key"} <= set(array.dims) <= {
        "layer",
        "head",
        "query",
        "key",
    }:
        got = f"dimensions {array.dims}" if isinstance(array, xarray.DataArray) else describe_value(array)
        raise ValueError(f"array: expected one of MixingMap.to_xarray, with its tokens, got {got}")
    axes: list[str] = [axis for axis in ("layer", "head", "query", "key") if axis in array.dims]
    array = array.transpose(*axes)
    if array.dtype.kind not in "iufb":
        raise ValueError(f"array: expected numbers, got {array.dtype}")
    labels = {
        axis: [check_whole_number(f"array[{axis!r}]", label, 0) for label in array[axis].values]
        for axis in axes
    }
    for axis in ("query", "key"):
        if array[f"{axis}_token"].dims != (axis,):
            raise ValueError(
                f"array: expected a token for each {axis} in {axis}_token, got one for each of "
                f"{array[f'{axis}_token'].dims}"
            )
    keys = labels["key"]
    if keys != list(range(len(keys))):
        raise ValueError(f"array: expected keys 0 to {len(keys) - 1} in order, got {describe_value(keys)}")
    tokens = {axis: [str(token) for token in array[f"{axis}_token"].values] for axis in ("query", "key")}
    by_query, by_key = (dict(zip(labels[axis], tokens[axis], strict=True)) for axis in ("query", "key"))
    return cls(**{**_make_fields(array.values, labels, by_query, by_key, array.attrs), **fields})


def _read_json(name: str, text: Any) -> Any:
    """Return the value of an entry of `attrs`; raise a ValueError that names the entry if it is not JSON."""
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError) as problem:
        raise ValueError(
            f"attrs[{name!r}]: expected JSON as MixingMap.to_dataframe and to_xarray write it, got "
            f"{describe_value(text)}; delete this entry, or give {name}= yourself"
        ) from problem


def _make_fields(
    scores: Any, labels: dict[str, list[int]], queries: dict[int, str], keys: dict[int, str], attrs: Any
) -> dict[str, Any]:
    """Return the fields of a map, from the scores and labels of its axes, its tokens and `attrs`."""
    import numpy as np

    hidden = np.isnan(scores)
    fields: dict[str, Any] = {name: attrs[name] for name in ("method", "kind") if name in attrs}
    fields |= {name: _read_json(name, attrs[name]) for name in _JSON_FIELDS if name in attrs}
    fields = {name: value for name, value in fields.items() if value is not None}
    if "explained" in fields:
        by_position = check_instance(
            "attrs['explained']", fields["explained"], dict, "a JSON object with the positions of rows"
        )
        fields["explained"] = [by_position.get(str(position)) for position in labels["query"]]
    names = list(keys.values())
    have_same_tokens = all(keys.get(position) == token for position, token in queries.items())
    keys_are_tokens = bool(attrs.get("keys_are_tokens", have_same_tokens))
    later = np.arange(len(names)) > np.asarray(labels["query"])[:, None]
    # All heads of a layer have the same mask, so the first head's is enough.
    hidden = hidden[:, 0] if hidden.ndim == 4 else hidden
    hides_later = bool((hidden == later).all())
    # One token shows no triangle, so a map of one token is causal only if `attrs` says so.
    looks_causal = hides_later and len(names) > 1
    causal = keys_are_tokens and (bool(attrs["causal"]) if "causal" in attrs else looks_causal)
    return {
        "tokens": names if keys_are_tokens else list(queries.values()),
        **fields,
        "scores": np.where(np.isnan(scores), 0, scores),
        "layers": labels["layer"],
        "key_tokens": None if keys_are_tokens else names,
        "queries": labels["query"],
        "causal": causal,
        "mask": None if (causal and hides_later) or not hidden.any() else ~hidden,
    }
