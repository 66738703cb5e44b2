"""Compute statistics of patterns, vectors and maps, as tables and plain tensors."""

from lens_mix.statistics.attention import attention_statistics
from lens_mix.statistics.head_probe import probe_heads

__all__ = ["attention_statistics", "probe_heads"]


def __dir__() -> list[str]:
    return __all__
