"""Fixtures of the tests of methods."""

import pytest

from lens_mix._model.model import Lens


@pytest.fixture
def count_tokens(monkeypatch):
    """Return a function that returns how many tokens the model has run since its last call."""
    counts, forward = [0], Lens.forward

    def counted(lens, batch, *args, **options):
        counts.append(batch.tokens.numel())
        return forward(lens, batch, *args, **options)

    def since():
        total = sum(counts)
        counts.clear()
        return total

    monkeypatch.setattr(Lens, "forward", counted)
    return since
