"""Test deletion and insertion curves against passes over changed tokens, and bounds against all orders."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import lens_mix as lm
from lens_mix.evaluation import RemovalCurves, ReplaceTokens, bootstrap, removal_curves
from lens_mix.evaluation.curves import _find_bounds
from tests import tiny_models
from tests.tiny_models import llama_like

FILL = 9
PROMPT_LENGTH = 5


def value_without(model, prompt: torch.Tensor, removed) -> float:
    """Compute the log probability of the clean prediction if some tokens are FILL."""
    edited = prompt.clone()
    edited[list(removed)] = FILL
    with torch.no_grad():
        token = int(model(prompt[None])[0, -1].argmax())
        return float(model(edited[None])[0, -1].log_softmax(-1)[token])


def aopc_of(model, prompt, order) -> float:
    """Compute (1 / N) Σ_i F(x) - F(x without the first i of an order)."""
    clean = value_without(model, prompt, [])
    drops = [clean - value_without(model, prompt, order[: i + 1]) for i in range(len(order))]
    return sum(drops) / len(drops)


def row_of(order, length: int) -> torch.Tensor:
    """Make scores that rank positions in this order."""
    row = torch.full((length,), -1.0)
    row[list(order)] = torch.arange(len(order), 0, -1.0)
    return row


def test_curves_by_hand(model, prompt):
    order = [3, 0, 4, 1, 2]
    found = removal_curves(model, prompt, row_of(order, 5), removal=ReplaceTokens(FILL))
    assert found.positions == tuple(order)
    for count in range(6):
        without = value_without(model, prompt, order[:count])
        only = value_without(model, prompt, order[count:])
        assert found.deletion[count] == pytest.approx(without, abs=1e-9)
        assert found.insertion[count] == pytest.approx(only, abs=1e-9)
    assert found.deletion[0] == found.insertion[-1]
    assert found.deletion[-1] == found.insertion[0]
    assert found.aopc() == pytest.approx(aopc_of(model, prompt, order))
    assert found.aopc("insertion") == pytest.approx(aopc_of(model, prompt, order[::-1]))
    table = found.to_dataframe()
    assert list(table.columns) == ["row", "count", "deletion", "insertion"]
    assert len(table) == 6


def test_exact_bounds_are_those_of_all_orders(model, prompt):
    """Of the 120 orders, the best has 1, the worst 0, and any other a value between."""
    sets = [set(one) for size in range(6) for one in itertools.combinations(range(5), size)]
    values = {frozenset(removed): value_without(model, prompt, removed) for removed in sets}

    def area(order) -> float:
        return sum(values[frozenset()] - values[frozenset(order[: i + 1])] for i in range(5)) / 5

    areas = {order: area(order) for order in itertools.permutations(range(5))}
    best, worst = max(areas, key=areas.get), min(areas, key=areas.get)
    rows = {str(order): row_of(order, 5) for order in (best, worst, (0, 1, 2, 3, 4))}
    found = removal_curves(model, prompt, rows, removal=ReplaceTokens(FILL))
    for curve in found.values():
        assert curve.exact
        assert (curve.lower, curve.upper) == pytest.approx((areas[worst], areas[best]), abs=1e-9)
    assert found[str(best)].comprehensiveness == pytest.approx(1)
    assert found[str(worst)].comprehensiveness == pytest.approx(0)
    usual, spread = found[str((0, 1, 2, 3, 4))], areas[best] - areas[worst]
    expected = (areas[0, 1, 2, 3, 4] - areas[worst]) / spread
    assert usual.comprehensiveness == pytest.approx(expected)
    expected = (areas[4, 3, 2, 1, 0] - areas[worst]) / spread
    assert usual.sufficiency == pytest.approx(expected)


def table_of(values: dict[int, float]):
    asked = []

    def value_of(sets):
        asked.extend(sets)
        return [values[one] for one in sets]

    return value_of, asked


def test_bounds_by_hand():
    # Removing 0 first costs 1 immediately. Removing 1 first costs nothing until both are removed.
    value_of, _ = table_of({0b00: 3.0, 0b01: 2.0, 0b10: 3.0, 0b11: 0.0})
    lower, upper, exact = _find_bounds(value_of, 2, [], 3.0, exact=8, beam=5)
    assert (lower, upper, exact) == (1.5, 2.0, True)


@pytest.mark.parametrize("seed", range(5))
def test_a_wide_beam_is_exact_and_a_narrow_one_inside(seed):
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(64, generator=generator, dtype=torch.float64).tolist()
    value_of, _ = table_of(dict(enumerate(drawn)))
    exact = _find_bounds(value_of, 6, [], drawn[0], exact=6, beam=0)[:2]
    orders = [
        sum(drawn[sum(1 << bit for bit in order[: i + 1])] for i in range(6)) / 6
        for order in itertools.permutations(range(6))
    ]
    assert exact == pytest.approx((drawn[0] - max(orders), drawn[0] - min(orders)))
    assert _find_bounds(value_of, 6, [], drawn[0], exact=0, beam=20)[:2] == pytest.approx(exact)
    lower, upper, true = _find_bounds(value_of, 6, [], drawn[0], exact=0, beam=1)
    assert exact[0] <= lower <= upper <= exact[1]
    assert not true


def test_the_search_has_a_bounded_cost():
    """At most beam x N (N + 1) sets run, and none without a search."""
    value_of, asked = table_of({taken: math.sin(taken) for taken in range(1 << 9)})
    _find_bounds(value_of, 9, [], 0.0, exact=8, beam=2)
    assert 0 < len(set(asked)) <= 2 * 9 * 10
    asked.clear()
    lower, upper, exact = _find_bounds(value_of, 9, [], 0.0, exact=8, beam=0)
    assert math.isnan(lower)
    assert math.isnan(upper)
    assert not exact
    assert not asked


def test_orders_that_are_given_widen_the_bounds():
    """A beam of one misses the order that is bad at first. A row with that order gets 1 and not more."""
    values = dict.fromkeys(range(8), 5.0) | {0b001: 4.0, 0b110: 0.0, 0b111: 0.0, 0b010: 4.5}
    value_of, _ = table_of(values)
    alone = _find_bounds(value_of, 3, [], 5.0, exact=0, beam=1)
    path = [0b000, 0b010, 0b110, 0b111]
    given = _find_bounds(value_of, 3, [path], 5.0, exact=0, beam=1)
    assert alone[1] < given[1] == pytest.approx(5 - 4.5 / 3)


def test_ties_and_constant_rows(model, prompt):
    constant = removal_curves(model, prompt, torch.ones(5), removal=ReplaceTokens(FILL))
    again = removal_curves(model, prompt, torch.zeros(5), removal=ReplaceTokens(FILL))
    other = removal_curves(model, prompt, torch.zeros(5), removal=ReplaceTokens(FILL), seed=3)
    assert sorted(constant.positions) == list(range(5))
    assert constant.deletion == pytest.approx(again.deletion, abs=1e-12)
    assert other.positions != again.positions
    # Other removals are in the same pass, and a processor may round their products differently.
    assert (other.lower, other.upper) == pytest.approx((again.lower, again.upper), abs=1e-12)


def test_some_positions(model, prompt):
    """The other positions stay unchanged, and their scores are not read."""
    row = torch.tensor([100.0, 1.0, 3.0, 2.0, 50.0])
    found = removal_curves(model, prompt, row, removal=ReplaceTokens(FILL), positions=[1, 2, 3])
    assert found.positions == (2, 3, 1)
    assert found.deletion[-1] == pytest.approx(value_without(model, prompt, [1, 2, 3]), abs=1e-9)


def test_later_positions_are_not_ranked(model, prompt):
    """In a causal model later positions cannot influence a target before them."""
    target = lm.targets.predicted(2, of="log_probability")
    found = removal_curves(model, prompt, torch.arange(5.0), removal=ReplaceTokens(FILL), target=target)
    assert found.positions == (2, 1, 0)


def test_one_position(model):
    found = removal_curves(model, [5], torch.ones(1), removal=ReplaceTokens(FILL))
    assert len(found.deletion) == 2
    assert math.isnan(found.comprehensiveness)
    assert found.aopc() == pytest.approx(found.deletion[0] - found.deletion[1])


def test_a_target_that_nothing_changes(model, prompt):
    found = removal_curves(
        model, prompt, torch.rand(5), removal=ReplaceTokens(FILL), target=lambda logits: logits[:, 0, 0] * 0
    )
    assert math.isnan(found.comprehensiveness)
    assert math.isnan(found.sufficiency)


def test_a_permuted_row_scores_as_a_random_one():
    """The interval contains 0 over prompts of unequal length, and the row of true effects is above both."""
    model, generator = llama_like(torch.float64), torch.Generator().manual_seed(0)
    found = {"permuted": [], "random": [], "effects": []}
    for number in range(12):
        length = 4 + number % 3
        prompt = tiny_models.tokens(model, 1, length, seed=number)[0]
        clean = value_without(model, prompt, [])
        effects = torch.tensor([clean - value_without(model, prompt, [key]) for key in range(length)])
        rows = {
            "effects": effects,
            "permuted": effects[torch.randperm(length, generator=generator)],
            "random": torch.rand(length, generator=generator),
        }
        for name, curve in removal_curves(model, prompt, rows, removal=ReplaceTokens(FILL)).items():
            found[name].append(curve.comprehensiveness)
    interval = bootstrap(found["permuted"], found["random"])
    assert interval.low <= 0 <= interval.high
    assert bootstrap(found["effects"], found["permuted"]).low > 0


def test_normalized_by_hand():
    curve = RemovalCurves("row", (0, 1), (4.0, 2.0, 0.0), (0.0, 1.0, 4.0), 2.5, 3.5, True)
    assert curve.aopc() == 3
    assert curve.comprehensiveness == 0.5
    assert curve.aopc("insertion") == 3.5
    assert curve.sufficiency == 1


def test_refusals(model, prompt):
    with pytest.raises(ValueError, match=r"rows\['row'\]: expected one score per position of the prompt"):
        removal_curves(model, prompt, torch.ones(4))
    with pytest.raises(ValueError, match=r"rows\['a'\]: expected finite scores"):
        removal_curves(model, prompt, {"a": torch.full((5,), math.nan)})
    with pytest.raises(ValueError, match="removal: expected one of"):
        removal_curves(model, prompt, torch.ones(5), removal="delete")
    with pytest.raises(TypeError, match="removal: expected one of"):
        removal_curves(model, prompt, torch.ones(5), removal=3)
    with pytest.raises(ValueError, match="exact: expected a whole number from 0 to 20"):
        removal_curves(model, prompt, torch.ones(5), exact=30)
    with pytest.raises(ValueError, match="at least one row"):
        removal_curves(model, prompt, {})
