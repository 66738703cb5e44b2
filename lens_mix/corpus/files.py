"""The files of a corpus: one file of maps and one of each reduction per shard, and the manifest.

The file of maps is written last. It has a digest of itself, and a record with those of the shard's other
files. Every file is written under another name and moved, so a process that is killed leaves no broken file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lens_mix.corpus.rows import make_schema, to_table
from lens_mix.files import NO_DIGEST, is_unchanged, replacing, seal

if TYPE_CHECKING:
    import pyarrow

FORMAT = "lens_mix.corpus/1"
# This entry of the manifest does not identify the run.
RECORDED = "recorded"
_KEY = b"lens_mix"
# The digest of a file of maps is the last entry of its metadata.
_DIGEST_KEY, _MARKER = b"lens_mix.digest", b"lens_mix.digest:"
# These are the fields of the record of a shard, with their types.
_RECORD = {"run": str, "shard": int, "prompts": list, "failed": int, "rounding": float, "reduced": dict}
# Rows wait in memory until they have so many bytes, because many small groups of rows compress badly.
_ROW_GROUP = 1 << 25
# A killed process leaves a file under another name; one that is so old belongs to no running process.
_LEFT_SECONDS = 3600


class BrokenShardError(ValueError):
    """A shard is not complete, so it must be computed again.

    Args:
        argument: The name of the argument that has the folder.
        shard: The number of the shard.
        path: The file that is missing or wrong.
        reason: What is wrong with it.
    """

    def __init__(self, argument: str, shard: int, path: Path, reason: str | None) -> None:
        self.what = f"{path} {reason}"
        super().__init__(
            f"{argument}: expected all files of shard {shard}, but {self.what}; run lm.corpus.run again with "
            "the same arguments to compute this shard"
        )


class Folder:
    """The folder of a corpus.

    Args:
        path: The folder.
        argument: The name of the argument that has the folder, for errors.
    """

    def __init__(self, path: str | os.PathLike[str], argument: str = "out") -> None:
        self.path, self.argument = Path(path), argument

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
        """Return the numbers of the shards that have a file of maps, in order. Other files do not matter."""
        found = (self.path / "maps").glob("[0-9]*.parquet")
        return sorted(int(path.stem) for path in found if re.fullmatch("[0-9]{7,}", path.stem))

    def read_shard(
        self, shard: int, run: str, reductions: Collection[str], every_byte: bool = True
    ) -> dict[str, Any]:
        """Return the record of a shard, after checking that all of its files are complete and of this run.

        Args:
            shard: The number of the shard.
            run: The digest of the manifest.
            reductions: The names of the reductions.
            every_byte: Whether to read the whole file of maps, and not only its record.

        Raises:
            BrokenShardError: If a file is missing, damaged, of another shard or of another time.
            ValueError: If another run wrote the file of maps.
        """
        path = self.maps_file(shard)
        record = _read_record(path)
        if record is not None and record.get("run") != run:
            raise ValueError(
                f"{self.argument}: expected files of the run in {self.manifest_file}, got {path}, which "
                "another run wrote; move that file away and run lm.corpus.run again, or undo changes of the "
                "manifest"
            )
        reason = None
        if record is None:
            reason = "is missing" if not path.exists() else "is not a complete file of lm.corpus.run"
        elif record["shard"] != shard:
            reason = f"is shard {record['shard']} under another name"
        elif every_byte and not is_unchanged(path, _MARKER, last=True):
            reason = "was changed after it was written"
        if record is None or reason:
            raise BrokenShardError(self.argument, shard, path, reason)
        for name in reductions:
            part = self.reduced_file(name, shard)
            try:
                reason = (
                    None if _digest_file(part) == record["reduced"].get(name) else "was not written with it"
                )
            except OSError as problem:
                reason = f"cannot be read ({problem.strerror})"
            if reason:
                raise BrokenShardError(self.argument, shard, part, reason)
        return record

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
    """Write a file of JSON in one step, unless it has this content: a finished folder may be read-only."""
    text = json.dumps(value, indent=1) + "\n"
    with contextlib.suppress(OSError, ValueError):
        if path.read_text(encoding="utf-8") == text:
            return
    with replacing(path) as beside:
        Path(beside).write_text(text, encoding="utf-8")


def read_json(path: Path, argument: str = "out") -> dict[str, Any]:
    """Return the JSON object of a file.

    Args:
        path: The file.
        argument: The name of the argument that has the folder, for errors.

    Raises:
        ValueError: If the file does not contain one.
    """
    expected = f"{argument}: expected a folder of lm.corpus.run, got {path}"
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as problem:
        raise ValueError(f"{expected}: {problem}") from problem
    if not isinstance(value, dict):
        raise ValueError(f"{expected}, which is not a JSON object")
    return value


def digest_manifest(manifest: Mapping[str, Any]) -> str:
    """Return the digest of a run, 32 characters, from its manifest without what is only recorded."""
    compared = {name: value for name, value in manifest.items() if name != RECORDED}
    return hashlib.blake2b(json.dumps(compared, sort_keys=True).encode(), digest_size=16).hexdigest()


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
        self._file.add_key_value_metadata({_DIGEST_KEY: _MARKER + NO_DIGEST.encode()})


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
        "use_dictionary": ["method", "text", "error", "fields", "tokens.list.element", "record"],
        "write_statistics": ["prompt"],
        # A lazy dataset reads single pages, whose damage the digest of the file cannot show.
        "write_page_checksum": True,
    }
    with replacing(path) as beside:
        with pq.ParquetWriter(beside, schema, **options) as file:
            writer = MapsWriter(file, schema)
            yield writer
            writer.flush()
        seal(beside, _MARKER, last=True)


def write_table(path: Path, table: pyarrow.Table) -> str:
    """Write a table of a reduction, and return the digest of the file."""
    import pyarrow.parquet as pq

    with replacing(path) as beside:
        pq.write_table(table, beside, compression="zstd")
        return _digest_file(Path(beside))


def _digest_file(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()


def _read_record(path: Path) -> dict[str, Any] | None:
    """Return what `MapsWriter.describe` stored in a file of maps; None without a complete record.

    A disk that failed may leave a broken file, whose shard is computed again.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        record = json.loads((pq.read_metadata(path).metadata or {}).get(_KEY, b""))
    except (pa.ArrowException, OSError, ValueError, RecursionError):
        return None
    is_record = isinstance(record, dict) and all(
        isinstance(record.get(name), kind) for name, kind in _RECORD.items()
    )
    return record if is_record else None
