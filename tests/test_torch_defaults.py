"""Test that no tensor of the library depends on torch's default dtype and device, which a user may set."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterator

import pandas
import pytest
import torch

import lens_mix as lm
from lens_mix.evaluation import Cells, Importance, Removals, SampleTokens
from lens_mix.experiments import attention_statistics
from lens_mix.experiments.constructed import constructed_models
from lens_mix.methods import METHODS
from tests.matrix import build_or_skip
from tests.random_maps import map_of, random_attention
from tests.source_tree import trees
from tests.tiny_models import bridge, gpt2_like, llama_like, tokens

DTYPES = (torch.float64, torch.bfloat16, torch.float16)
# With whole numbers, these functions return int64, whatever the default is.
WHOLE_NUMBERS = {"arange", "randint", "randperm", "tril_indices", "triu_indices"}
# Without a dtype and a device, these functions use the defaults.
MAKERS = WHOLE_NUMBERS | {
    *("eye", "zeros", "ones", "empty", "full", "linspace", "logspace", "scalar_tensor", "complex"),
    *("tensor", "as_tensor", "asarray", "rand", "randn", "normal", "hann_window", "range", "frombuffer"),
}
# These read or make tensors of the default type, or change the default.
NEVER = {"Tensor", "FloatTensor", "get_default_dtype", "set_default_dtype", "set_default_device"}


def takes_defaults(tree: ast.AST) -> Iterator[str]:
    """Yield the source of calls of torch's functions without a dtype or without a device."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if not isinstance(node.func.value, ast.Name) or node.func.value.id != "torch":
            continue
        name, given = node.func.attr, {keyword.arg for keyword in node.keywords}
        needed = {"device"} if name in WHOLE_NUMBERS else {"device", "dtype"}
        if name in NEVER or (name in MAKERS and not needed <= given):
            yield ast.unparse(node)


def test_every_tensor_has_a_dtype_and_a_device_of_its_own():
    found = {name: list(takes_defaults(tree)) for name, tree in trees().items()}
    assert {name: calls for name, calls in found.items() if calls} == {}


def test_the_rule_finds_them():
    found = takes_defaults(
        ast.parse(
            "torch.eye(3, device=x.device)\ntorch.zeros(2, dtype=y)\ntorch.arange(3)\n"
            "torch.get_default_dtype()\n"
            "torch.ones(2, dtype=y, device=z)\ntorch.arange(3, device=z)\nx.new_zeros(3)\n"
        )
    )
    assert list(found) == [
        "torch.eye(3, device=x.device)",
        "torch.zeros(2, dtype=y)",
        "torch.arange(3)",
        "torch.get_default_dtype()",
    ]


@contextlib.contextmanager
def defaults(dtype=torch.float32, device=None):
    """Set another default dtype or device of torch inside the context."""
    torch.set_default_dtype(dtype)
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


def same(what, found, expected):
    """Check that a map, including its dtype, equals the one with torch's own defaults."""
    assert (found.tokens, found.notes, found.layers) == (expected.tokens, expected.notes, expected.layers), (
        what
    )
    torch.testing.assert_close(
        found.scores, expected.scores, rtol=1e-5, atol=1e-6, msg=lambda text: f"{what}: {text}"
    )


def aggregated(maps):
    """Yield the name and the result of each aggregation that is defined for a map."""
    for name, m in maps.items():
        if m.kind == "layer" and not bool((m.scores < 0).any()):
            yield f"rollout of {name}", lm.rollout(m)
            yield f"receptive field of {name}", lm.rollout(m, receptive_field=True)
            yield f"flow of {name}", lm.flow(m)
        if m.residual_shares is not None:
            yield f"measured rollout of {name}", lm.rollout(m.normalized("absolute"), residual="measured")
        yield f"share of {name}", m.normalized("absolute")


def everything(model, prompt):
    """Return all results to compare: each method's map, aggregations, and the recommended map."""
    runs = [name for name, engine, _ in lm.support(model).rows if engine is not None]
    assert len(runs) > len(METHODS) // 2
    maps = lm.run(model, prompt, runs, residual_shares=True)
    yield from maps.items()
    yield from aggregated(maps)
    yield "input_map", lm.input_map(model, prompt)
    yield "merged words", maps["attention"].merge_words([[0, 1], [2, 3], [4, 5, 6]])
    for number, batch in enumerate(lm.run_many(model, [prompt, prompt[:5]], ["attention", "alti"])):
        for name, m in batch.items():
            yield f"{name} of prompt {number}", m


BUILDERS = {
    "gpt2": gpt2_like,
    "llama": llama_like,
    "bert": lambda dtype: build_or_skip(bridge, "bert", dtype),
}


@pytest.fixture(scope="module")
def usual():
    """Return a model by its name, a prompt, and all results with torch's own defaults."""
    made = {}

    def of(name):
        if name not in made:
            model = BUILDERS[name](torch.float32)
            prompt = tokens(model, 1, 7, 1)[0]
            made[name] = model, prompt, dict(everything(model, prompt))
        return made[name]

    return of


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", BUILDERS)
def test_maps_whatever_the_default_dtype_is(usual, name, dtype):
    model, prompt, expected = usual(name)
    with defaults(dtype):
        found = dict(everything(model, prompt))
    assert list(found) == list(expected)
    for what, m in found.items():
        same(what, m, expected[what])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_float64_model(dtype):
    model = llama_like(torch.float64)
    prompt = tokens(model, 1, 7, 1)[0]
    expected = lm.input_map(model, prompt)
    with defaults(dtype):
        found = lm.input_map(model, prompt)
    same("input_map", found, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_encoder_decoder(dtype):
    model = build_or_skip(bridge, "bart", torch.float32)
    pair = (torch.arange(3, 9), torch.arange(3, 8))

    def made():
        parts = lm.run(model, pair, "attention", part="all")
        yield from parts.items()
        yield "joint", lm.rollout(lm.aggregation.joint(parts))
        yield "gradients", lm.run(model, pair, "input_gradients", part="joint")

    expected = dict(made())
    with defaults(dtype):
        found = dict(made())
    for what, m in found.items():
        same(what, m, expected[what])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_evaluations(dtype):
    model = gpt2_like()
    prompt = tokens(model, 1, 7, 1)[0]
    tasks = {
        "importance": Importance([prompt], lm.methods.Occlusion(n_samples=2)),
        "removals": Removals([prompt], "zero_values"),
        "drawn tokens": Removals([prompt], SampleTokens(samples=2)),
        "cells": Cells([prompt], "mean"),
    }

    def made():
        for name, task in tasks.items():
            yield name, lm.evaluate(model, task, ["attention", "alti"], ["mean"]).table()

    expected = dict(made())
    with defaults(dtype):
        found = dict(made())
    for name, table in found.items():
        pandas.testing.assert_frame_equal(table, expected[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_statistics(dtype):
    """Check divisions and logarithms of whole numbers, whose results would have the default dtype."""
    model = gpt2_like()
    prompts = list(tokens(model, 3, 23, 1))

    def made():
        maps = lm.run_many(model, prompts, lm.methods.AttentionWeights(per_head=True))
        return attention_statistics(maps).evenness

    expected = made()
    with defaults(dtype):
        found = made()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reading_pages_and_figures(dtype, tmp_path):
    m = map_of(random_attention(heads=2).float())
    with defaults(dtype):
        m.save(tmp_path / "map.safetensors")
        assert lm.MixingMap.load(tmp_path / "map.safetensors").scores.dtype == torch.float32
        assert lm.MixingMap.from_dataframe(m.to_dataframe()).scores.dtype in (torch.float32, torch.float64)
        assert "lens_mix" in lm.page(m).html
        m.show()
        lm.MixingMap(scores=[[[1.0, 0.0], [0.5, 0.5]]], tokens=["a", "b"], causal=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_models_from_weights(dtype):
    built = constructed_models()["rasp_sort"]
    prompt = built.prompts(count=1)[0]
    expected = lm.run(built.model(), prompt, "attention")
    with defaults(dtype):
        model = built.model()
        found = lm.run(model, built.prompts(count=1)[0], "attention")
    with defaults(device="meta"):
        on_cpu = built.model()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert {parameter.device.type for parameter in on_cpu.parameters()} == {"cpu"}
    same("attention", found, expected)


def test_the_default_device_is_not_asked_either():
    model = llama_like()
    prompt = tokens(model, 1, 7, 1)[0]
    with defaults(device="meta"):
        try:
            model(prompt[None])
        except (RuntimeError, NotImplementedError) as problem:
            pytest.skip(f"the model itself does not run: {problem}")
    expected = dict(everything(model, prompt))
    with defaults(device="meta"):
        found = dict(everything(model, prompt))
    for what, m in found.items():
        same(what, m, expected[what])
