"""Every model of the factory by a label, with the expected result: maps, or an error."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch

from tests.tiny_models import (
    BRIDGE_NAMES,
    HOOKED_TRANSFORMER_NAMES,
    WIDE_NAMES,
    Unavailable,
    bridge,
    hooked_encoder,
    hooked_encoder_decoder,
    hooked_transformer,
    is_encoder_decoder,
    is_pair,
    tokens,
)

ENCODER_DECODERS = ("t5", "t5_gated", "bart", "marian")
PARTS = ("encoder", "decoder", "cross")
# `make test` has these models of the matrix: each class, and each kind of block, norm, position and
# feed-forward once. `.ci/run` has all models.
USUAL = (
    "bridge gpt2",
    "bridge llama",
    "bridge gemma3",
    "bridge gpt_neox",
    "bridge bloom",
    "bridge mixtral",
    "bridge bert",
    "bridge mamba",
    "HookedTransformer LN",
    "HookedEncoder",
    *(f"HookedEncoderDecoder {part}" for part in PARTS),
)

# These models raise an error with these words for every method. All other models must have maps.
UNSUPPORTED = {
    "bridge gpt2_unscaled": "known to run GPT-2 with scale_attn_weights=False wrongly",
    "bridge falcon_alibi": "known to run Falcon with alibi wrongly",
    "bridge falcon_new": "known to run Falcon's new decoder architecture wrongly",
    "bridge opt_postln": "cannot run OPT with do_layer_norm_before=False",
    "bridge mamba": "without attention there are no values or patterns",
    "bridge deepseek_v3": r"mixing is not verified|DeepSeek-V3 before TransformerLens 4 wrongly",
    "bridge vit": "expected a model that reads tokens, got a visual model",
}
UNSUPPORTED_BEFORE_4 = {
    "bridge cohere": "Cohere before TransformerLens 4 wrongly",
    **{f"bridge {name} {part}": "cannot run T5" for name in ("t5", "t5_gated") for part in PARTS},
}
UNSUPPORTED_BEFORE_3 = {
    f"HookedEncoderDecoder {part}": "not causal in TransformerLens 2.x" for part in ("decoder", "cross")
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One stack of one model."""

    label: str
    part: str | None = None

    def build(self, dtype: torch.dtype = torch.float32) -> Any:
        """Return the model; skip the test if this TransformerLens does not have it."""
        kind, _, rest = self.label.partition(" ")
        name = rest.split(" ")[0]
        factories = {
            "bridge": lambda: bridge(name, dtype),
            "HookedTransformer": lambda: hooked_transformer(name, dtype),
            "HookedEncoder": lambda: hooked_encoder(dtype),
            "HookedEncoderDecoder": lambda: hooked_encoder_decoder(dtype),
        }
        try:
            return factories[kind]()
        except Unavailable as problem:
            pytest.skip(str(problem))

    @property
    def refusal(self) -> str | None:
        """Return the words of the error on the installed TransformerLens; None if maps are expected."""
        from lens_mix.lens.model_classes import transformer_lens_version

        major = transformer_lens_version()[0]
        tables = [UNSUPPORTED]
        tables += [UNSUPPORTED_BEFORE_4] if major < 4 else []
        tables += [UNSUPPORTED_BEFORE_3] if major < 3 else []
        return next((table[self.label] for table in tables if self.label in table), None)

    @property
    def wrong_logits(self) -> bool:
        """Return whether this release has maps but wrong logits (the decoder of TransformerLens 2)."""
        from lens_mix.lens.model_classes import transformer_lens_version

        return self.label == "HookedEncoderDecoder encoder" and transformer_lens_version()[0] < 3


@functools.cache
def model_of(case: Case, dtype: torch.dtype = torch.float32) -> Any:
    """Return `case.build(dtype)`, which is built once, for tests that do not change it."""
    return case.build(dtype)


def cases(*, cross: bool = False) -> list[Case]:
    """Return all cases, which depend on the release of TransformerLens.

    Args:
        cross: Whether cross-attention is included, for which most methods are not defined.
    """
    found, parts = [], PARTS if cross else PARTS[:2]
    for name in BRIDGE_NAMES:
        if name in ENCODER_DECODERS:
            found += [Case(f"bridge {name} {part}", part) for part in parts]
        else:
            found.append(Case(f"bridge {name}"))
    found += [Case(f"HookedTransformer {name}") for name in HOOKED_TRANSFORMER_NAMES]
    found.append(Case("HookedEncoder"))
    found += [Case(f"HookedEncoderDecoder {part}", part) for part in parts]
    return found


def is_unusual(parameter: object) -> bool:
    """Return whether a test's parameter is a model of the matrix, or a label, that `make test` leaves out."""
    label = getattr(parameter, "label", parameter)
    return isinstance(label, str) and label in _labels() and label not in USUAL


@functools.cache
def _labels() -> frozenset[str]:
    return frozenset(case.label for case in cases(cross=True))


def wide_cases() -> list[Case]:
    """Return the cases of the wide sweep (`tests/test_wide.py`). `Case.refusal` is not for them."""
    pairs = [(name, is_pair(name)) for name in WIDE_NAMES]
    return [
        Case(f"bridge {name}{f' {stack}' if stack else ''}", stack)
        for name, pair in pairs
        for stack in (PARTS[:2] if pair else (None,))
    ]


def prompt_of(model: Any, seq: int = 7, seed: int = 1) -> Any:
    """Return tokens, or a pair of them for an encoder-decoder."""
    first = tokens(model, 1, seq, seed)
    return (first, tokens(model, 1, max(2, seq - 2), seed + 50)) if is_encoder_decoder(model) else first


def zeroed(values: torch.Tensor, key: int) -> torch.Tensor:
    """Return values [batch, key, ...] that are zero at one key."""
    values = values.clone()
    values[:, key] = 0
    return values


def slow(*values: Any) -> Any:
    """Return a parameter for `pytest.mark.parametrize` that runs in `.ci/run` and not in `make test`."""
    return pytest.param(*values, marks=pytest.mark.slow)


def build_or_skip(factory: Any, *arguments: Any, **keywords: Any) -> Any:
    """Return the model; skip the test if this TransformerLens does not have the class."""
    try:
        return factory(*arguments, **keywords)
    except Unavailable as problem:
        pytest.skip(str(problem))
