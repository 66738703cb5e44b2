"""Read the README, the first pages and the how-tos, and run their code with models from this machine.

`python -m tests.docs.how_tos` runs them on the demo models and writes what they print into the pages.
"""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
INDEX = ROOT / "docs" / "how_to" / "index.md"
README, TUTORIAL = ROOT / "README.md", ROOT / "docs" / "tutorial.md"
READ_A_MAP = ROOT / "docs" / "read_a_map.md"
HOW_TOS = sorted(path for path in INDEX.parent.glob("*.md") if path != INDEX)
PAGES = [README, TUTORIAL, READ_A_MAP, *HOW_TOS]

# A block of Python, or of what the block of Python before it prints.
_BLOCK = re.compile(r"^```(python|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

# A function from the name of a model on the hub to the folder of the model that replaces it.
Find = Callable[[str], Path]


class Step(NamedTuple):
    """A block of Python of a page, and what the page says that it prints; None if it says nothing."""

    code: str
    output: str | None


class Result(NamedTuple):
    """What a step printed, and the value of its last line if that is an expression."""

    printed: str
    value: Any


def read_steps(page: Path) -> list[Step]:
    """Return the steps of a page, in order. A how-to has one."""
    steps: list[Step] = []
    for language, content in _BLOCK.findall(page.read_text(encoding="utf-8")):
        if language == "python":
            steps.append(Step(content, None))
        else:
            steps[-1] = steps[-1]._replace(output=content)
    return steps


def read_code(page: Path) -> str:
    """Return all code of a page."""
    return "".join(step.code for step in read_steps(page))


def run(page: Path, find: Find, folder: Path) -> list[Result]:
    """Run the steps of a page one after another, with other models and without a browser.

    Args:
        page: the page.
        find: returns the folder of the model to load instead of one of the hub.
        folder: the working folder.
    """
    # A class looks for the module that it is defined in.
    module = types.ModuleType("how_to")
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.chdir(folder)
        patch.setitem(sys.modules, module.__name__, module)
        patch.setattr("webbrowser.open", lambda *_, **__: True)
        _replace_display(patch)
        _replace_loaders(patch, find)
        # These warnings are estimates of the work, for people.
        warnings.filterwarnings("ignore", message=".*takes about .*progress=True", category=UserWarning)
        return [_run_step(step.code, page.name, module.__dict__) for step in read_steps(page)]


def _run_step(code: str, name: str, names: dict[str, Any]) -> Result:
    tree = ast.parse(code)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, name, "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), name, "eval"), names)
    return Result(printed.getvalue(), value)


def _replace_display(patch: pytest.MonkeyPatch) -> None:
    """Let IPython's `display` print what a cell shows, because IPython is not needed elsewhere."""
    # The package itself stays away, because matplotlib would take it for the real one.
    module = types.ModuleType("IPython.display")
    module.display = lambda shown: print(shown._repr_html_())  # type: ignore[attr-defined]
    patch.setitem(sys.modules, module.__name__, module)


def _replace_loaders(patch: pytest.MonkeyPatch, find: Find) -> None:
    """Let TransformerBridge and transformers load from the folders that `find` returns."""
    import transformers

    models = import_models()
    load_classifier = transformers.AutoModelForSequenceClassification.from_pretrained
    try:
        from transformer_lens.model_bridge import TransformerBridge
    except ImportError:
        # TransformerLens 2 has no bridge.
        bridge = types.SimpleNamespace(boot_transformers=lambda name: models.load_hooked(find(name)))
        module = types.ModuleType("transformer_lens.model_bridge")
        module.TransformerBridge = bridge  # type: ignore[attr-defined]
        patch.setitem(sys.modules, module.__name__, module)
    else:
        boot = TransformerBridge.boot_transformers

        def boot_other(name: str, **options: Any) -> Any:
            return boot(str(find(name)), **options)

        patch.setattr(TransformerBridge, "boot_transformers", staticmethod(boot_other))
    classifiers = types.SimpleNamespace(from_pretrained=lambda name: load_classifier(find(name)))
    patch.setitem(vars(transformers), "AutoModelForSequenceClassification", classifiers)


def import_models() -> Any:
    """Return the module `models` of the demos."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "demos")
        import models

        patch.delitem(sys.modules, "models")
    return models


# ---------------------------------------------------------------------- the models of the demos


def find_demo_model(name: str, folder: Path) -> Path:
    """Return the folder of the demo model that is the closest to a model of the hub.

    Args:
        name: the name on the hub.
        folder: the folder for a classifier, which is trained here.
    """
    from tests.docs.sentiment import save_sentiment_classifier

    models, trained = import_models(), folder / "classifier"
    # What the first load of a model prints is not the page's output.
    with contextlib.redirect_stdout(sys.stderr):
        if "SmolLM2" in name:
            return models.smollm2_folder()
        if "flan-t5" in name:
            return models.flan_t5_folder()
        return trained if trained.is_dir() else save_sentiment_classifier(models.minilm_folder(), trained)


def write_outputs(page: Path, results: list[Result]) -> None:
    """Replace what a page says that its steps print."""
    number = -1

    def replace(block: re.Match[str]) -> str:
        nonlocal number
        if block[1] == "python":
            number += 1
            return block[0]
        return f"```text\n{results[number].printed}```"

    page.write_text(_BLOCK.sub(replace, page.read_text(encoding="utf-8")), encoding="utf-8")


def main() -> None:
    """Run the pages that are named, or all, and write what they print into them.

    The files that they write, with the pictures of `tutorial.md` and `compare.md`, are in outputs/how_to.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    folder = ROOT / "outputs" / "how_to"
    prepare(folder)
    for page in PAGES:
        if not sys.argv[1:] or page.stem in sys.argv[1:]:
            results = run(page, lambda model: find_demo_model(model, folder), folder)
            print(f"== {page.stem}", *(result.printed for result in results), sep="\n")
            write_outputs(page, results)


def prepare(folder: Path) -> Path:
    """Make a working folder with the file that a page reads from the repository."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "LICENSE").write_bytes((ROOT / "LICENSE").read_bytes())
    return folder


if __name__ == "__main__":
    main()
