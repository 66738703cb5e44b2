"""Write the tables of the trace benchmarks from what is stored.

python -m benchmarks.traces.table choose          writes results/choose_smollm2.md and choose_gemma3.md
python -m benchmarks.traces.table held_out        writes results/held_out_*.md, long.md and summary.md
python -m benchmarks.traces.table held_out gim    replaces the rows of gim in these pages, and no others
python -m benchmarks.traces.table held_out gim long    the same in long.md
python -m benchmarks.traces.table held_out "" same_form    writes results/same_form.md alone
"""

from __future__ import annotations

import dataclasses
import importlib.metadata as metadata
import math
import re
import sys
from collections import defaultdict
from collections.abc import Collection, Iterator
from datetime import date
from pathlib import Path

import numpy as np

from benchmarks.common import markdown_table
from benchmarks.input_map.table import interval as bootstrap_interval
from benchmarks.traces.__main__ import FAMILIES, MODELS
from benchmarks.traces.drops import removal_row, rows_of
from benchmarks.traces.gold import folder, records
from benchmarks.traces.maps import RECOMMENDED, REFERENCE
from benchmarks.traces.prompts import LENGTHS, SAME_FORM
from benchmarks.traces.scores import score

RESULTS = Path(__file__).parent / "results"
NAMES = {"smollm2": "SmolLM2", "gemma3": "Gemma 3"}
LESS_THIS = f"{REFERENCE} less this"
CEILING = "removal of each sentence (ceiling)"
# What the README compares, with the names that it gives them.
COMPARED = {
    RECOMMENDED: "recommended map",
    "attention, mean": "raw attention, mean over layers and heads",
    "attention, strongest head": "raw attention, strongest head",
    "attention, rollout": "attention rollout",
}
TITLES = {
    "right": (
        "right source",
        "Share of prompts in which the strongest sentence (conflict: passage) is right.",
    ),
    "source": (
        "sources of a chain",
        "Share of gold sources among as many strongest sources as there are gold ones. Only variables have "
        "several, so the other families are as above.",
    ),
    "recovery": (
        "recovery at 10 %",
        "Share of the gold sentence's tokens among the top tenth of prompt tokens.",
    ),
    "rank": ("reciprocal rank", "Reciprocal rank of the best deciding token among prompt tokens."),
    "LDS": ("LDS", "Spearman of predicted and real log probability over random removals of sentences."),
    "explained": (
        "five sentences",
        "Drop of the log probability without the map's five strongest sentences, over that without the five "
        "with the largest single effects.",
    ),
    "of the best": (
        "best five sentences",
        "Drop of the log probability without the map's five strongest sentences, over the largest drop "
        "without any five sentences. All sets of five were removed.",
    ),
    "drop of 1": ("drop of 1", "Drop of the log probability without the strongest sentence, in nats."),
    "drop of 5": ("drop of 5", "Drop of the log probability without the five strongest sentences, in nats."),
}
# The metrics of long prompts and of shuffled weights: neither has removals of all sentences.
LONG_METRICS = ("right", "recovery", "rank")


@dataclasses.dataclass(frozen=True)
class LongPage:
    """A page of long prompts.

    Attributes:
        title: Its title.
        by_length: The families of each column.
        reference: The map that paired differences are to.
    """

    title: str
    by_length: dict[str, tuple[str, ...]]
    reference: str

    @property
    def families(self) -> tuple[str, ...]:
        """The families of all columns."""
        return tuple(family for some in self.by_length.values() for family in some)


LONG_PAGE = LongPage(
    "Traces in long prompts",
    {"500 to 1,000 tokens": ("long_500", "long_1000"), "2,000 tokens": ("long_2000",)},
    REFERENCE,
)
SAME_FORM_PAGE = LongPage(
    "Traces among sentences of the same form",
    {f"{LENGTHS[family]:,} tokens": (family,) for family in SAME_FORM},
    RECOMMENDED,
)
SHUFFLED = ", shuffled weights"
# The end of a page's name, and the models and title of the page.
GROUPS_OF_MODELS = {
    **{model: ((model,), name) for model, name in NAMES.items()},
    "both": (MODELS, "both models"),
}
# Scores[map][metric][prompt], where a prompt is (model, family, file).
Key = tuple[str, str, str]
Scores = dict[str, dict[str, dict[Key, float]]]


def collect(half: str) -> Scores:
    """Return all scores that are defined."""
    found: Scores = defaultdict(lambda: defaultdict(dict))
    for model_name in MODELS:
        for family in (*FAMILIES, *LENGTHS):
            for path, record in records(model_name, half, family):
                rows = rows_of(path)
                ceiling = removal_row(record)
                if ceiling is not None and rows:
                    rows[CEILING] = ceiling
                for name, row in rows.items():
                    for metric, value in score(record, row).items():
                        # What single removals explain is what the others are compared with.
                        is_given = name == CEILING and metric == "explained"
                        if not math.isnan(value) and not is_given:
                            found[name][metric][model_name, family, path.name] = value
    return found


def wilson(values: np.ndarray) -> tuple[float, float]:
    """Return the 95 % interval of a share (Wilson), which has a width even if all values are equal."""
    n, p, z = len(values), values.mean(), 1.959964
    middle, half = (p + z * z / (2 * n)), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    # Rounding makes an end that is 0 slightly negative.
    return max(0.0, (middle - half) / (1 + z * z / n)), (middle + half) / (1 + z * z / n)


def interval(values: np.ndarray) -> tuple[float, float]:
    """Return the 95 % interval of a mean: Wilson's for shares, else percentiles of the bootstrap."""
    return wilson(values) if set(values.tolist()) <= {0.0, 1.0} else bootstrap_interval(values)


def cell(values: list[float]) -> str:
    """Return the mean with its interval, or nothing."""
    if not values:
        return ""
    array = np.array(values)
    low, high = interval(array)
    return f"{array.mean():.2f} [{low:.2f}, {high:.2f}]"


def percent(values: list[float]) -> str:
    """Return a share in percent with its interval, or nothing."""
    if not values:
        return ""
    share, low, high = (round(100 * each) for each in (np.mean(values), *interval(np.array(values))))
    return f"{share} [{low}, {high}]"


def difference(better: dict[Key, float], other: dict[Key, float]) -> str:
    """Return the mean of paired differences with its bootstrap interval, over common prompts."""
    common = sorted(set(better) & set(other))
    if not common:
        return ""
    values = np.array([better[key] - other[key] for key in common])
    low, high = bootstrap_interval(values)
    return f"{values.mean():.2f} [{low:.2f}, {high:.2f}]"


def make_table(scores: Scores, metric: str, models: tuple[str, ...]) -> str:
    """Return the table of one metric, the best map of all families first."""

    def chosen(name: str) -> dict[Key, float]:
        return {k: v for k, v in scores[name][metric].items() if k[0] in models and k[1] in FAMILIES}

    names = [name for name in scores if chosen(name) and not name.endswith(SHUFFLED)]
    families = [f for f in FAMILIES if any(key[1] == f for name in names for key in chosen(name))]
    names.sort(key=lambda name: -np.mean(list(chosen(name).values())))
    rows = []
    for name in names:
        values = chosen(name)
        row = {"map": f"**{name}**" if name == RECOMMENDED else name, "n": str(len(values))}
        row["all, 95 %"] = cell(list(values.values()))
        if len(families) > 1:
            for family in families:
                row[family] = cell([value for key, value in values.items() if key[1] == family])
        is_own = name == REFERENCE
        row[f"{LESS_THIS}, 95 %"] = "" if is_own else difference(chosen(REFERENCE), values)
        rows.append(row)
    return markdown_table(rows)


def count_prompts(scores: Scores, models: tuple[str, ...]) -> str:
    """Return how many prompts there are of each family."""
    keys = [key for key in scores["position"]["recovery"] if key[0] in models]
    counts = {family: sum(key[1] == family for key in keys) for family in FAMILIES}
    return ", ".join(f"{count} {family}" for family, count in counts.items() if count)


def versions() -> str:
    """Return the versions of what measured."""
    torch_version = metadata.version("torch").split("+")[0]
    return f"TransformerLens {metadata.version('transformer-lens')}, torch {torch_version}"


def page(scores: Scores, half: str, models: tuple[str, ...], title: str) -> str:
    """Return the page of all metrics."""
    halves = {"choose": "the half to choose on", "held_out": "held out"}
    lines = [
        f"# Traces on {title}, {halves[half]}",
        "",
        f"Written by `PYTHONPATH=.:demos python -m benchmarks.traces.table {half}`. Prompts: "
        f"{count_prompts(scores, models)}. Intervals are 95 %, over prompts: percentiles of the bootstrap, "
        "for shares of 0 and 1 Wilson's. The last column is the paired difference on common prompts.",
        "",
        f"Measured {date.today().isoformat()} with {versions()}.",
    ]
    for metric, (name, meaning) in TITLES.items():
        lines += ["", f"## {name[0].upper()}{name[1:]} of {title}, {halves[half]}", "", meaning, ""]
        lines.append(make_table(scores, metric, models))
    lines += ["", f"## Needles and conflicts of {title}, {halves[half]}", ""]
    lines += [f"Recovery, and paired differences: `{REFERENCE}` less this map.", ""]
    lines.append(retrieval_table(scores, models))
    shuffled = shuffled_table(scores, models)
    if shuffled:
        lines += ["", f"## Shuffled weights of {title}, {halves[half]}", ""]
        lines += ["The same prompts with the model's weights, and with shuffled ones.", "", shuffled]
    return "\n".join(lines) + "\n"


def retrieval_table(scores: Scores, models: tuple[str, ...]) -> str:
    """Return recovery and paired differences on needles and conflicts, the best map first."""

    def chosen(name: str, metric: str) -> dict[Key, float]:
        found = scores[name][metric].items()
        return {key: v for key, v in found if key[0] in models and key[1] in ("needle", "conflict")}

    rows = []
    for name in scores:
        values = chosen(name, "recovery")
        if values and not name.endswith(SHUFFLED):
            row = {"map": name, "n": str(len(values)), "recovery, 95 %": cell(list(values.values()))}
            for metric, title in (("recovery", "recovery"), ("right", "right source")):
                own = chosen(name, metric)
                row[f"{title}, difference"] = difference(chosen(REFERENCE, metric), own)
            rows.append((-np.mean(list(values.values())), row))
    return markdown_table([row for _, row in sorted(rows, key=lambda pair: pair[0])])


def shuffled_table(scores: Scores, models: tuple[str, ...]) -> str:
    """Return the scores of maps with and without shuffled weights, on the prompts that have both."""
    rows = []
    for name in sorted(each for each in scores if each.endswith(SHUFFLED)):
        own = name.removesuffix(SHUFFLED)
        row = {"map": own}
        for metric in LONG_METRICS:
            without, with_weights = scores[name][metric], scores[own][metric]
            keys = sorted(key for key in set(without) & set(with_weights) if key[0] in models)
            title = TITLES[metric][0]
            row.setdefault("n", str(len(keys)))
            row[title] = cell([with_weights[key] for key in keys])
            row[f"{title}, shuffled weights"] = cell([without[key] for key in keys])
        rows += [row] if row["n"] != "0" else []
    return markdown_table(rows) if rows else ""


def length_table(scores: Scores, metric: str, models: tuple[str, ...], of: LongPage = LONG_PAGE) -> str:
    """Return the table of one metric on long prompts, by their length, the best map first."""

    def chosen(name: str, families: Collection[str]) -> dict[Key, float]:
        return {k: v for k, v in scores[name][metric].items() if k[0] in models and k[1] in families}

    names = [name for name in scores if chosen(name, of.families)]
    names.sort(key=lambda name: -np.mean(list(chosen(name, of.families).values())))
    reference = chosen(of.reference, of.families)
    rows = []
    for name in names:
        row = {"map": f"**{name}**" if name == RECOMMENDED else name}
        for title, families in of.by_length.items():
            values = list(chosen(name, families).values())
            row |= {f"n, {title}": str(len(values)), title: cell(values)}
        is_own, own = name == of.reference, chosen(name, of.families)
        row[f"{of.reference} less this, all lengths"] = "" if is_own else difference(reference, own)
        rows.append(row)
    return markdown_table(rows)


def prompts_table(half: str, of: LongPage) -> str:
    """Return how many long prompts there are of each model, length and kind, and how many were tried."""
    rows = []
    for model_name in MODELS:
        for family in of.families:
            found = [record for _, record in records(model_name, half, family)]
            tried = folder(model_name, half, family) / "tried.txt"
            if not found:
                continue
            row = {
                "model": NAMES[model_name],
                "length": f"about {LENGTHS[family]:,} tokens",
                "n": str(len(found)),
            }
            row["tried"] = tried.read_text() if tried.exists() else ""
            for kind in ("needle", "conflict", "variables"):
                row[kind] = str(sum(record.family == kind for record in found))
            tokens = [len(record.tokens) for record in found]
            rows.append(row | {"fewest tokens": f"{min(tokens):,}", "most tokens": f"{max(tokens):,}"})
    return markdown_table(rows) if rows else ""


def length_page(scores: Scores, half: str, of: LongPage = LONG_PAGE) -> str:
    """Return a page of long prompts."""
    command = half if of is LONG_PAGE else f'{half} "" same_form'
    lines = [
        f"# {of.title}",
        "",
        f"Written by `PYTHONPATH=.:demos python -m benchmarks.traces.table {command}`. Intervals are 95 %, "
        "over prompts: percentiles of the bootstrap, for shares of 0 and 1 Wilson's. The last column is the "
        f"paired difference on common prompts. The recommended map is `{RECOMMENDED}`.",
        "",
        f"Measured {date.today().isoformat()} with {versions()}.",
        "",
        "## Long prompts",
        "",
        "Prompts that the model answers rightly, and how many candidates were tried.",
        "",
        prompts_table(half, of),
    ]
    for metric in LONG_METRICS:
        for models, title in GROUPS_OF_MODELS.values():
            name, meaning = TITLES[metric]
            lines += ["", f"## {name[0].upper()}{name[1:]} by length, {title}", "", meaning, ""]
            lines.append(length_table(scores, metric, models, of))
    return "\n".join(lines) + "\n"


def summary(scores: Scores) -> str:
    """Return the table of the README: how often some maps name the right source."""
    lines = [
        "# How often the right sentence is named",
        "",
        "Written by `PYTHONPATH=.:demos python -m benchmarks.traces.table held_out`. Held-out prompts of all "
        "families. The strongest sentence (in a conflict: passage) is the right one. "
        f"The recommended map is `{RECOMMENDED}`.",
        "",
        "## Right source, held out",
        "",
    ]
    rows = []
    for models, title in (*((((m,), NAMES[m])) for m in MODELS), (MODELS, "both")):
        common = [
            {
                key: value
                for key, value in scores[name]["right"].items()
                if key[0] in models and key[1] in FAMILIES
            }
            for name in COMPARED
        ]
        keys = set.intersection(*(set(each) for each in common))
        row = {"model": title, "n": str(len(keys))}
        for each, label in zip(common, COMPARED.values(), strict=True):
            values = [each[key] for key in sorted(keys)]
            row |= {label: cell(values), f"{label}, %": percent(values)}
        rows.append(row)
    return "\n".join([*lines, markdown_table(rows)]) + "\n"


# ------------------------------------------------------------------ rows of one method


def merge_page(recorded: str, fresh: str, method: str) -> str:
    """Return a recorded page with the rows of one method's maps of a fresh page; other rows stay.

    The line of the date names the method. A recorded row that the fresh page lacks stays. The row of
    `REFERENCE` must be the same in both: then both were measured in one way on the same prompts.

    Raises:
        ValueError: It is not.
    """
    tables = {heading: rows for heading, _, rows in _sections(fresh)}
    for heading, text, rows in _sections(recorded):
        if not rows or rows[0][0] != "map":
            continue
        header, new = rows[0], tables.get(heading, [])
        if new[1:] and new[0] != header:
            raise ValueError(f"{heading}: expected the columns {header}, got {new[0]}")
        before, after = ({_plain(row[0]): row[1:] for row in each[1:]} for each in (rows, new))
        if REFERENCE in after and after[REFERENCE] != before[REFERENCE]:
            raise ValueError(f"{heading}: {REFERENCE} was {before[REFERENCE]}, is {after[REFERENCE]}")
        own = {name for name in after if name.split(",")[0] == method and not name.startswith(REFERENCE)}
        merged = [[_plain(row[0]), *row[1:]] for row in rows[1:] if _plain(row[0]) not in own]
        for row in new[1:]:
            if _plain(row[0]) in own:
                lower = (i for i, each in enumerate(merged) if _first_score(each) < _first_score(row))
                merged.insert(next(lower, len(merged)), row)
        recorded = recorded.replace(
            text, markdown_table([dict(zip(header, row, strict=True)) for row in merged])
        )
    return re.sub(
        r"^(Measured [\d-]+)(?: \([^)]*\))?",
        rf"\1 ({method}: {date.today().isoformat()})",
        recorded,
        flags=re.MULTILINE,
    )


def merge_summary(recorded: str, scores: Scores) -> str:
    """Return the recorded table of the README with the recommended map's scores on the same prompts.

    Raises:
        ValueError: There are more or fewer prompts.
    """
    ((_, text, (header, *rows)),) = _sections(recorded)
    merged = [dict(zip(header, row, strict=True)) for row in rows]
    for row, (models, _) in zip(merged, GROUPS_OF_MODELS.values(), strict=True):
        found = scores[RECOMMENDED]["right"].items()
        values = [v for key, v in sorted(found) if key[0] in models and key[1] in FAMILIES]
        if str(len(values)) != row["n"]:
            raise ValueError(f"summary: expected {row['n']} prompts, got {len(values)}")
        label = COMPARED[RECOMMENDED]
        row |= {label: cell(values), f"{label}, %": percent(values)}
    named = re.sub(r"The recommended map is `[^`]*`", f"The recommended map is `{RECOMMENDED}`", recorded)
    return named.replace(text, markdown_table(merged))


def _sections(page: str) -> Iterator[tuple[str, str, list[list[str]]]]:
    """Yield the heading, the text and the rows (without the line below the header) of each table."""
    for section in re.split(r"^## ", page, flags=re.MULTILINE)[1:]:
        found = re.search(r"(?:^\|.*\n?)+", section, re.MULTILINE)
        lines = found[0].strip().split("\n") if found else []
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
        yield section.split("\n")[0], "\n".join(lines), rows[:1] + rows[2:]


def _plain(name: str) -> str:
    return name.replace("*", "")


def _first_score(row: list[str]) -> float:
    """Return the score that a table is sorted by: the first with an interval."""
    return next(float(cell.split()[0]) for cell in row if "[" in cell)


def merge(half: str, method: str) -> None:
    """Replace the rows of one method's maps in the pages of one half."""
    scores = collect(half)
    pages = {f"{half}_{name}": page(scores, half, *of) for name, of in GROUPS_OF_MODELS.items()}
    for name, fresh in pages.items():
        file = RESULTS / f"{name}.md"
        file.write_text(merge_page(file.read_text(encoding="utf-8"), fresh, method), encoding="utf-8")
    if half == "held_out":
        file = RESULTS / "summary.md"
        file.write_text(merge_summary(file.read_text(encoding="utf-8"), scores), encoding="utf-8")


def merge_long(half: str, method: str) -> None:
    """Replace the rows of one method's maps in the page of long prompts."""
    file = RESULTS / "long.md"
    fresh = length_page(collect(half), half)
    file.write_text(merge_page(file.read_text(encoding="utf-8"), fresh, method), encoding="utf-8")


def main(half: str, method: str = "", prompts: str = "short") -> None:
    """Write the pages of one half, or the rows of one method in those of its short or long prompts."""
    if prompts == "same_form":
        text = length_page(collect(half), half, SAME_FORM_PAGE)
        (RESULTS / "same_form.md").write_text(text, encoding="utf-8")
        return None
    if method:
        return merge_long(half, method) if prompts == "long" else merge(half, method)
    RESULTS.mkdir(exist_ok=True)
    scores = collect(half)
    for name, (models, title) in GROUPS_OF_MODELS.items():
        text = page(scores, half, models, title)
        (RESULTS / f"{half}_{name}.md").write_text(text, encoding="utf-8")
    if half == "held_out":
        (RESULTS / "long.md").write_text(length_page(scores, half), encoding="utf-8")
        (RESULTS / "summary.md").write_text(summary(scores), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
