"""Nothing in the tests reaches a model hub, and tiny tensors run on one thread.

Tests that go through all models of the matrix have the usual ones in `make test`, the others in `.ci/run`.
"""

import gc
import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
import torch

import tests.shape_checks  # noqa: F401  the type checker that pyproject.toml names has to be importable
from tests.matrix import is_unusual

torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
        if any(map(is_unusual, parameters)):
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish():
    # Memory is measured after gc.collect(), which goes through all tests that were collected otherwise.
    gc.freeze()
