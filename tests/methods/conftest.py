"""What several tests of methods set up."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lens_mix.methods import kept
from lens_mix.methods.zeroing import rotation


@pytest.fixture
def turned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Other axes for blocks of any size, nothing kept from before."""
    monkeypatch.setattr(rotation, "LEAST_PAIRS", 1)
    monkeypatch.setattr(rotation, "STEP", 4)
    kept.forget()
    yield
    kept.forget()
