from __future__ import annotations

import pytest

from lens_mix._blocks.cost import COSTS
from lens_mix.recommended import find_default_row
from lens_mix.serve.estimate import Estimate, Pace, estimate, in_words, measure_pace


def test_the_time_is_the_cost_times_a_forward_pass():
    pace = Pace(base=0.5, per_token=0.01, layers=4)
    found = estimate(pace, 50, ["attention", "gim", "attention_attribution", "unknown"], all_rows=False)
    forward = 0.5 + 50 * 0.01
    assert found.seconds == {
        "attention": COSTS["attention"].passes(50, 50, 4) * forward,
        "gim": COSTS["gim"].passes(50, 1, 4) * forward,
        "attention_attribution": COSTS["attention_attribution"].passes(50, 50, 4) * forward,
    }
    assert found.total == pytest.approx(sum(found.seconds.values()))
    every = estimate(pace, 50, ["gim"], all_rows=True)
    assert every.seconds == {"gim": COSTS["gim"].passes(50, 50, 4) * forward}
    bidirectional = estimate(pace._replace(is_causal=False), 50, ["value_zeroing"], all_rows=True)
    assert bidirectional.total > 1.5 * estimate(pace, 50, ["value_zeroing"], all_rows=True).total


def test_an_estimate_in_words():
    assert Estimate(1, {}).describe() == "1 token"
    assert Estimate(7, {"alti": 0.2, "gim": 0.3}).describe() == "7 tokens, less than a second"
    assert Estimate(7, {"alti": 12.0}).describe(12.0) == "7 tokens, about 12 seconds"
    both = Estimate(7, {"alti": 2.0, "gim": 30.0})
    slowest = "; the slowest method is gim, about 30 seconds"
    assert both.describe() == f"7 tokens, about 32 seconds{slowest}"
    limited = f"7 tokens, about 32 seconds, more than the limit of 20 seconds{slowest}"
    assert both.describe(20.0) == limited
    assert [in_words(seconds) for seconds in (0.9, 1.2, 99.4, 150, 600)] == [
        "less than a second",
        "about 1 second",
        "about 99 seconds",
        "about 2 minutes",
        "about 10 minutes",
    ]


def test_the_pace_of_a_model(model):
    pace = measure_pace(model)
    assert pace.layers == model.cfg.n_layers
    assert pace.is_causal == (find_default_row(model, "w3 w14") == -1)
    assert pace.base >= 0
    assert pace.per_token >= 0
    assert 0 < pace.base + 48 * pace.per_token < 10


def test_no_pace_if_nothing_can_run(model, monkeypatch):
    def refuse(*arguments, **options):
        raise ValueError("no model")

    monkeypatch.setattr("lens_mix.serve.estimate.run", refuse)
    assert measure_pace(model) is None
