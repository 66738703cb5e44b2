"""What several tests of methods set up."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lens_mix.algebra import weight_cache
from lens_mix.algebra.value_zeroing_old import rotation


@pytest.fixture
def turned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Other axes for blocks of any size, nothing kept from before."""
    monkeypatch.setattr(rotation, "LEAST_PAIRS", 1)
    monkeypatch.setattr(rotation, "STEP", 4)
    weight_cache.forget()
    yield
    weight_cache.forget()
