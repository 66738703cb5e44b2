"""Read text in every form in which users give it.

Every way into the library reads text with `as_text`. A value that is not certainly the user's text is an
error, never another text.
"""

from __future__ import annotations

import codecs
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lens_mix.arguments import check_file_path, describe_value

# The first bytes of a text say how it is encoded. The mark of UTF-32 begins with that of UTF-16.
_MARKS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
SURROGATE = re.compile("[\ud800-\udfff]")


def as_text(name: str, value: Any) -> Any:
    """Return text of any library as a string, and any other value unchanged.

    Text is a string, or bytes in UTF-8 (or in UTF-16 or UTF-32 with a mark), also as a scalar of NumPy or
    pyarrow.

    Args:
        name: The name of the argument, for errors.
        value: The value.

    Raises:
        ValueError: If bytes are not text in their encoding, or a string has a half of a surrogate pair.
    """
    if hasattr(value, "as_py"):
        # This is a scalar of pyarrow.
        value = value.as_py()
    if isinstance(value, np.ndarray) and value.ndim == 0 and value.dtype.kind in "USO":
        value = value.item()
    if isinstance(value, (bytes, bytearray)):
        value = decode(name, bytes(value))
    if not isinstance(value, str):
        return value
    half = SURROGATE.search(value)
    if half:
        raise ValueError(
            f"{name}: expected text that UTF-8 can represent, got U+{ord(half[0]):04X}, a half of a "
            f"surrogate pair, at character {half.start()}; remove it, or read the text again in its own "
            "encoding"
        )
    return str.__str__(value)


def decode(name: str, data: bytes) -> str:
    """Return bytes as text: in UTF-16 or UTF-32 if their mark says so, in UTF-8 otherwise.

    Raises:
        ValueError: If the bytes are not text in this encoding.
    """
    encoding = encoding_of(data[:4])
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as problem:
        expected = "UTF-8" if encoding == "utf-8-sig" else encoding.upper()
        raise ValueError(
            f"{name}: expected text in {expected}, got {describe_value(data)}: {problem.reason} at byte "
            f"{problem.start}"
        ) from problem


def encoding_of(start: bytes) -> str:
    """Return the encoding of a text by its first bytes: UTF-8 unless their mark says otherwise."""
    return next((encoding for mark, encoding in _MARKS.items() if start.startswith(mark)), "utf-8-sig")


def read_text(name: str, path: Any) -> str:
    """Return the whole text of a file, in which every line ends in the same way.

    Raises:
        TypeError: If `path` is not a path.
        ValueError: If the file is not text.
        FileNotFoundError: If it does not exist.
    """
    text = decode(f"{name} ({path})", Path(check_file_path(name, path)).read_bytes())
    return text.replace("\r\n", "\n").replace("\r", "\n")


def is_table(value: Any) -> bool:
    """Return whether a value has columns by name: a data frame, a table of pyarrow, or a dataset."""
    has_names = isinstance(getattr(value, "column_names", None), list) or hasattr(value, "columns")
    has_rows = hasattr(value, "__len__") and hasattr(value, "__getitem__")
    return has_names and has_rows and not isinstance(value, Mapping)


def advise(value: Any) -> str:
    """Return the advice for an error about a value that is not a prompt; "" if there is none."""
    if isinstance(value, os.PathLike):
        return "; give the text of the file, as in path.read_text()"
    if is_table(value):
        return "; give one text of a column, or the column to run_many"
    return ""
