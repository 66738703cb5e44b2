"""What is read off patterns, vectors and maps: tables and plain tensors, and figures of them."""

from lens_mix.statistics.attention import attention_statistics
from lens_mix.statistics.head_probe import probe_heads

__all__ = ["attention_statistics", "probe_heads"]
