"""Test that each script of hooks/ runs and prints, and that its function returns the documented numbers."""

from __future__ import annotations

import functools
import importlib.util
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import lens_mix as lm
from lens_mix.hooks import freeze_pattern, prune_heads, record_all, zero_values
from tests.tiny_models import available, bridge, hooked_transformer

COOKBOOK = Path(__file__).parents[2] / "hooks"
SCRIPTS = sorted(path.stem for path in COOKBOOK.glob("*.py") if path.stem != "tiny")
EXACT = {"rtol": 0.0, "atol": 1e-10}
# Models that differ from the scripts' own: grouped values, rotary positions, RMS norms.
MODELS = ["tiny", "bridge-llama", "hooked-grouped"]


@pytest.fixture(scope="module", autouse=True)
def as_a_script_sees_it() -> Iterator[None]:
    """Let a script import the modules of its own folder first, as `python hooks/script.py` does."""
    sys.path.insert(0, str(COOKBOOK))
    yield
    sys.path.remove(str(COOKBOOK))
    sys.modules.pop("tiny", None)


@functools.cache
def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"cookbook_{name}", COOKBOOK / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def build(name: str) -> Any:
    if name == "tiny":
        return script("tiny").tiny_model(torch.float64)
    factory, architecture = {
        "bridge-llama": (bridge, "llama"),
        "hooked-grouped": (hooked_transformer, "grouped"),
    }[name]
    if not available(factory, architecture):
        pytest.skip(f"no {factory.__name__} in this TransformerLens")
    return factory(architecture, torch.float64)


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    return build(request.param)


@pytest.fixture
def tokens() -> torch.Tensor:
    return script("tiny").PROMPT


def logits(model: Any, tokens: torch.Tensor, hooks: Any = ()) -> torch.Tensor:
    with torch.no_grad():
        return model.run_with_hooks(tokens, fwd_hooks=list(hooks))


def layers(model: Any) -> range:
    return range(model.cfg.n_layers)


def test_there_is_a_script_for_each_experiment_of_the_readme() -> None:
    named = re.findall(r"\]\((\w+)\.py\)", (COOKBOOK / "README.md").read_text())
    assert sorted(set(named) - {"tiny"}) == SCRIPTS


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_prints_its_result(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(COOKBOOK / f"{name}.py"), run_name="__main__")
    printed = capsys.readouterr().out
    numbers = [float(number) for number in re.findall(r"\d+\.\d+", printed)]
    assert max(numbers) > 0.01, printed
    assert "nan" not in printed


def test_knock_out(model: Any, tokens: torch.Tensor) -> None:
    knock_out = script("knock_out_values").knock_out
    clean = logits(model, tokens)
    assert torch.equal(knock_out(model, tokens, 2, []), clean)
    everywhere = knock_out(model, tokens, 2, layers(model))
    torch.testing.assert_close(everywhere[:, :2], clean[:, :2], **EXACT)
    assert (everywhere - clean)[:, 2:].abs().max() > 1e-3
    hooks = [zero_values(layer, slice(2, 3)) for layer in layers(model)]
    torch.testing.assert_close(everywhere, logits(model, tokens, hooks), **EXACT)


def test_scale_head(model: Any, tokens: torch.Tensor) -> None:
    scale_head = script("scale_head").scale_head
    torch.testing.assert_close(scale_head(model, tokens, 1, 2, 1.0), logits(model, tokens), **EXACT)
    removed = scale_head(model, tokens, 1, 2, 0.0)
    torch.testing.assert_close(removed, logits(model, tokens, [prune_heads(1, 2)]), **EXACT)
    assert (removed - logits(model, tokens)).abs().max() > 1e-3


def test_patch_pattern(model: Any, tokens: torch.Tensor) -> None:
    patch_pattern, other = script("patch_pattern").patch_pattern, script("tiny").OTHER_PROMPT
    assert other.shape == tokens.shape
    clean = logits(model, tokens)
    torch.testing.assert_close(patch_pattern(model, tokens, tokens, 1), clean, **EXACT)
    with torch.no_grad():
        _, cache = model.run_with_cache(other)
    expected = logits(model, tokens, [freeze_pattern(1, cache["blocks.1.attn.hook_pattern"])])
    patched = patch_pattern(model, tokens, other, 1)
    torch.testing.assert_close(patched, expected, **EXACT)
    assert (patched - clean).abs().max() > 1e-3


def test_freeze_patterns(model: Any, tokens: torch.Tensor) -> None:
    module = script("freeze_patterns")
    frozen = module.freeze_patterns(model, tokens)
    clean = logits(model, tokens)
    torch.testing.assert_close(logits(model, tokens, frozen), clean, **EXACT)
    direction = torch.linspace(-1, 1, model.cfg.d_model, dtype=torch.float64).square()
    edit = module.steer(1, 2, direction)
    free, held = logits(model, tokens, [edit]), logits(model, tokens, [edit, *frozen])
    for edited in (free, held):
        torch.testing.assert_close(edited[:, :2], clean[:, :2], **EXACT)
        assert (edited - clean)[:, 2:].abs().max() > 1e-3
    assert (free - held).abs().max() > 1e-3
    torch.testing.assert_close(
        logits(model, tokens, [module.steer(1, 2, 0 * direction), *frozen]), clean, **EXACT
    )


def test_keep_top_cells(model: Any, tokens: torch.Tensor) -> None:
    keep_top = script("keep_top_cells").keep_top
    scores = lm.run(model, tokens, "value_zeroing").scores
    torch.testing.assert_close(keep_top(model, tokens, scores, 100), logits(model, tokens), **EXACT)
    nothing = [prune_heads(layer, range(model.cfg.n_heads)) for layer in layers(model)]
    torch.testing.assert_close(keep_top(model, tokens, scores, 0), logits(model, tokens, nothing), **EXACT)


def test_removed_cells_are_the_worst_of_their_layer(model: Any, tokens: torch.Tensor) -> None:
    """If cells are ranked by distance from the diagonal, the top cells are the diagonal.

    Every token then reads only itself.
    """
    length = tokens.shape[1]
    distance = (torch.arange(length)[:, None] - torch.arange(length)).abs()
    scores = -distance.double().expand(model.cfg.n_layers, length, length)
    percent = 100 * length / (length * (length + 1) / 2)
    kept = script("keep_top_cells").keep_top(model, tokens, scores, percent)
    store: dict[str, torch.Tensor] = {}
    names = [f"blocks.{layer}.attn.hook_pattern" for layer in layers(model)]
    logits(model, tokens, record_all(store, names))
    diagonal = [freeze_pattern(layer, store[name] * torch.eye(length)) for layer, name in enumerate(names)]
    torch.testing.assert_close(kept, logits(model, tokens, diagonal), **EXACT)


def test_record_for_norms(model: Any, tokens: torch.Tensor) -> None:
    value_norms = script("record_for_norms").value_norms
    expected = lm.run(model, tokens, "value_norm").scores
    for layer in layers(model):
        torch.testing.assert_close(value_norms(model, tokens, layer), expected[layer], **EXACT)
