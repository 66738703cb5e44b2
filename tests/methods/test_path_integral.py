"""Test the error estimate, on paths whose gradient is a known function of the point."""

from __future__ import annotations

import math
import types

import pytest
import torch

from lens_mix._algebra.quadrature import nested_rules, one_rule
from lens_mix.methods.path_integral import Integral


class KnownPath:
    """Entries with known slopes along the path: [1 prompt, 1 head, 1 query, 1 key per slope]."""

    def __init__(self, *slopes, clean: float, baseline: float = 0.0, probability: bool = False) -> None:
        self.slopes, self.baseline, self.taken = slopes, baseline, 0
        self.pattern = self.difference = torch.ones(1, 1, 1, len(slopes), dtype=torch.float64)
        clean = torch.tensor([clean], dtype=torch.float64)
        self.bound = types.SimpleNamespace(clean=clean, is_probability=probability)
        self.block = types.SimpleNamespace(zeros=lambda *shape: torch.zeros(*shape, dtype=torch.float64))

    def chunks(self, rows: int):
        return [slice(start, start + 2) for start in range(0, rows, 2)]

    def gradients(self, prompts, alphas):
        self.taken += len(alphas)
        values = torch.full((len(alphas),), self.baseline, dtype=torch.float64)
        return values, torch.stack([slope(alphas) for slope in self.slopes], -1)[:, None, None]


def bump(width: float, place: float = 0.3):
    """Return a bump whose integral over 0..1 is width √π, except for its tails."""
    return lambda alpha: torch.exp(-(((alpha - place) / width) ** 2))


def test_a_smooth_path_takes_three_points_and_the_baseline():
    path = KnownPath(lambda a: 1 + a, lambda a: a**2, clean=1.5 + 1 / 3)
    integral = Integral(path, nested_rules(31))
    integral.refine(None)
    assert (integral.steps(0), path.taken) == (3, 4)
    assert integral.scores(0).flatten().tolist() == pytest.approx([1.5, 1 / 3], abs=1e-14)
    assert integral.gap(0) == pytest.approx(0, abs=1e-14)


@pytest.mark.parametrize(("width", "place"), [(0.3, 0.3), (0.2, 0.5), (0.1, 0.5), (0.2, 0.1)])
def test_a_gap_that_vanishes_by_accident_is_not_trusted(width, place):
    """The errors of two entries cancel: the sum is right with any rule, and the entries are not."""
    sharp = bump(width, place)
    path = KnownPath(sharp, lambda a: 1 - sharp(a), clean=1.0)
    first = Integral(path, nested_rules(3))
    first.refine(None)
    assert abs(first.gap(0)) <= 1e-14
    integral = Integral(path, nested_rules(63))
    integral.refine(None)
    fine = one_rule("riemann_middle", 2000)
    expected = (fine.weights[0] * sharp(fine.points)).sum().item()
    assert integral.steps(0) > 3
    assert integral.scores(0).flatten().tolist() == pytest.approx([expected, 1 - expected], abs=0.01)
    assert integral.error(0) <= integral.accepted(0, None) == pytest.approx(0.01, rel=0.05)


def test_the_last_rule_is_not_taken_where_it_would_not_do():
    rough = KnownPath(lambda a: 1 + 5 * torch.cos(70 * a), clean=1 + 5 * math.sin(70) / 70)
    integral = Integral(rough, nested_rules(31))
    integral.refine(None)
    assert integral.steps(0) == 15
    assert rough.taken == 16
    assert integral.error(0) > integral.accepted(0, None)


def test_a_degenerate_path_is_left_after_its_first_points():
    path = KnownPath(lambda a: 1 / a, lambda a: -(1 - 1e-4) / a, clean=1.0)
    integral = Integral(path, nested_rules(31))
    integral.refine(None)
    assert integral.is_degenerate(0)
    assert integral.steps(0) == 3


def test_what_is_accepted():
    path = KnownPath(lambda a: 40 + a, lambda a: -20 + a, clean=21.0)
    integral = Integral(path, nested_rules(3))
    integral.refine(None)
    assert integral.accepted(0, 0.3) == 0.3
    assert integral.accepted(0, None) == pytest.approx(0.01 * (40.5 + 19.5))
    path.bound.is_probability = True
    assert integral.accepted(0, None) == 0.01


def test_scores_below_the_rounding_of_the_target_need_no_points():
    path = KnownPath(lambda a: 1e-18 * bump(0.05)(a), clean=0.5 + 1e-16, baseline=0.5)
    integral = Integral(path, nested_rules(31))
    integral.refine(None)
    assert integral.steps(0) == 3


@pytest.mark.parametrize("seed", range(5))
def test_jumps_are_not_taken_for_smooth(seed):
    """The slopes of the entries jump, as with ReLU, and the estimate has the size of the error."""
    generator = torch.Generator().manual_seed(seed)
    places = torch.rand(40, generator=generator, dtype=torch.float64).tolist()
    path = KnownPath(
        *(lambda a, at=at: (a > at).double() for at in places), clean=sum(1 - at for at in places)
    )
    integral = Integral(path, nested_rules(31), is_smooth=False)
    integral.refine(None)
    exact = 1 - torch.tensor(places, dtype=torch.float64)
    error = (integral.scores(0).flatten() - exact).abs().sum().item()
    assert integral.error(0) >= 0.5 * error
    taken_for_smooth = Integral(path, nested_rules(31))
    taken_for_smooth.refine(None)
    wrong = (taken_for_smooth.scores(0).flatten() - exact).abs().sum().item()
    assert taken_for_smooth.error(0) < 0.5 * wrong
