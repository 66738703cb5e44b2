"""Configure the tests: they use no model hub, and one thread for their small tensors.

Tests of all models of the matrix run on the usual models in `make test`, and on the others in
`make test-all`: all of these tests on 4.3, and those marked `matrix` on older releases. Tests that do not
depend on the release of TransformerLens run on one release in `make test`.
"""

import functools
import gc
import os
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import jaxtyping
import pytest
import torch

import tests.shape_checks  # noqa: F401  pyproject.toml names this type checker, which must be importable.
from tests import shared_models
from tests.matrix import is_repeated, is_unusual

torch.set_num_threads(1)
# Collecting makes many objects that stay: looking for garbage among them takes a tenth of the time.
gc.disable()

TESTS = Path(__file__).parent
# These tests read the source, pages, pictures or matrices, or use maps, recorded numbers or hooks that other
# tests make on every release. Bad inputs are found before a model runs. What the algebra computes on every
# release is compared with hooks by the conformance table.
ONCE = (
    TESTS / "test_app.py",
    TESTS / "test_bad_inputs.py",
    TESTS / "test_files.py",
    TESTS / "test_floors.py",
    TESTS / "test_names.py",
    TESTS / "test_oldest.py",
    TESTS / "test_package.py",
    TESTS / "maps",
    TESTS / "_algebra",
    TESTS / "experiments",
    TESTS / "corpus",
    TESTS / "graphs",
    TESTS / "evaluation",
    TESTS / "benchmarks",
    TESTS / "aggregation",
    TESTS / "view",
    *(
        TESTS / "traces" / f"test_{name}.py"
        for name in ("losses", "many", "reading", "saved", "sources", "spans")
    ),
    TESTS / "demos" / "test_main.py",
    TESTS / "docs",
)
if missing := [place for place in ONCE if not place.exists()]:
    raise FileNotFoundError(f"ONCE: expected files and folders of tests, got {missing}")
ON_MODELS = TESTS / "aggregation" / "test_joint.py"
# Every method runs on every model in these files. In the others, shapes are checked on usual models alone,
# because the checks take a quarter of the time.
MATRIX = (TESTS / "test_matrix.py", TESTS / "test_wide.py", TESTS / "test_conformance.py")


@pytest.fixture(scope="session")
def model():
    """Return a decoder in float64 that reads words (`toy_tokenizer`). No test may change it."""
    return shared_models.decoder()


@pytest.fixture(autouse=True)
def shapes_of_unusual_models_are_checked_once(request, monkeypatch):
    if _is_on_an_unusual_model(request.node) and request.path not in MATRIX:
        monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.fixture
def softmax_in_the_dtype_of_the_model(monkeypatch):
    """Let softmax compute in the dtype of a float64 model. In many, transformers computes it in float32."""
    softmax = torch.nn.functional.softmax

    def wide(x, dim=None, dtype=None, **options):
        return softmax(x, dim=dim, dtype=None if x.dtype == torch.float64 else dtype, **options)

    monkeypatch.setattr(torch.nn.functional, "softmax", wide)


@pytest.fixture(scope="module", autouse=True)
def shared_models_are_as_they_were_built():
    yield
    changed = shared_models.changed()
    assert not changed, (
        f"this file's tests changed {changed}: let them build models of their own (tiny_models)"
    )
    # Later collections skip cached models and collected tests. They would spend seconds on them each time.
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    # A test whose cases are all on unusual Bridges is about these.
    usual = {
        _test_of(item)
        for item in items
        if not (_repeats_a_check(item) or _is_on_an_unusual_model(item) or _is_skipped(item))
    }
    for item in items:
        if _is_on_an_unusual_model(item) or (_repeats_a_check(item) and _test_of(item) in usual):
            item.add_marker(pytest.mark.slow)
        if item.path in MATRIX:
            item.add_marker(pytest.mark.matrix)
        if _is_once(item.path):
            item.add_marker(pytest.mark.once)


def _is_on_an_unusual_model(item):
    return hasattr(item, "callspec") and any(map(is_unusual, item.callspec.params.values()))


def _repeats_a_check(item):
    is_slow = item.get_closest_marker("slow") is not None
    return is_slow or (hasattr(item, "callspec") and any(map(is_repeated, item.callspec.params.values())))


def _is_skipped(item):
    """Return whether a case builds a class that TransformerLens 4 does not have."""
    # The checks of shapes have to be set up before lens_mix is imported.
    from lens_mix._classes.model_classes import transformer_lens_version

    values = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return transformer_lens_version()[0] >= 4 and any(
        getattr(value, "__name__", "").startswith("hooked_") for value in values
    )


def _test_of(item):
    return item.path, getattr(item, "originalname", item.name)


@functools.cache
def _is_once(path):
    return path != ON_MODELS and any(path.is_relative_to(place) for place in ONCE)


def pytest_collection_finish():
    gc.freeze()
    gc.enable()
