"""Test that the page of a long prompt is drawn quickly; `python -m benchmarks.page` prints the figures."""

from __future__ import annotations

import pytest

import lens_mix as lm
from benchmarks.page import make_maps, measure
from tests.browser import NEEDS_CHROMIUM, chromium  # noqa: F401

pytestmark = [NEEDS_CHROMIUM, pytest.mark.slow, pytest.mark.once]


def test_a_page_of_three_hundred_tokens_answers(browser, tmp_path):
    """The bounds are several times the figures of an idle machine, because tests share theirs."""
    path = tmp_path / "page.html"
    lm.page(make_maps(), path)
    found = measure(browser, path, repeats=3)
    assert found["first paint"] < 1.5
    for name, seconds in found.items():
        assert seconds < (1.5 if name.startswith(("view", "first")) else 0.5), name
