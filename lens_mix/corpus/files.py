"""The files of a corpus: one file of maps and one of each reduction per shard, and the manifest.

A shard is finished if its file of maps exists, which is written last. Every file is written under another
name and moved, so a process that is killed leaves no broken file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lens_mix.corpus.rows import make_schema, to_table
from lens_mix.files import replacing

if TYPE_CHECKING:
    import pyarrow

FORMAT = "lens_mix.corpus/1"
_KEY = b"lens_mix"
# Rows wait in memory until they have so many bytes, because many small groups of rows compress badly.
_ROW_GROUP = 1 << 25
# A killed process leaves a file under another name; one that is so old belongs to no running process.
_LEFT_SECONDS = 3600


class Folder:
    """The folder of a corpus.

    Args:
        path: The folder.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def maps_file(self, shard: int) -> Path:
        """Return the path of a shard's maps."""
        return self.path / "maps" / f"{shard:07d}.parquet"

    def reduced_file(self, name: str, shard: int) -> Path:
        """Return the path of a shard's part of a reduction."""
        return self.path / "reduced" / name / f"{shard:07d}.parquet"

    @property
    def manifest_file(self) -> Path:
        """Return the path of the manifest."""
        return self.path / "manifest.json"

    @property
    def finished_file(self) -> Path:
        """Return the path of the file that exists if all shards are finished."""
        return self.path / "finished.json"

    def shards(self) -> list[int]:
        """Return the numbers of the finished shards in order."""
        found = (self.path / "maps").glob("[0-9]*.parquet")
        return sorted(int(path.stem) for path in found)

    def create(self, reductions: list[str]) -> None:
        """Create the folders, and remove files that killed processes left in them."""
        folders = [self.path / "maps", *(self.path / "reduced" / name for name in reductions)]
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
        for folder in (self.path, *folders):
            for left in folder.glob(".lens_mix-*"):
                with contextlib.suppress(OSError):
                    if time.time() - left.stat().st_mtime > _LEFT_SECONDS:
                        left.unlink()


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a file of JSON in one step."""
    with replacing(path) as beside:
        Path(beside).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file.

    Raises:
        ValueError: If the file does not contain one.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as problem:
        raise ValueError(f"out: expected a folder of lm.corpus.run, got {path}: {problem}") from problem
    if not isinstance(value, dict):
        raise ValueError(f"out: expected a folder of lm.corpus.run, got {path}, which is not a JSON object")
    return value


def digest(value: Any) -> str:
    """Return a digest of 32 characters of a JSON value."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()


class MapsWriter:
    """Write the rows of one shard, a group of rows whenever enough of them wait.

    Args:
        file: An open `ParquetWriter`.
        schema: Its columns.
    """

    def __init__(self, file: Any, schema: pyarrow.Schema) -> None:
        self._file, self._schema = file, schema
        self._rows: list[Mapping[str, Any]] = []
        self._bytes = 0

    def add(self, row: Mapping[str, Any]) -> None:
        """Add a row."""
        self._rows.append(row)
        self._bytes += getattr(row.get("scores"), "nbytes", 0)
        if self._bytes >= _ROW_GROUP:
            self.flush()

    def flush(self) -> None:
        """Write the rows that wait."""
        if self._rows:
            self._file.write_table(to_table(self._rows, self._schema))
        self._rows, self._bytes = [], 0

    def describe(self, record: Mapping[str, Any]) -> None:
        """Store a JSON record in the file's metadata."""
        self._file.add_key_value_metadata({_KEY: json.dumps(dict(record))})


@contextlib.contextmanager
def writing_maps(path: Path, dtype: str) -> Iterator[MapsWriter]:
    """Yield a writer of one shard's rows; its file appears at `path` when the block ends without an error.

    Raises:
        OSError: If the file cannot be written (a full disk). Nothing is left then.
    """
    import pyarrow.parquet as pq

    schema = make_schema(dtype)
    numbers = ["scores.list.element", "residual_shares.list.element"]
    options: dict[str, Any] = {
        "compression": "zstd",
        "use_byte_stream_split": numbers,
        # A column is either split into streams of bytes or has a dictionary.
        "use_dictionary": ["method", "error", "fields", "tokens.list.element", "record"],
        "write_statistics": ["prompt"],
    }
    with replacing(path) as beside, pq.ParquetWriter(beside, schema, **options) as file:
        writer = MapsWriter(file, schema)
        yield writer
        writer.flush()


def write_table(path: Path, table: pyarrow.Table) -> None:
    """Write a table of a reduction."""
    import pyarrow.parquet as pq

    with replacing(path) as beside:
        pq.write_table(table, beside, compression="zstd")


def read_record(path: Path) -> dict[str, Any] | None:
    """Return what `MapsWriter.describe` stored in a file of maps; None without a complete file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        metadata = pq.read_metadata(path).metadata or {}
    except FileNotFoundError:
        return None
    except (pa.ArrowInvalid, OSError):
        # A disk that failed may leave a broken file, whose shard is computed again.
        return None
    try:
        record = json.loads(metadata.get(_KEY, b""))
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
