"""Test that the user's model is restored after success, after an exception in a hook and after Ctrl-C."""

from __future__ import annotations

import pytest
import torch

import lens_mix as lm
from lens_mix._care.state import all_modules, evaluation_mode
from lens_mix._passes.clean_pass import clean_pass
from lens_mix._passes.continuation import Continuation
from lens_mix.method import Method
from tests.matrix import Case, case_of, prompt_of
from tests.pictured_models import PICTURED_NAMES, pictured
from tests.tiny_models import available, inputs, toy_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")
LABELS = [
    "bridge llama",
    "bridge opt",
    "bridge bert",
    "bridge t5 decoder",
    "HookedTransformer LN",
    "HookedEncoder",
]


def state_of(model):
    """Return everything that must not change."""
    original = getattr(model, "original_model", None)
    return {
        "training": [module.training for tree in (model, original) if tree for module in tree.modules()],
        "requires_grad": {name: p.requires_grad for name, p in model.named_parameters()},
        "weights": {name: p.detach().clone() for name, p in model.named_parameters()},
        "gradients": {name: p.grad for name, p in model.named_parameters()},
        "hooks": {
            name: (len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks))
            for name, m in model.named_modules()
        },
        "attention": getattr(getattr(original, "config", None), "_attn_implementation", None),
        "forward": {name: "forward" in module.__dict__ for name, module in model.named_modules()},
        "gradients on": torch.is_grad_enabled(),
    }


def assert_same(before, after):
    for name in before:
        if name == "weights":
            assert all(torch.equal(before[name][p], after[name][p]) for p in before[name])
        else:
            assert before[name] == after[name], name


def disturbed(model):
    """Return a model with unusual settings: half in training mode, half frozen, with a user hook."""
    for index, module in enumerate(model.modules()):
        module.training = index % 2 == 0
    for index, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(index % 2 == 0)
    name = next(name for name in model.hook_dict if name.endswith("hook_v") or name.endswith("v.hook_out"))
    model.add_hook(name, lambda tensor, hook: tensor * 1.0)
    # TransformerLens's Bridge adds its own hooks to norms in the first forward pass.
    with torch.no_grad():
        arguments, keywords = inputs(model, 1)
        model(*arguments, **keywords)
    return model


def build(label) -> tuple[Case, object]:
    case = case_of(label)
    model = case.build()
    if case.refusal is not None:
        pytest.skip(case.refusal)
    return case, disturbed(model)


@pytest.mark.parametrize("label", LABELS)
def test_after_success(label):
    case, model = build(label)
    before = state_of(model)
    lm.run(model, prompt_of(model), ["attention", "value_zeroing"], part=case.part)
    list(lm.run_many(model, [prompt_of(model), prompt_of(model, 4)], "value_zeroing", part=case.part))
    lm.check(model, prompt_of(model), part=case.part)
    assert_same(before, state_of(model))


class Interrupting(Method):
    """A method that is interrupted in the middle of a replay."""

    name = "interrupting"
    residual = 0.0
    engines = ("hooks",)
    citation = ""
    problem: type[BaseException] = RuntimeError

    def __call__(self, block):
        def interrupt(tensor, hook):
            raise self.problem("in the middle")

        name = f"{block.stack.attention_template.format(layer=block.layer)}.hook_v"
        return block.replay(torch.tensor([0, 0]), [(name, interrupt)])


class Interrupted(Interrupting):
    problem = KeyboardInterrupt


@pytest.mark.parametrize("method", [Interrupting(), Interrupted()])
@pytest.mark.parametrize("label", LABELS)
def test_after_an_exception_inside_a_hook(label, method):
    case, model = build(label)
    before = state_of(model)
    with pytest.raises(method.problem, match="in the middle"):
        lm.run(model, prompt_of(model), method, part=case.part)
    assert_same(before, state_of(model))
    maps = lm.run(model, prompt_of(model), "attention", part=case.part)
    assert maps.scores.max() > 0


@pytest.mark.parametrize("label", LABELS)
def test_after_an_exception_in_the_clean_pass(label):
    case, model = build(label)

    def fail(module, arguments, output):
        raise KeyboardInterrupt

    handle = lm.Lens(model, case.part).stack.blocks[1].register_forward_hook(fail)
    before = state_of(model)
    with pytest.raises(KeyboardInterrupt):
        lm.run(model, prompt_of(model), "attention", part=case.part)
    assert_same(before, state_of(model))
    handle.remove()


@pytest.mark.parametrize("label", LABELS)
def test_after_an_exception_while_starting_at_a_block(label):
    case, model = build(label)
    lens = lm.Lens(model, case.part)
    clean = pass_of(lens, model)
    before = state_of(model)

    def fail(tensor, hook):
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        Continuation(clean, 1, fwd_hooks=[(lens.stack.hook_name("value", 1), fail)]).logits()
    assert_same(before, state_of(model))


def pass_of(lens, model):
    from lens_mix._inputs.batches import pad
    from lens_mix._inputs.prompts import read_prompt

    return clean_pass(lens, pad([read_prompt(model, lens.model_class, prompt_of(model))], 0, "right"))


def test_dropout_of_a_training_model_is_off():
    model = case_of("bridge gpt2").build()
    reference = lm.run(model, prompt_of(model), "value_zeroing").scores
    model.train()
    torch.testing.assert_close(
        lm.run(model, prompt_of(model), "value_zeroing").scores, reference, atol=0, rtol=0
    )


def test_maps_need_no_gradients():
    model = case_of("bridge gpt2").build()
    assert not lm.run(model, prompt_of(model), "value_zeroing").scores.requires_grad


def test_the_tokenizers_defaults_come_back():
    """Interrupt TransformerLens while it reads a string, before it restores the defaults."""
    model = case_of("bridge gpt2").build()
    model.tokenizer = toy_tokenizer()
    before = (model.cfg.default_prepend_bos, model.tokenizer.padding_side)

    def to_tokens(*arguments, **options):
        model.cfg.default_prepend_bos, model.tokenizer.padding_side = not before[0], "left"
        raise KeyboardInterrupt

    model.__dict__["to_tokens"] = to_tokens
    with pytest.raises(KeyboardInterrupt):
        lm.run(model, "a b", "attention")
    assert (model.cfg.default_prepend_bos, model.tokenizer.padding_side) == before


def test_each_configuration_keeps_its_own_attention():
    name = "gemma3_pictures"
    if name not in PICTURED_NAMES or not available(pictured, name):
        pytest.skip("no such model in this release")
    model = pictured(name)
    config = model.original_model.config
    found = [config, config.text_config, config.vision_config]
    for each, value in zip(found, ("sdpa", "eager", "flex_attention"), strict=True):
        each._attn_implementation_internal = value
    with evaluation_mode(model, all_modules(model)):
        assert [each._attn_implementation for each in found] == ["eager"] * 3
    assert [each._attn_implementation for each in found] == ["sdpa", "eager", "flex_attention"]
