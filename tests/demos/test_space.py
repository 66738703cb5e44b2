"""Test the Space: its app answers over HTTP with the page of a tiny local model, or says what is wrong.

`make test-space` runs this file; elsewhere gradio is not installed, and only the files are tested.
"""

from __future__ import annotations

import html
import importlib.util
import os
import re
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.demos.tiny_folder import save_tiny_llama

ROOT = Path(__file__).parents[2]
SPACE = ROOT / "demos" / "space"
PROMPT = "My grandmother was born in Italy"
SECONDS = 120

pytestmark = pytest.mark.once


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Start the app on a free port as a user would, and return a client of it."""
    if importlib.util.find_spec("gradio") is None:
        pytest.skip("no gradio: make test-space")
    from gradio_client import Client

    folder = save_tiny_llama(tmp_path_factory.mktemp("llama"))
    log = tmp_path_factory.mktemp("log") / "space.log"
    settings = {"LENS_MIX_MODEL": str(folder), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with log.open("w") as output:
        app = subprocess.Popen(
            [sys.executable, SPACE / "app.py"],
            env={**os.environ, **settings, "PYTHONPATH": path},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield Client(_wait_for_address(app, log), verbose=False)
    finally:
        app.terminate()
        app.wait(SECONDS)


def _wait_for_address(app: subprocess.Popen[bytes], log: Path) -> str:
    started = time.monotonic()
    while time.monotonic() - started < SECONDS:
        text = log.read_text()
        found = re.search(r"http://127\.0\.0\.1:\d+", text)
        if found:
            return found[0]
        if app.poll() is not None:
            break
        time.sleep(0.2)
    raise AssertionError(f"the app did not start: {log.read_text()}")


def ask(
    client: Any, prompt: str = PROMPT, target: str = "", methods: tuple[str, ...] = ("attention",)
) -> tuple[str, str]:
    sentence, frame = client.predict(prompt, list(methods), target, api_name="/map")
    return sentence, frame


def read_page(frame: str) -> str:
    (page,) = re.findall(r'srcdoc="([^"]*)"', frame)
    return html.unescape(page)


def test_the_prediction_and_the_page_come_back(client: Any) -> None:
    sentence, frame = ask(client, methods=("input_map", "value_zeroing"))
    assert re.match(
        r"After ' Italy', the model predicts '.+' \(\d+%\)\. Explained: log probability of", sentence
    )
    assert "The strongest tokens by input_map: '" in sentence
    page = read_page(frame)
    assert page.startswith("<!DOCTYPE html>")
    assert "value_zeroing" in page
    # Nothing is fetched when the page is viewed, and the frame may not reach the site around it.
    assert not re.search(r"""(?:src|href)=["']?https?:|@import|url\(\s*["']?https?:""", page)
    assert re.search(r'sandbox="([^"]*)"', frame)[1] == "allow-scripts allow-downloads"


def test_a_target_is_explained_by_the_methods_that_have_one(client: Any) -> None:
    sentence, frame = ask(client, target=" Japan", methods=("attention", "gim", "input_map"))
    assert "The strongest tokens by attention" in sentence
    assert "probability of ' Japan'" in read_page(frame)


@pytest.mark.parametrize(
    ("prompt", "target", "methods", "expected"),
    [
        ("  ", "", ("attention",), "There is no prompt"),
        (PROMPT, "", (), "No method is chosen"),
        ("My grandmother " * 40, "", ("attention",), "tokens, more than the limit of 64. Shorten it."),
        (
            PROMPT,
            " Japan war",
            ("input_map",),
            "This can't be computed: token: expected the text of one token",
        ),
    ],
)
def test_a_mistake_is_a_sentence_without_a_page(
    client: Any, prompt: str, target: str, methods: tuple[str, ...], expected: str
) -> None:
    sentence, frame = ask(client, prompt, target, methods)
    assert expected in sentence
    assert frame == ""


def test_the_site_answers_without_a_font_of_another_server(client: Any) -> None:
    with urllib.request.urlopen(client.src, timeout=SECONDS) as response:
        assert b"fonts.googleapis.com/css" not in response.read()


def test_the_requirements_are_the_librarys_and_gradio() -> None:
    lines = [line for line in (SPACE / "requirements.txt").read_text().splitlines() if line[0] not in "#-"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    name = re.compile(r"[\w-]+")
    library = {d for d in project["dependencies"] if not d.startswith("transformer-lens")}
    assert library <= set(lines)
    assert {name.match(line)[0] for line in lines} == {
        "gradio",
        *(name.match(each)[0] for each in project["dependencies"]),
    }


def test_the_header_names_the_files_and_versions_of_the_space() -> None:
    header = (SPACE / "README.md").read_text(encoding="utf-8").split("---")[1]
    fields = dict(re.findall(r"^(\w+): (.+)$", header, re.MULTILINE))
    assert fields["sdk"] == "gradio"
    assert f"gradio=={fields['sdk_version']}\n" in (SPACE / "requirements.txt").read_text()
    assert f"gradio=={fields['sdk_version']}\n" in (ROOT / "constraints" / "space.txt").read_text()
    assert (SPACE / fields["app_file"]).exists()
    # The hub refuses longer ones.
    assert len(fields["short_description"]) <= 60
    (model,) = re.findall(r"^  - (.+)$", header, re.MULTILINE)
    assert f'MODEL = "{model}"' in (SPACE / "app.py").read_text(encoding="utf-8")
