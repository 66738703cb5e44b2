"""Which class of TransformerLens model this is, and which version wrote it."""

from __future__ import annotations

import enum
import functools
import importlib.metadata
import re
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from torch import nn
from transformer_lens.hook_points import HookPoint


class ModelClass(enum.Enum):
    """The classes of TransformerLens model that the lens looks through."""

    HOOKED_TRANSFORMER = "HookedTransformer"
    HOOKED_ENCODER = "HookedEncoder"
    HOOKED_ENCODER_DECODER = "HookedEncoderDecoder"
    BRIDGE = "TransformerBridge"


class TransformerLensModel(Protocol):
    """What the classes of TransformerLens model have in common, as far as lens_mix asks for it."""

    @property
    def cfg(self) -> Any:
        """The configuration."""

    @property
    def hook_dict(self) -> Mapping[str, HookPoint]:
        """The hook points by name."""

    @property
    def tokenizer(self) -> Any:
        """Hugging Face's tokenizer; None, or no such attribute, where there is none."""

    def to_tokens(self, input: str, **options: Any) -> Any:
        """Text as tokens [1 pos]; of an encoder, these and its further inputs."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The forward pass."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """As of any torch module."""


class UnsupportedModelError(ValueError):
    """This model, or this method on this model, cannot give a map that can be trusted; the text says why."""


def model_class_of(model: object) -> ModelClass:
    """The class of a TransformerLens model.

    The class is recognised by name along the method resolution order: 4.x no longer has the
    hooked classes, 2.x does not have the Bridge yet, and importing either to ask is an error.

    Raises:
        TypeError: the model is not a TransformerLens model.
    """
    names = {base.__name__ for base in type(model).__mro__}
    for kind in ModelClass:
        if kind.value in names:
            return kind
    expected = ", ".join(kind.value for kind in ModelClass)
    got = f"{type(model).__module__}.{type(model).__qualname__}"
    hint = ""
    if isinstance(model, nn.Module) and hasattr(model, "config"):
        hint = (
            ". A Hugging Face model is wrapped by "
            "transformer_lens.model_bridge.TransformerBridge.boot_transformers("
            "name, hf_model=model, tokenizer=...)"
        )
    raise TypeError(f"model: expected a TransformerLens model ({expected}), got {got}{hint}")


@functools.cache
def transformer_lens_version() -> tuple[int, int]:
    """(major, minor) of the installed TransformerLens, which has no `__version__`."""
    numbers = re.findall(r"\d+", importlib.metadata.version("transformer-lens"))
    return int(numbers[0]), int(numbers[1])
