"""Write and read safetensors files that contain tensors and a record in JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lens_mix.arguments import check_file_path
from lens_mix.files import NO_DIGEST, is_unchanged, replacing, seal

# safetensors writes its header without spaces, and quotes inside of the record are escaped.
_MARKER = b'"digest":"'


class TensorFile(NamedTuple):
    """What a file contains.

    Attributes:
        record: The record; empty if the file does not contain one.
        tensors: The tensors by their names.
        is_unchanged: Whether the file is as it was written; None if it has no digest.
    """

    record: dict[str, Any]
    tensors: dict[str, Tensor]
    is_unchanged: bool | None


def write_tensors(
    path: str | os.PathLike[str], form: str, record: str, tensors: Mapping[str, Tensor]
) -> None:
    """Write a file with a digest, which is moved to `path` when it is complete.

    Args:
        path: The file, which is replaced if it exists.
        form: The name of the format, which is in the metadata.
        record: The record as JSON, which is in the metadata.
        tensors: The tensors by their names, none of which share memory.

    Raises:
        OSError: If the file cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    metadata = {"format": form, "record": record, "digest": NO_DIGEST}
    try:
        with replacing(path) as file:
            save_file(dict(tensors), file, metadata=metadata)
            seal(file, _MARKER)
    except SafetensorError as problem:
        raise OSError(f"path: expected a file that can be written, got {path}: {problem}") from problem


def read_tensors(
    path: str | os.PathLike[str], form: str, expected: str, device: str | torch.device = "cpu"
) -> TensorFile:
    """Read a file of `write_tensors`. Later changes of the file do not change the tensors.

    Args:
        path: The file.
        form: The name of the format.
        expected: The beginning of errors: what was expected.
        device: The device of the tensors.

    Raises:
        FileNotFoundError: If the file does not exist.
        ValueError: If the file is not a safetensors file of this format.
    """
    from safetensors import SafetensorError, safe_open

    location = check_file_path("path", path)
    try:
        with safe_open(location, framework="pt", device=str(device)) as file:
            metadata = file.metadata() or {}
            if metadata.get("format") == form:
                # Before 0.8, safetensors returned tensors that share the file's memory, so each is copied.
                tensors = {name: file.get_tensor(name).clone() for name in list(file.keys())}
    except (torch.OutOfMemoryError, PermissionError):
        raise
    # Each release of safetensors has other errors for a type of numbers that torch does not have.
    except (
        SafetensorError,
        OSError,
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        RuntimeError,
    ) as problem:
        raise ValueError(
            f"{expected}, got {location}, which is not a safetensors file: {problem}"
        ) from problem
    if metadata.get("format") != form:
        found = metadata.get("format")
        # "lens_mix.Maps/1" is the format of `Maps.save`.
        kind = str(found).removeprefix("lens_mix.").partition("/")[0]
        advice = f"; lm.{kind}.load reads it" if kind in ("MixingMap", "Maps", "Trace") else ""
        raise ValueError(f"{expected}, got format {found!r} in {location}{advice}")
    try:
        record = json.loads(metadata.get("record", ""))
    except (ValueError, RecursionError):
        record = None
    return TensorFile(record if isinstance(record, dict) else {}, tensors, is_unchanged(location, _MARKER))
