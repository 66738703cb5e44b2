"""Test that selected rows and layers equal those of the whole map, for every method on every model."""

from __future__ import annotations

import pytest
import torch

import lens_mix as lm
from lens_mix.method import Method
from lens_mix.methods.attn_res import attn_res
from lens_mix.session import Session
from tests.matrix import build_or_skip, maps_of
from tests.tiny_models import bridge, gpt2_like, hooked_transformer, tokens

pytestmark = pytest.mark.filterwarnings("ignore")


def test_the_asked_rows_alone_are_kept_where_passes_need_whole_patterns():
    model = gpt2_like()
    methods = [
        lm.methods.ValueZeroing(),
        lm.methods.GradientAttention(),
        lm.methods.AttentionAttribution(per_head=True),
    ]
    session = Session(model, {method.name: method for method in methods}, queries=[-1, 0])
    with session.checked_pass([session.read(tokens(model, 1, 6)[0])]) as checked:
        patterns = [kept for name, kept in checked.clean.recorded.items() if name.endswith("hook_pattern")]
        assert [pattern.shape[2] for pattern in patterns] == [2, 2]
        for method in methods:
            for scores in maps_of(method, checked.blocks(method.name)):
                assert scores.shape[-2:] == (2, 6)
                assert scores.untyped_storage().nbytes() == scores.numel() * scores.element_size()


@pytest.mark.parametrize("baseline", ["uniform", lambda pattern, layer: 0.5 * pattern])
def test_rows_of_a_path_from_a_baseline_are_the_cut_of_the_whole(baseline):
    model = gpt2_like(torch.float64)
    method, prompt = lm.methods.AttentionAttribution(baseline=baseline, per_head=True), tokens(model, 1, 6)
    whole, part = lm.run(model, prompt, method), lm.run(model, prompt, method, queries=[4, 1])
    torch.testing.assert_close(part.scores, whole.scores[:, :, [4, 1]], atol=1e-12, rtol=0)
    for name, found in part.provenance["details"].items():
        assert found == pytest.approx(whole.provenance["details"][name], abs=1e-12)


def test_prompts_with_fewer_rows_than_others():
    model = gpt2_like()
    prompts = [tokens(model, 1, size, seed=size)[0] for size in (7, 2, 5)]
    for prompt, part in zip(
        prompts, lm.run_many(model, prompts, "attn_res", queries=slice(-4, None)), strict=True
    ):
        whole = lm.run(model, prompt, "attn_res").select_queries(slice(-4, None))
        assert part.queries == whole.queries
        torch.testing.assert_close(part.scores, whole.scores, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"queries": 9}, r"queries: expected whole numbers or a slice from -6 to 5, got 9"),
        ({"queries": []}, r"queries: expected at least one of 0\.\.5, got none"),
        ({"queries": [1, 1]}, r"queries: expected each one once, got \[1, 1\]"),
        ({"queries": "last"}, "queries: expected a text that the prompt contains, got 'last'"),
        ({"layers": "last"}, "layers: expected whole numbers or a slice"),
        ({"queries": 1.5}, "queries: expected whole numbers or a slice from -6 to 5, got 1.5"),
        ({"queries": True}, "queries: expected whole numbers or a slice from -6 to 5, got True"),
        ({"layers": [2]}, "layers: layer 2 does not exist; expected 0 to 1, or -2 to -1 from the end, got 2"),
        ({"layers": slice(5, 9)}, r"layers: expected at least one of 0\.\.1, got none"),
    ],
)
def test_rows_and_layers_that_are_not_there_are_refused(options, message):
    model = gpt2_like()
    with pytest.raises((TypeError, ValueError), match=message):
        lm.run(model, tokens(model, 1, 6), "attention", **options)


def test_a_method_that_ignores_the_rows_is_refused_in_words():
    class Whole(Method):
        name = "whole"
        residual = 0.0
        engines = ("recorded",)
        citation = "none"

        def __call__(self, block):
            positions = block.real.shape[1]
            return torch.ones(len(block.real), positions, positions).tril()

    class Cut(Whole):
        def __call__(self, block):
            return block.rows_of(super().__call__(block))

    model = gpt2_like()
    prompt = tokens(model, 1, 6)
    assert lm.run(model, prompt, Whole()).scores.shape == (2, 6, 6)
    with pytest.raises(ValueError, match=r"1 queries for block 0, got .*; return block\.rows_of"):
        lm.run(model, prompt, Whole(), queries=-1)
    assert lm.run(model, prompt, Cut(), queries=-1).scores.shape == (2, 1, 6)


def test_a_user_can_put_a_methods_hooks_on_a_run_of_their_own():
    model = gpt2_like()
    prompt = tokens(model, 1, 6)
    store = {}
    with torch.no_grad():
        model.run_with_hooks(prompt, fwd_hooks=lm.methods.AttnRes().hooks(0, store))
    roles = {name.rsplit("hook_", 1)[1]: tensor.shape for name, tensor in store.items()}
    assert sorted(roles) == ["pattern", "resid_pre", "v"]
    store.clear()
    with torch.no_grad():
        model.run_with_hooks(
            prompt, fwd_hooks=lm.methods.AttnRes().hooks(1, store, queries=torch.tensor([[-1, 2]]))
        )
    assert store["blocks.1.attn.hook_pattern"].shape[2] == 2
    assert store["blocks.1.attn.hook_v"].shape[1] == 6
    assert store["blocks.1.hook_resid_pre"].shape[1] == 2


@pytest.mark.parametrize(("factory", "name"), [(bridge, "gpt2"), (hooked_transformer, "LN")])
def test_the_formula_on_what_a_methods_hooks_record_is_its_map(factory, name):
    model = build_or_skip(factory, name, torch.float64)
    prompt, store, layer = tokens(model, 1, 6), {}, 1
    with torch.no_grad():
        model.run_with_hooks(prompt, fwd_hooks=lm.methods.AttnRes().hooks(layer, store))
    pattern, value, resid_pre = (
        store[f"blocks.{layer}.{it}"] for it in ("attn.hook_pattern", "attn.hook_v", "hook_resid_pre")
    )
    scores = attn_res(pattern, value, model.W_O[layer], resid_pre)
    torch.testing.assert_close(scores[0], lm.run(model, prompt, "attn_res").scores[layer], atol=1e-10, rtol=0)
