"""What `lens_mix.algebra.weight_cache` keeps between runs: counted, and dropped."""

from __future__ import annotations

from lens_mix.algebra import weight_cache


def number(kind: str) -> int:
    """How many products of a kind are kept."""
    return sum(kind in entries for entries in weight_cache._store.values())


def forget() -> None:
    """Drop them all."""
    weight_cache._store.clear()
