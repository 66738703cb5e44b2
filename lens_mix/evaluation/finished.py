"""Store the finished cases of an evaluation in a file, so that a stopped run can be resumed."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lens_mix.arguments import check_instance
from lens_mix.files import replacing

# The first line of a file is a JSON object with this key, whose value is the header of the evaluation.
_TITLE = "lens_mix.evaluate"
_START = f'{{"{_TITLE}": '


class FinishedCases:
    """The finished cases of an evaluation, in memory and in a file.

    Args:
        path: The file. If it does not exist, it is created together with its folder. None: memory only.
        header: Plain JSON values that identify the evaluation. The header of the file has to be equal.
        cases: The number of cases.
        metrics: The scores of each record.

    Attributes:
        records: The records of each finished case, by its number.
        refused: The reasons why methods were left out.

    Raises:
        ValueError: The path is a folder, or the file is of another evaluation.
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
        header = json.loads(
            json.dumps(header)
        )  # JSON changes types (tuples), and the file's header is compared.
        self._path = None
        if path is None:
            return
        self._path = Path(check_instance("resume", path, str | os.PathLike, "the path of a file"))
        text = _read_text(self._path)
        first, *lines = text.split("\n")
        if _is_cut_header(first, lines):
            _write(self._path, header, [])
            return
        _check_header(self._path, first, header)
        kept = [line for line in lines if self._add_line(line)]
        if text != "\n".join([first, *kept, ""]):
            # A stopped run may leave an incomplete last line, after which no line may be written.
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
        """Add a finished case. One without records is in memory only, because the file could not show it."""
        self.records[number] = records
        if records:
            self._append({"case": number, "records": records})

    def note_refused(self, refused: Mapping[str, str]) -> None:
        """Store why methods were left out, for a resumed run."""
        if refused and dict(refused) != self.refused:
            self._append({"refused": dict(refused)})

    def _add_line(self, line: str) -> bool:
        """Add the records or reasons of a line. Return False if they are not of this evaluation."""
        entry = _parse(line)
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


def _read_text(path: Path) -> str:
    """Return the text of the file. If it does not exist, create its folder and return ""."""
    if path.is_dir():
        raise ValueError(f"resume: expected a file, got the folder {path}; give a path in it")
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        return ""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as problem:
        raise _make_error(path, "it is not a text file") from problem


def _make_error(path: Path, reason: str) -> ValueError:
    return ValueError(
        f"resume: expected a file of finished cases that lm.evaluate wrote, got {path}: {reason}; give "
        "another path, or delete the file to start again"
    )


def _write(path: Path, header: Mapping[str, Any], lines: Sequence[str]) -> None:
    """Write the file in one step, so that a run that stops meanwhile loses nothing."""
    with replacing(path) as beside:
        Path(beside).write_text("\n".join([json.dumps({_TITLE: header}), *lines, ""]), encoding="utf-8")


def _check_header(path: Path, first: str, header: Mapping[str, Any]) -> None:
    """Check that the first line of a file is the expected header.

    Raises:
        ValueError: It is not.
    """
    entry = _parse(first)
    file_header = None if entry is None else entry.get(_TITLE)
    if not isinstance(file_header, dict):
        raise _make_error(path, "its first line is not the header of an evaluation")
    names = [name for name in {**header, **file_header} if file_header.get(name) != header.get(name)]
    if names:
        different = ", ".join(
            _describe_difference(name, file_header.get(name), header.get(name)) for name in names
        )
        raise ValueError(
            f"resume: expected a file of this evaluation, got {path}, which differs in {different}; "
            "give another path, or delete the file to start again"
        )


def _is_cut_header(first: str, lines: Sequence[str]) -> bool:
    """Return whether a file is empty or ends within its header, so that no case was finished."""
    if any(line.strip() for line in lines):
        return False
    started = first.startswith(_START) or _START.startswith(first.strip())
    return started and _parse(first) is None


def _describe_difference(name: str, there: Any, here: Any) -> str:
    """Return the name of a difference, with both values if they are short."""
    if isinstance(there, dict) and isinstance(here, dict):
        inner = [key for key in {**there, **here} if there.get(key) != here.get(key)]
        differences = (_describe_difference(key, there.get(key), here.get(key)) for key in inner)
        return f"{name} ({', '.join(differences)})"
    values = json.dumps(there), json.dumps(here)
    return f"{name}: {values[0]} there, {values[1]} here" if max(map(len, values)) <= 24 else name


def _parse(line: str) -> dict[str, Any] | None:
    """Return the JSON object of a line, or None if it is not one."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) else None
