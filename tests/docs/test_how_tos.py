"""Test that the README, the tutorial and every how-to run as they are written, and print what the page shows.

The pages run on tiny models in the usual loop. Their output is compared on the demo models, if these are on
this machine (`python -m tests.docs.how_tos` downloads them).
"""

from __future__ import annotations

import functools
import importlib.metadata
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import lens_mix as lm
from tests.demos.tiny_folder import save_tiny_classifier, save_tiny_dinov2, save_tiny_llama, save_tiny_t5
from tests.docs import how_tos
from tests.docs.how_tos import HOW_TOS, INDEX, PAGES, ROOT, TUTORIAL, Result, read_code, read_steps
from tests.tiny_models import available, bridge

_NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?")
# A new user has five minutes, and reads the page too. With a tiny model only the library's own work is left.
# These are seconds of one core, as other processes of the machine must not count.
_SECONDS, _SECONDS_TINY = 150, 30
# They take as long as all other pages together.
_LONG = {"many_sentences", "long_page"}

each_how_to = pytest.mark.parametrize("page", HOW_TOS, ids=lambda page: page.stem)
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


@pytest.fixture(scope="module")
def tiny_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the folders of tiny models that know the pages' words, by a piece of the name on the hub.

    The Llama has as many layers as SmolLM2, because pages name layers.
    """
    words = sorted({word for page in PAGES for word in re.findall(r"[^\W\d_]+", read_code(page))})
    return {
        "SmolLM2": save_tiny_llama(tmp_path_factory.mktemp("llama"), words, context=512, layers=30),
        "flan-t5": save_tiny_t5(tmp_path_factory.mktemp("t5"), words),
        "SST-2": save_tiny_classifier(tmp_path_factory.mktemp("classifier")),
        "dinov2": save_tiny_dinov2(tmp_path_factory.mktemp("dinov2"), layers=12),
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return how_tos.prepare(tmp_path)


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.slow if page.stem in _LONG else (), id=page.stem)
        for page in PAGES
    ],
)
def test_the_code_runs_as_it_is_written(page: Path, tiny_folders: dict[str, Path], folder: Path) -> None:
    skip_without_the_model(page)
    if page.stem == "speech":
        pytest.skip("a random model does not hear the word that the page asks for")
    began = time.process_time()
    results = how_tos.run(page, lambda name: find(tiny_folders, name), folder)
    assert time.process_time() - began < _SECONDS_TINY
    # A random model prints other numbers, but as many lines.
    for result, step in zip(results, read_steps(page), strict=True):
        # The notebook prints a picture, the page of the shell shows a part of what is printed, and the audit
        # prints a line for each source that it finds.
        if page.stem not in {"notebook", "shell", "audit"}:
            assert len(result.printed.splitlines()) == len((step.output or "").splitlines())
    if (check := CHECKS.get(page.stem)) is not None:
        check(results[-1], folder)


def test_the_code_leaves_the_loaders_as_they_were(tiny_folders: dict[str, Path], folder: Path) -> None:
    import webbrowser

    import transformers

    before = (transformers.AutoModelForSequenceClassification, webbrowser.open)
    how_tos.run(INDEX.parent / "heads.md", lambda name: find(tiny_folders, name), folder)
    assert (transformers.AutoModelForSequenceClassification, webbrowser.open) == before


def check_notebook(result: Result, folder: Path) -> None:
    shown = result.value._repr_html_()
    assert "<iframe" in shown
    assert "data:image/svg+xml" in result.printed
    # Nothing is loaded from elsewhere, so the file works without a network.
    for text in (shown, result.printed):
        assert not re.search(r"(?:src|href)\s*=\s*[\"']?https?://", text)


def check_long_page(result: Result, folder: Path) -> None:
    assert "<html" in Path(result.value).read_text(encoding="utf-8")[:200].lower()


def check_files(result: Result, folder: Path, files: tuple[str, ...]) -> None:
    assert all((folder / file).stat().st_size > 1000 for file in files)


def check_shell(result: Result, folder: Path) -> None:
    check_files(result, folder, ("map.html",))
    assert set(lm.corpus.load(folder / "maps", long=True)["method"]) == {"value_zeroing"}


# What a page makes besides its output.
CHECKS: dict[str, Callable[[Result, Path], None]] = {
    "tutorial": functools.partial(check_files, files=("italian.png", "italian.safetensors", "italian.html")),
    "read_a_map": functools.partial(check_files, files=("map.png",)),
    "notebook": check_notebook,
    "long_page": check_long_page,
    "save": functools.partial(
        check_files, files=("paris.pdf", "paris.png", "paris.csv", "paris.safetensors")
    ),
    "compare": functools.partial(check_files, files=("compare.png",)),
    "generation": functools.partial(check_files, files=("trace.html",)),
    "picture": functools.partial(check_files, files=("picture.png",)),
    "shell": check_shell,
}


# ---------------------------------------------------------------------- on the demo models


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trained")


@pytest.mark.slow
@each_page
def test_it_prints_what_the_page_shows(page: Path, folder: Path, trained: Path) -> None:
    skip_without_the_model(page)
    skip_without_the_demo_model(page)
    if re.search("lm.input_map|--method input_map", read_code(page)) and not available(bridge, "llama"):
        pytest.skip("lm.input_map runs another method without a TransformerBridge")
    began = time.process_time()
    results = how_tos.run(page, lambda name: how_tos.find_demo_model(name, trained), folder)
    assert time.process_time() - began < _SECONDS
    for result, step in zip(results, read_steps(page), strict=True):
        if step.output is not None:
            assert_same_output(result.printed, step.output)


def assert_same_output(printed: str, shown: str) -> None:
    """Compare two texts: words exactly, and numbers to about the last digit that is shown."""
    assert words_of(printed) == words_of(shown), printed
    for got, expected in zip(_NUMBER.findall(printed), _NUMBER.findall(shown), strict=True):
        digits = len(expected.partition(".")[2])
        assert float(got) == pytest.approx(float(expected), rel=1e-3, abs=1.1 * 10**-digits), printed


def words_of(text: str) -> list[str]:
    """Return a text's words, with # for each number."""
    return _NUMBER.sub("#", text).split()


def test_outputs_that_differ_are_noticed() -> None:
    shown = "layer 23, head 4: 0.0100 (99%)\n"
    assert_same_output("layer 23,  head 4: 0.0101 (98%)", shown)
    for wrong in ("layer 23, head 4: 0.0110 (99%)", "layer 25, head 4: 0.0100 (99%)", "layer 23, head 4"):
        with pytest.raises(AssertionError):
            assert_same_output(wrong, shown)


@pytest.mark.parametrize("page", [TUTORIAL, *HOW_TOS], ids=lambda page: page.stem)
def test_figures_of_the_text_are_those_of_the_output(page: Path) -> None:
    text = re.sub(
        r"^```.*?^```$|`[^`]*`", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
    )
    quoted = re.findall(r"(?<![\w.])(\d+(?:\.\d+)?)( %)|(?<![\w.])(?<!Python )(\d+\.\d+)(?! %)", text)
    printed = [float(number) for step in read_steps(page) for number in _NUMBER.findall(step.output or "")]
    for percentage, percent_sign, decimal in quoted:
        # The share of an interval is not measured.
        if percentage != "95":
            digits = len((percentage or decimal).partition(".")[2])
            rounded = {f"{number * (100 if percent_sign else 1):.{digits}f}" for number in printed}
            assert (percentage or decimal) in rounded, percentage or decimal


# ---------------------------------------------------------------------- the form of the pages


@each_how_to
def test_the_page_is_short(page: Path) -> None:
    (step,) = read_steps(page)
    text, lines = page.read_text(encoding="utf-8"), step.code.splitlines()
    assert len(lines) <= 15
    assert max(map(len, lines)) <= 110
    assert text.startswith("# ")
    assert "\nYou get" in text
    assert text.partition("**If it fails:**")[2].partition("**Next:**")[2].count("](") in (1, 2)
    assert len(text.split()) < 280


@each_how_to
def test_the_index_names_the_page(page: Path) -> None:
    assert f"({page.name})" in INDEX.read_text(encoding="utf-8")


@pytest.mark.parametrize("page", ["README.md", "docs/tutorial.md"])
def test_the_first_pages_link_to_the_index(page: str) -> None:
    assert "how_to/index.md" in (ROOT / page).read_text(encoding="utf-8")


# ---------------------------------------------------------------------- models


def find(folders: dict[str, Path], name: str) -> Path:
    """Return the folder of the tiny model for a model of the hub."""
    return next(folder for part, folder in folders.items() if part in name)


def skip_without_the_model(page: Path) -> None:
    """Skip a page whose kind of model this TransformerLens does not have."""
    code = read_code(page)
    is_old = int(importlib.metadata.version("transformer-lens").split(".")[0]) < 4
    if ("flan-t5" in code or "whisper" in code) and is_old:
        pytest.skip("TransformerBridge runs T5 and Whisper on TransformerLens 4")
    if "SST-2" in code and not available(bridge, "bert"):
        pytest.skip("no BERT with a tokenizer in this TransformerLens")
    if "dinov2" in code and not available(bridge, "vit"):
        pytest.skip("no pictures in this TransformerLens")
    if "lens-mix" in code:
        pytest.importorskip("typer")
        if not available(bridge, "llama"):
            pytest.skip("the page's output is that of a TransformerBridge")


def skip_without_the_demo_model(page: Path) -> None:
    """Skip a page whose demo model is not in the cache, as a test downloads nothing."""
    code, cache = read_code(page), how_tos.import_models().cache_folder()
    needed = {
        "SmolLM2": "SmolLM2-135M-Instruct-Q4_1",
        "flan-t5": "flan-t5-small-titler",
        "SST-2": "all-minilm-l6-v2",
        "dinov2": "dinov2-small",
        "whisper": "whisper-base",
    }
    for part, name in needed.items():
        if part in code and not (cache / name).is_dir():
            pytest.skip(f"the demo model {name} is not in {cache}")
