"""Test that the errors of typical mistakes say what to do next."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import pytest
import torch

import lens_mix as lm
from tests.tiny_models import gpt2_like, wrapped_model

TOKENS = torch.tensor([5, 9, 12, 7, 30, 21])
PROMPT = "w5 w9 w12 w7"


@dataclasses.dataclass(frozen=True)
class Nameless(lm.Method):
    residual: ClassVar[float] = 0.5
    engines: ClassVar[tuple[str, ...]] = ("recorded",)


def in_inference_mode(model):
    with torch.inference_mode():
        return lm.run(model, PROMPT, "gradient_attention")


def signed(model):
    return lm.run(model, PROMPT, lm.methods.InputGradients(score="times_input"))


def of(target):
    return lm.methods.GradientAttention(target=target)


# What is done, and the words of the answer that say what to do next.
MISTAKES = {
    "a model of transformers": (
        lambda model: lm.run(wrapped_model("gpt2"), TOKENS, "attention"),
        r"boot_transformers\(name, hf_model=model",
    ),
    "several prompts to run": (
        lambda model: lm.run(model, [PROMPT, PROMPT, PROMPT], "attention"),
        "for several prompts use run_many",
    ),
    "one prompt to run_many": (
        lambda model: lm.run_many(model, PROMPT, "attention"),
        "use run for one prompt",
    ),
    "a typo in a method": (lambda model: lm.run(model, PROMPT, "atention"), r"did you mean 'attention'\?"),
    "a rollout for a method": (lambda model: lm.run(model, PROMPT, "rollout"), r"write lm.rollout\(lm.run\("),
    "an option of a method to run": (
        lambda model: lm.run(model, PROMPT, "value_zeroing", per_head=True),
        r"write lm.run\(model, prompt, lm.methods.ValueZeroing\(per_head=True\)\)",
    ),
    "an unknown engine": (
        lambda model: lm.run(model, PROMPT, "value_zeroing", engine="fast"),
        "expected 'auto', 'hooks' or 'algebra'",
    ),
    "an engine that the method has not": (
        lambda model: lm.run(model, PROMPT, "gradient_attention", engine="algebra"),
        r"gradient_attention has the engines \['hooks'\]",
    ),
    "a layer that is not there": (
        lambda model: lm.run(model, PROMPT, "attention", layers=[30]),
        "layer 30 does not exist; expected 0 to 1, or -2 to -1 from the end, got 30",
    ),
    "a string without a tokenizer": (
        lambda model: lm.run(gpt2_like(), PROMPT, "attention"),
        "expected tokens .*, or a model with model.tokenizer set",
    ),
    "chat messages without a template": (
        lambda model: lm.run(model, [{"role": "user", "content": "w5"}], "attention"),
        "set model.tokenizer.chat_template, or give a string",
    ),
    "a pair to a decoder": (lambda model: lm.run(model, ("w5", "w6"), "attention"), "use run_many"),
    "too long a prompt": (
        lambda model: lm.run(model, torch.full((33,), 5), "attention"),
        "expected at most n_ctx=32 tokens, got 33; shorten it",
    ),
    "a target of several tokens": (
        lambda model: lm.run(model, PROMPT, of(lm.targets.token("w9 w5"))),
        r"text of one token \(mind the leading space\)",
    ),
    "a class of a language model": (
        lambda model: lm.run(model, PROMPT, of(lm.targets.class_(1))),
        "use targets.token for a token",
    ),
    "a mask that is not there": (
        lambda model: lm.run(model, PROMPT, of(lm.targets.masked_token("w9"))),
        "expected the masked position",
    ),
    "gradients in inference mode": (in_inference_mode, r"outside torch.inference_mode.*no_grad is fine"),
    "shares of signed scores": (lambda model: signed(model).normalized(), r"\.normalized\(negative='clip'\)"),
    "a rollout of one row": (
        lambda model: lm.rollout(lm.run(model, PROMPT, "attention", queries=[-1])),
        r"compute all with lm.run\(..., queries=None\)",
    ),
    "a row that is not held": (
        lambda model: lm.run(model, PROMPT, "attention", queries=[-1]).top(query=1),
        r"compute it with lm.run\(..., queries=\[1\]\)",
    ),
    "a token that is not there": (
        lambda model: lm.run(model, PROMPT, "attention").top(query="Paris"),
        "expected a text that the prompt contains, got 'Paris'",
    ),
    "numbers in brackets": (
        lambda model: lm.run(model, PROMPT, "attention")[1, 3],
        "select rows with .select_queries, heads with .head, and numbers with .scores",
    ),
    "heads that were merged": (
        lambda model: lm.run(model, PROMPT, "value_zeroing").show(head="all"),
        "keep them with per_head=True",
    ),
    "words without marks": (
        lambda model: lm.run(model, PROMPT, "attention").merge_words(),
        "give groups= as words or as lists of positions",
    ),
    "one matrix for a map": (
        lambda model: lm.MixingMap(scores=torch.eye(2), tokens=["a", "b"]),
        "expected 3 axes",
    ),
    "one map to compare": (
        lambda model: lm.compare(lm.run(model, PROMPT, "attention")),
        "two or more to compare",
    ),
    "layer maps beside input maps": (
        lambda model: lm.compare([m := lm.run(model, PROMPT, "attention"), lm.rollout(m)]),
        "lm.rollout, lm.flow or lm.layer_mean make input maps of layer maps",
    ),
    "a method without a name": (
        lambda model: lm.run(model, PROMPT, Nameless()),
        "write name: ClassVar",
    ),
    "a map that no run made": (
        lambda model: lm.run_again(model, lm.MixingMap(scores=[[[1.0]]], tokens=["a"])),
        r"make it with lm.run\(model, prompt, method\)",
    ),
    "a folder for a file": (
        lambda model: lm.run(model, PROMPT, "attention").save("no/such/folder/map"),
        "expected a folder that exists",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_answer_says_what_to_do_next(model, mistake):
    make, next_step = MISTAKES[mistake]
    with pytest.raises((TypeError, ValueError, RuntimeError, OSError), match=next_step):
        make(model)


def test_there_are_twenty_of_them():
    assert len(MISTAKES) >= 20
