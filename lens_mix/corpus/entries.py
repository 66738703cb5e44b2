"""Read a corpus in numbered shards, from a file, a Hugging Face dataset, a list or an iterator."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any

from lens_mix.arguments import check_file_path, describe_value

# Files are read in so many rows at a time.
_ROWS_READ = 1024


@dataclasses.dataclass(frozen=True)
class Entry:
    """One prompt of a corpus.

    Attributes:
        number: The number of the prompt in the corpus, from 0.
        prompt: A string, a list of tokens, or a pair of strings. None if it cannot be read.
        fields: Further columns of the prompt, by name, as values that JSON can represent.
        error: Why the prompt cannot be read; None if it can.
    """

    number: int
    prompt: Any
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    error: str | None = None

    def fingerprint(self) -> str:
        """Return a digest of 16 characters of the prompt and its fields."""
        text = json.dumps([self.prompt, dict(self.fields), self.error])
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@dataclasses.dataclass(frozen=True)
class Shard:
    """Neighbouring prompts of a corpus, whose results are one file.

    Attributes:
        number: The number of the shard, from 0.
        entries: The prompts.
    """

    number: int
    entries: tuple[Entry, ...]

    def fingerprints(self) -> list[str]:
        """Return the fingerprint of each prompt."""
        return [entry.fingerprint() for entry in self.entries]


def read_shards(prompts: Any, size: int, column: str, fields: Sequence[str]) -> Iterator[Shard]:
    """Yield the prompts of a corpus in shards of a fixed size.

    Args:
        prompts: The path of a file (`.jsonl`, `.parquet`, any other: a prompt on each line), or an iterable
            of prompts or of rows with columns, such as a Hugging Face dataset.
        size: The number of prompts of each shard; the last one may have fewer.
        column: The column with the prompt, for rows.
        fields: The columns that are kept with each prompt.

    Raises:
        TypeError: If `prompts` is not a corpus.
        FileNotFoundError: If the file does not exist.
    """
    numbered = enumerate(_read(prompts, column))
    entries = (_make_entry(number, value, column, fields) for number, value in numbered)
    for number in itertools.count():
        some = tuple(itertools.islice(entries, size))
        if not some:
            return
        yield Shard(number, some)


def count_prompts(prompts: Any) -> int | None:
    """Return the number of prompts of a corpus; None if it is unknown before all are read."""
    if isinstance(prompts, (str, os.PathLike)):
        if Path(prompts).suffix != ".parquet":
            return sum(1 for _ in _read(prompts, ""))
        import pyarrow.parquet as pq

        return int(pq.read_metadata(os.fspath(prompts)).num_rows)
    return len(prompts) if isinstance(prompts, Sized) else None


def check_corpus(prompts: Any) -> None:
    """Raise an error if `prompts` is not the path of a file that exists, nor an iterable of prompts."""
    if isinstance(prompts, (str, os.PathLike)):
        check_file_path("prompts", prompts)
    elif isinstance(prompts, (bytes, Mapping)) or not isinstance(prompts, Iterable):
        raise TypeError(
            "prompts: expected the path of a file, or several prompts, got "
            f"{describe_value(prompts)}; use lm.run for one prompt"
        )


class _Unreadable:
    """A line that cannot be read, with the reason."""

    def __init__(self, reason: str) -> None:
        self.reason = reason


def _read(prompts: Any, column: str) -> Iterator[Any]:
    check_corpus(prompts)
    if not isinstance(prompts, (str, os.PathLike)):
        yield from prompts
        return
    suffix = Path(prompts).suffix
    if suffix == ".parquet":
        yield from _read_parquet(prompts, column)
        return
    with open(prompts, "rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield _read_line(line, number, is_json=suffix in (".jsonl", ".ndjson"))


def _read_parquet(path: str | os.PathLike[str], column: str) -> Iterator[Any]:
    import pyarrow.parquet as pq

    file = pq.ParquetFile(os.fspath(path))
    names = file.schema_arrow.names
    if column not in names:
        raise ValueError(f"column: expected one of {names}, which {path} has, got {column!r}")
    for batch in file.iter_batches(_ROWS_READ):
        yield from batch.to_pylist()


def _read_line(line: bytes, number: int, is_json: bool) -> Any:
    """Return a line of a file as text, or as what its JSON represents."""
    try:
        text = line.decode("utf-8").rstrip("\r\n")
        return json.loads(text) if is_json else text
    except (ValueError, RecursionError) as problem:
        return _Unreadable(f"line {number}: expected {'JSON' if is_json else 'UTF-8'}, got {problem}")


def _make_entry(number: int, value: Any, column: str, fields: Sequence[str]) -> Entry:
    if isinstance(value, _Unreadable):
        return Entry(number, None, error=value.reason)
    kept: dict[str, Any] = {}
    if isinstance(value, Mapping):
        missing = [name for name in (column, *fields) if name not in value]
        if missing:
            return Entry(number, None, error=f"expected the columns {missing}, got {list(value)}")
        kept = {name: _as_plain(value[name]) for name in fields}
        value = value[column]
    elif fields:
        return Entry(
            number, None, error=f"expected a row with the columns {list(fields)}, got a prompt alone"
        )
    prompt = _as_plain(value)
    is_pair = isinstance(prompt, list) and len(prompt) == 2 and all(isinstance(one, str) for one in prompt)
    is_tokens = isinstance(prompt, list) and all(type(token) is int for token in prompt)
    if not (isinstance(prompt, str) or is_pair or (is_tokens and prompt)):
        got = describe_value(value)
        return Entry(number, None, kept, f"expected a text, a pair of texts, or tokens, got {got}")
    return Entry(number, tuple(prompt) if is_pair else prompt, kept)


def _as_plain(value: Any) -> Any:
    """Return tensors, arrays and tuples as lists, and other values as JSON returns them."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, (list, tuple)):
        return [_as_plain(one) for one in value]
    # Bytes and dates of a dataset have no form in JSON.
    return value if isinstance(value, (str, int, float, bool, dict, type(None))) else str(value)
