"""Write tables whose text stays the same in a file, and is never a formula.

Readers of CSV guess the meaning of text: `NA` becomes a missing value, `01` a number, and `=1+1` a formula in
a spreadsheet. A cell that may be misread is therefore written as a JSON string, with quotation marks (`"NA"`)
and with escapes for control characters. Other cells are written unchanged. This module imports pandas.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from typing import Any

import pandas as pd

from lens_mix.arguments import check_file_path

__all__ = ["Table", "format_cell", "read_cell", "read_csv"]

# A spreadsheet computes a cell that starts like this, and `"` starts a JSON string.
_STARTS = re.compile(r'\s*[=+\-@\uff1d\uff0b\uff0d\uff20]|"')
# Some programs change these: control characters, line separators, surrogates and the byte order mark.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff\ud800-\udfff]")
# pandas and other readers take these for a missing value, a boolean or a number.
_NO_TEXT = re.compile(
    r"(|n/?a|nan|null|none|<na>|#n/?a( n/a)?|1\.#(ind|qnan)|true|false|inf(inity)?"
    r"|([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]*)?)",
    re.IGNORECASE,
)


def format_cell(text: str) -> str:
    """Return the cell for a text: the text itself, or a JSON string if a reader might misread it."""
    if not (_STARTS.match(text) or _CONTROL.search(text) or _NO_TEXT.fullmatch(text.strip())):
        return text
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(text, ensure_ascii=False))


def read_cell(cell: str) -> str:
    """Return the text that `format_cell` wrote as `cell`; any other cell is returned unchanged."""
    try:
        text = json.loads(cell) if cell.startswith('"') else cell
    except ValueError:
        return cell
    return text if isinstance(text, str) and format_cell(text) == cell else cell


def are_written(cells: Iterable[str]) -> bool:
    """Return whether `format_cell` could have written all these cells."""
    return all(format_cell(read_cell(cell)) == cell for cell in cells)


def read_csv(path: str | os.PathLike[str], **options: Any) -> Table:
    """Read a CSV file that `Table.to_csv` wrote, with the text of the original table.

    Args:
        path: The path of the file.
        options: The options of `pandas.read_csv`.
    """
    return Table(_convert_cells(pd.read_csv(check_file_path("path", path), **options), read_cell))


class Table(pd.DataFrame):  # type: ignore[misc]  # pandas comes without types
    """A data frame whose `to_csv` and `to_excel` write text that is not misread and is never a formula."""

    @property
    def _constructor(self) -> type[Table]:
        return Table

    @property
    def _constructor_sliced(self) -> type[Column]:
        return Column

    def to_csv(self, *arguments: Any, **options: Any) -> Any:
        """Write CSV as `pandas.DataFrame.to_csv` does, for `lens_mix.tables.read_csv` to read."""
        return _convert_cells(self, format_cell).to_csv(*arguments, **options)

    def to_excel(self, *arguments: Any, **options: Any) -> Any:
        """Write a sheet as `pandas.DataFrame.to_excel` does, without formulas."""
        return _convert_cells(self, format_cell).to_excel(*arguments, **options)


class Column(pd.Series):  # type: ignore[misc]  # pandas comes without types
    """A column of a `Table`, from which pandas makes further columns and tables of these classes."""

    @property
    def _constructor(self) -> type[Column]:
        return Column

    @property
    def _constructor_expanddim(self) -> type[Table]:
        return Table

    def to_csv(self, *arguments: Any, **options: Any) -> Any:
        """Write CSV as `Table.to_csv` does."""
        return self.to_frame().to_csv(*arguments, **options)


def _convert_cells(frame: pd.DataFrame, convert: Any) -> pd.DataFrame:
    """Return a plain data frame with `convert` applied to the text of all cells and labels."""

    def convert_text(value: Any) -> Any:
        return convert(value) if isinstance(value, str) else value

    plain = pd.DataFrame(frame).copy()
    for index in range(plain.shape[1]):
        column = plain.iloc[:, index]
        if not _is_text(column.dtype):
            continue
        # Each distinct text is converted once, because tables repeat their tokens.
        texts = {text: convert(text) for text in {cell for cell in column if isinstance(cell, str)}}
        cells = [texts[cell] if isinstance(cell, str) else cell for cell in column]
        plain.isetitem(index, pd.Series(cells, index=plain.index, dtype=object))
    return plain.rename(index=convert_text if _is_text(plain.index.dtype) else None, columns=convert_text)


def _is_text(dtype: Any) -> bool:
    kinds = (pd.api.types.is_numeric_dtype, pd.api.types.is_bool_dtype, pd.api.types.is_datetime64_any_dtype)
    return not any(kind(dtype) for kind in kinds)
