"""Test that maps and verifications have full precision inside autocast and with reduced float32 products."""

from __future__ import annotations

import pytest
import torch

import lens_mix as lm
from lens_mix._care.precision import switched_off
from lens_mix.experiments import pruned
from lens_mix.experiments.mixing_ratio import mixing_ratios
from tests.matrix import case_of, prompt_of

pytestmark = pytest.mark.filterwarnings("ignore")
LABELS = ["bridge gpt2", "bridge llama", "bridge bert", "HookedTransformer LN"]
METHODS = ["attention", "value_zeroing", "alti", "attention_attribution"]


@pytest.fixture(params=LABELS)
def model(request):
    case = case_of(request.param)
    model = case.build()
    if case.refusal is not None:
        pytest.skip(case.refusal)
    return model


@pytest.fixture(params=["autocast", "reduced products"])
def reduced(request):
    """Return a context in which the user's own passes are less precise."""
    if request.param == "autocast":
        with torch.autocast("cpu", dtype=torch.bfloat16):
            yield "torch.autocast"
        return
    torch.set_float32_matmul_precision("medium")
    yield "reduced float32 products"
    assert torch.get_float32_matmul_precision() == "medium"
    torch.set_float32_matmul_precision("highest")


def test_maps_are_of_full_precision_and_say_so(model, reduced):
    inside = lm.run(model, prompt_of(model), METHODS)
    support = str(lm.support(model))
    still_on = switched_off()
    with torch.autocast("cpu", enabled=False):
        torch.set_float32_matmul_precision("highest")
        outside = lm.run(model, prompt_of(model), METHODS)
        assert support == str(lm.support(model))
        torch.set_float32_matmul_precision("medium" if "reduced" in reduced else "highest")
    assert still_on == [reduced]
    for name in METHODS:
        torch.testing.assert_close(inside[name].scores, outside[name].scores, rtol=0, atol=1e-6)
        one, other = (dict(found[name].provenance, date="") for found in (inside, outside))
        assert one == other
        assert any(reduced in note for note in inside[name].notes)
        assert not any(reduced in note for note in outside[name].notes)


def test_statistics(model, reduced):
    prompt = prompt_of(model)
    inside = mixing_ratios(model, prompt)
    with torch.autocast("cpu", enabled=False):
        outside = mixing_ratios(model, prompt)
    numbers = inside.select_dtypes("number")
    torch.testing.assert_close(
        torch.tensor(numbers.to_numpy()), torch.tensor(outside[numbers.columns].to_numpy()), rtol=0, atol=1e-6
    )


def test_a_pruned_model_runs_in_the_users_precision(model):
    tokens = torch.tensor([[3, 5, 7]])
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        plain = model(tokens)
        with pruned(model, [(0, 0)]):
            assert torch.is_autocast_enabled("cpu")
            assert model(tokens).dtype == plain.dtype
