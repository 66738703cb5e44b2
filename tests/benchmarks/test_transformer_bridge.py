"""Test that the faults of TransformerBridge are still there, and that each issue has its program and output.

A failing program is good news: TransformerLens has mended the fault. Its issue and program are then deleted,
and perhaps an entry leaves `lens_mix/_classes/known_faults.py`.
"""

from __future__ import annotations

import re
import runpy
import types
from pathlib import Path

import pytest

from lens_mix._classes.model_classes import transformer_lens_version
from tests.demos.tiny_folder import save_tiny_llama
from tests.tiny_models import available, bridge

FOLDER = Path(__file__).parents[2] / "benchmarks" / "transformer_bridge"
README = (FOLDER / "README.md").read_text(encoding="utf-8")
PROGRAMS = sorted(FOLDER.glob("*.py"))
ISSUES = sorted(FOLDER.glob("[0-9]*.md"))
_NUMBER = re.compile(r"\d+(?:\.\d+)?")

each_program = pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.stem)
each_issue = pytest.mark.parametrize("issue", ISSUES, ids=lambda issue: issue.stem)


def read_block(issue: Path, language: str) -> str:
    (block,) = re.findall(rf"^```{language}\n(.*?)^```$", issue.read_text(encoding="utf-8"), re.M | re.S)
    return block


def test_every_program_has_an_issue() -> None:
    assert [program.stem for program in PROGRAMS] == [issue.stem for issue in ISSUES]


@each_issue
def test_an_issue_has_its_program_and_the_parts_of_the_template(issue: Path) -> None:
    text = issue.read_text(encoding="utf-8")
    assert read_block(issue, "python") == issue.with_suffix(".py").read_text(encoding="utf-8")
    headings = ["Describe the bug", "Code example", "System Info", "Additional context"]
    assert re.findall(r"^\*\*(.*?)\*\*$", text, re.MULTILINE) == headings
    for start in ("What happens", "Expected", "Why it matters", "Suggested fix", "Similar issues"):
        assert len(re.findall(rf"^{start}: \S", text, re.MULTILINE)) == 1, start


@each_issue
def test_the_table_has_the_title_of_the_issue(issue: Path) -> None:
    title = issue.read_text(encoding="utf-8").splitlines()[0].removeprefix("# [Bug Report] ")
    assert f"\n| [{title}]({issue.name}) |" in README


@each_program
def test_a_program_is_short_and_says_what_is_expected(program: Path) -> None:
    code = program.read_text(encoding="utf-8")
    assert len(code.splitlines()) <= 25
    assert "from_pretrained" not in code
    assert "expected" in code


@pytest.mark.skipif(transformer_lens_version() < (4, 3), reason="the faults are those of TransformerLens 4.3")
@pytest.mark.filterwarnings("ignore")
@each_program
def test_the_fault_is_still_there(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(program))
    printed = capsys.readouterr().out
    # Last digits may differ on another processor.
    shown = read_block(program.with_suffix(".md"), "text")
    assert _NUMBER.sub("#", printed) == _NUMBER.sub("#", shown)


@pytest.mark.skipif(not available(bridge, "llama"), reason="no TransformerBridge in this TransformerLens")
def test_the_code_of_the_entry_for_the_gallery_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformer_lens.model_bridge import TransformerBridge

    model = TransformerBridge.boot_transformers(str(save_tiny_llama(tmp_path)))
    loader = types.SimpleNamespace(boot_transformers=lambda name: model)
    monkeypatch.setattr("transformer_lens.model_bridge.TransformerBridge", loader)
    names: dict[str, object] = {}
    exec(compile(read_block(FOLDER / "gallery.md", "python"), "gallery.md", "exec"), names)
    assert set(names["maps"]) == {"attention", "value_zeroing"}  # type: ignore[call-overload]
