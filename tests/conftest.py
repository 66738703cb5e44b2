"""Nothing in the tests reaches a model hub, and tiny tensors run on one thread.

Tests that go through all models of the matrix have the usual ones in `make test`, the others in `.ci/run`.
What no release of TransformerLens could change, `make test` runs on one release.
"""

import functools
import gc
import os
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
import torch

import tests.shape_checks  # noqa: F401  the type checker that pyproject.toml names has to be importable
from tests import shared_models
from tests.matrix import is_unusual

torch.set_num_threads(1)

TESTS = Path(__file__).parent
# The source, pages, pictures (those of `make demo` too), matrices, and what is built on maps, on recorded
# numbers, or on hooks: these are made in other tests, on every release.
ONCE = (
    TESTS / "test_files.py",
    TESTS / "test_floors.py",
    TESTS / "test_names.py",
    TESTS / "test_oldest.py",
    TESTS / "test_package.py",
    TESTS / "maps",
    TESTS / "algebra" / "test_budget.py",
    TESTS / "algebra" / "test_folded_weights.py",
    TESTS / "graphs",
    TESTS / "evaluation",
    TESTS / "benchmarks",
    TESTS / "aggregation",
    TESTS / "serve" / "test_site_in_a_browser.py",
    TESTS / "view",
    TESTS / "demos" / "test_main.py",
)
ON_MODELS = TESTS / "aggregation" / "test_joint.py"


@pytest.fixture(scope="session")
def model():
    """A decoder in float64 that reads words (`toy_tokenizer`), one for all tests: none may change it."""
    return shared_models.decoder()


@pytest.fixture(scope="module", autouse=True)
def shared_models_are_as_they_were_built():
    yield
    changed = shared_models.changed()
    assert not changed, (
        f"this file's tests changed {changed}: let them build models of their own (tiny_models)"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
        if any(map(is_unusual, parameters)):
            item.add_marker(pytest.mark.slow)
        if _is_once(item.path):
            item.add_marker(pytest.mark.once)


@functools.cache
def _is_once(path):
    return path != ON_MODELS and any(path.is_relative_to(place) for place in ONCE)


def pytest_collection_finish():
    # Memory is measured after gc.collect(), which goes through all tests that were collected otherwise.
    gc.freeze()
