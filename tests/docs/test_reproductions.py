"""Test that the faults of TransformerBridge on the page are still there, and that it shows their programs.

A failing program is good news: TransformerLens has mended the fault. Its section then leaves the page,
and perhaps an entry leaves `lens_mix/_classes/known_faults.py`.
"""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from lens_mix._classes.model_classes import transformer_lens_version

PAGE = Path(__file__).parents[2] / "docs" / "neighbours" / "transformer_bridge.md"
TEXT = PAGE.read_text(encoding="utf-8")
PROGRAMS = sorted((PAGE.parent / "reproductions").glob("*.py"))
SECTIONS = dict(
    re.findall(
        r"^`docs/neighbours/reproductions/(\w+)\.py`:\n```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL
    )
)


def test_the_page_shows_every_program_as_it_is() -> None:
    programs = {program.stem: program.read_text(encoding="utf-8") for program in PROGRAMS}
    assert programs == SECTIONS


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.stem)
def test_a_program_is_short_and_says_what_is_expected(program: Path) -> None:
    code = program.read_text(encoding="utf-8")
    assert len(code.splitlines()) <= 25
    assert "from_pretrained" not in code
    assert "expected" in code


def test_every_section_answers_the_questions_of_an_issue() -> None:
    sections = re.split(r"^## ", TEXT, flags=re.MULTILINE)[1:-1]
    assert len(sections) == len(PROGRAMS)
    questions = ["Happens on", "What happens", "Expected", "Why it matters", "Suggested fix", "Known"]
    for section in sections:
        assert re.findall(r"^- \*\*(.*?):\*\*", section, re.MULTILINE) == questions, section.splitlines()[0]
        # The table at the top names the section.
        assert f"| {section.splitlines()[0]} |" in TEXT


@pytest.mark.skipif(transformer_lens_version() < (4, 3), reason="the faults are those of TransformerLens 4.3")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.stem)
def test_the_fault_is_still_there(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(program))
    assert "expected" in capsys.readouterr().out
