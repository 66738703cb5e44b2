"""Large products are computed by oneDNN if it is the faster library, and no others are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import lens_mix as lm
from lens_mix.lens import large_product
from tests.tiny_models import bridge_or_hooked, tokens

needs_onednn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"),
    reason="this PyTorch has no oneDNN",
)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Use oneDNN for products of any size, and return the shapes of the matrices that it gets."""
    found: list[tuple[int, ...]] = []
    original = large_product.product_by_onednn

    def watched(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        found.append(tuple(matrix.shape))
        return original(x, matrix)

    monkeypatch.setattr(large_product, "_onednn_is_faster", lambda threads: True)
    monkeypatch.setattr(large_product, "product_by_onednn", watched)
    monkeypatch.setattr(large_product, "_LEAST", 1)
    monkeypatch.setattr(large_product, "_COPY_EARNED_BY", 1)
    return found


@pytest.fixture
def unmeasured() -> Iterator[None]:
    """Clear the measurement of the faster library before and after a test."""
    large_product._onednn_is_faster.cache_clear()
    yield
    large_product._onednn_is_faster.cache_clear()


def a_model(dtype: torch.dtype, name: str = "gpt2") -> Any:
    """Return a tiny model; W_out of a Llama model is a transposed view."""
    return bridge_or_hooked(name, {"gpt2": "LN", "llama": "gated"}[name], dtype)


@needs_onednn
def test_it_adds_the_product(calls: list[tuple[int, ...]]) -> None:
    generator = torch.Generator().manual_seed(0)
    x, matrix, into = (torch.randn(5, 5, generator=generator) for _ in range(3))
    expected = into.double() + 0.5 * x.double() @ matrix.double()
    with torch.inference_mode():
        whole = into.clone()
        large_product.add_product(whole, x, matrix, 0.5)
        torch.testing.assert_close(whole.double(), expected, rtol=1e-5, atol=1e-6)
        strided = into.repeat(1, 2)
        large_product.add_product(strided[:, :5], x, matrix, 0.5)
        torch.testing.assert_close(strided[:, :5].double(), expected, rtol=1e-5, atol=1e-6)
        assert torch.equal(strided[:, 5:], into)
    assert calls == [(5, 5), (5, 5)]


@needs_onednn
@pytest.mark.filterwarnings("ignore:TF32")
def test_unsuitable_products_are_not_computed_by_onednn(calls: list[tuple[int, ...]]) -> None:
    wide = torch.randn(4, 8)
    for x, matrix in (
        (torch.randn(3, 4), wide[:, :4]),
        (torch.randn(3, 4).double(), wide.double()),
        (torch.randn(3, 4).bfloat16(), wide.bfloat16()),
    ):
        into = torch.zeros(3, matrix.shape[1], dtype=x.dtype)
        large_product.add_product(into, x, matrix)
        torch.testing.assert_close(into, x @ matrix)
    with torch.backends.mkldnn.flags(enabled=False):
        large_product.add_product(torch.zeros(3, 8), torch.randn(3, 4), wide)
    assert calls == []


@needs_onednn
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_value_zeroing_by_onednn(calls: list[tuple[int, ...]], name: str) -> None:
    model = a_model(torch.float32, name)
    prompt = tokens(model, 1, 9)[0]
    found = lm.run(model, prompt, "value_zeroing", engine="algebra")
    assert calls
    exact = lm.run(a_model(torch.float64, name), prompt, "value_zeroing", engine="hooks")
    torch.testing.assert_close(found.scores.double(), exact.scores, rtol=2e-5, atol=1e-7)
    bounded = lm.run(model, prompt, "value_zeroing", engine="algebra", max_memory=10**8)
    torch.testing.assert_close(found.scores, bounded.scores, rtol=2e-5, atol=1e-7)


@needs_onednn
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_maps_after_the_feed_forward_by_onednn(calls: list[tuple[int, ...]], name: str) -> None:
    model = a_model(torch.float32, name)
    prompt = tokens(model, 1, 9)[0]
    found = lm.run(model, prompt, "atb_ff_res")
    assert calls
    exact = lm.run(a_model(torch.float64, name), prompt, "atb_ff_res")
    torch.testing.assert_close(found.scores.double(), exact.scores, rtol=1e-4, atol=1e-6)


def test_a_release_without_the_operation_does_not_use_onednn(
    unmeasured: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        raise AttributeError("no such operation")

    monkeypatch.setattr(large_product, "product_by_onednn", missing)
    assert not large_product.by_onednn(torch.zeros(2, 2))


@needs_onednn
def test_wrong_products_are_not_used(unmeasured: None, monkeypatch: pytest.MonkeyPatch) -> None:
    original = large_product.product_by_onednn
    monkeypatch.setattr(large_product, "product_by_onednn", lambda x, matrix: original(x, matrix) * 1.01)
    monkeypatch.setattr(large_product, "_GAIN", 0.0)
    assert not large_product.by_onednn(torch.zeros(2, 2))
    monkeypatch.setattr(large_product, "product_by_onednn", original)
    large_product._onednn_is_faster.cache_clear()
    assert large_product.by_onednn(torch.zeros(2, 2))


@needs_onednn
def test_a_matrix_is_not_copied_for_few_rows(
    calls: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    view = torch.randn(6, 4).T
    assert large_product.as_right_factor(view, rows=1).is_contiguous()
    monkeypatch.setattr(large_product, "_COPY_EARNED_BY", 2)
    assert large_product.as_right_factor(view, rows=1) is view
    assert large_product.as_right_factor(view.double(), rows=2).stride() == view.stride()
