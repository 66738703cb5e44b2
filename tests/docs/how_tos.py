"""Read the how-tos, and run their code with models from this machine.

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
PAGES = sorted(path for path in INDEX.parent.glob("*.md") if path != INDEX)

# A function from the name of a model on the hub to the folder of the model that replaces it.
Find = Callable[[str], Path]


class Result(NamedTuple):
    """What a page's code printed, and the value of its last line if that is an expression."""

    printed: str
    value: Any


def read_code(page: Path) -> str:
    """Return the code of a page, which has one block of Python."""
    (code,) = _find_blocks(page, "python")
    return code


def read_output(page: Path) -> str | None:
    """Return what a page says that its code prints; None if it prints nothing."""
    return next(iter(_find_blocks(page, "text")), None)


def _find_blocks(page: Path, language: str) -> list[str]:
    text = page.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def run(page: Path, find: Find, folder: Path) -> Result:
    """Run the code of a page as it is written, with other models and without a browser.

    Args:
        page: the page.
        find: returns the folder of the model to load instead of one of the hub.
        folder: the working folder.
    """
    tree = ast.parse(read_code(page))
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    # A class looks for the module that it is defined in.
    module = types.ModuleType("how_to")
    with (
        pytest.MonkeyPatch.context() as patch,
        warnings.catch_warnings(),
        contextlib.redirect_stdout(printed),
    ):
        patch.chdir(folder)
        patch.setitem(sys.modules, module.__name__, module)
        patch.setattr("webbrowser.open", lambda *_, **__: True)
        _replace_display(patch)
        _replace_loaders(patch, find)
        # These warnings are estimates of the work, for people.
        warnings.filterwarnings("ignore", message=".*takes about .* forward passes", category=UserWarning)
        exec(compile(tree, page.name, "exec"), module.__dict__)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), page.name, "eval"), module.__dict__)
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


def write_output(page: Path, printed: str) -> None:
    """Replace what a page says that its code prints."""
    text = page.read_text(encoding="utf-8")
    new = re.sub(
        r"^```text\n.*?^```$", lambda _: f"```text\n{printed}```", text, flags=re.MULTILINE | re.DOTALL
    )
    page.write_text(new, encoding="utf-8")


def main() -> None:
    """Run the pages that are named, or all, and write what they print into them.

    The files that they write, with the picture of `compare.md`, are in outputs/how_to.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    folder = ROOT / "outputs" / "how_to"
    prepare(folder)
    for page in PAGES:
        if not sys.argv[1:] or page.stem in sys.argv[1:]:
            printed = run(page, lambda model: find_demo_model(model, folder), folder).printed
            print(f"== {page.stem}\n{printed}")
            write_output(page, printed)


def prepare(folder: Path) -> Path:
    """Make a working folder with the file that a page reads from the repository."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "LICENSE").write_bytes((ROOT / "LICENSE").read_bytes())
    return folder


if __name__ == "__main__":
    main()
