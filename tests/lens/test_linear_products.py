"""Passes other than the clean pass compute large products by oneDNN, with the same gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

import lens_mix as lm
from lens_mix.lens import large_product, linear_products
from lens_mix.lens.changes import Changes
from lens_mix.lens.model import Lens
from tests.tiny_models import available, bridge, gpt2_like, tokens

# Hooked classes have no linear layers: they multiply by `einsum`.
on_bridges = pytest.mark.skipif(
    not available(bridge, "llama"), reason="no TransformerBridge in this TransformerLens"
)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Compute all products by a stand-in for oneDNN in any dtype, and return the shapes of the matrices."""
    found: list[tuple[int, ...]] = []

    def product(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        found.append(tuple(matrix.shape))
        return (x.flatten(0, -2) @ matrix).unflatten(0, x.shape[:-1])

    monkeypatch.setattr(large_product, "_LEAST", 1)
    monkeypatch.setattr(large_product, "by_onednn", lambda x: True)
    monkeypatch.setattr(linear_products, "by_onednn", lambda x: True)
    monkeypatch.setattr(large_product, "product_by_onednn", product)
    return found


@pytest.mark.parametrize("layer", [nn.Linear(5, 3), nn.Linear(5, 3, bias=False), Conv1D(3, 5)])
def test_a_layer_has_the_same_output_and_gradient(products: list[tuple[int, ...]], layer: Any) -> None:
    layer = layer.double().requires_grad_(False)
    x = torch.randn(2, 4, 5, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(2, 4, 3, dtype=torch.float64)
    (expected,) = torch.autograd.grad((layer(x) * weights).sum(), x)
    output = linear_products._run_linear(layer, x)
    torch.testing.assert_close(output, layer(x), rtol=0, atol=1e-12)
    (got,) = torch.autograd.grad((output * weights).sum(), x)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    assert products == [(5, 3), (3, 5)]


def test_a_weight_with_a_gradient_is_multiplied_as_usual(products: list[tuple[int, ...]]) -> None:
    layer, x = nn.Linear(5, 3), torch.randn(4, 5)
    linear_products._run_linear(layer, x).sum().backward()
    assert layer.weight.grad is not None
    assert products == []


METHODS = [
    lm.Occlusion(by="replace", replacements=[3]),
    lm.InputGradients(score="integrated", n_steps=3),
    lm.AttentionAttribution(n_steps=3),
    "context_length",
]


@on_bridges
@pytest.mark.parametrize("make", [lambda: bridge("llama"), gpt2_like], ids=["linear", "conv1d"])
@pytest.mark.parametrize("method", METHODS, ids=["occlusion", "integrated", "attribution", "context"])
def test_maps_are_the_same(request: pytest.FixtureRequest, make: Any, method: Any) -> None:
    model = make().double()
    prompt = tokens(model, 1, 7)[0]
    expected = lm.run(model, prompt, method, queries=[-1], progress=None).scores
    products = request.getfixturevalue("products")
    got = lm.run(model, prompt, method, queries=[-1], progress=None).scores
    assert products
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)


@on_bridges
def test_layers_are_as_before_afterwards_and_other_classes_are_left_alone(
    products: list[tuple[int, ...]],
) -> None:
    class Adapted(nn.Linear):
        pass

    model = bridge("llama")
    lens = Lens(model)
    linear = [module for module in lens.modules if type(module) is nn.Linear]
    linear[0].__class__ = Adapted
    with Changes(linear_products.faster_products(lens, 10)):
        changed = [layer for layer in linear if "forward" in vars(layer)]
        assert changed == linear[1:]
    assert not any("forward" in vars(layer) for layer in linear)


@on_bridges
def test_a_model_in_float64_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_product, "_LEAST", 1)
    monkeypatch.setattr(linear_products, "is_large", lambda rows, matrix: True)
    assert linear_products.faster_products(Lens(bridge("llama").double()), 10) == []
