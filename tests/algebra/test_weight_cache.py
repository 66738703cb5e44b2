"""The store of products of weights."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from lens_mix.algebra import weight_cache
from tests import kept_products


class KeptMeanwhile:
    """A product; while its size is asked for, another thread keeps one more."""

    def __init__(self, weight: torch.Tensor, kind: str) -> None:
        self.weight, self.kind = weight, kind
        self.threads: list[threading.Thread] = []

    @property
    def nbytes(self) -> int:
        """Any size."""
        other = threading.Thread(target=weight_cache.keep, args=(self.weight, self.kind, [], torch.zeros(1)))
        self.threads.append(other)
        other.start()
        # Where the store is locked, the other thread waits.
        other.join(timeout=0.1)
        return 1


@pytest.fixture
def empty() -> Iterator[None]:
    """A store with nothing in it."""
    kept_products.forget()
    yield
    kept_products.forget()


@pytest.mark.parametrize("same_weight", [True, False])
def test_another_thread_may_keep_meanwhile(empty: None, same_weight: bool) -> None:
    weight = torch.zeros(2)
    other = weight if same_weight else torch.zeros(2)
    product = KeptMeanwhile(other, "meanwhile")
    weight_cache.keep(weight, "first", [], product)
    assert weight_cache.fits(torch.zeros(1), "first", 1)
    for thread in product.threads:
        thread.join()
    assert kept_products.number("meanwhile") == 1
