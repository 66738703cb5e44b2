"""Test that the examples of the docstrings and of the guide on hooks run unchanged."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lens_mix.hooks
from tests.tiny_models import (
    available,
    bridge,
    hooked_encoder,
    hooked_encoder_decoder,
    hooked_transformer,
    tokens,
)

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "hooks.md"
FUNCTIONS = [name for name in lens_mix.hooks.__all__ if inspect.isfunction(getattr(lens_mix.hooks, name))]
MODELS: list[tuple[Callable[..., Any], tuple[str, ...]]] = [
    (hooked_transformer, ("LN",)),
    (hooked_transformer, ("grouped",)),
    (hooked_encoder, ()),
    (bridge, ("gpt2",)),
    (bridge, ("llama",)),
    (bridge, ("opt",)),
]


def blocks(text: str, label: str = "") -> list[str]:
    """Return the fenced python examples with one label."""
    found = re.findall(
        rf"^ *```python{' ' + label if label else ''}\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL
    )
    return [textwrap.dedent(block) for block in found]


def docstring_blocks(name: str) -> list[str]:
    return blocks(inspect.getdoc(getattr(lens_mix.hooks, name)) or "")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_has_an_example(name: str) -> None:
    assert docstring_blocks(name)
    assert f"`{name}(" in PAGE.read_text()


@pytest.mark.parametrize(
    ("factory", "arguments"), MODELS, ids=["-".join([model.__name__, *names]) for model, names in MODELS]
)
def test_examples_run(factory: Callable[..., Any], arguments: tuple[str, ...]) -> None:
    if not available(factory, *arguments):
        pytest.skip(f"no {factory.__name__} {arguments} in this TransformerLens")
    examples = [*blocks(PAGE.read_text()), *(block for name in FUNCTIONS for block in docstring_blocks(name))]
    assert len(examples) == len(blocks(PAGE.read_text())) + len(FUNCTIONS) >= 14
    if arguments == ("opt",):
        # OPT's pattern fires after the mixing, so these hooks raise an error or record nothing.
        for name in ("mask_attention", "mask_keys", "record_mixing"):
            examples.remove(*docstring_blocks(name))
    if arguments != ("gpt2",):
        # The activation in this example is that of GPT-2.
        examples.remove(*docstring_blocks("hold_activation_ratio"))
    for example in examples:
        model = factory(*arguments)
        if arguments == ("opt",):
            model.original_model.set_attn_implementation("eager")
        names: dict[str, Any] = {"model": model, "tokens": tokens(model)}
        exec(compile(example, example, "exec"), names)


@pytest.mark.parametrize("label", ["HookedEncoderDecoder", "TransformerBridge"])
def test_examples_of_encoder_decoders_run(label: str) -> None:
    factory, arguments = (bridge, ("bart",)) if label == "TransformerBridge" else (hooked_encoder_decoder, ())
    if not available(factory, *arguments):
        pytest.skip(f"no {label} in this TransformerLens")
    examples = blocks(PAGE.read_text(), label)
    assert examples
    for example in examples:
        model = factory(*arguments)
        names = {"model": model, "tokens": tokens(model), "decoder_tokens": tokens(model, seq=5, seed=2)}
        exec(compile(example, example, "exec"), names)
