"""Test what sketches of a matrix detect."""

from __future__ import annotations

import pytest
import torch

from lens_mix._algebra.sketch import random_vectors, sketch


def test_equal_rows_have_equal_sketches_and_a_vector_that_of_a_row() -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert torch.equal(sketch(x), sketch(x.clone()))
    torch.testing.assert_close(sketch(x[2]), sketch(x)[2])


@pytest.mark.parametrize("second", range(1, 64))
def test_equal_changes_in_two_places_do_not_cancel(second: int) -> None:
    x = torch.randn(1, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for sign in (1, -1):
        changed = x.clone()
        changed[0, 0] += 0.01
        changed[0, second] += sign * 0.01
        assert float((sketch(changed) - sketch(x)).norm()) > 1e-3


def test_the_default_device_does_not_matter() -> None:
    random_vectors.cache_clear()
    with torch.device("meta"):
        assert random_vectors(5, torch.float32, torch.device("cpu")).device.type == "cpu"
    random_vectors.cache_clear()
