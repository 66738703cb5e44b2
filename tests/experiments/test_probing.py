"""Test probes against formulas and scikit-learn's definition, and their agreement with maps."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.optimize
import torch

from lens_mix.experiments import Probing, probe_layers, probing_agreement, residuals_at
from lens_mix.experiments.probing import _fit_probe
from tests import tiny_models
from tests.tiny_models import available, bridge, gpt2_like

NOUNS = 40


def sentences(count: int, seed: int = 0) -> tuple[list[bool], list[int]]:
    """Draw numbers and nouns, where even nouns are plural."""
    nouns = torch.randint(NOUNS, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return [noun % 2 == 0 for noun in nouns], nouns


def states_of(plural: list[bool], nouns: list[int], seed: int = 0) -> torch.Tensor:
    """Make three layers of noise. The second also has the number, and the third the whole noun."""
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(3, len(plural), NOUNS + 8, generator=generator)
    states[1, :, 0] += 8 * torch.tensor(plural).float()
    states[2, torch.arange(len(nouns)), torch.tensor(nouns)] += 20
    return states


# ------------------------------------------------------------------ the probe itself


def test_two_points_by_hand():
    """For x = ±1 with one label each, the classes' weights are ±w by symmetry, and penalty · w = 2 σ(−2w)."""
    w = 0.5
    penalty = 2 / (1 + math.e) / w
    probe = _fit_probe(torch.tensor([[-1.0], [1.0]]).double(), torch.tensor([0, 1]), 2, penalty)
    assert (probe.weights - torch.tensor([[-w, w]])).abs().max() < 1e-6
    assert (probe.bias[0] - probe.bias[1]).abs() < 1e-6
    right = probe(torch.tensor([[1.0]]).double())[0, 1].exp().item()
    assert right == pytest.approx(1 / (1 + math.exp(-2 * w)))


def test_the_minimum_that_scipy_finds():
    generator = torch.Generator().manual_seed(0)
    features = 3 + 5 * torch.randn(60, 4, generator=generator, dtype=torch.float64)
    labels = torch.randint(3, (60,), generator=generator)
    probe = _fit_probe(features, labels, 3, 0.7)
    standard = ((features - features.mean(0)) / features.std(0, correction=0)).numpy()

    def loss(flat: np.ndarray) -> float:
        weights, bias = flat[:12].reshape(4, 3), flat[12:]
        scores = standard @ weights + bias
        own = scores[np.arange(60), labels.numpy()]
        return float((np.log(np.exp(scores).sum(1)) - own).sum() + 0.35 * (weights**2).sum())

    best = scipy.optimize.minimize(loss, np.zeros(15), options={"gtol": 1e-9})
    ours = np.concatenate([probe.weights.numpy().ravel(), probe.bias.numpy()])
    assert loss(ours) <= best.fun + 1e-9
    assert np.abs(probe.weights.numpy() - best.x[:12].reshape(4, 3)).max() < 1e-4


def test_a_feature_that_never_changes_is_left_out():
    features = torch.tensor([[0.1, -1.0], [0.1, 1.0]]).double()
    probe = _fit_probe(features, torch.tensor([0, 1]), 2, 1.0)
    assert probe.weights[0].abs().max() == 0
    assert torch.isfinite(probe(features)).all()


# ------------------------------------------------------------------ layers


def test_a_feature_that_is_there_is_found_and_one_that_is_not_is_not():
    plural, nouns = sentences(800)
    found = probe_layers(states_of(plural, nouns), plural, nouns, penalty=10.0)
    assert found.accuracy.shape == found.control.shape == (3,)
    # With 400 held-out prompts, chance is 0.5 ± 0.025.
    assert abs(found.accuracy[0] - 0.5) < 0.1
    assert found.accuracy[1] > 0.98
    assert abs(found.control[1] - 0.5) < 0.12
    assert found.selectivity[1] > 0.35
    # A layer with the noun has its number, and also every random label, so the accuracy is the probe's own.
    assert found.accuracy[2] > 0.98
    assert found.control[2] > 0.98
    assert found.selectivity[2].abs() < 0.02


def test_what_is_held_out_was_not_fitted_to():
    """Noise of more dimensions than prompts can be learned by heart, but does not predict other prompts."""
    plural, nouns = sentences(200)
    states = torch.randn(1, 200, 300, generator=torch.Generator().manual_seed(1))
    found = probe_layers(states, plural, nouns, held_out=0.3)
    assert len(found.held_out) == len(set(found.held_out.tolist())) == 60
    assert found.accuracy[0] < 0.75
    changed = states.clone()
    changed[:, found.held_out] = 0
    again = probe_layers(changed, plural, nouns, held_out=0.3)
    assert len(set(again.evidence[0].tolist())) <= 2


def test_evidence_is_the_log_probability_of_the_right_value():
    plural, nouns = sentences(100)
    found = probe_layers(states_of(plural, nouns), plural, nouns)
    assert found.evidence.shape == (3, 50)
    # Of two values, the right one is predicted if its probability is above one half.
    assert torch.equal((found.evidence > math.log(0.5)).double().mean(-1), found.accuracy)
    mine = [plural[place] for place in found.held_out.tolist()]
    assert found.majority in (sum(mine) / 50, 1 - sum(mine) / 50)


def test_values_may_be_words_or_numbers_and_layers_do_not_see_one_another():
    plural, nouns = sentences(120)
    states = states_of(plural, nouns)
    one = probe_layers(states, plural, nouns)
    words = ["plural" if value else "singular" for value in plural]
    other = probe_layers(states, words, [f"noun {noun}" for noun in nouns])
    alone = probe_layers(states[1:2], torch.tensor(plural), torch.tensor(nouns))
    assert torch.equal(one.accuracy, other.accuracy)
    assert torch.equal(one.control, other.control)
    assert one.accuracy[1] == alone.accuracy[0]
    assert one.control[1] == alone.control[0]


def test_the_table():
    plural, nouns = sentences(100)
    table = probe_layers(states_of(plural, nouns), plural, nouns).to_dataframe()
    assert table.columns.tolist() == ["layer", "accuracy", "control", "selectivity"]
    assert table.layer.tolist() == [0, 1, 2]
    assert (table.selectivity == table.accuracy - table.control).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"states": torch.zeros(10, 4)},
            r"states: expected finite \[layer, prompt, d_model\], got \[10, 4\]",
        ),
        ({"states": torch.full((1, 10, 4), math.nan)}, "states: expected finite"),
        ({"values": [True] * 9}, "values: expected one for each of 10 prompts, got 9"),
        ({"types": [1] * 11}, "types: expected one for each of 10 prompts, got 11"),
        ({"values": [True] * 10}, "expected two values or more in 5 prompts"),
        ({"held_out": 0.0}, "and one prompt or more beside them, got held_out=0 of 10"),
        ({"held_out": 1.0}, "expected two values or more in 0 prompts"),
        ({"penalty": 0}, "penalty: expected a finite number, above 0"),
    ],
)
def test_what_can_not_be_probed(change, message):
    given = {"states": torch.randn(1, 10, 4), "values": [True, False] * 5, "types": list(range(10))}
    with pytest.raises(ValueError, match=message):
        probe_layers(**{**given, **change})


# ------------------------------------------------------------------ agreement


def made(accuracy: list[float], control: list[float], evidence: list[list[float]], held_out: list[int]):
    given = (torch.tensor(values, dtype=torch.float64) for values in (accuracy, control, evidence))
    return Probing(*given, held_out=torch.tensor(held_out), majority=0.5)


def test_agreement_by_hand():
    probing = made([0.5, 0.7, 0.9], [0.5, 0.4, 0.8], [[-3, -1], [-2, -2], [-1, -3]], [2, 0])
    # Column 1 was fitted to. The means of the others are .2, .3, .25, and 1 − 6 Σd²/(3·8) is for ranks 1 3 2.
    mixed = torch.tensor([[0.3, 9.0, 0.1], [0.4, 0.0, 0.2], [0.0, 5.0, 0.5]])
    found = probing_agreement(probing, mixed)
    assert found.accuracy == pytest.approx(0.5)
    # The selectivities are 0, .3 and .1.
    assert found.selectivity == pytest.approx(1.0)
    # Prompt 2 rises with the evidence. Prompt 0 has ranks 2 3 1 against 3 2 1.
    assert found.prompts.tolist() == pytest.approx([1.0, 0.5])


def test_where_nothing_changes_there_is_no_correlation():
    probing = made([0.9, 0.9], [0.5, 0.5], [[-1.0], [-1.0]], [0])
    found = probing_agreement(probing, torch.tensor([[0.1], [0.2]]))
    assert math.isnan(found.accuracy)
    assert math.isnan(found.selectivity)
    assert found.prompts.isnan().all()


def test_a_map_of_other_prompts_or_layers():
    probing = made([0.5, 0.7], [0.5, 0.5], [[-1.0], [-2.0]], [3])
    for shape in ([3, 4], [2, 3], [2]):
        with pytest.raises(ValueError, match="mixed: expected 2 layers and a column for every prompt"):
            probing_agreement(probing, torch.ones(shape))
    with pytest.raises(TypeError, match="probing: expected a Probing"):
        probing_agreement([0.5, 0.7], torch.ones(2, 4))
    with pytest.raises(ValueError, match="mixed: expected finite numbers"):
        probing_agreement(probing, torch.full((2, 4), math.nan))


# ------------------------------------------------------------------ states of a model


def test_residuals_are_those_of_the_hooks():
    model = gpt2_like(torch.float64)
    prompts = [tiny_models.tokens(model, 1, 5 + seed, seed=seed)[0] for seed in range(3)]
    found = residuals_at(model, prompts, [0, -1, 3])
    for index, (prompt, place) in enumerate(zip(prompts, [0, -1, 3], strict=True)):
        _, cache = model.run_with_cache(prompt[None])
        for layer in range(2):
            expected = cache[f"blocks.{layer}.hook_resid_post"][0, place]
            assert (found[layer, index] - expected).abs().max() < 1e-12
    last = residuals_at(model, prompts, layers=[-1])
    assert (last[0, 1] - found[1, 1]).abs().max() < 1e-12
    with pytest.raises(ValueError, match="positions: expected one, or one for each of 3 prompts, got 2"):
        residuals_at(model, prompts, [0, 1])
    with pytest.raises(ValueError, match="prompts: expected at least one"):
        residuals_at(model, [])
    with pytest.raises(TypeError, match="queries: expected the rows as `positions`"):
        residuals_at(model, prompts, queries=[1])


@pytest.mark.skipif(not available(bridge, "bert"), reason="no TransformerBridge in this TransformerLens")
def test_a_probe_finds_the_word_at_its_own_place():
    model = bridge("bert")
    draw = torch.Generator().manual_seed(0)
    prompts = [torch.randint(5, 45, (6,), generator=draw) for _ in range(120)]
    cues = [int(torch.randint(10, 14, (1,), generator=draw)) for _ in prompts]
    for prompt, cue in zip(prompts, cues, strict=True):
        prompt[2] = cue
    found = probe_layers(residuals_at(model, prompts, 2), [cue < 12 for cue in cues], cues)
    assert found.accuracy[0] > 0.95
    assert found.accuracy[0] > found.majority + 0.3
