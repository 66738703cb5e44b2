"""Tables whose text comes back from a file as it was, and is never a formula. Importing this imports pandas.

Readers of CSV guess what text means: `NA` becomes no value, `01` a number, `=1+1` a formula in a spreadsheet.
A cell that may be misread is therefore written as JSON writes a string, `"NA"` with its quotation marks, and
control characters in it as escapes. Other cells are written as they are.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from typing import Any

import pandas as pd

from lens_mix.arguments import file_path

__all__ = ["Table", "read_cell", "read_csv", "written_cell"]

# Starts of cells that spreadsheets compute, and of JSON strings. Then characters that programs change:
# control characters, line separators, halves of surrogate pairs, the byte order mark.
_STARTS = re.compile(r'\s*[=+\-@\uff1d\uff0b\uff0d\uff20]|"')
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff\ud800-\udfff]")
# What pandas and others read as no value, a truth value or a number.
_NO_TEXT = re.compile(
    r"(|n/?a|nan|null|none|<na>|#n/?a( n/a)?|1\.#(ind|qnan)|true|false|inf(inity)?"
    r"|([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]*)?)",
    re.IGNORECASE,
)


def written_cell(text: str) -> str:
    """Return a text as it is written: itself, or a JSON string if a reader might misread it."""
    if not (_STARTS.match(text) or _CONTROL.search(text) or _NO_TEXT.fullmatch(text.strip())):
        return text
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(text, ensure_ascii=False))


def read_cell(cell: str) -> str:
    """Return the text that `written_cell` wrote as `cell`; another cell is returned as it is."""
    try:
        text = json.loads(cell) if cell.startswith('"') else cell
    except ValueError:
        return cell
    return text if isinstance(text, str) and written_cell(text) == cell else cell


def are_written(cells: Iterable[str]) -> bool:
    """Return whether all cells are as `written_cell` writes them."""
    return all(written_cell(read_cell(cell)) == cell for cell in cells)


def read_csv(path: str | os.PathLike[str], **options: Any) -> Table:
    """Read a CSV file that `Table.to_csv` wrote; its text is what it was in the table.

    Args:
        path: the file.
        options: as in `pandas.read_csv`.
    """
    return Table(_with_cells(pd.read_csv(file_path("path", path), **options), read_cell))


class Table(pd.DataFrame):
    """A data frame whose `to_csv` and `to_excel` write text so that it comes back, and is never a formula."""

    @property
    def _constructor(self) -> type[Table]:
        return Table

    @property
    def _constructor_sliced(self) -> type[Column]:
        return Column

    def to_csv(self, *arguments: Any, **options: Any) -> Any:
        """Write CSV as `pandas.DataFrame.to_csv` does; `lens_mix.tables.read_csv` reads the same text."""
        return _with_cells(self, written_cell).to_csv(*arguments, **options)

    def to_excel(self, *arguments: Any, **options: Any) -> Any:
        """Write a sheet as `pandas.DataFrame.to_excel` does, without formulas."""
        return _with_cells(self, written_cell).to_excel(*arguments, **options)


class Column(pd.Series):
    """A column of a `Table`; pandas makes further columns and tables of these classes from it."""

    @property
    def _constructor(self) -> type[Column]:
        return Column

    @property
    def _constructor_expanddim(self) -> type[Table]:
        return Table

    def to_csv(self, *arguments: Any, **options: Any) -> Any:
        """Write CSV as `Table.to_csv` does."""
        return self.to_frame().to_csv(*arguments, **options)


def _with_cells(frame: pd.DataFrame, change: Any) -> pd.DataFrame:
    """Return a plain data frame whose texts, in cells and labels, are changed."""

    def changed(value: Any) -> Any:
        return change(value) if isinstance(value, str) else value

    plain = pd.DataFrame(frame).copy()
    for place in range(plain.shape[1]):
        column = plain.iloc[:, place]
        if not _is_text(column.dtype):
            continue
        # Once for each text: tables repeat their tokens.
        texts = {text: change(text) for text in {cell for cell in column if isinstance(cell, str)}}
        cells = [texts[cell] if isinstance(cell, str) else cell for cell in column]
        plain.isetitem(place, pd.Series(cells, index=plain.index, dtype=object))
    return plain.rename(index=changed if _is_text(plain.index.dtype) else None, columns=changed)


def _is_text(dtype: Any) -> bool:
    kinds = (pd.api.types.is_numeric_dtype, pd.api.types.is_bool_dtype, pd.api.types.is_datetime64_any_dtype)
    return not any(kind(dtype) for kind in kinds)
