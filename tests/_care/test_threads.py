"""Test several threads on one model: each gets its own maps, and the model is restored."""

from __future__ import annotations

import concurrent.futures
import threading

import pytest
import torch

import lens_mix as lm
from lens_mix._model.model import Lens
from lens_mix.experiments import pruned
from tests import tiny_models
from tests._care.test_state import state_of
from tests.matrix import case_of, slow

pytestmark = pytest.mark.filterwarnings("ignore")
METHODS = ["attention", "value_zeroing", "attention_attribution"]


@pytest.mark.parametrize("count", [24, slow(200)])
@pytest.mark.parametrize("label", ["bridge gpt2", "HookedTransformer LN"])
def test_each_thread_gets_its_own_maps(label, count):
    case = case_of(label)
    model = case.build()
    if case.refusal is not None:
        pytest.skip(case.refusal)
    prompts = [tiny_models.tokens(model, 1, seed=seed, seq=5 + seed) for seed in range(4)]
    expected = [lm.run(model, prompt, METHODS) for prompt in prompts]
    before = state_of(model)

    def wrong(number: int) -> bool:
        place, engine = number % len(prompts), ("hooks", "auto")[number // len(prompts) % 2]
        name = METHODS[number % len(METHODS)]
        found = lm.run(model, prompts[place], name, engine="auto" if name == METHODS[2] else engine)
        return not torch.allclose(found.scores, expected[place][name].scores, atol=1e-5)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(wrong, range(count))) == 0
    after = state_of(model)
    assert all(before[name] == after[name] for name in before if name != "weights")


def test_a_thread_waits_until_the_model_is_whole_again():
    model = case_of("bridge gpt2").build()
    tokens = tiny_models.tokens(model, 1)
    expected, found = lm.run(model, tokens, "attention").scores, []
    other = threading.Thread(target=lambda: found.append(lm.run(model, tokens, "attention").scores))
    with pruned(model, [(0, 0), (0, 1)]):
        model(tokens)
        other.start()
        other.join(0.5)
        assert not found
    other.join()
    assert torch.equal(found[0], expected)


def test_two_bridges_over_one_model_share_its_lock():
    model = case_of("bridge gpt2").build()
    if not hasattr(model, "original_model"):
        pytest.skip("no Bridge")
    other = type(model).__new__(type(model))
    torch.nn.Module.__init__(other)
    other.__dict__["original_model"] = model.original_model
    from lens_mix._care.state import evaluation_mode

    entered = threading.Event()

    def enter() -> None:
        with evaluation_mode(other, []):
            entered.set()

    thread = threading.Thread(target=enter)
    with Lens(model).evaluation_mode():
        thread.start()
        assert not entered.wait(0.3)
    thread.join()
    assert entered.is_set()
