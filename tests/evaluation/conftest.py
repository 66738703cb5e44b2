"""Share a decoder's tokens between the tests of scales."""

import pytest

from tests import tiny_models


@pytest.fixture(scope="module")
def prompt(model, request):
    """Return the shared decoder's tokens, as many as the file's PROMPT_LENGTH."""
    return tiny_models.tokens(model, 1, request.module.PROMPT_LENGTH)[0]
