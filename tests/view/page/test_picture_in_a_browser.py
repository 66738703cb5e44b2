"""Test the picture of the page in a browser: where the cells are, what they say, and what a click does."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

import lens_mix as lm
from lens_mix.maps import Grid
from tests.browser import NEEDS_CHROMIUM, chromium  # noqa: F401
from tests.view.page.test_in_a_browser import all_of, doing, open_pages, percent, tip_of  # noqa: F401
from tests.view.test_picture_figure import GRID, picture_map, wave_map

pytestmark = NEEDS_CHROMIUM

COLOURS = """
const [canvas, places] = arguments, scale = canvas.width / canvas.getBoundingClientRect().width;
const { data, width } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
return places.map(([x, y]) => 4 * (Math.floor(y * scale) * width + Math.floor(x * scale)))
  .map(start => [...data.slice(start, start + 3)]);
"""


def middle_of_cell(canvas, row, column):
    """Return where a cell of the grid of `picture_map` is in a canvas, from its left and its top."""
    return (column + 0.5) * canvas.size["width"] / 3, (row + 0.5) * canvas.size["height"] / 2


def click(browser, canvas, x, y):
    script = (
        "const box = arguments[0].getBoundingClientRect();"
        "arguments[0].dispatchEvent(new MouseEvent('click', {bubbles: true,"
        "clientX: box.left + arguments[1], clientY: box.top + arguments[2]}))"
    )
    doing(browser, lambda: browser.execute_script(script, canvas, x, y))


def test_the_row_lies_over_the_picture(opened):
    m = picture_map(features=torch.zeros(3, 8, 12))
    browser = opened(m, "", picture=True)
    canvas, *layers = all_of(browser, "#picture canvas")
    assert len(layers) == 2
    places = [middle_of_cell(canvas, *m.grid.place(position)) for position in m.grid.positions]
    # The row of [CLS], as a mean over the layers, is 10 % at the first patch.
    shares = m.scores[:, 0].mean(0)[1:]
    for place, position, share in zip(places, m.grid.positions, shares, strict=True):
        assert (
            tip_of(browser, canvas, *place)
            == f"{position} “{m.tokens[position]}”\n{percent(share)} of the row"
        )
    colors = browser.execute_script(COLOURS, canvas, places)
    strength = [max(color) - min(color) for color in colors]
    assert colors[2] == colors[3] == colors[5]
    assert strength[4] > strength[1] > strength[0] > strength[2] > 0


@pytest.mark.parametrize("size", [(60, 40), (40, 60), (90, 20)])
def test_the_grid_covers_what_was_read_in_its_own_proportions(opened, size):
    # The processor kept all of the picture but its ten upper rows, and stretched the rest to 8 x 12.
    grid = dataclasses.replace(GRID, picture_size=size, window=(10, 0, *size))
    m = picture_map(grid=grid)
    browser = opened(m, "", picture=np.zeros((*size, 3), np.uint8))
    for canvas in all_of(browser, "#picture canvas"):
        expected = (size[0] - 10) / size[1]
        assert canvas.size["height"] / canvas.size["width"] == pytest.approx(expected, rel=0.05)
        assert max(canvas.size["height"], canvas.size["width"]) <= 400
    canvas = all_of(browser, "#picture canvas")[0]
    assert "patch 1,2" in tip_of(browser, canvas, *middle_of_cell(canvas, 1, 2))
    caption = browser.find_element("css selector", "#picture .caption").text
    assert caption == "The row is drawn over the part of the picture that the model read."


def test_a_click_on_a_patch_explains_it(opened):
    browser = opened(picture_map(), "", picture=True)
    canvas = all_of(browser, "#picture canvas")[0]
    click(browser, canvas, *middle_of_cell(canvas, 1, 0))
    assert "patch 1,0" in browser.find_element("id", "prediction").get_property("textContent") + browser.title
    canvas = all_of(browser, "#picture canvas")[0]
    assert "100 % of the row" in tip_of(browser, canvas, *middle_of_cell(canvas, 0, 1))


def test_frames_lie_under_the_waveform(opened):
    browser = opened(wave_map(), "", picture=True)
    canvas = all_of(browser, "#picture canvas")[0]
    middle = (2.5 * 320 / 1700 * canvas.size["width"], canvas.size["height"] - 5)
    assert "0.04 s" in tip_of(browser, canvas, *middle)
    click(browser, canvas, *middle)
    assert "0.04 s" in browser.title


@pytest.mark.parametrize(
    ("token", "count", "expected"),
    [
        ("picture 1, 13,15", 12, "1: 13,15"),
        ("picture 2, 3", 12, "picture 2, 3"),
        ("a picture of a cat", 12, "a picture o…"),
    ],
)
def test_short_labels_of_patches_keep_the_place(opened, token, count, expected):
    browser = opened(picture_map(), "", picture=True)
    assert browser.execute_script(f"return shortened({token!r}, {count})") == expected


def test_a_decoder_of_pictures_writes_its_text_beside_the_picture(opened):
    labels = [*(f"picture 1, {row},{column}" for row in range(2) for column in range(3)), " a"]
    scores = torch.zeros(1, 7, 7)
    scores[0, -1] = torch.tensor([0.1, 0, 0, 0, 0, 0.3, 0.6])
    grid = Grid(2, 3, tuple(range(6)), (8, 12), (4, 4), (4, 4))
    m = lm.MixingMap(scores=scores, tokens=labels, grid=grid, causal=True, features=torch.zeros(3, 8, 12))
    browser = opened(m, "", picture=True)
    assert [box.text for box in all_of(browser, "#tokens .token") if box.is_displayed()] == [" a"]
    canvas = all_of(browser, "#picture canvas")[0]
    assert "picture 1, 1,2" in tip_of(browser, canvas, *middle_of_cell(canvas, 1, 2))
