"""Test the marks on the annotated figure: there is one for each entry of the page's list, on the figure."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import lens_mix as lm
from docs.make import annotated
from tests.docs.how_tos import READ_A_MAP, read_code


@pytest.fixture
def figure() -> Any:
    """Return a figure like that of the page, of maps that are made by hand."""
    tokens = ["<s>", "My", " mother", " was", " born", " in", " Italy", ",", " she", " sang", " in"]
    scores = torch.rand(14, 11, 11, generator=torch.Generator().manual_seed(0)).tril()
    explained = [None] * 10 + [{"prediction": " Italian", "probability": 0.7}]
    shared = {"tokens": tokens, "causal": True, "explained": explained}
    # A cell that has a column is the strongest, as on the page.
    scores[7, -1, 6] = 9
    maps = {
        "input map": lm.MixingMap(scores=scores[:1], method="input map", **shared),
        "value_zeroing": lm.MixingMap(scores=scores, method="value_zeroing", **shared),
    }
    return lm.Maps(maps).show(figsize=annotated.SIZE)


def test_the_page_has_an_entry_for_each_mark(figure: Any) -> None:
    before = list(figure.texts)
    count = annotated.mark(figure)
    marks = [text for text in figure.texts if text not in before]
    assert [mark.get_text() for mark in marks] == [str(number) for number in range(1, count + 1)]
    entries = re.findall(r"^(\d)\. ", READ_A_MAP.read_text(encoding="utf-8"), re.MULTILINE)
    assert [mark.get_text() for mark in marks] == entries


def test_marks_are_on_the_figure_and_apart(figure: Any) -> None:
    before = list(figure.texts)
    annotated.mark(figure)
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in figure.texts if text not in before]
    width, height = figure.bbox.size
    for index, box in enumerate(boxes):
        assert box.x0 >= 0
        assert box.x1 <= width
        assert box.y0 >= 0
        assert box.y1 <= height
        assert not any(box.overlaps(other) for other in boxes[:index])


def test_the_picture_is_that_of_the_example() -> None:
    code = read_code(READ_A_MAP)
    assert repr(annotated.PROMPT).replace("'", '"') in code
    assert f"layers={annotated.LAYERS}" in code
    assert f"figsize={annotated.SIZE}" in code
