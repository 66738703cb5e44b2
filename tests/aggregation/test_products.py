"""Test products of maps in logarithms against products of exact fractions."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lens_mix.aggregation.products import add_residual, compose, cumulative, log_matmul


def random_maps(layers, size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(layers, size, size, generator=generator, dtype=torch.float64).softmax(-1)


def exact_log(fraction):
    return -math.inf if fraction == 0 else math.log(fraction.numerator) - math.log(fraction.denominator)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 5), st.sampled_from([1, 50, 400]), st.floats(0, 0.6), st.integers(0, 10**6))
def test_log_matmul_against_fractions(size, spread, zeros, seed):
    generator = torch.Generator().manual_seed(seed)
    powers = torch.randint(-spread, 1, (2, size, size), generator=generator)
    gone = torch.rand(2, size, size, generator=generator) < zeros
    exact = [
        [[Fraction(0) if gone[m, i, j] else Fraction(10) ** int(powers[m, i, j]) for j in range(size)]
         for i in range(size)]
        for m in range(2)
    ]  # fmt: skip
    logs = [
        torch.tensor([[exact_log(x) for x in row] for row in matrix], dtype=torch.float64) for matrix in exact
    ]
    expected = torch.tensor(
        [
            [exact_log(sum(exact[0][i][k] * exact[1][k][j] for k in range(size))) for j in range(size)]
            for i in range(size)
        ],
        dtype=torch.float64,
    )
    assert torch.allclose(log_matmul(*logs), expected, rtol=1e-14, atol=1e-12)


def test_log_matmul_redoes_the_rows_that_underflow():
    # The column has its maximum 0 at k = 1, where the left factor is zero, so the entry is exp(-2000).
    left = torch.tensor([[-1000.0, -math.inf], [0.0, 0.0]], dtype=torch.float64)
    right = torch.tensor([[-1000.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    result = log_matmul(left, right)
    assert result[0].tolist() == [-2000.0, -1000.0]
    assert result[1].tolist() == pytest.approx([0.0, math.log(2)])
    # exp(-740) is subnormal in float64 and has few digits.
    right[0, 0] = -740.0
    assert log_matmul(left, right)[0, 0].item() == pytest.approx(-1740.0, abs=1e-12)


def test_log_matmul_keeps_exact_zeros():
    zero = torch.full((3, 3), -math.inf, dtype=torch.float64)
    assert torch.equal(log_matmul(zero, torch.zeros(3, 3, dtype=torch.float64)), zero)


def test_cumulative():
    maps = random_maps(3, 4)
    rolled = cumulative(maps)
    assert torch.equal(rolled[0], maps[0])
    assert torch.allclose(rolled[2], maps[2] @ maps[1] @ maps[0])
    logs = cumulative(maps.log(), product=log_matmul)
    assert torch.allclose(logs.exp(), rolled, rtol=1e-13)


def test_cumulative_per_head():
    heads = random_maps(6, 4).reshape(3, 2, 4, 4)
    maps = heads.mean(1)
    rolled = cumulative(maps, heads)
    assert torch.equal(rolled[0], heads[0])
    assert torch.allclose(rolled[2, 1], heads[2, 1] @ maps[1] @ maps[0])
    assert torch.allclose(rolled.mean(1), cumulative(maps))


@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
def test_add_residual(weight):
    maps = random_maps(2, 4)
    mixed = add_residual(maps.clone(), weight)
    assert torch.allclose(mixed, (1 - weight) * maps + weight * torch.eye(4, dtype=torch.float64))
    assert torch.allclose(mixed.sum(-1), torch.ones(2, 4, dtype=torch.float64))


def test_add_residual_to_an_empty_row():
    maps = random_maps(1, 3)
    maps[0, 1] = 0
    assert add_residual(maps.clone(), 0.3)[0, 1].tolist() == [0, 1, 0]
    assert add_residual(maps.clone(), 0.0)[0, 1].tolist() == [0, 0, 0]


def test_compose():
    step = torch.tensor([[1, 0, 0], [1, 0, 0], [0, 1, 0]], dtype=torch.bool)
    assert compose(step, step).tolist() == [[True, False, False], [True, False, False], [True, False, False]]
