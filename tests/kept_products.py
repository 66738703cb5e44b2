"""Count and delete the products that `lens_mix._algebra.weight_cache` keeps between runs."""

from __future__ import annotations

from lens_mix._algebra import weight_cache


def number(kind: str) -> int:
    """Return how many products of a kind are stored."""
    return sum(kind in entries for entries in weight_cache._store.values())


def forget() -> None:
    """Delete all stored products."""
    weight_cache._store.clear()
