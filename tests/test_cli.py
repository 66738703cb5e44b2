from __future__ import annotations

import importlib.metadata
import json
import math
import re
import subprocess
import sys

import pytest
import torch

import lens_mix as lm
from lens_mix import registry
from lens_mix._blocks.cost import COSTS
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
    assert "algebra: verified" in called("check", folder).output


def test_evaluate(folder, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("My grandmother was born in\n\nShe left the country with her\n")
    options = ["--method", "attention", "--method", "input_gradients", "--aggregation", "mean"]
    options += ["--resume", tmp_path / "r.jsonl"]
    for out in ("board.md", "board.csv", "board.png"):
        found = called("evaluate", folder, "--prompts", prompts, *options, "--out", tmp_path / out)
        assert found.exit_code == 0, found.output
        assert "| input_gradients | - |" in found.output
        for control in ("random", "position"):
            assert f" '{control}' in partial_spearman: the best, " in found.output
        assert f"wrote {tmp_path / out}" in found.output
        assert (tmp_path / out).stat().st_size > 0
    assert "| attention | mean |" in (tmp_path / "board.md").read_text()


def test_a_file_of_another_evaluation_is_an_error_without_a_traceback(folder, tmp_path):
    prompts, path = tmp_path / "prompts.txt", tmp_path / "r.jsonl"
    prompts.write_text("She left the country with her\n")
    options = ["--prompts", prompts, "--aggregation", "mean", "--resume", path, "--method"]
    assert called("evaluate", folder, *options, "attention").exit_code == 0
    found = called("evaluate", folder, *options, "value_zeroing")
    assert found.exit_code == 2
    assert "Traceback" not in found.output
    assert "resume" in found.output


def test_map_prints_the_answer_and_writes_a_page(folder, tmp_path):
    found = called("map", folder, "My grandmother was born in", "--out", tmp_path / "page.html")
    assert found.exit_code == 0, found.output
    lines = found.output.splitlines()
    assert lines[0].endswith(", 6 tokens")
    assert str(folder) not in lines[0]
    assert lines[1].startswith("after ' in': ")
    titles = [line.split(":")[0] for line in lines]
    titles = [title for title in titles if title.split(",")[0] in registry.list_names()]
    assert titles == ["input_map, by token_patching", "attention", "value_zeroing"]
    assert f"wrote the page of all views: {tmp_path / 'page.html'}" in found.output
    assert "<!DOCTYPE html>" in (tmp_path / "page.html").read_text()


def test_map_as_json(folder):
    text = "My grandmother was born in"
    options = ["--method", "input_map", "--method", "alti", "--layers", "1,2", "--json"]
    found = called("map", folder, text, *options)
    assert found.exit_code == 0, found.output
    record = json.loads(found.stdout)
    m = lm.run(_model(folder), text, "alti", layers=[1, 2])
    assert record["tokens"] == m.tokens
    assert list(record["maps"]) == ["input_map", "alti"]
    alti = record["maps"]["alti"]
    assert alti["layers"] == [1, 2]
    (row,) = alti["rows"]
    assert (row["position"], row["token"]) == (5, " in")
    assert row["explained"]["prediction"] == m.explained[-1].prediction
    assert torch.allclose(torch.tensor(row["scores"]), m.scores[:, -1], atol=1e-6)
    shares = m.normalized().scores[:, -1]
    share, key = shares.mean(0).max(0)
    largest, index = shares[:, key].max(0)
    source = row["sources"][0]
    assert (source["position"], source["layer"]) == (key.item(), [1, 2][index])
    assert [source["share"], source["largest"]] == pytest.approx([share.item(), largest.item()], abs=1e-6)


def test_map_of_chosen_positions_and_heads(folder):
    arguments = ["map", folder, "My grandmother was born in", "--method", "attention", "--json"]
    record = json.loads(called(*arguments, "--queries", "1:3", "--per-head").stdout)
    rows = record["maps"]["attention"]["rows"]
    assert [row["position"] for row in rows] == [1, 2]
    assert [len(rows[0]["scores"]), len(rows[0]["scores"][0]), len(rows[0]["scores"][0][0])] == [3, 4, 6]
    arguments = ["map", folder, "She left", "--method", "gim"]
    record = json.loads(called(*arguments, "--queries", "all", "--json").stdout)
    assert [row["position"] for row in record["maps"]["gim"]["rows"]] == [0, 1, 2]
    text = called(*arguments, "--queries=-1,1").output
    assert [line.split(",")[0] for line in text.splitlines() if line.startswith("  at ")] == [
        "  at ·left (2)",
        "  at She (1)",
    ]


def test_map_of_a_text_and_of_one_token_against_another(folder):
    arguments = ["map", folder, "My grandmother was born in", "--method", "gim", "--json"]
    options = ["--queries", "grandmother", "--target", "Italy", "--against", "war"]
    record = json.loads(called(*arguments, *options).stdout)
    (row,) = record["maps"]["gim"]["rows"]
    assert row["token"] == " grandmother"
    assert re.fullmatch(r"logit of ' ?Italy' minus that of ' ?war'", row["explained"]["target"])
    assert "'fathers'" in error_of("map", folder, "She left", "--method", "attention", "--queries", "fathers")


def test_positions_and_layers_that_do_not_exist_are_named_as_options(folder):
    for option in ("--queries", "--layers"):
        error = error_of("map", folder, "She left", "--method", "attention", option, "99")
        assert error.startswith(f"lens-mix: {option}: ")


@pytest.fixture
def documents(tmp_path):
    """Return options with two documents in files; the first one's name is that of its file."""
    (tmp_path / "family.txt").write_text("My grandmother was born in Italy. She sang to us.\n")
    (tmp_path / "war.txt").write_text("He left the country after war.")
    options = ["--document", tmp_path / "family.txt", "--document", f"the war={tmp_path / 'war.txt'}"]
    return [*options, "--question", "They live in"]


def test_trace_prints_the_sources_of_each_sentence(folder, documents, tmp_path):
    out = tmp_path / "page.html"
    found = called("trace", folder, *documents, "--answer", " Italy. She sang.", "--out", out)
    assert found.exit_code == 0, found.output
    assert str(folder) not in found.output
    prompt = lm.Documents(
        {
            "family": "My grandmother was born in Italy. She sang to us.",
            "the war": "He left the country after war.",
        },
        question="They live in",
    )
    t = lm.trace(_model(folder), prompt, answer=" Italy. She sang.")
    assert len(t.spans) == 2
    for span in t.spans:
        assert repr(span.top(5)) in found.output
    assert f"{t.n_prompt} prompt tokens, {t.reading.n_written} written: Italy. She sang." in found.output
    assert f"wrote the page of the trace: {out}" in found.output
    assert "<!DOCTYPE html>" in out.read_text()


def test_trace_as_json_with_options(folder, documents):
    options = [
        "--answer",
        " Italy. She sang.",
        "--span",
        "Italy",
        "--span",
        "She sang",
        "--sources",
        "document",
    ]
    more = ["--top", 2, "--verify", "--method", "attention", "--aggregation", "max", "--json"]
    found = called("trace", folder, *documents, *options, *more)
    assert found.exit_code == 0, found.output
    record = json.loads(found.stdout)
    assert (record["method"], record["unit"]) == ("attention, max", "document")
    assert [span["text"].strip() for span in record["spans"]] == ["Italy", "She sang"]
    for span in record["spans"]:
        assert "".join(record["tokens"][place] for place in span["positions"]) == span["text"]
        assert span["positions"][0] >= record["prompt_tokens"]
        assert math.log(span["probability"]) == pytest.approx(span["log_probability"])
        first, second = span["sources"]
        assert abs(first["score"]) >= abs(second["score"])
        assert {first["name"], second["name"]} < {"family", "the war", "question"}
        assert isinstance(first["loss"], float)
        assert record["tokens"][first["positions"][0]].strip() == first["text"].split()[0]


def test_trace_of_a_text_that_the_model_continues(folder, tmp_path, monkeypatch):
    from lens_mix.view.page import Page

    monkeypatch.setattr(Page, "open", lambda self: tmp_path / "opened.html", raising=False)
    found = called(
        "trace", folder, "My grandmother was born in", "--generate", 3, "--sources", "word", "--open"
    )
    assert found.exit_code == 0, found.output
    assert "6 prompt tokens, " in found.output
    assert f"wrote the page of the trace: {tmp_path / 'opened.html'}" in found.output
    found = called("trace", folder, "My grandmother was born in", "--generate", 3)
    assert "--open shows the page of the trace" in found.output


ANSWER = " Italy. She sang."


@pytest.fixture
def texts(tmp_path):
    """Return a folder with two documents and the question about them."""
    path = tmp_path / "documents"
    path.mkdir()
    (path / "family.txt").write_text("My grandmother was born in Italy. She sang to us.\n")
    (path / "war.MD").write_text("He left the country after war.")
    (path / ".hidden.txt").write_text("They live in Japan.")
    return path


def audit_of(folder, names=("family", "war"), **options):
    documents = ("My grandmother was born in Italy. She sang to us.", "He left the country after war.")
    prompt = lm.Documents(dict(zip(names, documents, strict=True)), question="They live in")
    return lm.audit(_model(folder), prompt, answer=ANSWER, **options)


def test_audit_prints_what_each_claim_rests_on(folder, texts, tmp_path):
    out = tmp_path / "page.html"
    options = ["--question", "They live in", "--answer", ANSWER, "--fail-on", "none"]
    found = called("audit", folder, texts, *options, "--out", out)
    assert found.exit_code == 0, found.output
    assert str(folder) not in found.output
    audit = audit_of(folder)
    assert len(audit) == 2
    assert repr(audit) in found.output
    assert "written: Italy. She sang.\ndocuments: family, war\n\n2 claims: " in found.output
    assert f"wrote the page of the trace: {out}" in found.output
    assert "<!DOCTYPE html>" in out.read_text()
    assert "not read" not in found.output


def test_audit_as_json_and_as_markdown(folder, texts, tmp_path):
    (tmp_path / "answer.txt").write_text(ANSWER + "\n")
    files = [f"the family={texts / 'family.txt'}", texts / "war.MD"]
    options = ["--question", "They live in", "--answer-file", tmp_path / "answer.txt", "--fail-on", "none"]
    more = ["--span", "Italy", "--span", "She", "--keep", "He left", "--passes", 9, "--sources", "document"]
    audit = audit_of(
        folder,
        ("the family", "war"),
        spans=["Italy", "She"],
        keep=["He left"],
        passes=9,
        sources="document",
    )
    assert [claim.span.text.strip() for claim in audit] == ["Italy", "She"]
    assert [source.name for source in audit.kept] == ["war"]
    found = called("audit", folder, *files, *options, *more, "--json")
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout) == json.loads(audit.to_json())
    found = called("audit", folder, *files, *options, *more, "--markdown")
    assert found.stdout == audit.to_markdown() + "\n"


def test_a_claim_with_a_verdict_of_fail_on_is_the_exit_code_1(folder, texts):
    from lens_mix.traces.claims import VERDICTS

    options = ["--question", "They live in", "--answer", ANSWER]
    verdicts = [claim.verdict for claim in audit_of(folder)]
    others = ",".join(set(VERDICTS) - set(verdicts))
    first = verdicts[0].replace(" ", "-").upper()
    for chosen in (["--fail-on", others], ["--fail-on", others, "--fail-on", first], []):
        failing = [verdict for verdict in verdicts if verdict in ("from memory", "unclear")]
        if chosen:
            failing = [verdict for verdict in verdicts if verdict == verdicts[0]] if len(chosen) > 2 else []
        found = called("audit", folder, texts, *options, *chosen)
        assert found.exit_code == bool(failing), found.output
        if failing:
            line = f"lens-mix: {len(failing)} of 2 claims failed (--fail-on): "
            assert line in found.output
            assert f"{failing.count(failing[0])} {failing[0]}" in found.output.split(line)[1]


def test_texts_that_an_audit_does_not_find_are_named_as_options(folder, texts):
    options = ["audit", folder, texts, "--answer", ANSWER]
    assert "--span: expected a text that was written, got 'Japan'" in error_of(*options, "--span", "Japan")
    assert "--keep: expected texts of the prompt, got 'Japan'" in error_of(*options, "--keep", "Japan")


def test_an_audit_of_what_the_model_writes(folder, texts, tmp_path, monkeypatch):
    from lens_mix.view.page import Page

    (texts / "scan.pdf").write_bytes(b"%PDF")
    monkeypatch.setattr(Page, "open", lambda self: tmp_path / "opened.html", raising=False)
    found = called("audit", folder, texts, "--generate", 3, "--open", "--fail-on", "none")
    assert found.exit_code == 0, found.output
    assert ", 3 written: " in found.output
    assert (
        f"DOCUMENTS: not read in {texts}: scan.pdf (expected files that end in .txt or .md)" in found.output
    )
    assert f"wrote the page of the trace: {tmp_path / 'opened.html'}" in found.output


def test_an_interrupted_audit_is_no_failed_claim(folder, texts, monkeypatch):
    from lens_mix.traces.auditor import Auditor

    monkeypatch.setattr(Auditor, "audit", raising(KeyboardInterrupt()))
    found = called("audit", folder, texts, "--answer", ANSWER)
    assert found.exit_code == 130
    assert "claims" not in found.output
    monkeypatch.setattr(Auditor, "audit", raising(KeyError("a bug")))
    assert called("audit", folder, texts, "--answer", ANSWER).exit_code == 4


def test_the_help_of_audit_has_the_verdicts_and_the_budget():
    from lens_mix.traces.audit import PASSES_PER_CLAIM
    from lens_mix.traces.claims import VERDICTS

    text = "".join(called("audit", "--help").output.split())
    assert "supported,redundant,conflicting,from-memoryorunclear;" in text
    assert set(VERDICTS) == {"supported", "redundant", "conflicting", "from memory", "unclear"}
    assert f"Default:{PASSES_PER_CLAIM}foreachclaim." in text


def test_a_folder_of_documents_is_traced(folder, texts):
    found = called("trace", folder, "--document", texts, "--answer", ANSWER, "--sources", "document")
    assert found.exit_code == 0, found.output
    assert "  family: 'My grandmother" in found.output
    assert "  war: 'He left" in found.output


def test_map_opens_a_page(folder, tmp_path, monkeypatch):
    from lens_mix.view.page import Page

    monkeypatch.setattr(Page, "open", lambda self: tmp_path / "opened.html", raising=False)
    found = called("map", folder, "She left", "--method", "alti", "--open")
    assert f"wrote the page of all views: {tmp_path / 'opened.html'}" in found.output


def test_methods_are_listed_with_their_groups_and_costs():
    found = called("methods").output
    assert found.startswith("Recommended\n  input_map ")
    records = json.loads(called("methods", "--json").stdout)
    assert [record["name"] for record in records] == registry.list_names()
    for record in records:
        assert record["says"] in found
        assert record["group"] in found
        cost = registry.describe(record["name"]).cost
        assert record["cost"] == (cost and str(cost))
        assert cost is None or str(cost) in found


@pytest.mark.once
def test_lists_and_help_import_no_large_package():
    """Run the commands that need no model in a new process, as a shell does."""
    code = (
        "import sys\nfrom lens_mix.cli import app\n"
        "for line in sys.argv[1:]:\n"
        "    try:\n        app(line.split())\n    except SystemExit as end:\n        assert not end.code\n"
        "print(*{name.split('.')[0] for name in sys.modules}, file=sys.stderr)"
    )
    commands = ["methods", "methods --json", "--help", "map --help", "corpus --help", "--version"]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *commands], capture_output=True, text=True, check=True
    )
    large = {"torch", "transformers", "transformer_lens", "matplotlib", "pandas", "numpy", "gradio"}
    assert not large & set(done.stderr.split())
    assert "value_zeroing" in done.stdout


def test_methods_of_installed_packages_are_listed(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: ["one"])
    monkeypatch.setattr(registry, "list_names", lambda: ["attention"])
    assert [record["name"] for record in json.loads(called("methods", "--json").stdout)] == ["attention"]


def test_loading_says_so_where_a_person_can_see_it(loaded, monkeypatch):
    from lens_mix import cli

    monkeypatch.setattr(cli, "_progress", lambda: True)
    assert called("check", "folder/of-a-model").output.startswith("loading ")
    monkeypatch.setattr(cli, "_progress", lambda: None)
    assert "loading" not in called("check", "folder/of-a-model").output


def test_a_method_without_a_recorded_cost_is_listed_with_an_unknown_one(monkeypatch):
    monkeypatch.delitem(COSTS, "attention")
    assert re.search(r"\n  attention .*\n +an unknown number of forward passes\n", called("methods").output)
    (record,) = (one for one in json.loads(called("methods", "--json").stdout) if one["name"] == "attention")
    assert record["cost"] is None


def test_the_version():
    found = called("--version")
    assert (found.exit_code, found.output) == (0, f"lens-mix {lm.__version__}\n")


def _model(folder):
    from lens_mix.cli import _load

    return _load(str(folder))


@pytest.fixture
def loaded(model, monkeypatch):
    """Load the tests' decoder for every name, so that the commands can be tested on every release."""
    from lens_mix import cli

    monkeypatch.setattr(cli, "_load_unchecked", lambda name: model)


def test_every_command_on_a_model(loaded, tmp_path):
    assert "value_zeroing" in called("support", "any").output
    assert "algebra: verified" in called("check", "any").output
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("b c d e f\n\nc d e f b\n")
    for out in ("board.md", "board.csv", "board.png"):
        options = ["--method", "attention", "--aggregation", "mean", "--out", tmp_path / out]
        found = called("evaluate", "any", "--prompts", prompts, *options)
        assert found.exit_code == 0, found.output
        assert (tmp_path / out).stat().st_size > 0
    options = ["--prompts", prompts, "--method", "input_map", "--aggregation", "mean"]
    found = called("evaluate", "any", *options)
    assert "input_map is " in found.output
    record = json.loads(called("evaluate", "any", *options, "--json").stdout)
    assert {"random", "position"} < {row["method"] for row in record["table"]}
    assert len(record["verdict"]) == 2
    supported = json.loads(called("support", "any", "--json").stdout)["methods"]
    assert {"name": "value_zeroing", "engine": "algebra", "reason": None} in supported
    checked = json.loads(called("check", "any", "--json").stdout)
    assert checked["ok"] is True
    assert {"layer", "component", "error"} < set(checked["components"][0])
    found = called("map", "any", "b c d", "--method", "alti", "--out", tmp_path / "page.html")
    assert found.exit_code == 0, found.output
    assert found.output.endswith("page.html\n")
    assert (tmp_path / "page.html").read_text().startswith("<!DOCTYPE html>")


@pytest.mark.parametrize(
    "command", ["", "map", "trace", "audit", "methods", "serve", "support", "check", "evaluate"]
)
def test_help(command):
    found = called(*command.split(), "--help")
    assert found.exit_code == 0
    assert "Usage:" in found.output
    assert called().exit_code == 0
    assert "evaluate" in called().output


def error_of(*arguments):
    """Return the one line that a failing command prints."""
    found = called(*arguments)
    assert found.exit_code in (2, 4, 130), found.output
    (line,) = found.output.splitlines()
    assert line.startswith("lens-mix: ")
    assert len(line) < 700
    return line


def test_arguments_that_are_wrong():
    for arguments, words in {
        ("nonsense",): "nonsense",
        ("--nonsense",): "nonsense",
        ("support",): "Missing argument",
        ("support", "m", "n"): "n",
        ("map",): "Missing argument",
        ("map", "m"): "Missing argument",
        ("map", "m", "b c", "--method"): "--method",
        ("map", "m", "b c", "--method", ""): "method",
        ("map", "m", "b c", "--method", "altii"): "did you mean 'alti'",
        ("map", "m", "b c", "--method", "input_map", "--method", "input_map"): "got input_map twice",
        ("map", "m", "b c", "--method", "alti", "--per-head"): "whose maps have heads (attention, ",
        ("map", "m", "b c", "--queries", "1:2:3"): "--queries: expected whole numbers such as 0,5,-1",
        ("map", "m", "b c", "--method", "attention", "--target", "d"): "--target: expected a method that",
        ("map", "m", "b c", "--method", "alti", "--against", "d"): "got alti, without a target",
        ("map", "m", "b c", "--layers", "1:2:3"): "--layers: expected whole numbers",
        ("map", "m", "b c", "--layers", ""): "--layers: expected whole numbers",
        ("map", "m", ""): "TEXT: expected a prompt, got ''",
        ("map", "m", " \n\t\u3000"): "TEXT: expected a prompt",
        ("trace", "m"): "TEXT, --document: expected a prompt or documents, got neither",
        ("trace", "m", " "): "TEXT: expected a prompt",
        ("trace", "m", "b", "--document", "x"): "TEXT, --document: expected one of the two, got both",
        ("trace", "m", "b", "--question", "c"): "--question, --instruction: expected documents",
        (
            "trace",
            "m",
            "b",
            "--answer",
            "c",
            "--generate",
            "3",
        ): "--answer, --generate: expected one of the two",
        ("trace", "m", "b", "--answer", " "): "--answer: expected what was written",
        ("trace", "m", "b", "--generate", "0"): "--generate",
        ("trace", "m", "b", "--top", "0"): "--top",
        ("trace", "m", "b", "--sources", "line"): "--sources: expected",
        ("trace", "m", "b", "--method", "altii"): "did you mean 'alti'",
        ("trace", "m", "b", "--method", "input_map"): "--method: expected a name",
        ("trace", "m", "b", "--aggregation", "middle"): "middle",
        ("audit", "m"): "Missing argument 'DOCUMENTS",
        ("audit", "m", "x", "--passes", "1"): "--passes",
        ("serve", "m", "--port", "port"): "--port",
        ("serve", "m", "--port", "65536"): "65535",
        ("serve", "m", "--port", "0"): "--port",
        ("serve", "m", "--tokens", "0"): "--tokens",
        ("serve", "m", "--tokens", "1.5"): "--tokens",
        ("serve", "m", "--trace-tokens", "0"): "--trace-tokens",
        ("evaluate", "m"): "exactly one of --prompts, --blimp, --planted; got none",
        ("evaluate", "m", "--planted", "-3"): "--planted",
        ("evaluate", "m", "--planted", "three"): "--planted",
        ("evaluate", "m", "--planted", "3", "--method", ""): "method",
        ("evaluate", "m", "--planted", "3", "--method", "altii"): "did you mean 'alti'",
        ("evaluate", "m", "--planted", "3", "--out", "board.docx"): ".md, .csv or .png",
    }.items():
        assert words in error_of(*arguments), arguments


def test_files_that_are_wrong(loaded, tmp_path):
    (tmp_path / "blank.txt").write_text(" \n\n")
    (tmp_path / "binary.bin").write_bytes(bytes(range(256)))
    (tmp_path / "binary.txt").write_bytes(bytes(range(256)))
    (tmp_path / "list.jsonl").write_text("[1, 2]\n")
    (tmp_path / "other.jsonl").write_text('{"UID": "other"}\n')
    (tmp_path / "half.jsonl").write_text('{"UID": "a", "one_prefix_method": true}\n')
    (tmp_path / "prompts.txt").write_text("b c d e\n")
    (tmp_path / "folder.md").mkdir()
    none, evaluate = (
        tmp_path / "none",
        ("evaluate", "any", "--method", "attention", "--aggregation", "mean"),
    )
    prompts = ("--prompts", tmp_path / "prompts.txt")
    audit = ("audit", "any", tmp_path / "prompts.txt")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "scan.pdf").write_bytes(b"%PDF")
    for arguments, words in {
        ("map", "any", "b", "--out", none / "page.html"): f"got {none}",
        ("map", "any", "b", "--out", tmp_path): "the folder",
        ("map", "any", "b", "--out", ""): "--out",
        ("trace", "any", "b", "--out", tmp_path): "the folder",
        ("trace", "any", "--document", none): f"--document: expected a file that exists, got {none}",
        ("trace", "any", "--document", f"a={none}"): f"--document: expected a file that exists, got {none}",
        ("trace", "any", "--document", f"a={tmp_path}"): "the folder",
        ("trace", "any", "--document", ""): "the folder",
        ("trace", "any", "--document", tmp_path / "folder.md"): "end in .txt or .md, got",
        ("trace", "any", "b", "--answer-file", none): "--answer-file: expected a file that exists",
        ("trace", "any", "b", "--answer-file", tmp_path / "blank.txt"): "--answer-file: expected what was",
        ("trace", "any", "--document", tmp_path / "blank.txt"): "NAME=FILE with a name and a text",
        ("trace", "any", "--document", f"={tmp_path / 'prompts.txt'}"): "NAME=FILE with a name and a text",
        ("trace", "any", "--document", tmp_path / "binary.bin"): "UTF-8",
        (
            *("trace", "any", "--document", tmp_path / "prompts.txt"),
            *("--document", f"prompts={tmp_path / 'list.jsonl'}"),
        ): "different names, got 'prompts' twice",
        ("audit", "any", none): f"DOCUMENTS: expected a file that exists, got {none}",
        ("audit", "any", tmp_path / "folder.md"): "folder.md with nothing",
        ("audit", "any", tmp_path / "blank.txt"): "blank.txt, which is empty",
        ("audit", "any", tmp_path / "folder"): "end in .txt or .md, got",
        (*audit, "--fail-on", "maybe"): "--fail-on: expected one of ['supported', ",
        (*audit, "--fail-on", ""): "--fail-on: expected one of",
        (*audit, "--fail-on", "none,unclear"): "--fail-on: expected none alone",
        (*audit, "--json", "--markdown"): "--json, --markdown: expected one of the two",
        (*audit, "--sources", "line"): "--sources: expected",
        (*audit, "--out", tmp_path): "the folder",
        (*audit, "--answer", "b", "--answer-file", "c"): "--answer, --answer-file: expected one of the two",
        (*evaluate, "--prompts", none): f"got {none}",
        (*evaluate, "--prompts", tmp_path): "the folder",
        (*evaluate, "--prompts", tmp_path / "blank.txt"): "at least one prompt, got none in",
        (*evaluate, "--prompts", tmp_path / "binary.bin"): "expected a file that ends in .txt",
        (*evaluate, "--prompts", tmp_path / "binary.txt"): "--prompts: prompt 0",
        (*evaluate, "--blimp", none): f"got {none}",
        (*evaluate, "--blimp", tmp_path): "the folder",
        (*evaluate, "--blimp", tmp_path / "blank.txt"): "whose line 1",
        (*evaluate, "--blimp", tmp_path / "binary.bin"): "utf-8",
        (*evaluate, "--blimp", tmp_path / "prompts.txt"): "whose line 1",
        (*evaluate, "--blimp", tmp_path / "list.jsonl"): "whose line 1",
        (*evaluate, "--blimp", tmp_path / "half.jsonl"): "one_prefix_method",
        (*evaluate, "--blimp", tmp_path / "other.jsonl"): "one_prefix_method",
        (*evaluate, *prompts, "--out", none / "board.md"): f"got {none}",
        (*evaluate, *prompts, "--out", tmp_path / "folder.md"): "the folder",
        (*evaluate, *prompts, "--resume", tmp_path): "the folder",
        (*evaluate, *prompts, "--resume", tmp_path / "list.jsonl"): "resume",
        (*evaluate, *prompts, "--aggregation", "middle"): "middle",
    }.items():
        assert words in error_of(*arguments), arguments


def test_an_unwritable_path_is_an_error_before_the_model_is_loaded(tmp_path, monkeypatch):
    from lens_mix import cli

    monkeypatch.setattr(cli.os, "access", lambda path, mode: False)
    monkeypatch.setattr(cli, "_load_unchecked", lambda name: pytest.fail("loaded"))
    assert "can be written" in error_of("map", "any", "b", "--out", tmp_path / "page.html")
    assert "can be written" in error_of("evaluate", "any", "--planted", 3, "--out", tmp_path / "board.md")


def test_models_that_cannot_be_loaded(tmp_path):
    """Names are not looked up, because all tests run offline."""
    from safetensors import SafetensorError

    (tmp_path / "file").write_text("no model")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    for name in (
        "nobody/nothing",
        "",
        "..",
        tmp_path / "none",
        tmp_path,
        tmp_path / "file",
        tmp_path / "broken",
    ):
        for arguments in (("support", name), ("map", name, "b c")):
            assert (
                f"MODEL: expected the name or the folder of a model that can be loaded, got {str(name)!r}"
                in (
                    error_of(
                        *arguments, *(("--out", tmp_path / "page.html") if arguments[0] == "map" else ())
                    )
                )
            )
    for command, more in (("check", ()), ("evaluate", ("--planted", 3))):
        assert "MODEL" in error_of(command, "nobody/nothing", *more)
    for problem in (SafetensorError("header too large"), MemoryError(), RuntimeError("size\nmismatch")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("lens_mix.cli._load_unchecked", raising(problem))
            assert type(problem).__name__ in error_of("support", "any")


def test_serve_without_gradio_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "gradio", None)
    monkeypatch.delitem(sys.modules, "lens_mix.app", raising=False)
    expected = "lens-mix: the app needs gradio: pip install 'lens_mix[serve]'"
    assert error_of("serve", "any") == expected


def raising(problem):
    def raise_it(*_):
        raise problem

    return raise_it


def test_a_bug_is_one_line_and_a_variable_shows_its_traceback(monkeypatch):
    from lens_mix import cli, supported_methods

    monkeypatch.setattr(cli, "_load_unchecked", lambda name: None)
    monkeypatch.setattr(supported_methods, "support", raising(KeyError("a bug")))
    assert error_of("support", "any").startswith("lens-mix: KeyError: 'a bug' (LENS_MIX_DEBUG=1")
    assert called("support", "any").exit_code == 4
    monkeypatch.setenv("LENS_MIX_DEBUG", "1")
    found = called("support", "any")
    assert isinstance(found.exception, KeyError)


def test_ctrl_c_prints_no_traceback(monkeypatch):
    from lens_mix import cli

    monkeypatch.setattr(cli, "_load_unchecked", raising(KeyboardInterrupt()))
    found = called("support", "any")
    assert found.exit_code == 130
    assert len(found.output.splitlines()) <= 2


def test_the_command_writes_one_line_on_the_standard_error(tmp_path):
    command = [sys.executable, "-m", "lens_mix", "support", tmp_path / "none"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("lens-mix: MODEL: expected")


def test_mistakes(folder, tmp_path):
    found = called("evaluate", folder)
    assert found.exit_code == 2
    assert "exactly one of" in found.output
    found = called("evaluate", folder, "--planted", 3, "--out", tmp_path / "x.docx")
    assert found.exit_code == 2
    assert ".md, .csv or .png" in found.output
    found = called("map", folder, "She left", "--method", "altii", "--out", tmp_path / "page.html")
    assert found.exit_code == 2
    assert "did you mean 'alti'" in found.output.replace("\n", " ")
    # The method's name is checked before the model is loaded.
    found = called("map", tmp_path / "no model", "She left", "--method", "altii")
    assert "did you mean 'alti'" in found.output.replace("\n", " ")
    found = called("map", folder, "She left", "--out", tmp_path / "none" / "page.html")
    assert found.exit_code == 2
