"""Products of W_O and W_in are stored between runs, and computed again if the weights differ."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lens_mix as lm
from lens_mix._algebra import folded_weights, value_zeroing, weight_cache
from lens_mix._algebra.folded_weights import folded
from lens_mix.experiments.passes import run_prompt
from tests import kept_products
from tests.tiny_models import available, bridge, gpt2_like, tokens

KIND = "folded torch.float64"
METHODS = [
    lm.methods.ValueZeroing(),
    lm.methods.ValueZeroing(metric="euclidean", per_head=True),
    lm.methods.AtbFf(),
    lm.methods.AtbFfResLn(),
]


@pytest.fixture(autouse=True)
def nothing_kept() -> None:
    kept_products.forget()


def maps(model: Any, prompt: Any, **options: Any) -> list[torch.Tensor]:
    return [lm.run(model, prompt, method, **options).scores for method in METHODS]


def test_products_are_kept_but_not_under_a_bound_or_past_what_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    model = gpt2_like(torch.float64)
    prompt = tokens(model, 1, 9, 1)[0]
    bounded = maps(model, prompt, max_memory=10**8)
    assert kept_products.number(KIND) == 0
    monkeypatch.setattr(weight_cache, "_KEPT_BYTES", 0)
    unkept = maps(model, prompt)
    assert kept_products.number(KIND) == 0
    monkeypatch.undo()
    for first, second, third in zip(bounded, unkept, maps(model, prompt), strict=True):
        torch.testing.assert_close(first, third, rtol=0, atol=1e-12)
        torch.testing.assert_close(second, third, rtol=0, atol=1e-12)
    assert kept_products.number(KIND) == model.cfg.n_layers


def test_a_short_prompt_needs_no_product_and_does_not_use_a_stored_one() -> None:
    model = gpt2_like(torch.float32)
    prompts = [tokens(model, 1, length, 1)[0] for length in (model.cfg.d_head // 2, 4 * model.cfg.d_head)]
    first = lm.run(model, prompts[0], "value_zeroing").scores
    assert kept_products.number("folded torch.float32") == 0
    lm.run(model, prompts[1], "value_zeroing")
    assert kept_products.number("folded torch.float32") == model.cfg.n_layers
    assert torch.equal(lm.run(model, prompts[0], "value_zeroing").scores, first)


def test_one_row_needs_no_product() -> None:
    model = gpt2_like(torch.float32)
    prompt = tokens(model, 1, 4 * model.cfg.d_head, 1)[0]
    lm.run(model, prompt, "value_zeroing", queries=[-1])
    assert kept_products.number("folded torch.float32") == 0


def test_products_that_cannot_be_stored_have_to_pay_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    model = gpt2_like(torch.float32)
    # Without products, W_in is applied to 30 vectors of 24 numbers, with them to 36 values of 6 numbers, and
    # a product costs as much as 24 vectors.
    prompt = tokens(model, 1, 9, 1)[0]
    folds, fold = [], folded_weights._fold
    monkeypatch.setattr(folded_weights, "_fold", lambda *args: folds.append(1) or fold(*args))
    lm.run(model, prompt, "value_zeroing", max_memory=10**8)
    monkeypatch.setattr(weight_cache, "_KEPT_BYTES", 10)
    lm.run(model, prompt, "value_zeroing")
    assert not folds
    monkeypatch.undo()
    monkeypatch.setattr(folded_weights, "_fold", lambda *args: folds.append(1) or fold(*args))
    lm.run(model, prompt, "value_zeroing")
    assert len(folds) == model.cfg.n_layers


@pytest.mark.parametrize(("rows", "is_by_head"), [(1, False), (2, False), (3, True), (4, True)])
def test_the_fewer_vectors_are_multiplied(rows: int, is_by_head: bool) -> None:
    weights, head_vectors = torch.randn(5, rows, 3), torch.randn(5, 3, 8)
    change = weights @ head_vectors
    factors, vectors = value_zeroing._fewer_vectors(weights, head_vectors, change)
    assert vectors.shape[1] == min(rows, 3)
    assert (vectors is head_vectors) == is_by_head
    torch.testing.assert_close(factors @ vectors, change)
    assert vectors.data_ptr() != change.data_ptr()


def test_weights_edited_through_data_are_seen() -> None:
    model = gpt2_like(torch.float64)
    prompt = tokens(model, 1, 9, 1)[0]
    before = maps(model, prompt)
    for block in model.blocks:
        for weight in (block.mlp.W_in, block.attn.W_O):
            weight.data.mul_(torch.linspace(0.5, 1.5, weight.shape[-1], dtype=weight.dtype))
    edited = maps(model, prompt)
    kept_products.forget()
    for first, found, expected in zip(before, edited, maps(model, prompt), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
        assert not torch.allclose(first, found)


def test_a_feed_forward_narrower_than_the_residual_stream() -> None:
    if not available(bridge, "gpt2"):
        pytest.skip("no such bridge")
    model = bridge("gpt2", torch.float64, n_inner=16)
    assert model.cfg.d_model > 16
    prompt = tokens(model, 1, 9, 1)[0]
    by_hooks = lm.run(model, prompt, "value_zeroing", engine="hooks").scores
    by_algebra = lm.run(model, prompt, "value_zeroing", engine="algebra").scores
    torch.testing.assert_close(by_algebra, by_hooks, rtol=0, atol=1e-10)


def test_the_default_device_has_no_effect() -> None:
    model = gpt2_like(torch.float64)
    anatomy = run_prompt(model, tokens(model, 1, 4, 1)[0], lm.methods.ValueZeroing()).blocks[0].anatomy
    kept_products.forget()
    matrices = anatomy.feed_forward.input_matrices
    expected = folded(anatomy, anatomy.value_path, None, torch.float64, True, matrices)
    kept_products.forget()
    with torch.device("meta"):
        found = folded(anatomy, anatomy.value_path, None, torch.float64, True, matrices)
    assert torch.equal(expected, found)
