"""The finished cases of an evaluation, kept in a file so that a run can go on where it stopped."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lens_mix.arguments import instance

# The first line of a file is {"<this>": what the evaluation is}.
_TITLE = "lens_mix.evaluate"
_START = f'{{"{_TITLE}": '


class FinishedCases:
    """The cases that are done, in memory and in a file.

    Args:
        path: the file; it is made, with its folder, if it is not there. None: in memory only.
        header: what the evaluation is, as JSON has it: the file must say the same.
        cases: how many cases there are.
        metrics: the scores of each record.

    Attributes:
        records: by the cases' numbers.
        refused: why methods were left out.

    Raises:
        ValueError: the path is a folder, or the file is no file of finished cases, or another evaluation's.
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
            # A run that is ended may leave half a line at the end, behind which no other may be written.
            *lines, end = lines or [""]
            broken = sum(line.strip() != "" for line in lines) + (end in kept) - len(kept)
            if broken:
                warnings.warn(
                    f"resume: {broken} lines of {self._path} are broken or no records of this evaluation; "
                    "their cases are computed again",
                    stacklevel=3,
                )
            _write(self._path, header, kept)

    def add(self, number: int, records: list[dict[str, Any]]) -> None:
        """Keep a case."""
        self.records[number] = records
        self._append({"case": number, "records": records})

    def note_refused(self, refused: Mapping[str, str]) -> None:
        """Keep why methods were left out, so that a resumed run can tell."""
        if refused and dict(refused) != self.refused:
            self._append({"refused": dict(refused)})

    def _take(self, line: str) -> bool:
        """Take what a line holds; False where it holds nothing of this evaluation."""
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
        if not 0 <= number < self._cases or not all(self._is_record(one, number) for one in records):
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
    """What the file says; "" where there is none yet."""
    if path.is_dir():
        raise ValueError(f"resume: expected a file, got the folder {path}; give a path in it")
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        return ""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as problem:
        raise _none_of_ours(path, "it is no text") from problem


def _none_of_ours(path: Path, reason: str) -> ValueError:
    return ValueError(
        f"resume: expected a file of finished cases that lm.evaluate wrote, got {path}: {reason}; give "
        "another path, or delete the file to start anew"
    )


def _write(path: Path, header: Mapping[str, Any], lines: Sequence[str]) -> None:
    """Write the file anew, in one step: a run that ends meanwhile loses nothing."""
    beside = path.with_name(f"{path.name}.new")
    beside.write_text("\n".join([json.dumps({_TITLE: header}), *lines, ""]), encoding="utf-8")
    beside.replace(path)


def _require_same(path: Path, first: str, header: Mapping[str, Any]) -> None:
    """Raise ValueError where the first line of a file is not the header that is expected."""
    entry = _parsed(first)
    there = None if entry is None else entry.get(_TITLE)
    if not isinstance(there, dict):
        raise _none_of_ours(path, "its first line does not say which evaluation it is of")
    names = [name for name in {**header, **there} if there.get(name) != header.get(name)]
    if names:
        different = ", ".join(_difference(name, there.get(name), header.get(name)) for name in names)
        raise ValueError(
            f"resume: expected a file of this very evaluation, got {path}, which differs in {different}; "
            "give another path, or delete the file to start anew"
        )


def _is_cut_header(first: str, lines: Sequence[str]) -> bool:
    """Whether a file is empty, or ends within its header: then no case was finished."""
    if any(line.strip() for line in lines):
        return False
    started = first.startswith(_START) or _START.startswith(first.strip())
    return started and _parsed(first) is None


def _difference(name: str, there: Any, here: Any) -> str:
    """A difference, with the values of both where they are short."""
    if isinstance(there, dict) and isinstance(here, dict):
        inner = [key for key in {**there, **here} if there.get(key) != here.get(key)]
        return f"{name} ({', '.join(_difference(key, there.get(key), here.get(key)) for key in inner)})"
    values = json.dumps(there), json.dumps(here)
    return f"{name}: {values[0]} there, {values[1]} here" if max(map(len, values)) <= 24 else name


def _parsed(line: str) -> dict[str, Any] | None:
    """A line's object; None where it is none."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) else None
