"""Test the pins of the oldest dependencies in constraints/oldest.txt, and the library with them.

`make test-oldest` runs this file and a few others in an environment with these pins.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import tomllib

import numpy as np
import pytest
import torch
from packaging.requirements import Requirement
from packaging.version import Version

import lens_mix as lm
from tests.source_tree import ROOT

# torch always has the release of constraints/torch.txt, because each other release is gigabytes. Ray and
# gradio, with its starlette, have environments of their own.
NOT_PINNED = {"torch", "ray", "gradio", "starlette"}
PROMPT = "w3 w5 w7 w9 w4"


def requirements():
    """Return the requirements of pyproject.toml, including extras, each once."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    found = [
        Requirement(text) for text in [*project["dependencies"], *(one for extra in extras for one in extra)]
    ]
    return {one.name: one for one in found if one.name != "lens_mix"}


def pins():
    """Return the pins of constraints/oldest.txt."""
    lines = (ROOT / "constraints" / "oldest.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


def bound_of(requirement):
    """Return the lower bound of a requirement."""
    (bound,) = [one.version for one in requirement.specifier if one.operator == ">="]
    return Version(bound)


def test_each_lower_bound_is_the_release_that_is_tested():
    bounds = {name: bound_of(one) for name, one in requirements().items() if name not in NOT_PINNED}
    tested = {name: Version(pin) for name, pin in pins().items() if name in bounds}
    assert tested == bounds


def test_no_bound_is_below_what_the_oldest_transformer_lens_asks_for():
    """Check packages for which the oldest TransformerLens (2.16.1) has bounds in its metadata."""
    wanted = {"torch": "2.6", "transformers": "4.51", "numpy": "1.24", "rich": "12.6", "beartype": "0.14.1"}
    assert str(requirements()["transformer-lens"].specifier) == "<5,>=2.16.1"
    for name, least in wanted.items():
        assert bound_of(requirements()[name]) >= Version(least)


def test_the_environment_has_the_pins():
    if importlib.metadata.version("transformer-lens") != pins()["transformer-lens"]:
        pytest.skip("not the environment of the oldest dependencies")
    installed = {name: Version(importlib.metadata.version(name)) for name in pins()}
    assert installed == {name: Version(pin) for name, pin in pins().items()}


def test_every_method_runs_and_its_map_comes_back(model, tmp_path):
    names = [name for name, engine, _ in lm.support(model) if engine]
    assert {"attention", "value_zeroing", "alti", "decompx", "gradient_attention", "gim"} <= set(names)
    for name, m in lm.run(model, PROMPT, names).items():
        m.save(tmp_path / f"{name}.safetensors")
        back = lm.MixingMap.load(tmp_path / f"{name}.safetensors")
        assert torch.equal(back.scores, m.scores)
        assert back.tokens == m.tokens
        assert torch.allclose(lm.MixingMap.from_dataframe(m.to_dataframe()).scores, m.scores)
        assert torch.allclose(lm.MixingMap.from_xarray(m.to_xarray()).scores, m.scores)
        assert np.isfinite(np.asarray(m)).all()


def test_aggregations_figures_pages_and_tables(model, tmp_path):
    m = lm.run(model, PROMPT, "value_zeroing")
    for one in (lm.rollout(m), lm.flow(m), lm.input_map(model, PROMPT)):
        assert one.tokens == ["<bos>", *PROMPT.split()]
        one.show().savefig(tmp_path / "figure.png")
        assert lm.page(one).html.startswith("<!DOCTYPE html>")
    assert len(lm.compare({"a": m, "b": lm.run(model, PROMPT, "attention")}))


def test_what_scripts_and_tests_use_is_imported():
    for name in ("gguf", "onnx", "captum", "selenium", "jupytext", "xdist", "hypothesis"):
        importlib.import_module(name)
