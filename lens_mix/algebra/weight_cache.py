"""Products of a model's weights, kept between runs: in one store, each kind up to one bound.

They go with the weights that they are made of. An edit through `.data` leaves no trace that could be asked:
whoever keeps a product says by probes (`sketch`) what the weights were, and asks again before it is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from lens_mix.lens.changes import changing

_KEPT_BYTES = 2 << 30  # bytes of products of one kind that are kept


class _Entry(NamedTuple):
    probes: Sequence[Tensor]
    product: Any


# By a weight as the verification has read it (a new verification reads anew), then by kind of product.
_store: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def recall(weight: Tensor, kind: str, probes: Sequence[Tensor]) -> Any | None:
    """What was kept; None where nothing was, or where the probes differ."""
    entry = _store.get(weight, {}).get(kind)
    if entry is None or any(
        old.dtype != new.dtype or not torch.equal(old, new)
        for old, new in zip(entry.probes, probes, strict=True)
    ):
        return None
    return entry.product


def fits(weight: Tensor, kind: str, size: int) -> bool:
    """Whether a product of `size` bytes may be kept, beside others of its kind."""
    # Another thread may add a product while the store is searched, which would break the search.
    with changing:
        others: int = sum(
            entries[kind].product.nbytes
            for name, entries in _store.items()
            if kind in entries and name is not weight
        )
    return size + others <= _KEPT_BYTES


def keep(weight: Tensor, kind: str, probes: Sequence[Tensor], product: Any) -> None:
    """Keep a product, which has `nbytes`, in the place of an older one of its kind."""
    with changing:
        _store.setdefault(weight, {})[kind] = _Entry(probes, product)
