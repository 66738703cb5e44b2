"""Test that selected rows and layers equal those of the whole map, for every method on every model."""

from __future__ import annotations

import pytest
import torch

import lens_mix as lm
from lens_mix.method import Method
from lens_mix.methods import METHODS
from lens_mix.methods.attn_res import attn_res
from lens_mix.pass_plan import takes_rows
from lens_mix.session import Session
from tests.matrix import build_or_skip, cases, maps_of, prompt_of
from tests.tiny_models import bridge, gpt2_like, hooked_transformer, tokens

pytestmark = pytest.mark.filterwarnings("ignore")
CASES = {case.label: case for case in cases(cross=True, refused=False)}


def supported(model, stack):
    """Return the methods that run on a model.

    Returns:
        Three lists: the methods that compute single rows, all methods that can select layers, and the methods
        with one map of the whole model.
    """
    engines = {name: engine for name, engine, _ in lm.support(model, part=stack) if engine is not None}
    names = list(engines)
    layerwise = [name for name in names if not METHODS[name]().is_input_map]
    alone = [name for name in layerwise if takes_rows(METHODS[name](), engines[name])]
    whole = [name for name in names if METHODS[name].reads == "model"]
    return alone, [name for name in names if name not in whole], whole


def assert_cut(part, whole, queries, layers, exactness=1e-10):
    """Check that `part` is the selection of `whole`, and contains nothing else."""
    cut = whole.select_layers(layers).select_queries(queries)
    assert (part.queries, part.layers, part.tokens) == (cut.queries, cut.layers, cut.tokens)
    assert part.causal == cut.causal
    assert torch.equal(part.visible(), cut.visible())
    torch.testing.assert_close(
        part.scores, cut.scores, atol=exactness, rtol=0, msg=lambda text: f"{part.method}: {text}"
    )


@pytest.mark.parametrize("label", CASES)
def test_rows_and_layers_equal_the_cut_of_the_whole_map(label, request):
    case = CASES[label]
    model = case.build(torch.float64)
    # Replaced tokens of all rows run in one pass, so other rows are rounded otherwise in a float32 softmax.
    request.getfixturevalue("softmax_in_the_dtype_of_the_model")
    prompt = prompt_of(model, 9)
    alone, every, one_map = supported(model, case.part)
    # The patterns of Hugging Face's GPT-Neo and GPT-J are float32 in any model.
    exactness = 1e-5 if label in ("bridge gpt_neo", "bridge gptj") else 1e-10
    whole = lm.run(model, prompt, [*every, *one_map], part=case.part)
    # For the methods of `alone` the pass records only the selected rows. With others it records all rows.
    for names, queries, layers in (
        (alone, [-1], [1]),
        (every, [5, 2], [0]),
        (every, slice(-3, None), [1, 0]),
        (one_map, [5, 2], [1]),
    ):
        if not names:
            continue
        parts = lm.run(model, prompt, names, part=case.part, queries=queries, layers=layers)
        for name in names:
            assert_cut(parts[name], whole[name], queries, layers, exactness)


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


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize(
    ("factory", "name"), [(bridge, "llama"), (bridge, "gemma2"), (hooked_transformer, "LN")]
)
def test_the_last_row_of_padded_prompts_is_each_prompts_own(factory, name, side):
    model = build_or_skip(factory, name)
    prompts = [tokens(model, 1, size, seed=size)[0] for size in (7, 4, 6)]
    alone, _, _ = supported(model, None)
    many = lm.run_many(model, prompts, alone, queries=[-1, 0], layers=-1, padding_side=side)
    for prompt, parts in zip(prompts, many, strict=True):
        single = lm.run(model, prompt, alone, queries=[-1, 0], layers=-1)
        for method in alone:
            assert parts[method].queries == [len(prompt) - 1, 0]
            torch.testing.assert_close(parts[method].scores, single[method].scores, atol=1e-5, rtol=1e-4)


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
        ({"queries": "last"}, "queries: expected whole numbers or a slice from -6 to 5, got 'last'"),
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
