"""Checks by a few random vectors: what they must see."""

from __future__ import annotations

import pytest
import torch

from lens_mix._blocks.sketch import random_vectors, sketch, sketched_error


def rows(count: int = 400, width: int = 64) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(1))


def test_right_rows_have_no_error() -> None:
    x = rows().double()
    assert sketched_error(sketch(x), x) == 0
    assert sketched_error(sketch(torch.zeros(2, 8)), torch.zeros(2, 8)) == 0


def test_an_error_comes_out_about_as_large_as_it_is() -> None:
    x, error = rows().double(), rows()[1:].double()
    error = error / error.norm(dim=-1, keepdim=True)
    for row, own in zip(x, error, strict=False):
        found = sketched_error(sketch((row + 0.1 * row.norm() * own)[None]), row[None])
        assert 0.02 < found < 0.25


@pytest.mark.parametrize("second", range(1, 64))
def test_equal_errors_in_two_places_do_not_cancel(second: int) -> None:
    x = rows(1).double()
    for sign in (1, -1):
        wrong = x.clone()
        wrong[0, 0] += 0.01 * x.norm()
        wrong[0, second] += sign * 0.01 * x.norm()
        assert 2e-3 < sketched_error(sketch(wrong), x) < 4e-2


def test_rows_that_do_not_count_and_nan() -> None:
    x = rows(3)
    wrong = x.clone()
    wrong[1] = 7
    assert sketched_error(sketch(wrong), x, torch.tensor([True, False, True])) < 1e-5
    wrong[2] = torch.nan
    assert not sketched_error(sketch(wrong), x) < 1


def test_the_default_device_does_not_matter() -> None:
    random_vectors.cache_clear()
    with torch.device("meta"):
        assert random_vectors(5, torch.float32, torch.device("cpu")).device.type == "cpu"
    random_vectors.cache_clear()
