"""Measured facts: read from recorded tables, written into one JSON, and into the figures of the pages.

    python -m benchmarks.leaderboard --facts

A fact is named "table: row [column]", after the table that it is recorded in. Without a column it is that
table's own score. "best of METHOD" is the best row of a method. A page quotes a fact as a figure followed by
a comment with the fact's name, which readers do not see. Several names, divided by "; ", give the range of
their values, and "[n]" after a name gives the number of cases:

    0.42 [0.35, 0.49]<!-- smollm2-importance: decompx -->

Facts are collected from the pages and from the library, so that the JSON has what is quoted and nothing else.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from lens_mix import recommended
from lens_mix.methods import METHODS

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "lens_mix" / "measured.json"
RECORD = ROOT / "benchmarks" / "LEADERBOARD.md"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))

SMOLLM2, GEMMA3, MINILM = "SmolLM2-135M-Instruct", "Gemma 3 270M", "all-MiniLM-L6-v2"
PARTIAL = "partial Spearman (controlled for position) with measured replacement of tokens"
DRAWN, PLAIN = f"{PARTIAL} by drawn ones", f"{PARTIAL} by plain words"
RELEASE = "TransformerLens 4.3, torch 2.13"
RUN = "PYTHONPATH=.:demos python -m benchmarks."

_FIGURE = re.compile(r"([-−]?\d+(?:\.\d+)?)(?: [\[(]([-−]?[\d.]+)(?:,| to) ([-−]?[\d.]+)[\])])?")
_NAME = re.compile(r"(?P<table>[\w-]+): (?P<row>.+?)(?: \[(?P<column>[^\]]+)\])?")
_QUOTED = re.compile(
    r"(?P<figure>[-−]?\d+(?:\.\d+)?(?: \[[^\]\n]*\]| to [-−]?\d+(?:\.\d+)?)?)"
    r"<!-- (?P<names>[\w-]+: [^>]*?) -->"
)
_MEASURED = re.compile(r"^Measured (?P<date>.+?) with (?P<release>.+)\.$", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Table:
    """A recorded table, and what its figures are of.

    Attributes:
        page: its file, from the repository's root.
        heading: how the heading above it begins.
        column: the column of its score.
        score, model, cases, command: as in `lens_mix.measured.Fact`.
        n: the number of cases; None: a column "n" or "cases" has it.
        date, release: as in `Fact`; "": a line "Measured ... with ..." below the heading has them.
        digits: the number of decimals.
    """

    page: str
    heading: str
    column: str
    score: str
    model: str
    cases: str
    command: str
    n: int | None = None
    date: str = ""
    release: str = ""
    digits: int = 2


# Runs that are not called like their table.
_RUNS = {
    "rxnfp-importance": "encoder 24",
    "gemma3-importance": "leaderboard gemma3 importance 25",
    "gemma3-differences": "leaderboard gemma3 importance 25",
}


def _leaderboard(name: str, heading: str, column: str, score: str, model: str, cases: str) -> Table:
    run = _RUNS.get(name, f"leaderboard {name.replace('-', ' ')}")
    return Table("benchmarks/LEADERBOARD.md", heading, column, score, model, cases, f"{RUN}{run}")


def _search(heading: str, column: str, model: str, command: str, date: str, **options: Any) -> Table:
    options = {"cases": "held-out prompts", "release": RELEASE, "date": date, **options}
    page = "docs/evidence/input_map.md"
    return Table(page, heading, column, PLAIN, model, command=f"{RUN}{command}", **options)


def _alignment(heading: str, column: str) -> Table:
    score, cases = "alignment error rate in percent", "pairs of the Hansards"
    command = "python -m benchmarks.alignment --only hansards"
    page, when = "benchmarks/alignment/results/hansards.md", "2026-11-23"
    return Table(page, heading, column, score, "flan-t5-small", cases, command, 447, when, RELEASE, 1)


_RANK = "reciprocal rank of the token that decides"
_DISTANCE = "distance of the answer's log probability from the whole model's, in nats"
_DELETION = "deletion, normalised between the worst and the best order"
_LEADERBOARD = (
    ("smollm2-importance", "Importance: 40", "partial_spearman", DRAWN, SMOLLM2, "prompts"),
    ("gemma3-importance", "Importance on Gemma 3", "partial_spearman", DRAWN, GEMMA3, "prompts"),
    ("rxnfp-importance", "Importance on an encoder", "partial_spearman", DRAWN, "rxnfp", "reactions"),
    ("smollm2-planted", "Planted facts: 11", "reciprocal_rank", _RANK, SMOLLM2, "prompts"),
    ("gemma3-planted", "Planted facts on Gemma 3", "reciprocal_rank", _RANK, GEMMA3, "prompts"),
    ("gemma3-differences", "Paired differences on", "partial_spearman", DRAWN, GEMMA3, "prompts"),
    ("smollm2-cells", "Cells kept, values", "closeness", _DISTANCE, SMOLLM2, "prompts"),
    ("gemma3-cells", "Cells kept on Gemma 3", "closeness", _DISTANCE, GEMMA3, "prompts"),
    ("smollm2-removals", "Removals: 12", "deletion", _DELETION, SMOLLM2, "prompts"),
    ("gemma3-removals", "Removals on Gemma 3", "deletion", _DELETION, GEMMA3, "prompts"),
    ("minilm-removals", "Removals on all-MiniLM", "deletion", _DELETION, MINILM, "sentences"),
)
TABLES = {
    **{name: _leaderboard(name, *rest) for name, *rest in _LEADERBOARD},
    "smollm2-held_out": _search(
        "SmolLM2, held out", "partial, 95 %", SMOLLM2, "input_map.table smollm2 held_out", "2026-11-23"
    ),
    "gemma3-held_out": _search(
        "Gemma 3, held out", "partial, 95 %", GEMMA3, "input_map.table gemma3 held_out", "2026-11-23"
    ),
    "smollm2-forms": _search(
        "In five forwards", "held out", SMOLLM2, "input_map.cheaper smollm2 held_out", "2026-11-24", n=105
    ),
    "smollm2-long": _search(
        *("In five forwards", "partial, 95 %", SMOLLM2, "input_map.library smollm2 held_out", "2026-11-24"),
        cases="of them with more than 20 tokens",
    ),
    "flan-t5-joint": Table(
        "docs/guides/encoder_decoder.md",
        "Input maps over source and prefix",
        "partial (position out)",
        PLAIN,
        "flan-t5-small",
        "held-out pairs of English and French",
        f"{RUN}input_map.joint held_out 30",
        30,
        "2026-11-23",
        RELEASE,
    ),
    "hansards-layers": _alignment("By layer, the end of the sentence competes", "layer 2"),
    "hansards-weights": _alignment("Weights and norms", "weights"),
    "hansards-floors": _alignment("Floors and published aligners", "AER"),
}


def rows(table: Table, column: str) -> tuple[dict[str, tuple[str, str]], str]:
    """Return the rows of a recorded table, label to (cell of the column, cell with n), and its section.

    Raises:
        LookupError: no such heading, or no table below it with the column.
    """
    text = (ROOT / table.page).read_text(encoding="utf-8")
    sections = re.split(r"^#+ ", text, flags=re.MULTILINE)
    section = next((part for part in sections if part.startswith(table.heading)), None)
    if section is None:
        raise LookupError(f"{table.page}: expected a heading that begins with {table.heading!r}")
    for block in re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE):
        lines = block.strip().split("\n")
        header, _, *body = ([cell.strip() for cell in line.strip()[1:-1].split("|")] for line in lines)
        if column in header:
            place = header.index(column)
            counts = [i for i, name in enumerate(header) if name in ("n", "cases")]
            found = {_label(cells): (cells[place], cells[counts[0]] if counts else "") for cells in body}
            return found, section
    raise LookupError(f"{table.page}, {table.heading!r}: expected a table with a column {column!r}")


def _label(cells: list[str]) -> str:
    """Return what a row is called: its cells before the first figure, without marks of Markdown."""
    plain = [re.sub(r"[*`]", "", cell) for cell in cells]
    figures = [i for i, cell in enumerate(plain) if _FIGURE.match(cell)]
    return ", ".join(cell for cell in plain[: figures[0] if figures else None] if cell not in ("-", ""))


def _figures(cell: str) -> list[float | int]:
    """Return the figure that a cell begins with, and the ends of its interval if it has one."""
    found = _FIGURE.match(re.sub(r"[*`]", "", cell))
    if found is None:
        raise LookupError(f"expected a figure, got {cell!r}")
    texts = [text.replace("−", "-") for text in found.groups() if text]
    return [float(text) if "." in text else int(text) for text in texts]


def look_up(name: str) -> dict[str, Any]:
    """Return one fact from its table, without what all facts of the table share.

    Raises:
        LookupError: no such table, column or row.
    """
    asked = _NAME.fullmatch(name)
    if asked is None or asked["table"] not in TABLES:
        raise LookupError(f"expected 'table: row [column]' with a table of {', '.join(TABLES)}; got {name!r}")
    table = TABLES[asked["table"]]
    found, _ = rows(table, asked["column"] or table.column)
    row, more = asked["row"], {"score": asked["column"]} if asked["column"] else {}
    method = row.removeprefix("best of ")
    named = [label for label in found if re.match(rf"{re.escape(method)}\b(?!.*randomised)", label)]
    if named and method != row:
        row = more["row"] = max(named, key=lambda label: _figures(found[label][0])[0])
    if row not in found:
        raise LookupError(f"{name!r}: no such row in {table.page}")
    value, low, high = (*_figures(found[row][0]), None, None)[:3]
    return {"value": value, "low": low, "high": high, "n": table.n or int(found[row][1]), **more}


def names_of_the_library() -> list[str]:
    """Return the names of the facts that the library quotes: of its recipes, and one per scored method."""
    found, _ = rows(TABLES["smollm2-importance"], "method")
    scored = {re.match(r"\w+", label)[0] for label in found}
    best = [f"smollm2-importance: best of {method}" for method in METHODS if method in scored]
    return [*best, *(name for names in recommended.EVIDENCE.values() for name in names)]


def names_in(text: str) -> Iterator[str]:
    """Yield the names of the facts that a page quotes."""
    for quoted in _QUOTED.finditer(text):
        yield from (name.removesuffix(" [n]") for name in quoted["names"].split("; "))


def gather(pages: Iterable[Path] = PAGES) -> dict[str, Any]:
    """Return what the JSON has: the tables with what their facts share, and every fact that is quoted."""
    quoted = [name for page in pages for name in names_in(page.read_text(encoding="utf-8"))]
    facts = {name: look_up(name) for name in sorted({*names_of_the_library(), *quoted})}
    tables = {}
    for key in sorted({name.split(":")[0] for name in facts}):
        table = TABLES[key]
        shared = {field: getattr(table, field) for field in ("score", "model", "cases", "command", "digits")}
        dated = {"date": table.date, "release": table.release}
        if not table.date:
            line = _MEASURED.search(rows(table, table.column)[1])
            if line is None:
                raise LookupError(f"{table.page}, {table.heading!r}: expected a line 'Measured ... with ...'")
            dated = line.groupdict()
        tables[key] = {**shared, **dated, "recorded_in": table.page}
    return {"tables": tables, "facts": facts}


def as_json(gathered: dict[str, Any]) -> str:
    """Return the text of the JSON file, one table or fact a line."""

    def line(key: str, entry: dict[str, Any]) -> str:
        return f"  {json.dumps(key, ensure_ascii=False)}: {json.dumps(entry, ensure_ascii=False)}"

    parts = []
    for part, entries in gathered.items():
        lines = (line(key, entry) for key, entry in entries.items())
        parts.append(f' "{part}": {{\n' + ",\n".join(lines) + "\n }")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def render(text: str, gathered: dict[str, Any]) -> str:
    """Return a page with the figure before each name of a fact written anew; an interval stays one."""

    def figure(quoted: re.Match[str]) -> str:
        names = list(names_in(quoted[0]))
        facts = [gathered["facts"][name] for name in names]
        if quoted["names"].endswith(" [n]"):
            return f"{facts[0]['n']}<!-- {quoted['names']} -->"
        digits = gathered["tables"][names[0].split(":")[0]]["digits"]
        written = [_written(fact["value"], digits) for fact in facts]
        shown = written[0]
        if len(facts) > 1:
            by_value = sorted(zip((fact["value"] for fact in facts), written, strict=True))
            shown = " to ".join(dict.fromkeys((by_value[0][1], by_value[-1][1])))
        elif "[" in quoted["figure"]:
            shown += f" [{_written(facts[0]['low'], digits)}, {_written(facts[0]['high'], digits)}]"
        return f"{shown}<!-- {quoted['names']} -->"

    return _QUOTED.sub(figure, text)


def _written(value: float | int, digits: int) -> str:
    return (str(value) if isinstance(value, int) else f"{value:.{digits}f}").replace("-", "−")


def write() -> None:
    """Write the JSON and the figures of all pages."""
    gathered = gather()
    FILE.write_text(as_json(gathered), encoding="utf-8")
    for page in PAGES:
        page.write_text(render(page.read_text(encoding="utf-8"), gathered), encoding="utf-8")


def record(name: str, table: str, measured: str) -> None:
    """Put the table of a finished run in the place of the recorded one, with its line "Measured ..."."""
    heading = f"## {TABLES[name].heading}"
    text = RECORD.read_text(encoding="utf-8")
    start = text.index(heading)
    end = text.find("\n## ", start)
    section = text[start : end if end >= 0 else len(text)]
    fresh = re.sub(r"(?:^\|.*\n?)+", lambda _: table.strip() + "\n", section, count=1, flags=re.MULTILINE)
    fresh = _MEASURED.sub(measured, fresh)
    RECORD.write_text(text.replace(section, fresh), encoding="utf-8")
