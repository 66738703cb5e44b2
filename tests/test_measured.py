"""Test that all quoted facts are in `measured.json`, and that no docstring or comment has a figure."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator

import pytest

from lens_mix import measured
from lens_mix.recommended import EVIDENCE
from tests.source_tree import LIBRARY

pytestmark = pytest.mark.once

# It finds a mean with its interval: 0.51 [0.46, 0.57], or 0.51 (0.46 to 0.57).
INTERVAL = re.compile(r"\d\.\d+ [\[(][-−]?\d*\.\d+(?:,| to) [-−]?\d*\.\d+[\])]")
# A text about a measurement names the model or the procedure.
MODEL = re.compile(r"SmolLM|Gemma 3 270M|MiniLM|rxnfp|flan-t5|held[- ]out|GFLOP|\bmeasured:")
FIGURE = re.compile(r"\d\.\d|\d ?%|\b\d+ ms\b")
# It finds by how much something is faster.
MANY = r"(?:\d|\b(?:two|three|four|five|ten|forty|hundred))"
SPEED = re.compile(rf"{MANY} times (?:as (?:fast|long)|slower|faster)")


def texts() -> Iterator[tuple[str, str]]:
    """Yield the place and the text of every docstring, and of all neighboring comments, of the library."""
    for path in sorted(LIBRARY.rglob("*.py")):
        source, name = path.read_text(), path.relative_to(LIBRARY).as_posix()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield name, ast.get_docstring(node) or ""
        lines: dict[int, str] = {}
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                line = token.start[0]
                lines[line] = f"{lines.pop(line - 1, '')} {token.string.lstrip('# ')}"
        yield from ((f"{name}:{line}", text) for line, text in lines.items())


def quotes_a_measurement(text: str) -> bool:
    measured_somewhere = any(FIGURE.search(part) for part in text.split("\n\n") if MODEL.search(part))
    return bool(INTERVAL.search(text) or SPEED.search(text) or measured_somewhere)


@pytest.mark.parametrize(
    ("text", "quotes"),
    [
        ("It had 0.51 [0.46, 0.57].", True),
        ("It had 0.51 (0.46 to 0.57).", True),
        ("The time of one row: 0.08 to 0.13 on SmolLM2-135M.", True),
        ("head by head, three times as fast", True),
        ("0.5 Ā_ij + 0.5 δ_ij, weights in [0.1, 0.5]", False),
        ("A note says where it is more than 10 % of that.", False),
    ],
)
def test_what_counts_as_a_measured_figure(text: str, quotes: bool) -> None:
    assert quotes_a_measurement(text) is quotes


def test_no_docstring_or_comment_quotes_a_measured_figure() -> None:
    found = [(where, text) for where, text in texts() if quotes_a_measurement(text)]
    assert [(where, text) for where, text in found] == []


def test_a_fact_has_its_interval_cases_and_origin() -> None:
    for name, fact in measured._read_facts().items():
        assert fact.n > 0, name
        assert fact.low is None or fact.low <= fact.value <= fact.high, name
        assert all((fact.score, fact.model, fact.cases, fact.date, fact.release, fact.command)), name


def test_a_sentence_has_score_model_cases_and_figures() -> None:
    first, second = EVIDENCE["token_patching"]
    facts = measured._read_facts()
    text = measured.sentence(first, second)
    for part in (facts[first].score, facts[first].model, str(facts[first]), str(facts[second])):
        assert part in text
    assert f"{facts[second].n} {facts[second].cases}: " in text
    assert re.search(r"\d\.\d\d \[\d\.\d\d, \d\.\d\d\]$", text)


def test_facts_of_one_sentence_have_the_same_score_and_model() -> None:
    facts = measured._read_facts()
    for names in EVIDENCE.values():
        assert len({(facts[name].score, facts[name].model) for name in names}) == 1
