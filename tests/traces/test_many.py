"""Test that the traces of many prompts are those of the prompts alone."""

from __future__ import annotations

import pytest
import torch

import lens_mix as lm
from tests.shared_models import decoder

PROMPTS = ["w5 w6 w7 w8", "w9 w10 w11", "w12 w13 w14 w15 w16"]
ANSWERS = [" w20 w21", " w22", " w23 w24 w25"]


def require_equal(found, expected):
    assert (found.tokens, found.text) == (expected.tokens, expected.text)
    torch.testing.assert_close(found.log_probabilities, expected.log_probabilities, atol=0, rtol=0)
    torch.testing.assert_close(found[:].scores, expected[:].scores, atol=0, rtol=0)


def test_each_trace_is_that_of_its_prompt_alone():
    model = decoder()
    found = list(lm.trace_many(model, iter(PROMPTS), answers=iter(ANSWERS), sources="word"))
    assert len(found) == len(PROMPTS)
    for each, prompt, answer in zip(found, PROMPTS, ANSWERS, strict=True):
        require_equal(each, lm.trace(model, prompt, answer=answer, sources="word"))


def test_the_model_writes_the_answers():
    model = decoder()
    options = {"generate": 3, "do_sample": True, "seed": 4, "sources": "word"}
    found = list(lm.trace_many(model, PROMPTS[:2], **options))
    for each, prompt in zip(found, PROMPTS, strict=False):
        require_equal(each, lm.trace(model, prompt, **options))


@pytest.mark.parametrize("prompts", ["w5 w6", lm.Documents({"a": "w5"}), {"input_ids": [3]}, 3])
def test_one_prompt_is_an_error_at_once(prompts):
    with pytest.raises(TypeError, match=r"prompts: expected several prompts, got .*use lm\.trace"):
        lm.trace_many(decoder(), prompts, generate=2)


def test_one_answer_for_all_is_an_error_at_once():
    with pytest.raises(TypeError, match="answers: expected one answer per prompt"):
        lm.trace_many(decoder(), PROMPTS, answers=" w20")


@pytest.mark.parametrize("answers", [ANSWERS[:2], [*ANSWERS, " w30"]])
def test_another_number_of_answers_is_an_error_after_the_traces_before(answers):
    stream = lm.trace_many(decoder(), PROMPTS, answers=answers, sources="word")
    for _ in range(min(len(answers), len(PROMPTS))):
        next(stream)
    with pytest.raises(ValueError, match="answers: expected one answer per prompt"):
        next(stream)


def test_an_error_has_the_number_of_the_prompt():
    stream = lm.trace_many(decoder(), PROMPTS, answers=[ANSWERS[0], "", ANSWERS[2]], sources="word")
    next(stream)
    with pytest.raises(ValueError, match=r"^prompt 1: answer: expected text of at least one token"):
        next(stream)
