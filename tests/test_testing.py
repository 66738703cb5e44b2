"""Test that `lm.testing.check_method` accepts the library's methods and finds each violated property."""

import dataclasses
from typing import ClassVar

import pytest
import torch

import lens_mix as lm
from tests.matrix import slow
from tests.tiny_models import gpt2_like


@pytest.mark.parametrize(
    "name", ["value_zeroing", *map(slow, ("gim", "attention", "attn_res_ln", "decompx", "globenc"))]
)
def test_methods_of_the_library_pass(name, capsys):
    lm.testing.check_method(lm.METHODS[name])
    assert capsys.readouterr().out == ""


def test_the_checks_are_functions_with_names():
    checks = lm.testing.method_checks(lm.methods.AttentionWeights)
    names = [str(check) for check in checks]
    assert len(set(names)) == len(names)
    assert names[-1] == "a model that it runs on"
    chosen = checks[names.index("rows on a causal model with LayerNorm")]
    assert chosen.subject.model_name == "a causal model with LayerNorm"
    chosen()
    checks[-1]()


def test_with_parameters_and_a_model():
    lm.testing.check_method(lm.methods.ValueZeroing(metric="euclidean", per_head=True), gpt2_like())


@dataclasses.dataclass(frozen=True)
class Broken(lm.Method):
    name: ClassVar[str] = "broken"
    residual: ClassVar[float] = 0.5
    engines: ClassVar[tuple[str, ...]] = ("recorded",)
    records: ClassVar[frozenset[str]] = frozenset({"pattern"})


def broken(call, **attributes):
    attributes = {"__annotations__": {}, "__call__": lambda self, block: call(block), **attributes}
    return dataclasses.dataclass(frozen=True)(type("Broken", (Broken,), attributes))


def pattern(block):
    return block.recorded("pattern").mean(1)


def by_engine(block):
    return pattern(block) * (2 if block.engine == "hooks" else 1)


BROKEN = {
    "the same map twice": lambda block: pattern(block) * (1 + torch.rand(())),
    "whatever the padding": lambda block: pattern(block) * block.real.shape[1],
    "no weight on what is hidden": lambda block: pattern(block) + 1,
    "finite": lambda block: pattern(block) / 0,
    "rows": lambda block: pattern(block) / (1 + torch.arange(block.queries.shape[1]))[:, None],
}
MESSAGES = {
    "the same map twice": "expected the same map in two runs",
    "whatever the padding": "expected the maps of a batch padded on the right to equal those of",
    "no weight on what is hidden": "a key that the attention mask hides has a score",
    "finite": "expected a map of a prompt, got an error: scores: expected finite numbers",
    "rows": r"expected queries=\[-1\] to give these rows",
}


@pytest.mark.parametrize("violated", BROKEN)
def test_violated_properties(violated):
    with pytest.raises(AssertionError, match=rf"broken on a (causal )?model.*: {MESSAGES[violated]}"):
        lm.testing.check_method(broken(BROKEN[violated]))


def test_engines_that_disagree():
    kind = broken(by_engine, engines=("recorded", "hooks"))
    with pytest.raises(AssertionError, match="expected engine='hooks' to give the map of 'recorded'"):
        lm.testing.check_method(kind)


def test_a_method_that_runs_nowhere():
    kind = broken(
        pattern, engines=("algebra",), unsupported_block=lambda self, anatomy: "expected other blocks"
    )
    with pytest.raises(AssertionError, match=r"a model that it runs on, got .*expected other blocks"):
        lm.testing.check_method(kind)


def zero_the_unembedding(block):
    block.clean.lens.model.unembed.W_U.data.zero_()
    return pattern(block)


def add_to_gradients(block):
    for parameter in block.clean.lens.model.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.grad is None else parameter.grad
    return pattern(block)


@pytest.mark.parametrize(
    ("call", "name"), [(zero_the_unembedding, "weights"), (add_to_gradients, "gradients")]
)
def test_a_change_of_the_model_that_every_run_repeats_is_found(call, name):
    checks = [
        each for each in lm.testing.method_checks(broken(call)) if str(each).startswith("unchanged model")
    ]
    with pytest.raises(AssertionError, match=rf"expected the model as it was after a run, got other {name}"):
        checks[0]()


def refuse_long_prompts(block):
    if block.tokens.shape[1] > 5:
        raise lm.UnsupportedModelError("expected at most 5 tokens")
    return pattern(block)


def test_a_method_may_refuse_a_model_in_a_run():
    checks = lm.testing.method_checks(broken(refuse_long_prompts))
    for check in checks[:-1]:
        check()
    with pytest.raises(AssertionError, match="expected a model that it runs on"):
        checks[-1]()


def test_an_engine_that_its_method_always_refuses_is_found():
    def by_recorded(block):
        if block.engine == "hooks":
            raise lm.UnsupportedModelError("expected the other engine")
        return pattern(block)

    with pytest.raises(AssertionError, match="expected the other engine"):
        lm.testing.check_method(broken(by_recorded, engines=("recorded", "hooks")))
