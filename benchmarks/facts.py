"""Measured figures: read from recorded tables, and written into the library's JSON and into the pages.

    python -m benchmarks.leaderboard --facts

A recorded table is a Markdown table below a heading of a file in `benchmarks/`. It is named by a key of
`TABLES`, or by the file's path below `benchmarks/`, "#", and the beginning of the heading. A fact is named
"table: row [column]". The row is named by its cells before the first figure, joined by ", "; if several rows
share these, by more of its cells. "best of METHOD" is the best row of a method. Without a column it is the
one that the key of `TABLES` has.

The figures that a page quotes are listed in `docs/figures.toml`, so that the page has no comments between its
words. An entry is a text of the page with {} in place of each figure, and the names of the facts. Several
names, separated by "; ", give the range of their values. "[n]" after a name gives the number of cases:

    ["docs/evidence/index.md"]
    "its score is {} on {} prompts" = ["smollm2-importance: decompx", "smollm2-importance: decompx [n]"]

The text occurs once in the page. A figure that has an interval keeps one: 0.42 [0.35, 0.49].

A page quotes a table by a comment with its name, the columns, and the rows unless all are wanted. What
follows, up to the closing comment, is written anew. The cells are copied as they are:

    <!-- table alignment/results/hansards.md#Floors and published
    columns: method as Method | AER as Error rate, %
    rows: diagonal | random
    -->
    <!-- /table -->

In a table, the spaces of a figure with its interval are no-break spaces.

A column may be of other rows. "NAME + VARIANT" is of the rows whose first cell ends with ", VARIANT", and
"NAME @ TABLE" of the same rows in another table:

    columns: method | closeness | closeness + randomised model as Shuffled | closeness @ gemma3-cells
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import json
import math
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lens_mix import recommended
from lens_mix.methods import METHODS
from lens_mix.methods.token_patching import TokenPatching
from lens_mix.traces.claims import VERDICTS

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "lens_mix" / "measured.json"
QUOTED = ROOT / "docs" / "figures.toml"
RECORD = ROOT / "benchmarks" / "LEADERBOARD.md"
# The pages of the methods are generated, with their figures (`docs/make/methods.py`).
PAGES = (
    ROOT / "README.md",
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page.parent.name != "methods"),
)

_NUMBER = r"[-−+]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?"
_FIGURE = re.compile(rf"({_NUMBER})(?: [\[(]({_NUMBER})(?:,| to) ({_NUMBER})[\])]| ± ({_NUMBER}))?")
# A comment is a quotation if it has a key or a path, ": ", and a row.
_COMMENT = r"<!-- (?P<names>[\w./-]+(?:#[^>]*?)?:\s[^>]*?) -->"
_NAMES = re.compile(_COMMENT)
_QUOTED_FIGURE = rf"{_NUMBER}(?:\s\[[^\]]*\]|\s±\s{_NUMBER}|\sto\s{_NUMBER})?"
# Within `annotate`, a quoted figure is followed by a comment with its names.
_QUOTED = re.compile(rf"(?P<figure>{_QUOTED_FIGURE}){_COMMENT}")
_TABLE = re.compile(
    r"^<!-- table (?P<source>[^\n]+)\n(?P<options>(?:(?!<!--).)*?)-->\n"
    r"(?P<body>(?:(?!<!-- table).)*?)^<!-- /table -->",
    re.MULTILINE | re.DOTALL,
)
_MEASURED = re.compile(r"^Measured (?P<date>.+?) with (?P<release>.+)\.$", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Table:
    """A place of recorded tables: one heading of one file.

    Attributes:
        page: The file, from the repository's root.
        heading: How the heading above the table begins.
        column: The column of its score; "" if each fact names its own.
        n: The number of cases; None if a column "n" or "cases" has it.
    """

    page: str
    heading: str
    column: str = ""
    n: int | None = None


_HELD_OUT = "benchmarks/input_map/results"
_LEADERBOARD = "benchmarks/LEADERBOARD.md"
_HANSARDS = "benchmarks/alignment/results/hansards.md"
_AUDIT = "benchmarks/audit/results/verdicts.md"
TABLES = {
    "smollm2-importance": Table(_LEADERBOARD, "Importance: 40", "partial_spearman"),
    "gemma3-importance": Table(_LEADERBOARD, "Importance on Gemma 3", "partial_spearman"),
    "rxnfp-importance": Table(_LEADERBOARD, "Importance on an encoder", "partial_spearman"),
    "smollm2-planted": Table(_LEADERBOARD, "Planted facts: 11", "reciprocal_rank"),
    "gemma3-planted": Table(_LEADERBOARD, "Planted facts on Gemma 3", "reciprocal_rank"),
    "gemma3-differences": Table(_LEADERBOARD, "Paired differences on", "partial_spearman"),
    "smollm2-cells": Table(_LEADERBOARD, "Cells kept, values", "closeness"),
    "gemma3-cells": Table(_LEADERBOARD, "Cells kept on Gemma 3", "closeness"),
    "smollm2-removals": Table(_LEADERBOARD, "Removals: 12", "deletion"),
    "gemma3-removals": Table(_LEADERBOARD, "Removals on Gemma 3", "deletion"),
    "minilm-removals": Table(_LEADERBOARD, "Removals on all-MiniLM", "deletion"),
    "smollm2-held_out": Table(f"{_HELD_OUT}/smollm2.md", "SmolLM2, held out", "partial, 95 %"),
    "smollm2-forms": Table(f"{_HELD_OUT}/forms.md", "Forms of the recipe", "held out", 105),
    "smollm2-long": Table(f"{_HELD_OUT}/forms.md", "Rows of", "partial, 95 %"),
    "traces": Table("benchmarks/traces/results/summary.md", "Right source", "recommended map"),
    "smollm2-exact": Table(f"{_HELD_OUT}/exact.md", "smollm2, held out, at most", "partial, 95 %"),
    "smollm2-exact-long": Table(f"{_HELD_OUT}/exact.md", "smollm2, held out, more", "partial, 95 %"),
    "smollm2-exact-all": Table(f"{_HELD_OUT}/exact.md", "smollm2, held out, all", "partial, 95 %"),
    "gemma3-exact": Table(f"{_HELD_OUT}/exact_gemma3.md", "gemma3, held out, at most", "partial, 95 %"),
    "flan-t5-joint": Table(f"{_HELD_OUT}/joint.md", "Input maps over", "partial (position out)", 30),
    **{
        f"{model}-audit-{group}": Table(_AUDIT, f"Verdicts of {name}, {group}", "precision, 95 %")
        for model, name in (("smollm2", "SmolLM2"), ("gemma3", "Gemma 3"))
        for group in ("short", "hard")
    },
    "hansards-layers": Table(_HANSARDS, "By layer, the end of the sentence competes", "layer 2", 447),
    "hansards-floors": Table(_HANSARDS, "Floors and published aligners", "AER", 447),
}

_PARTIAL = "partial Spearman (controlled for position) with measured replacement of tokens"
_RUN = "PYTHONPATH=.:demos python -m benchmarks."
_SMOLLM2 = "SmolLM2-135M-Instruct"
# What the library says about the figures of a table: score, model, cases, and the command that measures it.
_LIBRARY = {
    "smollm2-importance": (
        f"{_PARTIAL} by drawn ones",
        _SMOLLM2,
        "prompts",
        "leaderboard smollm2 importance",
    ),
    "rxnfp-importance": (f"{_PARTIAL} by drawn ones", "rxnfp", "reactions", "encoder 24"),
    "smollm2-held_out": (
        *(f"{_PARTIAL} by plain words", _SMOLLM2),
        *("held-out prompts", "input_map.table smollm2 held_out"),
    ),
    "smollm2-forms": (
        *(f"{_PARTIAL} by plain words", _SMOLLM2),
        *("held-out prompts", "input_map.cheaper smollm2 held_out"),
    ),
    "smollm2-long": (
        *(f"{_PARTIAL} by plain words", _SMOLLM2),
        *("of them with more than 20 tokens", "input_map.library smollm2 held_out"),
    ),
    "smollm2-exact": (
        *(f"{_PARTIAL} by plain words", _SMOLLM2),
        *("held-out prompts of at most 32 tokens", "input_map.exact smollm2"),
    ),
    **{
        f"{model}-audit-{group}": (
            *("share of claims whose planted truth is the verdict", name),
            *(f"{group} planted claims with it", f"audit {model} report 0 13"),
        )
        for model, name in (("smollm2", _SMOLLM2), ("gemma3", "Gemma 3 270M"))
        for group in ("short", "hard")
    },
    "flan-t5-joint": (
        *(f"{_PARTIAL} by plain words", "flan-t5-small"),
        *("held-out pairs of English and French", "input_map.joint held_out 30"),
    ),
}


@dataclasses.dataclass(frozen=True)
class Recorded:
    """One recorded table: its header, its rows of cells, and the text of its section."""

    place: str
    header: list[str]
    body: list[list[str]]
    section: str

    def column(self, name: str) -> int:
        """Return the place of a column.

        Raises:
            LookupError: The table has no such column.
        """
        if name not in self.header:
            raise LookupError(f"{self.place}: expected a column {name!r}, found {', '.join(self.header)}")
        return self.header.index(name)

    @functools.cached_property
    def labels(self) -> list[str]:
        """Return the name of each row."""
        return [label(cells) for cells in self.body]

    def rows(self, name: str) -> list[list[str]]:
        """Return the rows with a name: by their cells before the first figure, else by more or fewer cells.

        Raises:
            LookupError: The table has no such row.
        """
        found = [cells for each, cells in zip(self.labels, self.body, strict=True) if each == name]
        found = found or [cells for cells in self.body if name in _beginnings(cells)]
        if not found:
            labels = list(dict.fromkeys(self.labels))
            near = difflib.get_close_matches(name, labels, n=5, cutoff=0.3) or labels[:5]
            raise LookupError(f"{self.place}: expected a row {name!r}, found for example {'; '.join(near)}")
        return found


def label(cells: list[str]) -> str:
    """Return the name of a row: its cells before the first figure (the first cell always), without marks."""
    plain = [_plain(cell) for cell in cells]
    figures = [i for i, cell in enumerate(plain) if i and _FIGURE.match(cell)]
    return _joined(plain[: figures[0] if figures else None])


def _beginnings(cells: list[str]) -> set[str]:
    plain = [_plain(cell) for cell in cells]
    return {_joined(plain[: count + 1]) for count in range(len(plain))}


def _plain(cell: str) -> str:
    return re.sub(r"[*`]", "", cell)


def _joined(cells: list[str]) -> str:
    return ", ".join(cell for cell in cells if cell not in ("-", ""))


def place_of(name: str) -> Table:
    """Return the place that a key of `TABLES`, or a path with the beginning of a heading, is the name of.

    Raises:
        LookupError: It is neither, or there is no such file.
    """
    if name in TABLES:
        return TABLES[name]
    path, mark, heading = name.partition("#")
    if not mark:
        raise LookupError(f"expected PATH#HEADING or one of {', '.join(TABLES)}; got {name!r}")
    if not (ROOT / "benchmarks" / path).is_file():
        raise LookupError(f"expected a file below benchmarks/, got {path!r}")
    return Table(f"benchmarks/{path}", heading.strip())


def recorded(table: Table, *columns: str) -> Recorded:
    """Return the first table below a heading that has all of these columns.

    Raises:
        LookupError: No heading begins so, or several do, or no table below it has these columns.
    """
    text = (ROOT / table.page).read_text(encoding="utf-8")
    sections = re.split(r"^#+ ", text, flags=re.MULTILINE)[1:]
    headings = [section.split("\n")[0].strip() for section in sections]
    found = [i for i, heading in enumerate(headings) if heading == table.heading]
    found = found or [i for i, heading in enumerate(headings) if heading.startswith(table.heading)]
    if len(found) != 1:
        listed = "; ".join(headings[i] for i in found) if found else f"none of: {'; '.join(headings)}"
        raise LookupError(
            f"{table.page}: expected one heading that begins with {table.heading!r}, found {listed}"
        )
    section = sections[found[0]]
    place, headers = f"{table.page}#{table.heading}", []
    for block in re.findall(r"(?:^\|.*\n?)+", section, re.MULTILINE):
        header, _, *body = (_cells(line) for line in block.strip().split("\n"))
        if set(columns) <= set(header):
            return Recorded(place, header, body, section)
        headers.append(" | ".join(header))
    raise LookupError(
        f"{place}: expected a table with the columns {' | '.join(columns)!r}, found "
        + ("; ".join(headers) or "no table")
    )


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def _split(name: str) -> tuple[Table, str, str]:
    """Return the place, the row and the column that a fact is named by. A heading may have ": " too."""
    asked = re.fullmatch(r"(?P<row>.+?)(?: \[(?P<column>[^\]]+)\])?", name)
    assert asked is not None
    *splits, row = asked["row"].split(": ")
    errors = []
    for count in range(1, len(splits) + 1):
        try:
            table = place_of(": ".join(splits[:count]))
            column = asked["column"] or table.column
            recorded(table, *([column] if column else []))
        except LookupError as error:
            errors.append(error)
        else:
            if not column:
                raise LookupError(f"{name!r}: expected 'TABLE: row [column]' with a column")
            return table, ": ".join([*splits[count:], row]), column
    raise errors[0] if errors else LookupError(f"expected 'TABLE: row [column]', got {name!r}")


def look_up(name: str) -> dict[str, Any]:
    """Return one fact: its value, the ends of its interval, all of these as they are written, and its cases.

    Raises:
        LookupError: There is no such table, column or row, or the row has no figure.
    """
    table, row, column = _split(name)
    found = recorded(table, column)
    place = found.column(column)
    method = row.removeprefix("best of ")
    own = [each for each in found.labels if re.match(rf"{re.escape(method)}\b(?!.*randomised)", each)]
    if method != row and row not in found.labels and own:
        row = max(own, key=lambda each: _value(_texts(found.rows(each)[0][place], name)[0]))
    rows = found.rows(row)
    if len(rows) > 1:
        raise LookupError(f"{name!r}: expected one row, found {len(rows)}; add more of its cells")
    texts = _texts(rows[0][place], name)
    counts = [i for i, each in enumerate(found.header) if each in ("n", "cases")]
    counted = _FIGURE.match(rows[0][counts[0]]) if counts else None
    return {
        "texts": texts,
        "row": row,
        "n": table.n or (int(counted[1].replace(",", "")) if counted else None),
    }


def _texts(cell: str, name: str) -> list[str]:
    """Return the figure that a cell begins with, and the ends of its interval or what follows ±."""
    found = _FIGURE.match(_plain(cell))
    if found is None:
        raise LookupError(f"{name!r}: expected a cell that begins with a figure, got {cell!r}")
    return [text for text in found.groups() if text]


def _value(text: str) -> float | int:
    plain = text.replace("−", "-").replace(",", "")
    return float(plain) if re.search(r"[.e]", plain) else int(plain)


def names_of_the_library() -> list[str]:
    """Return the names of the facts that the library quotes: of its recipes, and one per scored method."""
    scored = {
        re.match(r"\w+", label(cells))[0] for cells in recorded(TABLES["smollm2-importance"], "method").body
    }
    best = [f"smollm2-importance: best of {method}" for method in METHODS if method in scored]
    verdicts = [
        f"{key}: {label(cells)}"
        for key, table in TABLES.items()
        if table.page == _AUDIT
        for cells in recorded(table, table.column).body
        if label(cells) in VERDICTS and cells[1] != "0"
    ]
    return [*best, *verdicts, *(name for names in recommended.EVIDENCE.values() for name in names)]


def measured(name: str) -> tuple[str, str]:
    """Return the date and the releases of a recorded table.

    Raises:
        LookupError: It has no line "Measured ... with ...".
    """
    found = _MEASURED.search(recorded(TABLES[name], TABLES[name].column).section)
    if found is None:
        raise LookupError(f"{name}: expected a line 'Measured ... with ...' below its heading")
    return found["date"], found["release"]


def gather() -> dict[str, Any]:
    """Return what the library's JSON has: facts, what all facts of one table share, and costs of methods.

    Raises:
        LookupError: A fact is not recorded, or its table has no line "Measured ... with ...".
    """
    found = {name: look_up(name) for name in sorted(set(names_of_the_library()))}
    tables, facts = {}, {}
    for name, fact in found.items():
        key = name.split(":")[0]
        score, model, cases, command = _LIBRARY[key]
        date, release = measured(key)
        tables[key] = {
            **{"score": score, "model": model, "cases": cases, "command": f"{_RUN}{command}", "digits": 2},
            **{"date": date, "release": release},
            "recorded_in": TABLES[key].page,
        }
        value, low, high = (*(_value(text) for text in fact["texts"]), None, None)[:3]
        facts[name] = {"value": value, "low": low, "high": high, "n": fact["n"]}
        if name != f"{key}: {fact['row']}":
            facts[name]["row"] = fact["row"]
    return {"tables": dict(sorted(tables.items())), "facts": facts, "costs": costs()}


_RESULTS = "benchmarks/RESULTS.md"
# The tables of costs with their columns, the first that counts first, and the layers of their model.
_COSTS = (
    (Table(_RESULTS, "What calls cost"), "call", "tokens"),
    (Table(_RESULTS, "Time and memory by length"), "call", ""),
    (Table(_RESULTS, "Every method, SmolLM2-135M"), "method", "positions"),
)
_N_LAYERS = 30
# The lengths of the second table that count, because the time of a long prompt is that of its attention.
_LENGTHS = (20, 64, 200)
_PASSES = "÷ forward"
_ONE_ROW, _ALL_ROWS = "last row", "all rows"


def costs() -> dict[str, dict[str, float]]:
    """Return the cost of every built-in method and of `input_map`, by the fields of `Cost`, from the records.

    A record is the time of a call with default parameters, for one row or all rows of a prompt, in forward
    passes of SmolLM2-135M. For each number of rows, the first of three tables that has the method counts:
    "What calls cost", "Time and memory by length" up to 200 tokens, and "Every method, SmolLM2-135M". The
    middle of several figures is √(smallest · largest), which is as near as possible to the furthest one. A
    method without a record is left out, and its cost is unknown.

    The method says what its time grows with (`cost_grows_with`):

    - nothing: `base` is the middle of the records of all rows, but at least 1, the clean pass.
    - rows: one row takes `base + per_row`, which is the middle of the records of one row. `per_row` is the
      middle of (record of all rows − one row) / (rows − 1). If all records are of one row, or all of all
      rows, `base` is 1, and `per_row` is the middle of (record − 1) / rows.
    - tokens, layers: `base` is 1, and the rest is the middle of (record − 1) / number. For tokens, these are
      the records of one row if there are any.

    `bidirectional` is the middle of the ratios of "Every method, bert-like" to "Every method, gpt2-like", at
    the same number of positions, if the time grows with rows or tokens and both are recorded.
    """
    found = {name: METHODS[name].cost_grows_with for name in METHODS}
    found = {"input_map": TokenPatching.cost_grows_with, **found}
    fitted = {name: _fit(name, growth) for name, growth in found.items()}
    return {name: cost for name, cost in fitted.items() if cost}


def _fit(name: str, growth: str) -> dict[str, float]:
    """Return the cost of a method; it is empty if no table has the method."""
    one, every = (_records_of_cost(name, rows) for rows in (_ONE_ROW, _ALL_ROWS))
    records = [passes for _, passes in every or one]
    if not records:
        return {}
    if growth == "nothing":
        return {"base": _rounded(max(1.0, _middle(records)))}
    if growth == "layers":
        return {"base": 1, "per_layer": _rounded(_middle([(each - 1) / _N_LAYERS for each in records]))}
    bidirectional = _bidirectional(name)
    cost: dict[str, float] = {"base": 1} | ({"bidirectional": bidirectional} if bidirectional else {})
    if growth == "tokens":
        return cost | {"per_token": _rounded(_middle([(each - 1) / count for count, each in one or every]))}
    single = _middle([each for _, each in one]) if one else 1.0
    if not every:
        return cost | {"per_row": _rounded(single - 1)}
    started = 1 if one else 0
    per_row = _middle([(each - single) / (count - started) for count, each in every])
    return cost | {"base": _rounded(single - started * per_row), "per_row": _rounded(per_row)}


def _records_of_cost(name: str, rows: str) -> list[tuple[int, float]]:
    """Return the numbers of tokens and of forward passes from the first table that has records."""
    default = _ONE_ROW if name == "input_map" else _ALL_ROWS
    calls = {f"lm.{name}", f"lm.{name}, {rows}", name, f"{name}, {rows}"} - (
        set() if rows == default else {name, f"lm.{name}"}
    )
    for table, called, length in _COSTS:
        figures = [f"{each} {_PASSES}" for each in _LENGTHS]
        found = recorded(table, called, *([length, _PASSES] if length else figures))
        own = [cells for cells in found.body if cells[found.column(called)] in calls]
        if length:
            columns = found.column(length), found.column(_PASSES)
            pairs = [(cells[columns[0]], cells[columns[1]]) for cells in own]
        else:
            places = [(str(each), found.column(f"{each} {_PASSES}")) for each in _LENGTHS]
            pairs = [(each, cells[place]) for cells in own for each, place in places]
        records = [(int(count), float(passes)) for count, passes in pairs if passes]
        if records:
            return records
    return []


def _bidirectional(name: str) -> float | None:
    """Return how many times more the method takes in a bidirectional model; None if it is not recorded."""
    passes: list[dict[str, float]] = []
    for model in ("bert-like", "gpt2-like"):
        found = recorded(Table(_RESULTS, f"Every method, {model}"), "method", "positions", _PASSES)
        method, length, figure = (found.column(each) for each in ("method", "positions", _PASSES))
        own = (cells for cells in found.body if cells[method] == name and cells[figure])
        passes.append({cells[length]: float(cells[figure]) for cells in own})
    shared = passes[0].keys() & passes[1].keys()
    return _rounded(_middle([passes[0][each] / passes[1][each] for each in shared])) if shared else None


def _middle(figures: list[float]) -> float:
    return math.sqrt(min(figures) * max(figures))


def _rounded(figure: float) -> float:
    return float(f"{figure:.2g}")


def as_json(gathered: dict[str, Any]) -> str:
    """Return the text of the JSON file, one table or fact a line."""

    def line(key: str, entry: dict[str, Any]) -> str:
        return f"  {json.dumps(key, ensure_ascii=False)}: {json.dumps(entry, ensure_ascii=False)}"

    parts = []
    for part, entries in gathered.items():
        lines = (line(key, entry) for key, entry in entries.items())
        parts.append(f' "{part}": {{\n' + ",\n".join(lines) + "\n }")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def names_in(text: str) -> Iterator[str]:
    """Yield the names of the facts that a text quotes."""
    for quoted in _NAMES.finditer(text):
        names = " ".join(quoted["names"].split()).split("; ")
        yield from (name.removesuffix(" [n]") for name in names)


def render(text: str) -> str:
    """Return a page with its quoted figures and tables written anew. A figure with an interval keeps one.

    Raises:
        LookupError: Something that is quoted is not recorded.
    """
    return _QUOTED.sub(_figure, _TABLE.sub(_table, text))


def _figure(quoted: re.Match[str]) -> str:
    names = list(names_in(quoted[0]))
    if quoted["names"].endswith(" [n]"):
        return f"{_cases(names[0])}<!-- {quoted['names']} -->"
    facts = [look_up(name) for name in names]
    shown, *ends = facts[0]["texts"]
    if len(facts) > 1:
        by_value = sorted((fact["texts"][0] for fact in facts), key=_value)
        shown = " to ".join(dict.fromkeys((by_value[0], by_value[-1])))
    elif re.search(r"[\[±]", quoted["figure"]):
        if not ends:
            raise LookupError(f"{names[0]!r}: expected an interval in the recorded table, found {shown!r}")
        shown += f" [{', '.join(ends)}]" if len(ends) == 2 else f" ± {ends[0]}"
    # A line that begins with "|" is a row of a table.
    in_table = quoted.string[quoted.string.rfind("\n", 0, quoted.start()) + 1 :].startswith("|")
    shown = _unbroken(shown) if in_table else shown
    return f"{shown.replace('-', '−')}<!-- {quoted['names']} -->"


def _unbroken(text: str) -> str:
    """Return a text whose figures have minus signs and no-break spaces, for one line each."""
    text = _FIGURE.sub(lambda figure: figure[0].replace(" ", "\N{NO-BREAK SPACE}"), text)
    return re.sub(r"(?<![\w.])-(?=\d)", "−", text)


def _cases(name: str) -> int:
    """Return the number of cases of a fact, which needs no column for that."""
    found = None
    for asked in (name, f"{name} [n]", f"{name} [cases]"):
        with contextlib.suppress(LookupError):
            found = found or look_up(asked)["n"]
    if found is None:
        # An error about the name itself says more.
        look_up(name)
        raise LookupError(f"{name!r}: expected a column 'n' or 'cases', found none")
    return int(found)


@dataclasses.dataclass(frozen=True)
class _Column:
    """One column of a quoted table.

    Attributes:
        name: Its recorded name.
        title: Its name in the page.
        variant: What is added to the first cell of a row, to copy from that row instead: "randomised model".
        table: The other table with the same rows that is copied from; "": the quoted one.
    """

    name: str
    title: str
    variant: str
    table: str

    @classmethod
    def of(cls, text: str) -> _Column:
        """Read "name + variant @ table as title"; all but the name may be missing."""
        rest, _, title = (part.strip() for part in text.partition(" as "))
        rest, _, table = (part.strip() for part in rest.partition(" @ "))
        name, _, variant = (part.strip() for part in rest.partition(" + "))
        return cls(name, title or name, variant, table)

    @property
    def elsewhere(self) -> bool:
        """Whether the cells are not those of the quoted rows."""
        return bool(self.variant or self.table)

    def cells(self, quoted: Recorded, body: list[list[str]]) -> list[str]:
        """Return the cell of each quoted row. It is empty if the other row is not recorded.

        Raises:
            LookupError: None of the other rows is recorded.
        """
        if not self.elsewhere:
            return [cells[quoted.column(self.name)] for cells in body]
        other = recorded(place_of(self.table), self.name) if self.table else quoted
        place = other.column(self.name)
        by_label = {each: cells[place] for each, cells in zip(other.labels, other.body, strict=True)}
        names = [label(cells) for cells in body]
        if self.variant:
            firsts = [_plain(cells[0]) for cells in body]
            names = [
                f"{first}, {self.variant}{name[len(first) :]}"
                for first, name in zip(firsts, names, strict=True)
            ]
        if not set(names) & set(by_label):
            raise LookupError(f"{other.place}: expected one of the rows {'; '.join(names)}, found none")
        return [by_label.get(name, "") for name in names]


def _table(quoted: re.Match[str]) -> str:
    options = _options(quoted["options"])
    if "columns" not in options or set(options) - {"columns", "rows"}:
        got = ", ".join(options) or "nothing"
        raise LookupError(f"table {quoted['source']}: expected 'columns:' and perhaps 'rows:', got {got}")
    columns = [_Column.of(text) for text in options["columns"].split(" | ")]
    own = [column.name for column in columns if not column.elsewhere]
    found = recorded(place_of(quoted["source"].strip()), *own)
    wanted = [row.strip() for row in options["rows"].split(" | ")] if options.get("rows") else []
    body = [cells for row in wanted for cells in found.rows(row)] if wanted else found.body
    copied = [column.cells(found, body) for column in columns]
    rows = ([_unbroken(cell) for cell in cells] for cells in zip(*copied, strict=True))
    lines = [[column.title for column in columns], ["---"] * len(columns), *rows]
    opening = quoted[0].split("-->\n", 1)[0]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    # Markdown needs the empty lines: without them some renderers take the table for a part of the comment.
    return f"{opening}-->\n\n{table}\n\n<!-- /table -->"


def _options(text: str) -> dict[str, str]:
    """Return the options of a quoted table. An option may go on in the next line."""
    options: dict[str, str] = {}
    key = ""
    for line in text.strip().split("\n"):
        found = re.match(r"(\w+):(?: |$)", line)
        if found:
            key, line = found[1], line[found.end() :]
        options[key] = f"{options.get(key, '')} {line.strip()}".strip()
    return options


@functools.cache
def _quotations(file: Path) -> dict[str, dict[str, list[str]]]:
    return tomllib.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def annotate(page: Path) -> str:
    """Return the text of a page with the names of each quoted figure in a comment behind it.

    Raises:
        LookupError: A quoted text does not occur once in the page.
    """
    text = page.read_text(encoding="utf-8")
    comments: dict[int, str] = {}
    for quoted, names in _quotations(QUOTED).get(page.relative_to(ROOT).as_posix(), {}).items():
        found = list(re.finditer(_pattern(quoted), text))
        if len(found) != 1 or len(found[0].groups()) != len(names):
            raise LookupError(
                f"docs/figures.toml: expected the text {quoted!r} once in the page, with a name for each "
                f"{{}}, found it {len(found)} times and {len(names)} names"
            )
        comments |= {found[0].end(i + 1): f"<!-- {each} -->" for i, each in enumerate(names)}
    for place in sorted(comments, reverse=True):
        text = text[:place] + comments[place] + text[place:]
    return text


def _pattern(quoted: str) -> str:
    """Return the regular expression of a quoted text, whose words may be on two lines of the page."""
    words = (re.escape(each) for each in quoted.split())
    return r"\s+".join(words).replace(r"\{\}", f"({_QUOTED_FIGURE})")


def render_page(page: Path) -> str:
    """Return the text of a page with its quoted figures and tables written anew.

    Raises:
        LookupError: Something that the page quotes is not recorded.
    """
    try:
        return _NAMES.sub("", render(annotate(page)))
    except LookupError as error:
        raise LookupError(f"{page.relative_to(ROOT)}: {error}") from None


def write() -> None:
    """Write the library's JSON, and the figures and tables of all pages.

    Raises:
        LookupError: Some pages quote what is not recorded. The others are written all the same.
    """
    FILE.write_text(as_json(gather()), encoding="utf-8")
    errors = []
    for page in PAGES:
        try:
            page.write_text(render_page(page), encoding="utf-8")
        except LookupError as error:
            errors.append(str(error))
    if errors:
        raise LookupError("\n".join(errors))


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
