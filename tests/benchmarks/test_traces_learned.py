"""Test the weights that are learned from removals on planted effects."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.traces.gold import Record
from benchmarks.traces.learned import (
    STRENGTHS,
    Example,
    choose_strength,
    correlate,
    fit,
    list_removals,
    score_lds,
    score_source,
)

SENTENCES = 6


def make_example(seed: int, weights: np.ndarray, noise: float = 0.0) -> Example:
    """Return a prompt whose removals lose the weighted features of the removed sentences."""
    draw = np.random.default_rng(seed)
    features = draw.random((SENTENCES, len(weights)))
    effects = features @ weights
    masks = draw.random((16, SENTENCES)) < 0.5
    log_p = -3.0
    values = log_p - ~masks @ effects + noise * draw.standard_normal(16)
    record = Record(
        name="statement, planted",
        number=seed,
        tokens=torch.arange(10),
        n_prompt=8,
        piece_of=torch.arange(8),
        document_of=[0] * SENTENCES,
        gold=[int(effects.argmax())],
        deciding=[],
        log_p=log_p,
        sentences=list(range(SENTENCES)),
        effects=effects.tolist(),
        masks=masks.tolist(),
        mask_log_p=values.tolist(),
    )
    return Example(record, {"planted": features}, {}, *list_removals(record))


def test_planted_weights_are_found():
    weights = np.array([2.0, 0.0, -1.0, 0.5])
    examples = [make_example(seed, weights) for seed in range(12)]
    found = fit(examples, "planted", 1e-6)
    assert found / found[0] == pytest.approx(weights / weights[0], abs=0.15)
    assert correlate(examples, "planted", weights) == pytest.approx(1)
    assert correlate(examples, "planted", found) > 0.99
    held_out = make_example(99, weights)
    scores = held_out.features["planted"] @ weights
    assert score_lds(held_out, scores) == pytest.approx(1)
    assert score_lds(held_out, -scores) == pytest.approx(-1)
    assert score_source(held_out, scores) == 1
    assert score_source(held_out, -scores) == 0


def test_the_chosen_penalty_is_good_on_other_prompts():
    """There are more features than a few noisy prompts determine, so the weakest penalty is a bad choice."""
    draw = np.random.default_rng(0)
    weights = draw.standard_normal(60) * (np.arange(60) < 3)
    noisy = [make_example(seed, weights, noise=1.0) for seed in range(10)]
    others = [make_example(seed, weights) for seed in range(100, 120)]
    found = {
        strength: correlate(others, "planted", fit(noisy, "planted", strength)) for strength in STRENGTHS
    }
    chosen = found[choose_strength(noisy, "planted")]
    assert chosen > max(found.values()) - 0.05
    assert chosen > fit_without_penalty(noisy, others) + 0.05


def fit_without_penalty(examples, others) -> float:
    return correlate(others, "planted", fit(examples, "planted", 1e-9))


def test_removals_are_single_sentences_and_random_sets():
    example = make_example(0, np.array([1.0, 2.0]))
    record = example.record
    assert example.removed.shape == (SENTENCES + 16, SENTENCES)
    assert example.removed[:SENTENCES].tolist() == np.eye(SENTENCES, dtype=bool).tolist()
    assert example.removed[SENTENCES:].tolist() == (~np.array(record.masks)).tolist()
    effects = np.array(record.effects)
    assert example.drops == pytest.approx(example.removed @ effects)
