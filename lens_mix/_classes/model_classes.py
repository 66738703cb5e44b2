"""The classes of TransformerLens models, and the installed version of TransformerLens."""

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
    """The classes of TransformerLens models that lens_mix supports."""

    HOOKED_TRANSFORMER = "HookedTransformer"
    HOOKED_ENCODER = "HookedEncoder"
    HOOKED_ENCODER_DECODER = "HookedEncoderDecoder"
    BRIDGE = "TransformerBridge"


class TransformerLensModel(Protocol):
    """What lens_mix uses of every TransformerLens model.

    >>> def count_hooks(model: lm.models.TransformerLensModel) -> int:
    ...     return len(model.hook_dict)
    """

    @property
    def cfg(self) -> Any:
        """Return the configuration."""

    @property
    def hook_dict(self) -> Mapping[str, HookPoint]:
        """Return the hook points by name."""

    @property
    def tokenizer(self) -> Any:
        """Return Hugging Face's tokenizer. A model without one has None here, or no such attribute."""

    def to_tokens(self, input: str, **options: Any) -> Any:
        """Return the tokens [1, pos] of a text; an encoder also returns its further inputs."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """Iterate over the parameters, as in any torch module."""


class UnsupportedModelError(ValueError):
    """The model, or the method on this model, cannot be used for a correct map; the message says why.

    >>> try:
    ...     lm.run(model, "The Eiffel Tower is in the city of", "alti_logit")
    ... except lm.UnsupportedModelError as error:
    ...     print(error)
    """


def model_class_of(model: object) -> ModelClass:
    """Return the class of a TransformerLens model.

    The class is found by the names of its base classes, because no release has all classes to import: release
    4 has no hooked classes, and release 2 has no Bridge.

    Raises:
        TypeError: If the model is not a TransformerLens model.
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
            ". Wrap a Hugging Face model with "
            "transformer_lens.model_bridge.TransformerBridge.boot_transformers("
            "name, hf_model=model, tokenizer=...), or an encoder or classifier with lm.wrap(model, tokenizer)"
        )
        hint = _explain_missing_adapter(model) or hint
    hint = hint or describe_inner_model(model)
    raise TypeError(f"model: expected a TransformerLens model ({expected}), got {got}{hint}")


def describe_inner_model(model: object) -> str:
    """Return the part of an error about an object that contains a model, as those of nnsight do; else ""."""
    own = getattr(model, "__dict__", {})
    # The name was `_model` in older releases of nnsight.
    name = next((name for name in ("_module", "_model") if isinstance(own.get(name), nn.Module)), None)
    if name is None or isinstance(model, nn.Module):
        return ""
    return (
        f". It contains a {type(own[name]).__name__}: give model.{name} to lm.wrap, or to TransformerBridge."
        "boot_transformers(name, hf_model=...) if it is a decoder"
    )


NO_REGISTERS = (
    "expected a DINOv2 without registers, because the ViT that TransformerLens knows has no tokens between "
    "[CLS] and the patches"
)


def _explain_missing_adapter(hf_model: Any) -> str | None:
    """Return why TransformerLens can't wrap a model of pictures or sound; None for other models."""
    reads_text = getattr(hf_model, "main_input_name", "input_ids") == "input_ids"
    kind, config = type(hf_model).__name__, hf_model.config
    if config.model_type == "dinov2":
        return (
            ". TransformerLens has no adapter for DINOv2, but for a ViT with the same outputs: "
            "lm.models.fold_layer_scale(model)"
        )
    if config.model_type == "dinov2_with_registers":
        return f". TransformerLens has no adapter for it: {NO_REGISTERS}"
    if reads_text and not hasattr(config, "vision_config"):
        return None
    try:
        from transformer_lens.factories.architecture_adapter_factory import SUPPORTED_ARCHITECTURES
    except ImportError:
        return ". TransformerLens 2 has no TransformerBridge, so it has no models of pictures or sound"
    if kind in SUPPORTED_ARCHITECTURES:
        return None
    version = ".".join(map(str, transformer_lens_version()))
    return f". TransformerLens {version} has no adapter for {kind}, so it can't be mapped"


def reads_features(model: TransformerLensModel) -> bool:
    """Return whether the model reads pictures or sound instead of tokens."""
    flags = ("is_visual_model", "is_audio_model")
    return any(bool(getattr(model.cfg, flag, False)) for flag in flags)


def has_classifier(model: TransformerLensModel) -> bool:
    """Return whether a model of pictures or sound has logits, and not only a last hidden state."""
    return hasattr(model, "unembed")


# The attribute of a Bridge with (the model of transformers that it was made from, whether it has its logits).
_ORIGINAL = "_lens_mix_original"


def keep_original(bridge: Any, hf_model: Any, has_logits: bool) -> None:
    """Store the model of transformers that `lm.wrap` made a Bridge from.

    It is not a submodule of the Bridge, so that the Bridge has only its own parameters and hooks.
    """
    vars(bridge)[_ORIGINAL] = (hf_model, has_logits)


def find_original(model: object) -> Any:
    """Return the model of transformers that `lm.wrap` made a Bridge from; None for all other models."""
    return getattr(model, "__dict__", {}).get(_ORIGINAL, (None, True))[0]


def find_missing_logits(model: object) -> str | None:
    """Return why a model that `lm.wrap` made has no logits; None for all other models."""
    original, has_logits = getattr(model, "__dict__", {}).get(_ORIGINAL, (None, True))
    if has_logits:
        return None
    output = original.get_output_embeddings()
    known = "no masked-language head" if output is None else "a head that lm.wrap does not know"
    return (
        f"{type(original).__name__} has {known}, so there are no logits of tokens; explain a "
        "class with target=lm.targets.hf_classifier(model, class_), or a function of the last hidden states "
        "with target=lm.targets.head(function)"
    )


@functools.cache
def transformer_lens_version() -> tuple[int, int]:
    """Return (major, minor) of the installed TransformerLens, which has no `__version__`."""
    numbers = re.findall(r"\d+", importlib.metadata.version("transformer-lens"))
    return int(numbers[0]), int(numbers[1])


def wrapped_config(model: TransformerLensModel, name: str) -> Any:
    """Return a setting of the transformers model inside a TransformerBridge; None if there is none."""
    return getattr(getattr(getattr(model, "original_model", None), "config", None), name, None)
