"""The store of products of weights."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from lens_mix._algebra import weight_cache
from tests import kept_products


class StoredMeanwhile:
    """A product whose size is read while another thread stores one more."""

    def __init__(self, weight: torch.Tensor, kind: str) -> None:
        self.weight, self.kind = weight, kind
        self.threads: list[threading.Thread] = []

    @property
    def nbytes(self) -> int:
        """Start the other thread, and return any size."""
        other = threading.Thread(target=weight_cache.store, args=(self.weight, self.kind, [], torch.zeros(1)))
        self.threads.append(other)
        other.start()
        # The other thread has to wait, because the store is locked.
        other.join(timeout=0.1)
        return 1


@pytest.fixture
def empty() -> Iterator[None]:
    """Empty the store before and after a test."""
    kept_products.forget()
    yield
    kept_products.forget()


@pytest.mark.parametrize("same_weight", [True, False])
def test_another_thread_may_store_meanwhile(empty: None, same_weight: bool) -> None:
    weight = torch.zeros(2)
    other = weight if same_weight else torch.zeros(2)
    product = StoredMeanwhile(other, "meanwhile")
    weight_cache.store(weight, "first", [], product)
    assert weight_cache._has_space(torch.zeros(1), "first", 1)
    for thread in product.threads:
        thread.join()
    assert kept_products.number("meanwhile") == 1
