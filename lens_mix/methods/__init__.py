"""One paper, one file: each method is a small frozen dataclass with one call."""

from lens_mix.methods.attention import AttentionWeights
from lens_mix.methods.base import Method
from lens_mix.methods.value_zeroing import ValueZeroing

METHODS: dict[str, type[Method]] = {method.name: method for method in (AttentionWeights, ValueZeroing)}

__all__ = ["METHODS", "AttentionWeights", "Method", "ValueZeroing"]
