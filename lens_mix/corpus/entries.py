"""Read a corpus in numbered shards. Each item that `lens_mix.inputs` reads becomes an entry."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import hashlib
import itertools
import json
import math
import numbers
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from lens_mix.arguments import check_dense_tensor, check_whole_number, describe_value
from lens_mix.inputs import Unreadable, read_items
from lens_mix.plain_text import advise, as_text

_LONGEST_REASON = 2000
# Python's reader and writer of JSON have a limit that depends on the call.
_DEEPEST = 64


@dataclasses.dataclass(frozen=True)
class Entry:
    """One prompt of a corpus.

    Attributes:
        number: The number of the prompt in the corpus, from 0.
        prompt: A string, a list of tokens, a pair of strings, or chat messages. None if it cannot be read.
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
    """Neighboring prompts of a corpus, whose results are one file.

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
        prompts: What `lens_mix.inputs.read_items` reads.
        size: The number of prompts of each shard; the last one may have fewer.
        column: The column with the prompt, for rows.
        fields: The columns that are kept with each prompt.

    Raises:
        TypeError: If `prompts` is not a corpus.
        ValueError: If there are no prompts, or a file or a column is not what was expected.
        FileNotFoundError: If the file does not exist.
    """
    numbered = enumerate(read_items(prompts, column, fields))
    entries = (_make_entry(number, item, column, fields) for number, item in numbered)
    for number in itertools.count():
        some = tuple(itertools.islice(entries, size))
        if not some and number == 0:
            got = f"none in {prompts}" if isinstance(prompts, (str, os.PathLike)) else "none"
            raise ValueError(f"prompts: expected at least one prompt, got {got}")
        if not some:
            return
        yield Shard(number, some)


def _make_entry(number: int, item: Any, column: str, fields: Sequence[str]) -> Entry:
    """Return the entry of an item, with the reason if it is not a prompt.

    Args:
        number: The number of the prompt in the corpus.
        item: A prompt, a row (a mapping with columns), or `lens_mix.inputs.Unreadable`.
        column: The column with the prompt, for rows.
        fields: The columns to keep, for rows.
    """
    kept: dict[str, Any] = {}
    # An item may be of any library and raise an error of any class, which must not end the corpus.
    try:
        if isinstance(item, Unreadable):
            return Entry(number, None, error=item.reason)
        if isinstance(item, Mapping):
            missing = [name for name in (column, *fields) if name not in item]
            if missing:
                raise ValueError(f"expected the columns {missing}, got {list(item)}")
            kept = {name: _as_json(name, item[name]) for name in fields}
            item = item[column]
        elif fields:
            raise ValueError(f"expected a row with the columns {list(fields)}, got a prompt alone")
        entry = Entry(number, _as_prompt(item), kept)
        entry.fingerprint()
        return entry
    except Exception as problem:
        is_named = isinstance(problem, (TypeError, ValueError))
        reason = str(problem) if is_named else f"{type(problem).__name__}: {problem}"
        return Entry(number, None, kept, reason[:_LONGEST_REASON])


def _as_prompt(value: Any) -> Any:
    """Return a prompt as a string, a pair of strings, a list of tokens, or chat messages.

    Raises:
        TypeError: If it is not a prompt.
        ValueError: If it is text or tokens that no model can read.
    """
    plain = as_text("prompt", value)
    if isinstance(plain, str):
        return plain
    if isinstance(plain, torch.Tensor):
        check_dense_tensor("tokens", plain)
    if isinstance(plain, torch.Tensor) or (isinstance(plain, np.ndarray) and plain.dtype.kind in "iufbUSO"):
        plain = plain[0] if plain.ndim == 2 and len(plain) == 1 else plain
        plain = plain.tolist()
    if isinstance(plain, (list, tuple)) and plain:
        items = [as_text("prompt", item) for item in plain]
        if len(items) == 2 and all(isinstance(item, str) for item in items):
            return tuple(items)
        if all(isinstance(item, Mapping) and "role" in item for item in items):
            return [_as_json("prompt", item) for item in items]
        if all(isinstance(item, numbers.Number) or getattr(item, "ndim", 1) == 0 for item in items):
            return [check_whole_number("tokens", item, 0, 2**63 - 1) for item in items]
    missing = " (a missing value)" if _is_missing(plain) else ""
    raise TypeError(
        f"expected a text, a pair of texts, tokens, or messages, got {describe_value(plain)}{missing}"
        f"{advise(plain)}"
    )


def _is_missing(value: Any) -> bool:
    """Return whether a value is None, NaN, or what pandas has for a missing value or time."""
    is_nan = isinstance(value, float) and math.isnan(value)
    return value is None or is_nan or type(value).__name__ in ("NAType", "NaTType")


def _as_json(name: str, value: Any, depth: int = 0) -> Any:
    """Return a field as JSON represents it. Dates and decimal numbers become text.

    Raises:
        TypeError: If JSON does not represent such a value.
        ValueError: If text is not valid, or the value is nested too deeply.
    """
    value = as_text(name, value)
    if isinstance(value, (np.generic, np.ndarray)) and value.dtype.kind == "M":
        # The items of these are whole numbers, if the unit is a nanosecond.
        dates = np.asarray(value)
        value = np.where(np.isnat(dates), np.array(None), np.datetime_as_string(dates)).tolist()
    elif isinstance(value, torch.Tensor):
        value = check_dense_tensor(name, value).tolist()
    elif isinstance(value, (np.generic, np.ndarray)) and value.dtype.kind in "iufbUSO":
        value = value.tolist()
    if depth > _DEEPEST:
        raise ValueError(f"{name}: expected at most {_DEEPEST} values inside each other, got more")
    if _is_missing(value) and not isinstance(value, float):
        return None
    if isinstance(value, int) and value.bit_length() > 64:
        raise ValueError(f"{name}: expected numbers of at most 64 bits, got a longer one")
    if isinstance(value, (str, int, float)):
        return value
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        return format(value)
    if isinstance(value, (list, tuple)):
        return [_as_json(name, item, depth + 1) for item in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {as_text(name, key): _as_json(name, item, depth + 1) for key, item in value.items()}
    raise TypeError(
        f"{name}: expected text, numbers, dates, lists or mappings with names, got {describe_value(value)}"
    )
