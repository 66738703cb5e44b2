"""Test `lens-mix corpus` (lens_mix/cli.py)."""

from __future__ import annotations

import json
import os
import sys

import pytest

from lens_mix import corpus
from tests.demos.tiny_folder import save_tiny_llama
from tests.test_cli import called
from tests.tiny_models import available, bridge

pytest.importorskip("typer")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    if not available(bridge, "llama"):
        pytest.skip("no bridge in this TransformerLens")
    return save_tiny_llama(tmp_path_factory.mktemp("model"))


def test_a_corpus_in_two_processes(folder, tmp_path):
    prompts, out = tmp_path / "prompts.txt", tmp_path / "out"
    prompts.write_text("My grandmother was born in\n\nShe left the country\nall her life she cooked\n")
    options = ["corpus", folder, prompts, "--out", out, "--mean", "layer,key_kind", "--per-row"]
    options += ["--method", "attention", "--method", "value_norm", "--shard-size", 2, "--queries=-1"]
    first = called(*options, "--shard", "0/2")
    assert first.exit_code == 0, first.output
    assert "2 prompts, 0 of them failed; other processes have not finished" in first.output
    second = called(*options, "--shard", "1/2", "--json")
    assert second.exit_code == 0, second.output
    expected = {"out": str(out), "prompts": 1, "reused": 0, "failed": 0, "is_finished": True}
    assert json.loads(second.stdout) == expected
    assert len(corpus.load(out)) == 6
    assert [mixing.queries for _, _, mixing in corpus.maps(out, method="attention")] == [[5], [4], [5]]
    table = corpus.load(out, "layer_key_kind")
    assert set(table["method"]) == {"attention", "value_norm"}
    other = called(*options, "--layers", "0")
    assert other.exit_code == 2
    assert "options.layers: null there, [0] here" in " ".join(other.output.split())


def test_the_exit_code_says_that_prompts_failed(folder, tmp_path):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out"
    prompts.write_text('{"s": "She left the country", "cue": "country"}\n{"s": \n')
    options = [
        "corpus",
        folder,
        prompts,
        "--out",
        out,
        "--column",
        "s",
        "--field",
        "cue",
        "--mean",
        "layer,cue",
    ]
    found = called(*options, "--no-maps")
    assert found.exit_code == 3, found.output
    assert "2 prompts, 1 of them failed; all files are there" in found.output
    table = corpus.load(out)
    assert table["cue"].tolist()[0] == "country"
    assert "line 2: expected JSON" in table["error"][1]


def test_wrong_arguments_of_the_command_are_errors(folder, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("She left\n")
    for wrong, message in (
        (["--shard", "2/2"], "--shard: expected I/N"),
        (["--method", "attentoin"], "did you mean 'attention'"),
        (["--mean", "layr"], "expected some of"),
        (["--layers", "x"], "--layers: expected whole numbers"),
    ):
        found = called("corpus", folder, prompts, "--out", tmp_path / "out", *wrong)
        assert found.exit_code == 2, found.output
        assert message in found.output
    assert called("corpus", folder, tmp_path / "none.txt", "--out", tmp_path / "out").exit_code == 2


def test_actors_need_ray(folder, tmp_path, monkeypatch):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("She left\n")
    monkeypatch.setitem(sys.modules, "ray", None)
    found = called("corpus", folder, prompts, "--out", tmp_path / "out", "--actors", 2)
    assert found.exit_code == 2, found.output
    assert "actors= needs Ray: pip install 'lens_mix[ray]'" in found.output


def test_a_pipe_is_read_once_and_no_prompts_are_an_error(folder, tmp_path):
    def piped(data):
        reader, writer = os.pipe()
        os.write(writer, data)
        os.close(writer)
        return called("corpus", folder, f"/dev/fd/{reader}", "--out", tmp_path / "out")

    nothing = piped(b"\n")
    assert nothing.exit_code == 2, nothing.output
    assert "prompts: expected at least one prompt, got none in /dev/fd" in " ".join(nothing.output.split())
    assert not (tmp_path / "out").exists()
    found = piped("She left the country\r\nall her life\r\n".encode("utf-16"))
    assert found.exit_code == 0, found.output
    assert corpus.load(tmp_path / "out")["text"].tolist() == ["She left the country", "all her life"]
    empty = called("corpus", folder, tmp_path / "none.txt", "--out", "")
    assert empty.exit_code == 2, empty.output
