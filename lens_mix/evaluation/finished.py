"""The finished cases of an evaluation, kept in a file so that a run can go on where it stopped."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lens_mix.arguments import instance
from lens_mix.files import replacing

# The first line of a file is {"<this>": the header of the evaluation}.
_TITLE = "lens_mix.evaluate"
_START = f'{{"{_TITLE}": '


class FinishedCases:
    """The cases that are done, in memory and in a file.

    Args:
        path: the file; it is made, with its folder, if it is not there. None: in memory only.
        header: what identifies the evaluation, made of what JSON has; the header of the file must be equal.
        cases: how many cases there are.
        metrics: the scores of each record.

    Attributes:
        records: by the cases' numbers.
        refused: why methods were left out.

    Raises:
        ValueError: the path is a folder, or the file is not one of this very evaluation.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        header: Mapping[str, Any],
        cases: int,
        metrics: Sequence[str],
    ) -> None:
        self._cases, self._metrics = cases, metrics
        self.records: dict[int, list[dict[str, Any]]] = {}
        self.refused: dict[str, str] = {}
        header = json.loads(json.dumps(header))  # as it comes back from a file
        self._path = None
        if path is None:
            return
        self._path = Path(instance("resume", path, str | os.PathLike, "the path of a file"))
        text = _text(self._path)
        first, *lines = text.split("\n")
        if _is_cut_header(first, lines):
            _write(self._path, header, [])
            return
        _require_same(self._path, first, header)
        kept = [line for line in lines if self._take(line)]
        if text != "\n".join([first, *kept, ""]):
            # A run that was stopped may leave half a line at the end, and no line may be written behind it.
            *lines, end = lines or [""]
            broken = sum(line.strip() != "" for line in lines) + (end in kept) - len(kept)
            if broken:
                warnings.warn(
                    f"resume: {broken} lines of {self._path} are broken or are not records of this "
                    "evaluation; their cases are computed again",
                    stacklevel=3,
                )
            _write(self._path, header, kept)

    def add(self, number: int, records: list[dict[str, Any]]) -> None:
        """Keep a case; one without records, of which a file could not say that it is done, in memory only."""
        self.records[number] = records
        if records:
            self._append({"case": number, "records": records})

    def note_refused(self, refused: Mapping[str, str]) -> None:
        """Keep why methods were left out, so that a resumed run can tell."""
        if refused and dict(refused) != self.refused:
            self._append({"refused": dict(refused)})

    def _take(self, line: str) -> bool:
        """Add the records or reasons of a line; return False if it has none of this evaluation."""
        entry = _parsed(line)
        if entry is None:
            return False
        refused = entry.get("refused")
        if set(entry) == {"refused"} and isinstance(refused, dict):
            self.refused |= {name: str(reason) for name, reason in refused.items()}
            return True
        number, records = entry.get("case"), entry.get("records")
        if set(entry) != {"case", "records"} or type(number) is not int or not isinstance(records, list):
            return False
        are_records = bool(records) and all(self._is_record(one, number) for one in records)
        if not 0 <= number < self._cases or not are_records:
            return False
        self.records[number] = records
        return True

    def _is_record(self, record: Any, number: int) -> bool:
        if not isinstance(record, dict) or set(record) != {"case", "method", "aggregation", *self._metrics}:
            return False
        names = (record["method"], record["aggregation"])
        scores = (record[metric] for metric in self._metrics)
        return (
            record["case"] == number
            and all(isinstance(name, str) for name in names)
            and all(score is None or type(score) in (int, float) for score in scores)
        )

    def _append(self, entry: Mapping[str, Any]) -> None:
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")


def _text(path: Path) -> str:
    """Return the text of the file; if there is no file yet, make its folder and return ""."""
    if path.is_dir():
        raise ValueError(f"resume: expected a file, got the folder {path}; give a path in it")
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        return ""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as problem:
        raise _another_file(path, "it is not a text file") from problem


def _another_file(path: Path, reason: str) -> ValueError:
    return ValueError(
        f"resume: expected a file of finished cases that lm.evaluate wrote, got {path}: {reason}; give "
        "another path, or delete the file to start anew"
    )


def _write(path: Path, header: Mapping[str, Any], lines: Sequence[str]) -> None:
    """Write the file anew, in one step: a run that ends meanwhile loses nothing."""
    with replacing(path) as beside:
        Path(beside).write_text("\n".join([json.dumps({_TITLE: header}), *lines, ""]), encoding="utf-8")


def _require_same(path: Path, first: str, header: Mapping[str, Any]) -> None:
    """Raise ValueError unless the first line of a file is the expected header."""
    entry = _parsed(first)
    there = None if entry is None else entry.get(_TITLE)
    if not isinstance(there, dict):
        raise _another_file(path, "its first line is not the header of an evaluation")
    names = [name for name in {**header, **there} if there.get(name) != header.get(name)]
    if names:
        different = ", ".join(_difference(name, there.get(name), header.get(name)) for name in names)
        raise ValueError(
            f"resume: expected a file of this very evaluation, got {path}, which differs in {different}; "
            "give another path, or delete the file to start anew"
        )


def _is_cut_header(first: str, lines: Sequence[str]) -> bool:
    """Return whether a file is empty or ends within its header, so that no case was finished."""
    if any(line.strip() for line in lines):
        return False
    started = first.startswith(_START) or _START.startswith(first.strip())
    return started and _parsed(first) is None


def _difference(name: str, there: Any, here: Any) -> str:
    """Return the name of a difference, with both values if they are short."""
    if isinstance(there, dict) and isinstance(here, dict):
        inner = [key for key in {**there, **here} if there.get(key) != here.get(key)]
        return f"{name} ({', '.join(_difference(key, there.get(key), here.get(key)) for key in inner)})"
    values = json.dumps(there), json.dumps(here)
    return f"{name}: {values[0]} there, {values[1]} here" if max(map(len, values)) <= 24 else name


def _parsed(line: str) -> dict[str, Any] | None:
    """Return the JSON object of a line; None if it is not one."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) else None
