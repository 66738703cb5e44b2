"""Run the code of the guides with models from this machine.

`python -m tests.docs.guides` runs the steps that have an output on the demo models, and writes what they
print into the guides.
"""

from __future__ import annotations

import contextlib
import os
import sys
import types
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.docs import how_tos
from tests.docs.how_tos import ROOT, read_steps

GUIDES = {
    name: ROOT / "docs" / "guides" / f"{name}.md"
    for name in ("models", "pictures", "many_prompts", "hooks", "score_a_map", "add_a_method")
}
# How many steps of a guide run on the demo models. The later steps print nothing.
STEPS_WITH_OUTPUT = {name: 2 if name == "add_a_method" else 1 for name in GUIDES}

# A function from the name of a model on the hub to what a loader returns for it.
Load = Callable[..., Any]


class GuideResult(NamedTuple):
    """What a step of a guide printed, and the names that are defined after the last step."""

    printed: str
    names: dict[str, Any]


def run(
    guide: str, find: Load, loaders: Mapping[str, Load], folder: Path, n_steps: int | None = None
) -> list[GuideResult]:
    """Run the steps of a guide one after another, with other models.

    Args:
        guide: The name of the guide.
        find: Returns, for a name on the hub, the folder to load with TransformerBridge, or a model.
        loaders: What `from_pretrained` of classes of transformers does, by the name of the class.
        folder: The working folder.
        n_steps: How many steps to run, as the end of a slice. None: all.
    """
    module = types.ModuleType("guide")
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.chdir(folder)
        # A dataclass looks for the module that it is defined in.
        patch.setitem(sys.modules, module.__name__, module)
        _replace_loaders(patch, find, loaders)
        # These warnings are estimates of the work, for people.
        warnings.filterwarnings("ignore", message=".*takes about .*progress=True", category=UserWarning)
        steps = read_steps(GUIDES[guide])[:n_steps]
        results = [how_tos._run_step(step.code, guide, module.__dict__) for step in steps]
    return [GuideResult(result.printed, module.__dict__) for result in results]


def _replace_loaders(patch: pytest.MonkeyPatch, find: Load, loaders: Mapping[str, Load]) -> None:
    import transformers

    try:
        from transformer_lens.model_bridge import TransformerBridge
    except ImportError:
        # TransformerLens 2 has no bridge.
        models = how_tos.import_models()
        module = types.ModuleType("transformer_lens.model_bridge")
        module.TransformerBridge = types.SimpleNamespace(  # type: ignore[attr-defined]
            boot_transformers=lambda name, **_: models.load_hooked(find(name))
        )
        patch.setitem(sys.modules, module.__name__, module)
    else:
        boot = TransformerBridge.boot_transformers

        def boot_other(name: str, hf_model: Any = None, **options: Any) -> Any:
            if hf_model is not None:
                return boot(name, hf_model=hf_model, **options)
            found = find(name)
            return boot(str(found), **options) if isinstance(found, Path) else found

        patch.setattr(TransformerBridge, "boot_transformers", staticmethod(boot_other))
    for name, load in loaders.items():
        patch.setitem(vars(transformers), name, types.SimpleNamespace(from_pretrained=load))


# ---------------------------------------------------------------------- the models of the demos


def run_on_demo_models(guide: str, folder: Path) -> list[GuideResult]:
    """Run the steps of a guide that have an output."""
    import transformers
    from PIL import Image

    models, dinov2 = how_tos.import_models(), transformers.Dinov2Model

    def load_processor(name: str) -> Any:
        # These are the numbers of the processor of DINOv2.
        return transformers.BitImageProcessor(
            size={"shortest_edge": 256},
            crop_size={"height": 224, "width": 224},
            resample=Image.Resampling.BICUBIC,
            image_mean=[0.485, 0.456, 0.406],
            image_std=[0.229, 0.224, 0.225],
        )

    loaders: dict[str, Load] = {}
    if guide == "pictures":
        from demos.pictures import draw_picture

        Image.fromarray(draw_picture()).save(folder / "picture.png")
        loaders["Dinov2Model"] = lambda name: dinov2.from_pretrained(models.dinov2_folder())
        loaders["AutoImageProcessor"] = load_processor
    # What the first load of a model prints is not the page's output.
    with contextlib.redirect_stdout(sys.stderr):
        smollm2 = models.smollm2_folder()
    return run(guide, lambda name: smollm2, loaders, folder, STEPS_WITH_OUTPUT[guide])


def main() -> None:
    """Run the guides that are named, or all, and write what they print into them."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    folder = ROOT / "outputs" / "guides"
    folder.mkdir(parents=True, exist_ok=True)
    for name, page in GUIDES.items():
        if not sys.argv[1:] or name in sys.argv[1:]:
            results = run_on_demo_models(name, folder)
            print(f"== {name}", *(result.printed for result in results), sep="\n")
            how_tos.write_outputs(page, [how_tos.Result(result.printed, None) for result in results])


if __name__ == "__main__":
    main()
