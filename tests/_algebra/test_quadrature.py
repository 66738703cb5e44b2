from __future__ import annotations

import math

import pytest
import torch

from lens_mix._algebra.quadrature import RULES, nested_rules, quadrature


@pytest.mark.parametrize("rule", RULES)
def test_rules_integrate(rule):
    points, weights = quadrature(rule, 64)
    assert weights.sum().item() == pytest.approx(1, abs=1e-14)
    assert 0 <= points.min() <= points.max() <= 1
    error = abs((weights * points.exp()).sum().item() - (math.e - 1))
    assert error <= {"gauss_legendre": 1e-14, "riemann_middle": 1e-4, "trapezoid": 1e-4}.get(rule, 2e-2)
    assert (error > 1e-3) == (rule in ("riemann_left", "riemann_right"))


def test_left_and_right_points():
    assert quadrature("riemann_left", 4)[0].tolist() == [0, 0.25, 0.5, 0.75]
    assert quadrature("riemann_right", 4)[0].tolist() == [0.25, 0.5, 0.75, 1]
    assert quadrature("trapezoid", 3)[1].tolist() == [0.25, 0.5, 0.25]
    assert torch.equal(quadrature("gausslegendre", 5)[0], quadrature("gauss_legendre", 5)[0])


@pytest.mark.parametrize("largest", [3, 7, 20, 63, 1000])
def test_nested_rules_reuse_their_points(largest):
    rules = nested_rules(largest)
    assert rules.counts == tuple(count for count in (1, 3, 7, 15, 31, 63) if count <= largest)
    assert len(rules.points) == rules.counts[-1]
    assert 0 < rules.points.min() < rules.points.max() < 1
    for rule, (count, degree) in enumerate(zip(rules.counts, rules.degrees, strict=True)):
        weights = rules.weights[rule]
        assert (weights[:count] > 0).all()
        assert not weights[count:].any()
        for power in range(degree + 1):
            assert (weights * rules.points**power).sum().item() == pytest.approx(1 / (power + 1), abs=1e-13)
        beyond = (weights * (2 * rules.points - 1) ** (degree + 1)).sum() - 1 / (degree + 2)
        assert count > 15 or abs(beyond) > 1e-9


def test_nested_rules_are_the_published_ones():
    """Compare with Kronrod's extension of 3 points, which Patterson's tables have to 20 digits."""
    rules = nested_rules(7)
    own, expected = rules.points[:3].sort().values, quadrature("gauss_legendre", 3)[0]
    torch.testing.assert_close(own, expected, rtol=0, atol=1e-15)
    nodes, order = (2 * rules.points - 1).sort()
    expected = [0, 0.43424374934680255800, 0.77459666924148337704, 0.96049126870802028342]
    assert nodes[3:].tolist() == pytest.approx(expected, abs=1e-15)
    weights = [0.45091653865847414235, 0.40139741477596222291, 0.26848808986833344073, 0.10465622602646726519]
    assert (2 * rules.weights[2][order])[3:].tolist() == pytest.approx(weights, abs=1e-15)
