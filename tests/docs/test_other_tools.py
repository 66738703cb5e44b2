"""Test that docs/guides/other_tools.md shows what benchmarks/peers/side_by_side.py ran and recorded."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.peers import side_by_side
from benchmarks.peers.side_by_side import ASKED, PROMPT, RECORD
from tests.demos.tiny_folder import save_tiny_llama
from tests.tiny_models import available, bridge

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guides" / "other_tools.md").read_text(encoding="utf-8")
RECORDED = RECORD.read_text(encoding="utf-8")
BLOCKS = re.compile(
    r"^```python\n(?P<code>.*?)^```\n\n```text\n(?P<output>.*?)^```", re.MULTILINE | re.DOTALL
)

each_tool = pytest.mark.parametrize("title", [title for title in ASKED if ":" not in title])


def read_section(text: str, title: str) -> str:
    """Return a section by its title, in which capitals do not count."""
    (found,) = re.findall(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", text, re.I | re.M | re.S)
    return found


@each_tool
def test_the_page_shows_the_record(title: str) -> None:
    page, record = (BLOCKS.search(read_section(text, title)) for text in (PAGE, RECORDED))
    assert page is not None
    assert record is not None
    assert page.groupdict() == record.groupdict()


@pytest.mark.parametrize("title", ASKED)
def test_the_record_is_of_the_code_as_it_is(title: str) -> None:
    record = BLOCKS.search(read_section(RECORDED, title))
    assert record is not None
    assert record["code"] == side_by_side.read_code(ASKED[title])


def test_all_read_the_prompt_of_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for text in (PAGE, readme):
        parts = re.findall(r'^ {4}"(My grand.*?)"\n {4}"(.*?)"$', text, re.MULTILINE)
        assert "".join(parts[0]) == PROMPT
    assert PROMPT in RECORDED


def test_versions_and_errors_that_the_page_names_are_recorded() -> None:
    assert "with transformers 5.24" in PAGE
    assert "transformers 5.24." in RECORDED
    assert "TypeError: " in read_section(RECORDED, "inseq: value_zeroing")


def test_the_code_of_lens_mix_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if not available(bridge, "llama"):
        pytest.skip("the page is about TransformerBridge")
    folder = save_tiny_llama(tmp_path, words=re.findall(r"\w+", PROMPT), layers=24)
    side_by_side.ask_lens_mix(str(folder), None, None, PROMPT)
    assert "layer 23 of 0 to 23" in capsys.readouterr().out
