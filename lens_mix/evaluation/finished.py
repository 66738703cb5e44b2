"""The finished cases of an evaluation, kept in a file so that a run can go on where it stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class FinishedCases:
    """The cases that are done, in memory and in a file."""

    def __init__(self, path: str | os.PathLike[str] | None, header: dict[str, Any]) -> None:
        self._path = None if path is None else Path(path)
        self.records: dict[int, list[dict[str, Any]]] = {}
        self.refused: dict[str, str] = {}
        if self._path is None:
            return
        if not self._path.exists():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(header) + "\n", encoding="utf-8")
            return
        first, *lines = self._path.read_text(encoding="utf-8").splitlines() or [""]
        different = [name for name in header if _parsed(first).get(name) != header[name]]
        if different:
            raise ValueError(
                f"resume: expected a file of this very evaluation, got {self._path}, which differs in "
                f"{', '.join(different)}; give another path"
            )
        for line in lines:
            # The last line may have been cut short when the run ended.
            entry = _parsed(line)
            if "records" in entry:
                self.records[entry["case"]] = entry["records"]
            self.refused |= entry.get("refused", {})

    def add(self, number: int, records: list[dict[str, Any]]) -> None:
        """Keep a case."""
        self.records[number] = records
        self._write({"case": number, "records": records})

    def note_refused(self, refused: Mapping[str, str]) -> None:
        """Keep why methods were left out, so that a resumed run can tell."""
        if refused and dict(refused) != self.refused:
            self._write({"refused": dict(refused)})

    def _write(self, entry: Mapping[str, Any]) -> None:
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")


def _parsed(line: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except ValueError:
        return {}
    return entry if isinstance(entry, dict) else {}
