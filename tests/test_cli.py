from __future__ import annotations

import pytest

from tests.demos.tiny_folder import save_tiny_llama
from tests.tiny_models import available, bridge

pytest.importorskip("typer")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    if not available(bridge, "llama"):
        pytest.skip("no bridge in this TransformerLens")
    return save_tiny_llama(tmp_path_factory.mktemp("model"))


def called(*arguments):
    from typer.testing import CliRunner

    from lens_mix.cli import app

    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_support_and_check(folder):
    assert "value_zeroing" in called("support", folder).output
    assert "algebra: proven" in called("check", folder).output


def test_evaluate(folder, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("My grandmother was born in\n\nShe left the country with her\n")
    options = [
        "--methods",
        "attention,input_gradients",
        "--aggregations",
        "mean",
        "--resume",
        tmp_path / "r.jsonl",
    ]
    for out in ("board.md", "board.csv", "board.png"):
        found = called("evaluate", folder, "--prompts", prompts, *options, "--out", tmp_path / out)
        assert found.exit_code == 0, found.output
        assert "| input_gradients | - |" in found.output
        assert (tmp_path / out).stat().st_size > 0
    assert "| attention | mean |" in (tmp_path / "board.md").read_text()


def test_a_file_of_another_evaluation_is_refused_in_one_sentence(folder, tmp_path):
    prompts, path = tmp_path / "prompts.txt", tmp_path / "r.jsonl"
    prompts.write_text("She left the country with her\n")
    options = ["--prompts", prompts, "--aggregations", "mean", "--resume", path, "--methods"]
    assert called("evaluate", folder, *options, "attention").exit_code == 0
    found = called("evaluate", folder, *options, "value_zeroing")
    assert found.exit_code == 2
    assert "Traceback" not in found.output
    assert "resume" in found.output


def test_map_writes_a_page(folder, tmp_path):
    found = called("map", "My grandmother was born in", "--model", folder, "--out", tmp_path / "page.html")
    assert found.exit_code == 0, found.output
    assert "attention, value_zeroing, input_map" in found.output
    assert "<!DOCTYPE html>" in (tmp_path / "page.html").read_text()
    found = called("map", "She left", "--model", folder, "--method", "alti", "--out", tmp_path / "one.html")
    assert "one.html: alti" in found.output


def test_mistakes(folder, tmp_path):
    found = called("evaluate", folder)
    assert found.exit_code == 2
    assert "exactly one of" in found.output
    found = called("evaluate", folder, "--planted", 3, "--out", tmp_path / "x.docx")
    assert found.exit_code == 2
    assert ".md, .csv or .png" in found.output
    found = called("map", "She left", "--model", folder, "--method", "altii", "--out", tmp_path / "page.html")
    assert found.exit_code == 2
    assert "did you mean 'alti'" in found.output.replace("\n", " ")
    # before a model is looked for
    found = called("map", "She left", "--model", tmp_path / "no model", "--method", "altii")
    assert "did you mean 'alti'" in found.output.replace("\n", " ")
    found = called("map", "She left", "--model", folder, "--out", tmp_path / "none" / "page.html")
    assert found.exit_code == 2
