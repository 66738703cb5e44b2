"""Convert maps to rows of a Parquet file, and rows back to maps."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lens_mix.maps import MixingMap
from lens_mix.maps.exchange import as_json, to_numpy
from lens_mix.maps.explained import as_records

if TYPE_CHECKING:
    import pyarrow

DTYPES = {"float16": np.float16, "float32": np.float32, "float64": np.float64}
# These fields of a map are JSON in the column `record`. Tokens and tensors have columns of their own.
_RECORDED = "method causal key_tokens parameters residual kind layers provenance notes queries default_query"
# These differ between two runs of the same prompt, and the files must not.
_OF_THE_RUN = ("date", "verification_error")
_TENSORS = ("scores", "mask", "residual_shares")


def make_schema(dtype: str) -> pyarrow.Schema:
    """Return the columns of a file of maps: one row for each prompt and method.

    Args:
        dtype: The type of scores: "float16", "float32" or "float64".
    """
    import pyarrow as pa

    # pyarrow has no name "float16" for its own type of that size.
    number = pa.from_numpy_dtype(DTYPES[dtype])
    return pa.schema(
        [
            ("prompt", pa.int64()),
            ("method", pa.string()),
            ("text", pa.string()),
            ("error", pa.string()),
            ("fields", pa.string()),
            ("tokens", pa.list_(pa.string())),
            ("shape", pa.list_(pa.int32())),
            ("scores", pa.list_(number)),
            ("mask_shape", pa.list_(pa.int32())),
            ("mask", pa.list_(pa.bool_())),
            ("residual_shares", pa.list_(number)),
            ("record", pa.string()),
        ]
    )


def failed_row(prompt: int, method: str, fields: Mapping[str, Any], reason: str) -> dict[str, Any]:
    """Return the row of a prompt without a map."""
    # A reason may quote a prompt, whose halves of surrogate pairs no file in UTF-8 can contain.
    reason = reason.encode("utf-8", "backslashreplace").decode()
    return {"prompt": prompt, "method": method, "error": reason, "fields": _fields_text(fields)}


def map_row(
    prompt: int, method: str, fields: Mapping[str, Any], mixing: MixingMap, dtype: str, keep: bool
) -> tuple[dict[str, Any], float]:
    """Return the row of a map, and the largest change of a score by rounding to `dtype`.

    Args:
        prompt: The number of the prompt.
        method: The label of the method.
        fields: The fields of the prompt.
        mixing: The map.
        dtype: The type of scores in the file.
        keep: Whether the row has the map, and not only its tokens.

    Raises:
        ValueError: If a score is too large for `dtype`, or a token has no form in UTF-8.
    """
    row: dict[str, Any] = {"prompt": prompt, "method": method, "fields": _fields_text(fields)}
    for token in mixing.tokens:
        token.encode("utf-8")
    row["tokens"] = list(mixing.tokens)
    if not keep:
        return row, 0.0
    error = 0.0
    exact = to_numpy(mixing.scores)
    with np.errstate(over="ignore"):
        scores = exact.astype(DTYPES[dtype])
    if scores.dtype != exact.dtype:
        if not np.isfinite(scores).all():
            raise ValueError(
                f"dtype: expected scores that {dtype} can represent, got {np.abs(exact).max():.4g}; "
                "use float32"
            )
        error = float(np.abs(exact - scores.astype(exact.dtype)).max())
    row |= {"shape": list(scores.shape), "scores": scores.reshape(-1)}
    if mixing.mask is not None:
        row |= {"mask_shape": list(mixing.mask.shape), "mask": mixing.mask.cpu().numpy().reshape(-1)}
    if mixing.residual_shares is not None:
        row["residual_shares"] = to_numpy(mixing.residual_shares).astype(DTYPES[dtype]).reshape(-1)
    row["record"] = _record_text(mixing)
    return row, error


def _fields_text(fields: Mapping[str, Any]) -> str | None:
    return json.dumps(dict(fields)) if fields else None


def _record_text(mixing: MixingMap) -> str:
    record = {name: getattr(mixing, name) for name in _RECORDED.split()}
    record["key_tokens"] = None if mixing.keys_are_tokens else list(mixing.key_tokens)
    record["explained"] = as_records(mixing.explained)
    record["provenance"] = {
        name: value for name, value in mixing.provenance.items() if name not in _OF_THE_RUN
    }
    return as_json(record)


def to_table(rows: Sequence[Mapping[str, Any]], schema: pyarrow.Schema) -> pyarrow.Table:
    """Return rows as a table; a column that a row lacks is null."""
    import pyarrow as pa

    columns = [pa.array([row.get(field.name) for row in rows], field.type) for field in schema]
    return pa.Table.from_arrays(columns, schema=schema)


def read_maps(table: pyarrow.Table) -> Iterator[tuple[int, str, MixingMap | None]]:
    """Yield prompt, method and map of each row, None for a row without a map."""
    columns = {name: table.column(name) for name in table.column_names}
    for index in range(table.num_rows):
        row = {name: column[index] for name, column in columns.items()}
        yield row["prompt"].as_py(), row["method"].as_py(), _make_map(row)


def _make_map(row: Mapping[str, Any]) -> MixingMap | None:
    if not row["scores"].is_valid:
        return None
    record = json.loads(row["record"].as_py())
    shape = row["shape"].as_py()
    tensors: dict[str, Any] = {name: _tensor(row[name]) for name in _TENSORS}
    if tensors["mask"] is not None:
        tensors["mask"] = tensors["mask"].view(row["mask_shape"].as_py())
    if tensors["residual_shares"] is not None:
        tensors["residual_shares"] = tensors["residual_shares"].view(shape[0], shape[-2])
    scores = tensors.pop("scores")
    if scores.dtype == torch.float16:
        scores = scores.to(torch.float32)
    return MixingMap(scores=scores.view(shape), tokens=row["tokens"].as_py(), **record, **tensors)


def _tensor(value: Any) -> torch.Tensor | None:
    if not value.is_valid:
        return None
    array = value.values.to_numpy(zero_copy_only=False)
    return torch.from_numpy(np.array(array))
