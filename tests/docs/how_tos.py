"""Read the README, the first pages and the how-tos, and run their code with models from this machine.

`python -m tests.docs.how_tos` runs them on the demo models and writes what they print into the pages.
"""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
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

# A block of Python or of the shell, or of what the block before it prints.
_BLOCK = re.compile(r"^```(python|sh|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

# A function from the name of a model on the hub to the folder of the model that replaces it.
Find = Callable[[str], Path]


class Step(NamedTuple):
    """A block of code of a page, and what the page says that it prints; None if it says nothing."""

    code: str
    output: str | None
    language: str = "python"


class Result(NamedTuple):
    """What a step printed, and the value of its last line if that is an expression."""

    printed: str
    value: Any


def read_steps(page: Path) -> list[Step]:
    """Return the steps of a page, in order. A how-to has one."""
    steps: list[Step] = []
    for language, content in _BLOCK.findall(page.read_text(encoding="utf-8")):
        if _is_step(language, content):
            steps.append(Step(content, None, language))
        elif language == "text":
            steps[-1] = steps[-1]._replace(output=content)
    return steps


def _is_step(language: str, content: str) -> bool:
    """Return whether a block is run: Python, and commands of the library, but not those of other programs."""
    return language == "python" or (language == "sh" and "lens-mix" in content)


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
        return [
            _run_shell(step, patch)
            if step.language == "sh"
            else _run_step(step.code, page.name, module.__dict__)
            for step in read_steps(page)
        ]


def _run_step(code: str, name: str, names: dict[str, Any]) -> Result:
    tree = ast.parse(code)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, name, "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), name, "eval"), names)
    return Result(printed.getvalue(), value)


def _run_shell(step: Step, patch: pytest.MonkeyPatch) -> Result:
    """Run lines of the shell, and return what they print of the lines that the page shows.

    A line may have other numbers than on the page. `lens-mix` runs in this process, because every start of
    Python takes seconds. `lens-mix serve` starts no server: the app is tested with gradio, in an environment
    of its own.
    """
    from typer.testing import CliRunner

    from lens_mix.cli import app

    served = types.SimpleNamespace(block_thread=lambda: None)
    module = types.ModuleType("lens_mix.app")
    module.launch = lambda *_, **__: (served, "http://127.0.0.1:7860/")  # type: ignore[attr-defined]
    patch.setitem(sys.modules, module.__name__, module)
    printed: list[str] = []
    for line in filter(None, step.code.splitlines()):
        if variable := re.fullmatch(r"([A-Z]+)=(\S+)", line):
            patch.setenv(variable[1], variable[2])
        elif line.startswith("lens-mix "):
            words = [os.path.expandvars(word) for word in shlex.split(line, comments=True)]
            result = CliRunner().invoke(app, words[1:])
            assert result.exit_code == 0, result.output
            printed += result.stdout.splitlines()
        else:
            subprocess.run(["sh", "-c", line], check=True)
    shown = {_without_numbers(line) for line in (step.output or "").splitlines()}
    return Result("".join(f"{line}\n" for line in printed if _without_numbers(line) in shown), None)


def _without_numbers(line: str) -> str:
    return re.sub(r"\s*\d+(\.\d+)?", "#", line)


def _replace_display(patch: pytest.MonkeyPatch) -> None:
    """Let IPython's `display` print what a cell shows, because IPython is not needed elsewhere."""
    # The package itself stays away, because matplotlib would take it for the real one.
    module = types.ModuleType("IPython.display")
    module.display = lambda shown: print(shown._repr_html_())  # type: ignore[attr-defined]
    patch.setitem(sys.modules, module.__name__, module)


def _replace_loaders(patch: pytest.MonkeyPatch, find: Find) -> None:
    """Let TransformerBridge and transformers load from the folders that `find` returns."""
    # Without torchvision, transformers replaces its own module when it is asked for this class.
    processor = _make_processor()
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
            return boot(name if "hf_model" in options else str(find(name)), **options)

        patch.setattr(TransformerBridge, "boot_transformers", staticmethod(boot_other))
    classifiers = types.SimpleNamespace(from_pretrained=lambda name: load_classifier(find(name)))
    patch.setitem(vars(transformers), "AutoModelForSequenceClassification", classifiers)
    load_dinov2 = transformers.Dinov2Model.from_pretrained
    dinov2 = types.SimpleNamespace(from_pretrained=lambda name: load_dinov2(find(name)))
    patch.setitem(vars(transformers), "Dinov2Model", dinov2)
    load_tokenizer = transformers.WhisperTokenizer.from_pretrained
    tokenizers = types.SimpleNamespace(
        from_pretrained=lambda name, **options: load_tokenizer(find(name), **options)
    )
    patch.setitem(vars(transformers), "WhisperTokenizer", tokenizers)
    processors = types.SimpleNamespace(from_pretrained=lambda name: processor)
    patch.setitem(vars(transformers), "AutoImageProcessor", processors)


def _make_processor() -> Any:
    """Return the processor of DINOv2, which no package has."""
    from transformers import BitImageProcessor

    mean, deviation = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    return BitImageProcessor(size={"shortest_edge": 256}, image_mean=mean, image_std=deviation)


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
        if "whisper" in name:
            return models.whisper_folder()
        if "dinov2" in name:
            return models.dinov2_folder()
        return trained if trained.is_dir() else save_sentiment_classifier(models.minilm_folder(), trained)


def write_outputs(page: Path, results: list[Result]) -> None:
    """Replace what a page says that its steps print."""
    number = -1

    def replace(block: re.Match[str]) -> str:
        nonlocal number
        if block[1] == "text":
            return f"```text\n{results[number].printed}```"
        number += _is_step(block[1], block[2])
        return block[0]

    page.write_text(_BLOCK.sub(replace, page.read_text(encoding="utf-8")), encoding="utf-8")


def main() -> None:
    """Run the pages that are named, or all, and write what they print into them.

    The files that they write, with the pictures of `tutorial.md`, `compare.md` and `picture.md`, are in
    outputs/how_to.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    folder = ROOT / "outputs" / "how_to"
    # A corpus continues in its folder, and says so.
    shutil.rmtree(folder / "maps", ignore_errors=True)
    prepare(folder)
    for page in PAGES:
        if not sys.argv[1:] or page.stem in sys.argv[1:]:
            results = run(page, lambda model: find_demo_model(model, folder), folder)
            print(f"== {page.stem}", *(result.printed for result in results), sep="\n")
            write_outputs(page, results)


def prepare(folder: Path) -> Path:
    """Make a working folder with the files that pages read from the repository."""
    for name in ("LICENSE", "docs/images/house.png", "demos/data/speech/farmer.wav"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes((ROOT / name).read_bytes())
    return folder


if __name__ == "__main__":
    main()
