"""What the README and the pages say is true: examples run, links lead somewhere, the table is complete."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import lens_mix as lm
from tests.demos.tiny_folder import save_tiny_llama
from tests.matrix import build_or_skip
from tests.tiny_models import bridge, toy_tokenizer

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
HOW_TO = (ROOT / "docs" / "how_to_add_a_method.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


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


def test_the_readmes_examples_run_one_after_the_other(model: Any) -> None:
    names: dict[str, Any] = {"model": model}
    found = examples(README)
    assert len(found) >= 3
    for example in found:
        exec(compile(example, "README.md", "exec"), names)
    assert names["m"].scores.shape == names["maps"]["attention"].scores.shape
    assert names["r"].kind == "input"
    assert names["logits"].shape[1] == len(names["m"].tokens)


def test_the_examples_of_the_scales_run(model: Any) -> None:
    names: dict[str, Any] = {"model": model}
    (example,) = examples((ROOT / "docs" / "scales.md").read_text(encoding="utf-8"))
    exec(compile(example, "scales.md", "exec"), names)
    assert names["curves"]["value_zeroing"].exact
    assert set(names["cells"]) == {"value_zeroing", "attn_res_ln"}
    assert names["soft"]["random"].retained == 0.5


def test_the_readmes_table_is_the_list_of_methods() -> None:
    rows = [line.split("|")[1] for line in README.splitlines() if line.startswith("| `")]
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(named) == sorted(lm.METHODS)


def test_the_example_method_of_the_page_runs(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    method, use = examples(HOW_TO)
    # A dataclass looks its module up by name.
    module = types.ModuleType("example")
    monkeypatch.setitem(sys.modules, "example", module)
    prompt = "My grandmother was born in"
    module.__dict__.update(lm=lm, model=model, prompt=prompt)
    for example in (method, use):
        exec(compile(example, "how_to_add_a_method.md", "exec"), module.__dict__)
    found = module.__dict__["m"]
    largest = lm.run(model, prompt, lm.AttentionWeights(per_head=True)).scores.amax(1)
    assert found.parameters == {"floor": 0.1}
    assert found.scores.equal(largest.where(largest >= 0.1, 0.0))
    with pytest.raises(ValueError, match="floor: expected a number from 0 to 1, got 2"):
        module.__dict__["LargestWeight"](floor=2)


def test_the_example_of_the_page_on_gradients_runs(model: Any) -> None:
    names: dict[str, Any] = {"model": model}
    (example,) = examples((ROOT / "docs" / "input_gradients.md").read_text(encoding="utf-8"))
    exec(compile(example, "input_gradients.md", "exec"), names)
    ((gap,),) = names["f"].provenance["details"]["conservation_gap"]
    assert abs(gap) < 1e-4 * float(names["f"].scores.abs().sum())


@pytest.mark.filterwarnings("ignore")
def test_the_examples_of_the_page_on_encoder_decoders_run_one_after_the_other() -> None:
    model = build_or_skip(bridge, "bart")
    model.tokenizer = toy_tokenizer()
    names: dict[str, Any] = {"model": model}
    found = examples((ROOT / "docs" / "encoder_decoder.md").read_text(encoding="utf-8"))
    assert len(found) == 3
    for example in found:
        exec(compile(example, "encoder_decoder.md", "exec"), names)
    assert names["m"].key_tokens[-1] == "w3"
    assert names["whole"].key_tokens[-1] == "[RESIDUAL]"
    assert names["rows"].query_labels == names["m"].tokens
    assert float(names["rows"].scores.sum(-1).min()) == pytest.approx(1)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8"))
    here = [target for target in targets if "://" not in target]
    assert [target for target in here if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_that_the_page_names_exist(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    text = page.read_text(encoding="utf-8")
    # In a block without a language, or in backticks; "make" is also a word.
    blocks = re.findall(r"^```\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    named = re.findall(r"`make ([\w-]+)", text)
    named += [target for block in blocks for target in re.findall(r"^make ([\w-]+)", block, re.MULTILINE)]
    for target in set(named):
        assert re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE), f"no make target {target}"
