"""Test that the examples of the pages run, and that the commands and messages that they name exist."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path
from typing import Any

import matplotlib
import pytest

import lens_mix as lm
from benchmarks import facts
from lens_mix._classes.model_classes import transformer_lens_version
from tests.demos.tiny_folder import save_tiny_bert, save_tiny_classifier, save_tiny_llama, save_tiny_t5
from tests.tiny_models import available, bridge

ROOT = Path(__file__).parents[2]
# The how-tos have tests of their own, and so have the pages that `make docs` writes.
PAGES = [page for page in facts.PAGES if page.parent.name != "how_to"]


def examples(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = save_tiny_llama(tmp_path_factory.mktemp("llama"))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "demos")
        import models

        loaded = models.load(folder)
        patch.delitem(sys.modules, "models")
    return loaded


# ---------------------------------------------------------------------- pages from a clean start

# Pages with a test of their own, which checks the results of the examples.
ELSEWHERE = {
    *("README.md", "tutorial.md", "read_a_map.md", "choose_a_method.md", "other_tools.md"),
    *("models.md", "pictures.md", "many_prompts.md", "hooks.md", "score_a_map.md", "add_a_method.md"),
}
SELF_CONTAINED = {"index.md", "cheat_sheet.md", "gallery.md", "troubleshooting.md"}
WITH_CODE = [
    pytest.param(page, id=page.name)
    for page in PAGES
    if "```python" in page.read_text(encoding="utf-8") and page.name not in ELSEWHERE
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the folders of the tiny models that replace models of a hub, by a piece of the hub's name."""
    return {
        "SST-2": save_tiny_classifier(tmp_path_factory.mktemp("classifier")),
        "bert": save_tiny_bert(tmp_path_factory.mktemp("bert")),
        "flan-t5": save_tiny_t5(
            tmp_path_factory.mktemp("t5"), ["see", "red", "house", "vois", "maison", "rouge", "."]
        ),
        "": save_tiny_llama(tmp_path_factory.mktemp("llama")),
    }


@pytest.fixture(scope="module")
def stand_ins(folders: dict[str, Path]) -> dict[str, Any]:
    """Return the same as models of TransformerLens, without those that this release has no bridge for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "demos")
        import models

        has = {
            "SST-2": available(bridge, "bert"),
            "bert": available(bridge, "bert"),
            "flan-t5": available(bridge, "t5"),
        }
        loaded = {part: models.load(folder) for part, folder in folders.items() if has.get(part, True)}
        patch.delitem(sys.modules, "models")
    return loaded


@pytest.fixture
def hub(folders: dict[str, Path], stand_ins: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace every loader that a page uses by one that returns a tiny model, on every TransformerLens."""
    import transformer_lens
    import transformers

    def load(name: str, dtype: Any = None) -> Any:
        # The stand-ins are in float32, whatever dtype a page asks for.
        return next(model for part, model in stand_ins.items() if part in name)

    classifier = transformers.AutoModelForSequenceClassification.from_pretrained

    def load_classifier(name: str) -> Any:
        return classifier(next(folder for part, folder in folders.items() if part in name))

    loader = types.SimpleNamespace(boot_transformers=load, from_pretrained=load)
    module = types.ModuleType("transformer_lens.model_bridge")
    module.TransformerBridge = loader  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformer_lens.model_bridge", module)
    monkeypatch.setitem(vars(transformer_lens), "HookedTransformer", loader)
    auto = types.SimpleNamespace(from_pretrained=load_classifier)
    monkeypatch.setitem(vars(transformers), "AutoModelForSequenceClassification", auto)


@pytest.mark.parametrize("page", WITH_CODE)
def test_every_code_block_runs_from_a_clean_start(
    page: Path, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # A dataclass needs its module in sys.modules.
    module = types.ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)
    names = module.__dict__
    if page.name in SELF_CONTAINED:
        request.getfixturevalue("hub")
    else:
        prompt = "My grandmother was born in Italy"
        names.update(lm=lm, model=request.getfixturevalue("model"), prompt=prompt)
    # A page may choose a style for all later figures.
    with matplotlib.rc_context():
        for example in examples(page.read_text(encoding="utf-8")):
            exec(compile(example, page.name, "exec"), names)


def test_ways_to_load_that_the_pages_name_are_there() -> None:
    if transformer_lens_version()[0] >= 3:
        from transformer_lens.model_bridge import TransformerBridge

        assert callable(TransformerBridge.boot_transformers)
    if transformer_lens_version()[0] <= 3:
        from transformer_lens import HookedTransformer

        assert callable(HookedTransformer.from_pretrained)


@pytest.mark.usefixtures("hub")
def test_the_examples_of_the_page_on_the_choice_of_a_method_run(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    page = ROOT / "docs" / "guides" / "choose_a_method.md"
    for example in examples(page.read_text(encoding="utf-8")):
        exec(compile(example, page.name, "exec"), names)
    ((gap,),) = names["f"].provenance["details"]["conservation_gap"]
    assert abs(gap) < 1e-4 * float(names["f"].scores.abs().sum())
    # The integrated gradients that are named run, too.
    integrated = lm.run(names["model"], names["prompt"], names["method"], queries=[-1])
    assert integrated.provenance["details"]["convergence_delta"]
    controls = {record["method"] for record in names["board"].records}
    assert {"position", "random", "gim, randomised model", "attention, randomised model"} <= controls
    printed = capsys.readouterr().out
    assert "'verification_error'" in printed
    assert "@inproceedings{mohebbi" in printed


@pytest.mark.once
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_that_the_page_names_exist(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    text = page.read_text(encoding="utf-8")
    # Commands are in blocks without a language or in backticks; elsewhere "make" is a word.
    blocks = re.findall(r"^```\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    named = re.findall(r"`make ([\w-]+)", text)
    named += [target for block in blocks for target in re.findall(r"^make ([\w-]+)", block, re.MULTILINE)]
    for target in set(named):
        assert re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE), f"no make target {target}"
