"""Read several prompts: from open files, files by their endings, tables and iterables.

Text is read as by `lens_mix.plain_text`: what is not certainly the user's text is an error.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lens_mix.arguments import check_file_path, describe_value
from lens_mix.plain_text import SURROGATE, decode, encoding_of, is_table

_ENDINGS = {
    "": "lines or rows",
    ".txt": "lines",
    ".text": "lines",
    ".jsonl": "rows",
    ".ndjson": "rows",
    ".json": "array",
    ".csv": ",",
    ".tsv": "\t",
    ".parquet": "parquet",
}
# A Parquet file is read in so many rows at a time.
_ROWS_READ = 1024
# The largest limit that the C code of every platform takes. Python's own limit is global: 131,072 characters.
_LONGEST_CELL = 2**31 - 1


class Unreadable(NamedTuple):
    """An item of a file that cannot be read, with the reason."""

    reason: str


def _is_open_file(value: Any) -> bool:
    """Return whether a value is an open file."""
    return callable(getattr(value, "read", None)) and hasattr(value, "readline")


def read_several(prompts: Any, single: str) -> Iterable[Any]:
    """Return several prompts that were given at once; an open file is read.

    Args:
        prompts: The prompts.
        single: The name of the function for one prompt, for errors.

    Raises:
        TypeError: If it is one prompt, a path, or a table, whose items are not prompts.
        ValueError: If a line of an open file cannot be read.
    """
    if _is_open_file(prompts):
        items = list(read_items(prompts))
        reasons = [item.reason for item in items if isinstance(item, Unreadable)]
        if reasons:
            raise ValueError(f"prompts: {reasons[0]}")
        return items
    # The rows of a dataset of Hugging Face may be what a tokenizer returned.
    is_frame = is_table(prompts) and not hasattr(prompts, "with_format")
    is_single = isinstance(prompts, (str, bytes, bytearray, Mapping)) or getattr(prompts, "ndim", 1) == 0
    if is_frame or is_single or not isinstance(prompts, Iterable):
        advice = "give one of its columns" if is_frame else f"use {single} for one prompt"
        raise TypeError(f"prompts: expected several prompts, got {describe_value(prompts)}; {advice}")
    return prompts


def check_several(prompts: Any) -> None:
    """Raise an error unless `prompts` can be read by `read_items`.

    Raises:
        TypeError: If it is neither a path, an open file or a table, nor an iterable with an order.
        ValueError: If the ending of a file is not known.
        FileNotFoundError: If a file does not exist.
    """
    if isinstance(prompts, (str, os.PathLike)):
        _format_of(check_file_path("prompts", prompts))
    elif _is_open_file(prompts):
        _format_of(_name_of(prompts))
    elif not is_table(prompts) and (
        isinstance(prompts, (bytes, bytearray, Mapping, set, frozenset)) or not isinstance(prompts, Iterable)
    ):
        raise TypeError(
            "prompts: expected the path of a file, or several prompts in an order, got "
            f"{describe_value(prompts)}; use lm.run for one prompt"
        )


def read_items(prompts: Any, column: str = "text", fields: Sequence[str] = ()) -> Iterator[Any]:
    """Yield the items of a file, an open file, a table or an iterable.

    An item is a prompt, a row (a mapping with the columns), or `Unreadable`.

    Args:
        prompts: The path of a file, whose ending says what it is; an open file; a data frame, a table of
            pyarrow or a dataset; or an iterable of items.
        column: The column with the prompt, for tables.
        fields: Further columns, for tables.

    Raises:
        TypeError: If `prompts` is none of these.
        ValueError: If a file is not what its ending says, or a table has no such column.
        FileNotFoundError: If a file does not exist.
    """
    check_several(prompts)
    wanted = list(dict.fromkeys((column, *fields)))
    if isinstance(prompts, (str, os.PathLike)):
        with _reading(prompts), _open_binary(prompts) as file:
            yield from _read_file(file, _format_of(prompts), wanted)
    elif _is_open_file(prompts):
        name = _name_of(prompts)
        with _reading(name or "an open file"):
            content = prompts.read()
            data = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
            yield from _read_file(io.BytesIO(data), _format_of(name), wanted)
    elif is_table(prompts):
        _check_columns(_column_names(prompts), wanted)
        for values in zip(*(prompts[name] for name in wanted), strict=True):
            yield dict(zip(wanted, values, strict=True))
    else:
        yield from prompts


def count_items(prompts: Any, column: str) -> int | None:
    """Return the number of items of `read_items`; None if it is unknown before all are read."""
    if not isinstance(prompts, (str, os.PathLike)):
        return len(prompts) if hasattr(prompts, "__len__") else None
    if not os.path.isfile(prompts):
        # A pipe can be read only once.
        return None
    if _format_of(prompts) != "parquet":
        return sum(1 for _ in read_items(prompts, column))
    import pyarrow.parquet as pq

    with _reading(prompts), _open_binary(prompts) as file:
        return int(pq.ParquetFile(file).metadata.num_rows)


def _column_names(table: Any) -> list[Any]:
    names = getattr(table, "column_names", None)
    return list(table.columns if names is None else names)


def _name_of(file: Any) -> str:
    """Return the name of an open file, which has a number instead if it is a pipe; "" without a name."""
    name = getattr(file, "name", "")
    return name if isinstance(name, str) else ""


def _format_of(path: str | os.PathLike[str]) -> str:
    """Return what a file contains, by its ending.

    Raises:
        ValueError: If the ending is not known.
    """
    name = Path(path).name.lower().removesuffix(".gz")
    ending = Path(name).suffix
    if ending not in _ENDINGS:
        known = ", ".join(filter(None, _ENDINGS))
        raise ValueError(
            f"prompts: expected a file that ends in {known}, any of these and .gz, or nothing (a prompt on "
            f"each line), got {os.fspath(path)!r}"
        )
    return _ENDINGS[ending]


@contextlib.contextmanager
def _reading(path: Any) -> Iterator[None]:
    """Name the file in errors about what it contains."""
    from pyarrow import ArrowException

    try:
        yield
    except (ArrowException, EOFError, zlib.error, gzip.BadGzipFile, csv.Error, UnicodeError) as problem:
        raise ValueError(f"prompts: expected a whole file, got {path}: {problem}") from problem
    except ValueError as problem:
        raise ValueError(f"{problem}, in {path}") from problem


def _open_binary(path: str | os.PathLike[str]) -> Any:
    """Return an open file that can be read from any position."""
    if os.fspath(path).lower().endswith(".gz"):
        return gzip.open(path, "rb")
    if os.path.isfile(path):
        return open(path, "rb")
    with open(path, "rb") as pipe:
        return io.BytesIO(pipe.read())


def _read_file(file: Any, format: str, wanted: list[str]) -> Iterator[Any]:
    if format == "parquet":
        yield from _read_parquet(file, wanted)
    elif format == "array":
        yield from _read_array(file)
    elif format in (",", "\t"):
        yield from _read_cells(_open_text(file, newline=""), format, wanted)
    else:
        yield from _read_lines(_open_text(file), format)


def _open_text(file: Any, newline: str | None = None) -> io.TextIOWrapper:
    """Return a file as text, in which bytes that are not text are halves of surrogate pairs."""
    encoding = encoding_of(file.read(4))
    file.seek(0)
    errors = "surrogateescape" if encoding == "utf-8-sig" else "surrogatepass"
    return io.TextIOWrapper(file, encoding, errors, newline)


def _read_lines(file: Iterable[str], format: str) -> Iterator[Any]:
    """Yield each line that is not blank: as text, or as what its JSON represents."""
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        text = line.removesuffix("\n")
        if format == "lines or rows":
            # The ending of a pipe does not say whether its lines are rows.
            format = "rows" if isinstance(_parse(text, number), Mapping) else "lines"
        unreadable = _find_problem(text, number)
        yield unreadable or (text if format == "lines" else _parse(text, number))


def _find_problem(text: str, number: int) -> Unreadable | None:
    """Return why a line cannot be the user's text; None if it can be."""
    half = SURROGATE.search(text)
    if half:
        code = ord(half[0])
        got = f"the byte {code - 0xDC00:#x}" if 0xDC80 <= code <= 0xDCFF else f"U+{code:04X}"
        return Unreadable(f"line {number}: expected UTF-8, got {got} at character {half.start()}")
    if "\0" in text:
        return Unreadable(f"line {number}: expected text, got a null character (UTF-16 without its mark?)")
    return None


def _parse(text: str, number: int) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as problem:
        return Unreadable(f"line {number}: expected JSON, got {problem}")


def _read_array(file: Any) -> Iterator[Any]:
    """Yield the items of a JSON array; a file with an object on each line is read as such."""
    text = decode("prompts", file.read())
    try:
        items = json.loads(text)
    except (ValueError, RecursionError) as problem:
        if not isinstance(_parse(text.lstrip().split("\n")[0], 1), Mapping):
            raise ValueError(f"prompts: expected an array in a .json file, got {problem}") from problem
        yield from _read_lines(io.StringIO(text, newline=None), "rows")
        return
    if not isinstance(items, list):
        raise ValueError(
            f"prompts: expected an array in a .json file, as in [{{'text': ...}}], got "
            f"{describe_value(items)}; a file with an object on each line ends in .jsonl"
        )
    yield from items


def _read_cells(file: Iterable[str], delimiter: str, wanted: list[str]) -> Iterator[Any]:
    """Yield the rows of a CSV file, whose cells are text. An empty cell of the first column is missing."""
    reader = csv.reader(file, delimiter=delimiter, strict=True)
    names: list[str] = []
    while (cells := _next_cells(reader)) is not None:
        if not cells:
            continue
        unreadable = _find_problem(delimiter.join(cells), reader.line_num)
        if not names:
            names = cells
            _check_columns(names, wanted)
        elif unreadable or len(cells) != len(names):
            reason = f"line {reader.line_num}: expected {len(names)} cells, got {len(cells)}"
            yield unreadable or Unreadable(reason)
        else:
            row = dict(zip(names, cells, strict=True))
            yield {name: row[name] or (None if name == wanted[0] else "") for name in wanted}


def _next_cells(reader: Any) -> list[str] | None:
    """Return the next row of a CSV file; None at its end."""
    limit = csv.field_size_limit(_LONGEST_CELL)
    try:
        return next(reader, None)
    except csv.Error as problem:
        raise ValueError(
            f"prompts: expected CSV, got line {reader.line_num}: {problem}; a cell with quotation marks is "
            'written as "a ""b"" c"'
        ) from problem
    finally:
        csv.field_size_limit(limit)


def _read_parquet(file: Any, wanted: list[str]) -> Iterator[Any]:
    """Yield the rows of a Parquet file, whose values are scalars of pyarrow."""
    import pyarrow.parquet as pq

    parquet = pq.ParquetFile(file)
    _check_columns(parquet.schema_arrow.names, wanted)
    for batch in parquet.iter_batches(_ROWS_READ, columns=wanted):
        columns = [batch.column(name) for name in wanted]
        for index in range(batch.num_rows):
            yield {name: column[index] for name, column in zip(wanted, columns, strict=True)}


def _check_columns(names: Sequence[str], wanted: Sequence[str]) -> None:
    """Raise a ValueError unless each wanted column exists once; the first one is the prompt's."""
    for name in wanted:
        if list(names).count(name) != 1:
            argument = "column" if name == wanted[0] else "fields"
            twice = " (twice)" if name in names else ""
            raise ValueError(f"{argument}: expected one of {list(names)}, got {name!r}{twice}")
