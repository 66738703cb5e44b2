"""Test that user hooks are distinguished from the hooks that TransformerLens adds itself."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.nn.modules import module as everywhere

import lens_mix as lm
from lens_mix import hooks
from lens_mix._care.state import all_modules
from lens_mix._care.users_hooks import has_user_hooks, plain_values
from tests.matrix import build_or_skip, cases, prompt_of
from tests.tiny_models import available, bridge, hooked_encoder, hooked_transformer, is_encoder_decoder

pytestmark = pytest.mark.filterwarnings("ignore")


# ------------------------------------------------------------------ hooks of TransformerLens


@pytest.mark.parametrize("case", [case for case in cases() if case.part != "decoder"], ids=lambda c: c.label)
def test_a_model_as_it_is_carries_none(case):
    """Check Bridges before and after a first pass, which adds hooks. Some models have hooks before too."""
    model = case.build()
    assert not has_user_hooks(all_modules(model))
    if case.refusal is None:
        lm.run(model, prompt_of(model), "attention")
        assert not has_user_hooks(all_modules(model))
        if not is_encoder_decoder(model):
            model.run_with_cache(prompt_of(model))
            assert not has_user_hooks(all_modules(model))


def test_the_bridge_puts_hooks_of_its_own():
    """Check that there are such hooks, because the test above would be empty without them."""
    model = build_or_skip(bridge, "gpt2")
    model(prompt_of(model))
    assert any(module._forward_pre_hooks for module in model.modules())
    falcon = build_or_skip(bridge, "falcon_mqa")
    assert any("forward" in vars(module) for module in falcon.modules())


# ------------------------------------------------------------------ hooks of the user


def unchanged(x, hook=None):
    return x


def see(module, given, out=None):
    return None


class Watcher:
    """An object that can be called, also by a method."""

    def __call__(self, module, given, out=None):
        return None

    def see(self, module, given, out=None):
        return None


def pattern_point(model):
    name = next(name for name in model.hook_dict if name.endswith("hook_pattern"))
    return model.hook_dict[name]


def add_hook(model):
    model.add_hook(next(name for name in model.hook_dict if name.endswith("hook_pattern")), unchanged)
    return model.reset_hooks


def add_hook_on_the_feed_forward(model):
    model.add_hook(next(name for name in model.hook_dict if name.endswith("hook_mlp_out")), unchanged)
    return model.reset_hooks


def add_hook_of_this_library(model):
    model.add_hook(*hooks.zero_values(0, 0))
    return model.reset_hooks


def hook_a_module(model):
    return model.blocks[0].attn.register_forward_hook(see).remove


def hook_a_module_before(model):
    return model.blocks[0].attn.register_forward_pre_hook(see).remove


def hook_the_wrapped_model(model):
    if not hasattr(model, "original_model"):
        pytest.skip("no model is wrapped")
    return model.original_model.register_forward_hook(see).remove


def hook_a_point(model):
    return pattern_point(model).register_forward_hook(see).remove


def hook_a_point_before(model):
    return pattern_point(model).register_forward_pre_hook(see).remove


def hook_with_a_partial(model):
    return model.blocks[0].register_forward_hook(functools.partial(see)).remove


def hook_with_an_object(model):
    return model.blocks[0].register_forward_hook(Watcher()).remove


def hook_with_a_method(model):
    return model.blocks[0].register_forward_hook(Watcher().see).remove


def replace_forward(model):
    module = model.blocks[0].attn
    # The Bridge passes its inputs to this module.
    module = getattr(module, "original_component", module)
    original = module.forward

    @functools.wraps(original)  # The result has the `__module__` of the wrapped function.
    def forward(*args, **kwargs):
        return original(*args, **kwargs)

    module.forward = forward
    return functools.partial(delattr, module, "forward")


def replace_forward_of_a_class(model):
    module = model.blocks[0].mlp
    kind = type(getattr(module, "original_component", module))
    original = kind.forward

    @torch.no_grad()  # The result has torch's `__module__`.
    def forward(self, *args, **kwargs):
        return original(self, *args, **kwargs)

    kind.forward = forward
    return functools.partial(setattr, kind, "forward", original)


def hook_all(model):
    return everywhere.register_module_forward_hook(see).remove


def hook_all_before(model):
    return everywhere.register_module_forward_pre_hook(see).remove


@pytest.mark.parametrize(
    "put",
    [
        add_hook,
        add_hook_on_the_feed_forward,
        add_hook_of_this_library,
        hook_a_module,
        hook_a_module_before,
        hook_the_wrapped_model,
        hook_a_point,
        hook_a_point_before,
        hook_with_a_partial,
        hook_with_an_object,
        hook_with_a_method,
        replace_forward,
        replace_forward_of_a_class,
        hook_all,
        hook_all_before,
    ],
)
@pytest.mark.parametrize(
    ("factory", "arguments"),
    [(bridge, ("llama",)), (bridge, ("bert",)), (hooked_transformer, ("LN",)), (hooked_encoder, ())],
)
def test_what_a_user_puts_is_seen_until_it_is_gone(factory, arguments, put):
    model = build_or_skip(factory, *arguments)
    lm.run(model, prompt_of(model), "attention")
    remove = put(model)
    try:
        assert has_user_hooks(all_modules(model))
    finally:
        remove()
    assert not has_user_hooks(all_modules(model))


# ------------------------------------------------------------------ attributes of a user's module


class Noting(torch.nn.Module):
    """A module with an attribute of any kind."""

    def __init__(self, inner, noted):
        super().__init__()
        self.inner, self.noted = inner, noted

    def forward(self, *arguments):
        return self.inner(*arguments)


def with_a_noting_module(noted):
    model = build_or_skip(hooked_transformer, "LN") if not available(bridge, "gpt2") else bridge("gpt2")
    tree = getattr(model, "original_model", model)
    name = next(name for name, _ in tree.named_modules() if name.endswith((".act", "ln2")))
    parent, _, last = name.rpartition(".")
    setattr(tree.get_submodule(parent), last, Noting(tree.get_submodule(name), noted))
    return model


def containing_itself():
    loop = [1]
    loop.append(loop)
    return loop


def nested(count, width):
    value = [1]
    for _ in range(count):
        value = [value] * width
    return value


@pytest.mark.parametrize(
    "noted",
    [containing_itself(), {"a": containing_itself()}, nested(5_000, 1), nested(40, 2), 10**5_000],
    ids=["itself", "itself in a dict", "deep", "shared", "digits"],
)
def test_a_module_may_have_attributes_of_any_shape(noted):
    model = with_a_noting_module(noted)
    assert has_user_hooks(all_modules(model))
    assert bool(lm.run(model, prompt_of(model), "attention").scores.isfinite().all())


def test_plain_values_are_told_apart_and_are_the_same_for_equal_ones():
    one, two = [1], [2]
    values = [1, "1", [1], (1,), [[1]], [1, [2]], [[1], 2], {1: 2}, {2: 1}, {"a"}, {"a", "b"}, None, [], {}]
    values += [[one, two, one], [one, two, two], containing_itself()]
    assert len(set(map(plain_values, values))) == len(values)
    assert plain_values(containing_itself()) == plain_values(containing_itself())
    assert plain_values([1, object()]) is None
    assert plain_values({"a": torch.ones(1)}) is None


# ------------------------------------------------------------------ hooks on single positions


def zeroed_at(position):
    def zero(tensor, hook):
        tensor = tensor.clone()
        tensor[:, position] = 0
        return tensor

    return zero


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("place", ["blocks.0.hook_resid_post", "blocks.1.attn.hook_v"])
def test_a_hook_on_a_position_past_the_short_prompt_of_the_verification(name, place):
    """Check that the verification takes more of the prompt until the hook runs."""
    model = build_or_skip(bridge, name)
    prompt = prompt_of(model, 20)
    model.add_hook(place, zeroed_at(18))
    maps = lm.run(model, prompt, ["attention", "value_zeroing", "input_gradients", "gim"])
    for mixing_map in maps.values():
        assert bool(mixing_map.scores.isfinite().all())
    with pytest.raises(IndexError):
        # The model's own pass raises this error too.
        lm.run(model, prompt[..., :9], "attention")


def test_a_hook_on_a_position_of_the_decoder():
    model = build_or_skip(bridge, "bart")
    source, target = torch.arange(5, 9), torch.arange(5, 25)
    model.add_hook("decoder_blocks.0.hook_resid_post", zeroed_at(18))
    scores = lm.run(model, (source, target), "attention", part="decoder").scores
    assert scores.shape[-1] == 20


@pytest.mark.parametrize("place", ["unembed.hook_in", "unembed.hook_out"])
def test_a_hook_on_a_position_of_the_unembedding(place):
    """Add a hook, because without hooks only the logits of the target's row are computed."""
    model = build_or_skip(bridge, "llama")
    prompt = prompt_of(model, 7)
    methods = ["input_gradients", "occlusion", "gim", "gradient_attention"]
    expected = lm.run(model, prompt, methods, queries=[-1])
    model.add_hook(place, zeroed_at(3))
    found = lm.run(model, prompt, methods, queries=[-1])
    for name, mixing_map in found.items():
        torch.testing.assert_close(mixing_map.scores, expected[name].scores, atol=1e-5, rtol=1e-4)
    # In the row of this position the target is constant, so all scores are 0.
    assert float(lm.run(model, prompt, "occlusion", queries=[3]).scores.abs().max()) < 1e-5


def test_a_hook_that_fails_in_a_shorter_pass_is_named():
    model = build_or_skip(bridge, "llama")
    prompt = prompt_of(model, 7)
    model.add_hook("blocks.0.hook_resid_post", zeroed_at(5))
    words = r"a pass over [1-5] tokens and the prompt has 7; got IndexError in zero \(.*Remove the hook"
    with pytest.raises(lm.UnsupportedModelError, match=words):
        lm.run(model, prompt, "context_length", queries=[6], max_memory=60_000)
