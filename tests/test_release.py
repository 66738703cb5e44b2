"""Test what a release is checked for, the files that are for the repository's site, and the paper."""

from __future__ import annotations

import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks import facts
from lens_mix.version import __version__
from tests import release
from tests.source_tree import ROOT

FILES = ("pyproject.toml", "lens_mix/version.py", "CHANGELOG.md", "CITATION.cff")
GITHUB = ROOT / ".github"

pytestmark = pytest.mark.once
needs_github = pytest.mark.skipif(not GITHUB.is_dir(), reason="a source distribution has no .github")


def read_yaml(path: Path) -> Any:
    # Every value is read as text: `on` would be a boolean, and 3.10 a number.
    return yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a copy of the files that a release is checked for, without authors, address and date."""
    (tmp_path / "lens_mix").mkdir()
    for name in FILES:
        shutil.copy(ROOT / name, tmp_path / name)
    replace(tmp_path / "pyproject.toml", r"^authors = .*$", "authors = []")
    replace(tmp_path / "pyproject.toml", r"^Repository = .*\n", "")
    replace(tmp_path / "CHANGELOG.md", rf"^## {re.escape(__version__)} - .*$", f"## {__version__} - later")
    return tmp_path


def replace(path: Path, pattern: str, by: str) -> None:
    path.write_text(re.sub(pattern, by, path.read_text(), flags=re.MULTILINE))


def complete(checkout: Path) -> None:
    """Write an author, an address and a date."""
    replace(checkout / "pyproject.toml", r"^authors = .*$", 'authors = [{ name = "Zoë Example" }]')
    address = '[project.urls]\nRepository = "https://example.org/a/lens_mix"'
    replace(checkout / "pyproject.toml", r"^\[project\.urls\]$", address)
    replace(
        checkout / "CHANGELOG.md", rf"^## {re.escape(__version__)} - .*$", f"## {__version__} - 2030-01-31"
    )


def test_a_release_without_authors_address_and_date_is_refused(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    release.main([], root=checkout)
    capsys.readouterr()
    assert release.main([f"v{__version__}"], root=checkout) == 1
    printed = capsys.readouterr().out.splitlines()
    assert printed == [
        "Not ready for a release:",
        "- pyproject.toml, [project] authors: expected at least one with a name, got none",
        "- pyproject.toml, [project.urls] Repository: expected an address with https://, got none",
        f"- CHANGELOG.md: expected the heading '## {__version__} - YYYY-MM-DD', found none",
    ]


def test_a_complete_release_is_accepted_under_its_own_tag_only(checkout: Path) -> None:
    complete(checkout)
    assert release.main([], root=checkout) == 0
    assert release.main([f"v{__version__}"], root=checkout) == 0
    (line,) = release.find_missing(checkout, "v9.9.9")
    assert line == f"- the tag: expected v{__version__}, as in lens_mix/version.py, got v9.9.9"


def test_a_citation_that_does_not_agree_is_found(checkout: Path) -> None:
    release.main([], root=checkout)
    complete(checkout)
    (line,) = release.find_missing(checkout)
    assert line.startswith("- CITATION.cff: expected one that agrees")
    (checkout / "CITATION.cff").unlink()
    assert list(release.find_missing(checkout)) == [line]


def test_the_citation_has_what_the_other_files_say(checkout: Path) -> None:
    release.main([], root=checkout)
    found = read_yaml(checkout / "CITATION.cff")
    assert found["authors"] == [{"name": release.UNNAMED}]
    assert found["version"] == __version__
    assert not {"repository-code", "date-released"} & found.keys()
    complete(checkout)
    release.main([], root=checkout)
    found = read_yaml(checkout / "CITATION.cff")
    assert found["authors"] == [{"name": "Zoë Example"}]
    assert found["repository-code"] == "https://example.org/a/lens_mix"
    assert found["date-released"] == "2030-01-31"


def test_the_citation_is_up_to_date() -> None:
    assert (ROOT / "CITATION.cff").read_text() == release.citation(ROOT), "run `python -m tests.release`"


@pytest.mark.parametrize("address", ["", "http://example.org/a/b", "https://", "https://example.org"])
def test_what_is_no_address_of_a_repository(checkout: Path, address: str) -> None:
    entry = f'[project.urls]\nRepository = "{address}"'
    replace(checkout / "pyproject.toml", r"^\[project\.urls\]$", entry)
    assert release.read_repository(checkout) is None


def test_the_changelog_is_short_and_has_this_version() -> None:
    lines = (ROOT / "CHANGELOG.md").read_text().splitlines()
    releases = [line for line in lines if line.startswith("## ")]
    assert any(line.startswith(f"## {__version__} - ") for line in releases)
    assert len(lines) <= 60 * len(releases)


@needs_github
def test_the_release_workflow_publishes_only_what_was_checked_and_tried() -> None:
    jobs = read_yaml(GITHUB / "workflows" / "release.yml")["jobs"]
    assert [jobs[name].get("needs") for name in ("check", "build", "wheel", "publish")] == [
        None,
        "check",
        "build",
        "wheel",
    ]
    assert any("python -m tests.release" in step.get("run", "") for step in jobs["check"]["steps"])
    allowed = {name for name, job in jobs.items() if "id-token" in job.get("permissions", {})}
    assert allowed == {"publish"}


@needs_github
@pytest.mark.parametrize("name", ["ci.yml", "release.yml"])
def test_foreign_actions_are_pinned_to_a_commit(name: str) -> None:
    workflow = read_yaml(GITHUB / "workflows" / name)
    assert workflow["permissions"] == {"contents": "read"}
    used = [step["uses"] for job in workflow["jobs"].values() for step in job["steps"] if "uses" in step]
    assert used
    assert [one for one in used if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", one)] == []


@needs_github
def test_the_workflow_has_the_stages_of_ci_and_the_pythons_of_the_classifiers() -> None:
    jobs = read_yaml(GITHUB / "workflows" / "ci.yml")["jobs"]
    script = (ROOT / ".ci" / "run").read_text()
    lines = re.findall(r"^(?:stage|tests) ([^'\n]+)", script, re.MULTILINE)
    stages = {word for line in lines for word in line.split() if re.fullmatch(r"[a-z][\w-]+", word)}
    targets = {word for stage in jobs["stage"]["strategy"]["matrix"]["stage"] for word in stage.split()}
    assert {"lint", "types", "docs", "test", "test-oldest", "test-wheel"} < stages
    # On GitHub each release of `make test` is a job of its own.
    assert (stages - {"environments", "browser", "test"}) | {"test-tl4", "test-tl3"} == targets
    # At night there is all of `make test-all`, with the wheel in a job for each Python.
    everything = re.search(r"^test-all: .*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert everything is not None
    night = {stage.split()[0] for stage in jobs["night"]["strategy"]["matrix"]["stage"]}
    assert night | {"test-wheel"} == set(re.findall(r"test-[a-z]+\d?", everything[1]))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    versions = [one.split(" :: ")[-1] for one in project["classifiers"] if re.search(r":: 3\.\d+$", one)]
    for workflow in ("ci.yml", "release.yml"):
        wheel = read_yaml(GITHUB / "workflows" / workflow)["jobs"]["wheel"]
        assert wheel["strategy"]["matrix"]["python"] == versions


@needs_github
def test_the_newest_releases_are_tried_every_night_and_before_a_release() -> None:
    workflow = read_yaml(GITHUB / "workflows" / "ci.yml")
    (nightly,) = workflow["on"]["schedule"]
    assert re.fullmatch(r"\d+ \d+ \* \* \*", nightly["cron"])
    night = workflow["jobs"]["night"]
    assert night["if"] == "github.event_name == 'schedule'"
    assert "test-newest" in night["strategy"]["matrix"]["stage"]
    assert "`make test-all`" in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert (ROOT / "constraints" / "newest.txt").read_text().splitlines()[1:] == ["-c torch.txt"]


@needs_github
def test_issue_forms_have_what_the_site_of_the_repository_needs() -> None:
    forms = [path for path in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml"]
    assert len(forms) == 2
    for path in forms:
        form = read_yaml(path)
        assert {"name", "description", "body"} <= form.keys()
        fields = [field for field in form["body"] if field["type"] != "markdown"]
        assert len({field["id"] for field in fields}) == len(fields)
        assert all(field["attributes"]["label"] for field in fields)
    assert "lm.check(model" in (GITHUB / "ISSUE_TEMPLATE" / "wrong_map.yml").read_text()


PAPER = (ROOT / "paper.md").read_text(encoding="utf-8")


def test_the_paper_has_the_authors_and_the_length_of_its_journal() -> None:
    _, header, text = PAPER.split("---\n", 2)
    fields = yaml.safe_load(header)
    assert [author["name"] for author in fields["authors"]] == release.read_authors(ROOT)
    assert {"title", "tags", "authors", "affiliations", "date", "bibliography"} == fields.keys()
    words = len(re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL).split())
    assert 750 <= words <= 1750
    for section in ("Summary", "Statement of need", "State of the field", "References"):
        assert f"\n# {section}\n" in text


def test_the_paper_cites_what_its_bibliography_has() -> None:
    cited = set(re.findall(r"@([\w-]+)", PAPER))
    entries = bib_entries(ROOT / "paper.bib")
    assert cited == entries.keys()
    library = bib_entries(ROOT / "lens_mix" / "references.bib")
    assert {key: entries[key] for key in cited & library.keys()} == {
        key: library[key] for key in cited & library.keys()
    }


def bib_entries(path: Path) -> dict[str, str]:
    text = path.read_text(encoding="utf-8")
    return {
        found[1]: found[0] for found in re.finditer(r"^@\w+\{([\w-]+),.*?^\}", text, re.DOTALL | re.MULTILINE)
    }


def test_no_page_invents_the_address() -> None:
    """Check that the address is in pyproject.toml, and in files that are generated from it, alone."""
    if release.read_repository(ROOT) is not None:
        pytest.skip("the address is known")
    pages = [*facts.PAGES, *ROOT.glob("*.md"), *(ROOT / "demos").rglob("*.md"), *GITHUB.rglob("*.[my]*")]
    address = re.compile(r"(github|gitlab)\.com/[\w-]+/lens[_-]mix")
    found = [path for path in pages if address.search(path.read_text(encoding="utf-8"))]
    assert found == []
