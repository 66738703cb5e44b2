"""A store of products of a model's weights, which are kept between runs; each kind has one bound.

A product is deleted with its weight. An edit of a weight through `.data` can't be detected by its version. So
a product is stored with probes of its weights (`sketch`), and is used only if the weights still have equal
probes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from lens_mix._care.changes import changing

_KEPT_BYTES = 2 << 30  # The largest number of bytes of all products of one kind.


class _StoredProduct(NamedTuple):
    probes: Sequence[Tensor]
    product: Any


# The keys are a weight, as the verification has read it, and then the kind of product.
_store: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def load_or_store(
    weight: Tensor, kind: str, probes: Sequence[Tensor], make: Callable[[], Any], size: int | None
) -> Any | None:
    """Return the stored product, which is made and stored first if there is space.

    Args:
        weight: The weight that the product is deleted with.
        kind: The kind of the product.
        probes: The probes of all weights that the product depends on.
        make: A function that returns the product.
        size: The bytes of the product; None if it may not be stored.
    """
    product = load(weight, kind, probes)
    if product is None and size is not None and _has_space(weight, kind, size):
        product = make()
        store(weight, kind, probes, product)
    return product


def load(weight: Tensor, kind: str, probes: Sequence[Tensor]) -> Any | None:
    """Return the stored product; None if there is none, or if its probes differ."""
    entry = _store.get(weight, {}).get(kind)
    if entry is None or any(
        old.dtype != new.dtype or not torch.equal(old, new)
        for old, new in zip(entry.probes, probes, strict=True)
    ):
        return None
    return entry.product


def fits(size: int) -> bool:
    """Return whether an empty store has space for `size` bytes of products of one kind."""
    return size <= _KEPT_BYTES


def _has_space(weight: Tensor, kind: str, size: int) -> bool:
    """Return whether a product of `size` bytes may be stored besides others of its kind."""
    # Without the lock, another thread could change the store during the iteration.
    with changing:
        others: int = sum(
            entries[kind].product.nbytes
            for name, entries in _store.items()
            if kind in entries and name is not weight
        )
    return fits(size + others)


def store(weight: Tensor, kind: str, probes: Sequence[Tensor], product: Any) -> None:
    """Store a product, which has `nbytes`, and replace an older one of its kind."""
    with changing:
        _store.setdefault(weight, {})[kind] = _StoredProduct(probes, product)
