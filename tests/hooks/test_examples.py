"""Test that the examples of the docstrings and of the guide on hooks run unchanged."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lens_mix.hooks
from lens_mix.hooks import must_fire, record, zero_values
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
CROSS_ATTENTION = [
    pytest.param(hooked_encoder_decoder, (), "decoder.{layer}.cross_attn", id="HookedEncoderDecoder"),
    pytest.param(bridge, ("bart",), "decoder_blocks.{layer}.cross_attn", id="TransformerBridge"),
]


def blocks(text: str) -> list[str]:
    """Return the fenced python examples."""
    found = re.findall(r"^ *```python\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(block) for block in found]


def docstring_blocks(name: str) -> list[str]:
    return blocks(inspect.getdoc(getattr(lens_mix.hooks, name)) or "")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_has_an_example(name: str) -> None:
    assert docstring_blocks(name)
    assert re.search(rf"`{name}\b", PAGE.read_text())


@pytest.mark.parametrize(
    ("factory", "arguments"), MODELS, ids=["-".join([model.__name__, *names]) for model, names in MODELS]
)
def test_examples_run(factory: Callable[..., Any], arguments: tuple[str, ...]) -> None:
    if not available(factory, *arguments):
        pytest.skip(f"no {factory.__name__} {arguments} in this TransformerLens")
    examples = [block for name in FUNCTIONS for block in docstring_blocks(name)]
    assert len(examples) == len(FUNCTIONS) >= 14
    if arguments == ("opt",):
        # OPT's pattern fires after the mixing, so these hooks raise an error or record nothing.
        for name in ("mask_attention", "mask_keys", "record_mixing"):
            examples.remove(*docstring_blocks(name))
    if arguments != ("gpt2",):
        # The activation in this example is that of GPT-2.
        examples.remove(*docstring_blocks("hold_activation_ratio"))
    for example in examples:
        names = start(factory, arguments)
        exec(compile(example, example, "exec"), names)


@pytest.mark.parametrize(
    ("factory", "arguments"), MODELS, ids=["-".join([model.__name__, *names]) for model, names in MODELS]
)
def test_the_guide_runs_on_every_class(factory: Callable[..., Any], arguments: tuple[str, ...]) -> None:
    """Run the blocks of the guide one after another; `tests/docs` runs the first one, which loads a model."""
    if not available(factory, *arguments):
        pytest.skip(f"no {factory.__name__} {arguments} in this TransformerLens")
    first, *others = blocks(PAGE.read_text())
    assert "must_fire" in first
    assert len(others) >= 3
    names = start(factory, arguments)
    exec("import torch\nfrom lens_mix.hooks import must_fire, zero_values", names)
    for example in others:
        exec(compile(example, example, "exec"), names)
    assert names["scores"].shape == names["tokens"].shape
    assert names["hook"].calls == 1


def start(factory: Callable[..., Any], arguments: tuple[str, ...]) -> dict[str, Any]:
    """Return the names that an example starts with: a new model, and tokens."""
    model = factory(*arguments)
    if arguments == ("opt",):
        model.original_model.set_attn_implementation("eager")
    return {"model": model, "tokens": tokens(model)}


@pytest.mark.parametrize(("factory", "arguments", "attention"), CROSS_ATTENTION)
def test_the_names_of_cross_attention_are_accepted(
    factory: Callable[..., Any], arguments: tuple[str, ...], attention: str
) -> None:
    if not available(factory, *arguments):
        pytest.skip(f"no {factory.__name__} in this TransformerLens")
    model = factory(*arguments)
    source, target = tokens(model), tokens(model, seq=5, seed=2)
    inputs = ((source,), {"decoder_input": target}) if factory is bridge else ((source, target), {})
    with must_fire(zero_values(0, 2, attention=attention)) as hooks:
        logits = model.run_with_hooks(*inputs[0], **inputs[1], fwd_hooks=hooks)
    assert not torch.equal(logits, model(*inputs[0], **inputs[1]))
    assert f'"{attention}"' in lens_mix.hooks.zero_values.__doc__


@pytest.mark.skipif(not available(bridge, "bart"), reason="no TransformerBridge of BART")
def test_eager_attention_lets_a_pattern_be_recorded() -> None:
    model = bridge("bart")
    model.original_model.set_attn_implementation("eager")
    store: dict[str, torch.Tensor] = {}
    with must_fire(record(store, "encoder_blocks.0.attn.hook_pattern")) as hooks:
        model.run_with_hooks(tokens(model), decoder_input=tokens(model, seq=5, seed=2), fwd_hooks=hooks)
    (pattern,) = store.values()
    assert torch.allclose(pattern.sum(-1), torch.ones(()))
