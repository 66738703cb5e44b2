"""Maps in axes in which W_out is triangular are the maps in the model's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lens_mix as lm
from lens_mix.algebra import folded_weights, weight_cache
from lens_mix.statistics.passes import prompt_blocks
from tests import kept_products
from tests.matrix import Case, cases
from tests.tiny_models import available, bridge, gpt2_like, is_encoder_decoder, tokens

KIND = "rotated torch.float64"
METHODS = {
    "value_zeroing": lm.ValueZeroing(),
    "euclidean": lm.ValueZeroing(metric="euclidean", per_head=True),
    "spans": lm.ValueZeroing(spans=[(0, 1), (3,), (5, 2, 6)], heads=[1, 2]),
    "after the final norm": lm.ValueZeroing(last_layer="after_final_norm"),
    "feed-forward": lm.AtbFf(),
    "with the residual stream": lm.AtbFfRes(),
    "and the last norm": lm.AtbFfResLn(),
    "and the next norm": lm.AtbFfResLn(next_norm=True),
}


@pytest.fixture(autouse=True)
def nothing_kept() -> None:
    kept_products.forget()


def maps(model: Any, prompt: Any, methods: dict[str, Any] = METHODS, **options: Any) -> list[torch.Tensor]:
    return [lm.run(model, prompt, method, **options).scores for method in methods.values()]


def both(monkeypatch: pytest.MonkeyPatch, model: Any, prompt: Any, **options: Any) -> tuple[Any, Any]:
    """In the model's own axes, and rotated where that can be."""
    found = []
    for least in (10**9, 0):
        monkeypatch.setattr(folded_weights, "_PAIRS_PER_AXIS", least)
        found.append(maps(model, prompt, **options))
    return found[0], found[1]


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.label)
def test_maps_do_not_depend_on_the_axes(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    if case.refusal:
        pytest.skip("refused altogether")
    model = case.build(torch.float64)
    prompt = tokens(model, 1, 9, 1)[0]
    if is_encoder_decoder(model):
        prompt = (prompt, tokens(model, 1, 7, 2)[0])
    supported = {
        name: method
        for name, method in METHODS.items()
        if lm.support(model, part=case.part)[method.name] == "ok (algebra)"
    }
    if not supported:
        pytest.skip("nothing by algebra")
    own, other = both(monkeypatch, model, prompt, methods=supported, part=case.part)
    for expected, found in zip(own, other, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10 * max(1.0, float(expected.max())))


@pytest.mark.parametrize("method", ["value_zeroing", "atb_ff", "atb_ff_res_ln"])
@pytest.mark.parametrize(
    ("name", "layers"), [("gpt2", 2), ("llama", 2), ("bert", 0), ("gemma2", 0), ("olmo2", 0), ("gpt_neox", 0)]
)
def test_where_it_is_done(name: str, layers: int, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In pre-norm blocks whose branches follow each other."""
    if not available(bridge, name):
        pytest.skip("no such bridge")
    monkeypatch.setattr(folded_weights, "_PAIRS_PER_AXIS", 0)
    model = bridge(name, torch.float64)
    lm.run(model, tokens(model, 1, 9, 1)[0], method, engine="algebra")
    assert kept_products.number(KIND) == (layers and model.cfg.n_layers)


def test_not_where_another_norm_reads_what_comes_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folded_weights, "_PAIRS_PER_AXIS", 0)
    model = gpt2_like(torch.float64)
    lm.run(model, tokens(model, 1, 9, 1)[0], lm.AtbFfResLn(next_norm=True))
    assert kept_products.number(KIND) == 0


def test_few_pairs_do_not_pay_for_it() -> None:
    model = gpt2_like(torch.float64)
    lm.run(model, tokens(model, 1, 9, 1)[0], "value_zeroing", engine="algebra")
    assert kept_products.number(KIND) == 0
    lm.run(model, tokens(model, 1, 30, 1)[0], "value_zeroing", engine="algebra")
    assert kept_products.number(KIND) == model.cfg.n_layers


def test_the_triangle_in_steps_is_the_whole_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folded_weights, "_STEP", 3)
    model = gpt2_like(torch.float64)
    anatomy = prompt_blocks(model, tokens(model, 1, 4, 1)[0], lm.ValueZeroing()).blocks[0].anatomy
    axes, W_O, W_out = folded_weights.rotated(anatomy, anatomy.value_path, torch.float64, 10**9)
    before = anatomy.feed_forward.W_out
    torch.testing.assert_close(axes.T @ axes, torch.eye(len(axes), dtype=axes.dtype), rtol=0, atol=1e-12)
    torch.testing.assert_close(W_out @ axes.T, before, rtol=0, atol=1e-12)
    torch.testing.assert_close(W_O @ axes.T, anatomy.value_path.W_O, rtol=0, atol=1e-12)
    for neurons in (7, 16, 1000):
        parts = list(folded_weights.in_steps(W_out, neurons, True))
        assert [sum(map(len, part)) for part in parts] == [len(x) for x in W_out.split(neurons)]
        steps = [step for part in parts for step in part]
        assert any(step.shape[1] < len(axes) for step in steps)
        padded = [torch.nn.functional.pad(step, (0, len(axes) - step.shape[1])) for step in steps]
        torch.testing.assert_close(torch.cat(padded), W_out, rtol=0, atol=1e-12)


def test_nothing_is_kept_under_a_bound_or_past_what_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folded_weights, "_PAIRS_PER_AXIS", 0)
    model = gpt2_like(torch.float64)
    prompt = tokens(model, 1, 9, 1)[0]
    maps(model, prompt, max_memory=10**8)
    assert kept_products.number(KIND) == 0
    monkeypatch.setattr(weight_cache, "_KEPT_BYTES", 0)
    maps(model, prompt)
    assert kept_products.number(KIND) == 0


def test_weights_edited_through_data_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folded_weights, "_PAIRS_PER_AXIS", 0)
    model = gpt2_like(torch.float64)
    prompt = tokens(model, 1, 9, 1)[0]
    before = maps(model, prompt)
    for block in model.blocks:
        for weight in (block.mlp.W_out, block.attn.W_O):
            weight.data.mul_(torch.linspace(0.5, 1.5, weight.shape[-1], dtype=weight.dtype))
    edited = maps(model, prompt)
    own, _ = both(monkeypatch, model, prompt)
    for first, found, expected in zip(before, edited, own, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
        assert not torch.allclose(first, found)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_float32_keeps_its_digits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not available(bridge, name):
        pytest.skip("no such bridge")
    model = bridge(name, torch.float32)
    own, other = both(monkeypatch, model, tokens(model, 1, 16, 1)[0])
    for expected, found in zip(own, other, strict=True):
        counted = expected > 1e-7
        assert float(((found - expected).abs() / expected)[counted].max()) < 2e-5


def test_a_feed_forward_narrower_than_the_residual_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    if not available(bridge, "gpt2"):
        pytest.skip("no such bridge")
    model = bridge("gpt2", torch.float64, n_inner=16)
    assert model.cfg.d_model > 16
    prompt = tokens(model, 1, 9, 1)[0]
    own, other = both(monkeypatch, model, prompt)
    assert kept_products.number(KIND) == model.cfg.n_layers
    for expected, found in zip(own, other, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    exact = lm.run(model, prompt, "value_zeroing", engine="hooks").scores
    torch.testing.assert_close(other[0], exact, rtol=0, atol=1e-10)


def test_products_of_one_kind_do_not_crowd_out_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound of its own for each: a rotated layer must not cost the next layer its folded matrices."""
    model = gpt2_like(torch.float64)
    prompt = tokens(model, 1, 9, 1)[0]
    lm.run(model, prompt, "value_zeroing", engine="algebra")
    folded = [entries["folded torch.float64"].product.nbytes for entries in weight_cache._store.values()]
    kept_products.forget()
    monkeypatch.setattr(folded_weights, "_PAIRS_PER_AXIS", 0)
    monkeypatch.setattr(weight_cache, "_KEPT_BYTES", sum(folded))
    lm.run(model, prompt, "value_zeroing", engine="algebra")
    assert kept_products.number("folded torch.float64") == model.cfg.n_layers
    assert 0 < kept_products.number(KIND) <= model.cfg.n_layers


def test_weights_that_are_not_on_the_default_device() -> None:
    model = gpt2_like(torch.float64)
    anatomy = prompt_blocks(model, tokens(model, 1, 4, 1)[0], lm.ValueZeroing()).blocks[0].anatomy
    expected = folded_weights.rotated(anatomy, anatomy.value_path, torch.float64, 10**9)
    kept_products.forget()
    with torch.device("meta"):
        found = folded_weights.rotated(anatomy, anatomy.value_path, torch.float64, 10**9)
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)
