"""Test soft erasure against masks by hand, and its matched retention."""

from __future__ import annotations

import math

import pytest
import torch

import lens_mix as lm
from lens_mix.evaluation import bootstrap, soft_faithfulness
from lens_mix.evaluation.intervention_passes import InterventionPasses
from lens_mix.evaluation.soft import _compute_scores, _match_mean
from tests import tiny_models
from tests.matrix import cases, prompt_of
from tests.tiny_models import llama_like

PROMPT_LENGTH = 5


def row(*scores: float) -> torch.Tensor:
    return torch.tensor(scores, dtype=torch.float64)


# ------------------------------------------------------------------ matched retention


def test_matched_by_hand():
    assert _match_mean(row(1, 2, 3, 4), 0.25).tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4])
    # The highest score reaches 1, and the others share the rest by their scores.
    assert _match_mean(row(1, 2, 3, 94), 0.5).tolist() == pytest.approx([1 / 6, 2 / 6, 3 / 6, 1])
    # The mean requires more than the positive scores can have, so the others share the rest equally.
    assert _match_mean(row(5, 0, -3, 1), 0.75).tolist() == pytest.approx([1, 0.5, 0.5, 1])
    assert _match_mean(row(2, 2), 0.3).tolist() == pytest.approx([0.3, 0.3])
    assert _match_mean(row(0, 0, 0), 0.4).tolist() == pytest.approx([0.4] * 3)
    assert _match_mean(row(7), 0.4).tolist() == pytest.approx([0.4])


@pytest.mark.parametrize("mean", [0.01, 0.3, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("seed", range(4))
def test_every_row_keeps_as_much(mean, seed):
    drawn = torch.randn(12, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).exp() ** 3
    for scores in (drawn, drawn * 1e6, drawn - drawn.median(), drawn.round()):
        kept = _match_mean(scores, mean)
        assert float(kept.mean()) == pytest.approx(mean)
        assert bool(((kept >= 0) & (kept <= 1)).all())
        # No position with a lower score keeps more.
        order = scores.argsort()
        assert bool((kept[order].diff() >= -1e-12).all())
    assert _match_mean(drawn, mean).tolist() == pytest.approx(_match_mean(drawn * 1e6, mean).tolist())


# ------------------------------------------------------------------ the measure


def test_formulas_by_hand():
    # p(x) = 0.8 and p(0) = 0.2, so S(0) = 1 - 0.6. Without: 0.5, Soft-C = 0.3. With only: 0.7, Soft-S = 0.9.
    assert _compute_scores(0.8, 0.2, 0.5, 0.7) == pytest.approx((0.3 / 0.6, (0.9 - 0.4) / 0.6))
    # A higher target counts as no loss.
    assert _compute_scores(0.8, 0.2, 0.9, 0.9) == pytest.approx((0, 1))
    assert all(map(math.isnan, _compute_scores(0.2, 0.3, 0.1, 0.1)))


def test_vectors_are_masked_as_by_hand(model, prompt):
    """A hook of the test changes the residual stream that enters the first block."""
    scores = row(5, 1, 0, 2, 2)
    found = soft_faithfulness(model, prompt, scores, retained=0.4, samples=3, seed=2)
    uniform = torch.rand(3, 5, 24, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    with torch.no_grad():
        clean = model(prompt[None])[0, -1].softmax(-1)
        token = int(clean.argmax())

        def probability(keep: torch.Tensor) -> float:
            def mask(resid, hook):
                return resid * (uniform < keep[:, None]).to(resid)

            copies = prompt.expand(3, -1)
            logits = model.run_with_hooks(copies, fwd_hooks=[("blocks.0.hook_resid_pre", mask)])
            return float(logits[:, -1].softmax(-1)[:, token].mean())

        assert found.clean == pytest.approx(float(clean[token]))
        assert found.erased == pytest.approx(probability(torch.zeros(5)), abs=1e-9)
        # 2 of 5 are kept on average. The factor 0.5 leaves no score above 1 except the first.
        with_only = probability(row(1, 0.2, 0, 0.4, 0.4))
        assert found.with_only == pytest.approx(with_only, abs=1e-9)
        # 3 of 5 are removed: all of the first, and the others by their scores, 2 in 5.
        without = probability(1 - row(1, 0.4, 0, 0.8, 0.8))
        assert found.without == pytest.approx(without, abs=1e-9)
    expected = _compute_scores(found.clean, found.erased, found.without, found.with_only)
    assert (found.comprehensiveness, found.sufficiency) == pytest.approx(expected, nan_ok=True)
    assert list(found.to_dataframe()["retained"]) == [0.4]


def test_the_scale_of_a_map_is_nothing(model, prompt):
    """Without matched retention, the soft measures reward larger scores, which keep more of the input."""
    scores = torch.rand(5, generator=torch.Generator().manual_seed(0))
    found = soft_faithfulness(model, prompt, {"small": scores * 1e-3, "large": scores * 1e3})
    assert found["small"].with_only == pytest.approx(found["large"].with_only, abs=1e-12)
    assert found["small"].without == pytest.approx(found["large"].without, abs=1e-12)


def test_maps_are_compared_at_equal_retention(model, prompt, monkeypatch):
    """In the passes themselves, every map keeps the share π of the input's coordinates, in both inputs."""
    kept = []

    def watch(self, copies, fwd_hooks=(), **options):
        kept.append(float((options["resid_pre"] != 0).double().mean()))
        return torch.zeros(copies, dtype=torch.float64)

    monkeypatch.setattr(InterventionPasses, "values", watch)
    monkeypatch.setattr(InterventionPasses, "at_once", 1000)
    rows = {
        "peaked": row(1e6, 1, 1e-6, 1, 1),
        "flat": torch.ones(5),
        "none": torch.zeros(5),
        "one positive": row(-3, 0, 5, -1, 0),
        "attention": lm.run(model, prompt, "attention").merge_heads().scores[-1, -1],
    }
    for retained in (0.2, 0.5, 0.8):
        kept.clear()
        soft_faithfulness(model, prompt, rows, retained=retained, samples=1000)
        erased, *others = kept
        assert erased == 0
        # Two inputs per map: 120,000 coordinates have a standard error of at most 0.0015.
        assert others == pytest.approx([retained] * 2 * len(rows), abs=0.006)


def test_positions_that_are_not_ranked_stay(model, prompt):
    first = soft_faithfulness(model, prompt, row(9, 1, 2, 3, 9), positions=[1, 2, 3])
    other = soft_faithfulness(model, prompt, row(0, 1, 2, 3, 0), positions=[1, 2, 3])
    assert first == other
    one = soft_faithfulness(model, prompt, row(9, 1, 2, 3, 9), positions=[1], retained=0.999_999)
    assert one.with_only == pytest.approx(one.clean, abs=1e-3)


def test_one_token(model):
    """One position keeps the share itself, important or not."""
    found = soft_faithfulness(model, [5], row(3), retained=0.5)
    assert found.with_only == pytest.approx(soft_faithfulness(model, [5], row(0.1)).with_only)


WITH_RIGHT_LOGITS = [case for case in cases(refused=False) if not case.wrong_logits]


@pytest.mark.parametrize("case", WITH_RIGHT_LOGITS, ids=lambda case: case.label)
def test_every_model_is_masked(case):
    model = case.build()
    prompt = prompt_of(model)
    length = (prompt if not isinstance(prompt, tuple) else prompt[case.part == "decoder"]).shape[1]
    found = soft_faithfulness(
        model, prompt, torch.arange(float(length)), part=case.part, retained=0.999_999, samples=2
    )
    assert found.with_only == pytest.approx(found.clean, abs=1e-3)
    assert found.erased != pytest.approx(found.clean, abs=1e-5)


def test_a_permuted_row_scores_as_a_random_one():
    model, generator = llama_like(torch.float64), torch.Generator().manual_seed(0)
    permuted, random = [], []
    for number in range(9):
        length = 4 + number % 3
        prompt = tiny_models.tokens(model, 1, length, seed=number)[0]
        scores = lm.rollout(lm.run(model, prompt, "value_zeroing")).scores[-1, -1]
        rows = {
            "permuted": scores[torch.randperm(length, generator=generator)],
            "random": scores[torch.randperm(length, generator=generator)],
        }
        found = soft_faithfulness(model, prompt, rows)
        permuted.append(found["permuted"].without - found["permuted"].clean)
        random.append(found["random"].without - found["random"].clean)
    interval = bootstrap(permuted, random)
    assert interval.low <= 0 <= interval.high


def test_refusals(model, prompt):
    with pytest.raises(ValueError, match="target: expected a probability"):
        soft_faithfulness(model, prompt, torch.ones(5), target=lm.targets.logit(3))
    for retained in (0, 1, 1.5):
        with pytest.raises(ValueError, match="retained: expected a number"):
            soft_faithfulness(model, prompt, torch.ones(5), retained=retained)
    with pytest.raises(ValueError, match=r"rows\['row'\]: expected one score per position"):
        soft_faithfulness(model, prompt, torch.ones(4))
