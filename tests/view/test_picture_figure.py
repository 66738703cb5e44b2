"""Test figures and pages that draw a row of a map over a picture or under a waveform."""

from __future__ import annotations

import base64
import dataclasses
import io
import itertools
import json
import pathlib
import re

import numpy as np
import pytest
import torch

import lens_mix as lm
from lens_mix.maps import Grid
from lens_mix.view.images import encode_png, read_image
from lens_mix.view.position import SHARE

pytest.importorskip("matplotlib")
from matplotlib import colors

# Two rows of three patches of 4 pixels; position 0 is outside.
GRID = Grid(2, 3, (1, 2, 3, 4, 5, 6), (8, 12), (4, 4), (4, 4))
LABELS = ["[CLS]", *(f"patch {row},{column}" for row in range(2) for column in range(3))]


def picture_map(**changes):
    scores = torch.zeros(2, 7, 7)
    scores[:, 0] = torch.tensor([[0.5, 0, 0.1, 0, 0, 0.4, 0], [0.2, 0.2, 0.2, 0.1, 0.1, 0.1, 0.1]])
    scores[:, 4, 2] = 1
    fields = {"scores": scores, "tokens": LABELS, "grid": GRID, "default_query": 0}
    return lm.MixingMap(**{**fields, "features": torch.rand(3, 8, 12), **changes})


def wave_map(**changes):
    grid = Grid(1, 5, (0, 1, 2, 3, 4), (1, 1700), (1, 400), (1, 320), 1 / 16000)
    labels = [str(grid.label(position)) for position in range(5)]
    scores = torch.full((2, 5, 5), 0.2)
    return lm.MixingMap(
        **{
            "scores": scores,
            "tokens": labels,
            "grid": grid,
            "features": torch.sin(torch.arange(1700.0)),
            **changes,
        }
    )


def overlays(figure):
    """Return the images with scores, which are drawn over the gray pictures."""
    return [axes.images[1].get_array() for axes in figure.axes if len(axes.images) == 2]


def texts(figure):
    found = figure.findobj(lambda artist: hasattr(artist, "get_text"))
    return [artist.get_text().replace("\n", " ") for artist in found if artist.get_text()]


def test_the_color_of_a_patch_is_strongest_where_the_score_is_largest():
    first, second = overlays(picture_map().show(picture=True))
    # Positions 2 and 5 are the second of the first row, and the second of the second row.
    assert np.unravel_index(first[..., 3].argmax(), (2, 3)) == (1, 1)
    assert first[0, 1, 3] == pytest.approx(0.9 * np.sqrt(0.25))
    assert (first[[0, 0, 1, 1], [0, 2, 0, 2], 3] == 0).all()
    # Each layer has its own scale, up to its largest patch.
    assert second[..., 3].max() == pytest.approx(0.9)
    assert first.shape == second.shape == (2, 3, 4)


def test_texts_name_layers_and_positions_outside_of_the_grid():
    written = texts(picture_map().show(picture=True))
    assert "What '[CLS]' used" in written
    assert "layer 0, a patch ≤ 40 %" in written
    assert "[CLS] 50 %" in written
    assert "layer 1, a patch ≤ 20 %" in written


def test_nearly_all_of_a_row_is_written_as_a_whole_number():
    scores = torch.zeros(1, 7, 7)
    scores[:, 0, :2] = torch.tensor([0.9999, 0.0001])
    written = " ".join(texts(picture_map(scores=scores).show(picture=True)))
    assert "[CLS] 100 %" in written
    assert "a patch ≤ 0.01 %" in written


def test_the_text_beside_a_picture_is_written_as_a_sum():
    grid = Grid(1, 2, (3, 4), (4, 8), (4, 4), (4, 4))
    scores = torch.tensor([0.1, 0.2, 0.05, 0.3, 0.1, 0.2, 0.05]).expand(1, 7, 7)
    written = " ".join(texts(picture_map(scores=scores, grid=grid).show(picture=np.zeros((4, 8, 3)))))
    assert "all tokens 60 %" in written


def test_a_row_is_chosen_and_framed():
    figure = picture_map().show(picture=True, query="patch 1,0", layer=1)
    (axes,) = [axes for axes in figure.axes if len(axes.images) == 2]
    (frame,) = [patch for patch in axes.patches if patch.get_fill() is False]
    assert (frame.get_x(), frame.get_y(), frame.get_width(), frame.get_height()) == (0, 4, 4, 4)
    assert np.unravel_index(overlays(figure)[0][..., 3].argmax(), (2, 3)) == (0, 1)


def test_negative_scores_have_another_color():
    scores = torch.zeros(1, 7, 7)
    scores[0, 0, 1], scores[0, 0, 2] = -1, 1
    (overlay,) = overlays(picture_map(scores=scores).show(picture=True))
    assert overlay[0, 0, 3] == overlay[0, 1, 3] == pytest.approx(0.9)
    assert not np.allclose(overlay[0, 0], overlay[0, 1])
    with pytest.raises(ValueError, match="without negative scores"):
        picture_map(scores=scores).show(picture=True, normalize=True)


def test_the_lowest_band_of_a_spectrogram_is_at_the_bottom():
    grid = Grid(2, 3, (1, 2, 3, 4, 5, 6), (8, 12), (4, 4), (4, 4), 0.01)
    m = picture_map(grid=grid, features=torch.rand(12, 8))
    (axes, *_) = [axes for axes in m.show(picture=True).axes if len(axes.images) == 2]
    assert axes.images[1].origin == "lower"
    image = read_image(m, True).pixels
    assert image.shape == (8, 12, 3)
    lowest = m.features[:, 0]
    assert np.corrcoef(image[-1, :, 0], lowest)[0, 1] > 0.999


def test_a_waveform_is_above_its_scores():
    figure = wave_map().show(picture=True)
    above, below = figure.axes[:2]
    assert above.get_position().y0 > below.get_position().y1
    assert len(above.lines[0].get_xdata()) == 1700
    assert above.get_xlim() == below.get_xlim() == pytest.approx((0, 1700 / 16000))
    assert below.images[0].get_array().shape == (2, 5)
    left, right, *_ = below.images[0].get_extent()
    assert (left, right) == pytest.approx((0, 1600 / 16000))


@pytest.mark.parametrize(
    "picture",
    [
        np.zeros((8, 12, 3), np.uint8),
        np.zeros((8, 12)),
        torch.zeros(3, 8, 12),
        np.zeros((80, 120, 4), np.uint8),
        np.zeros((8, 12), bool),
        torch.zeros(3, 8, 12, dtype=torch.bfloat16),
    ],
)
def test_a_picture_can_be_an_array_or_a_tensor(picture):
    m = picture_map(features=None)
    assert len(overlays(m.show(picture=picture))) == 2
    assert (read_image(m, picture).pixels == 0).all()
    assert "as if nothing of it had been cropped" in " ".join(texts(m.show(picture=picture)))


def test_a_picture_can_be_a_pil_picture():
    image = pytest.importorskip("PIL.Image").new("L", (12, 8), 77)
    assert (read_image(picture_map(features=None), image).pixels == 77).all()


# Of a picture of 40 x 30 pixels, the processor kept rows 10 to 30, and padded 5 columns on the left.
PLACED = dataclasses.replace(GRID, picture_size=(40, 30), window=(10.0, -5.0, 30.0, 25.0))


def numbered(scale=1):
    """Return a picture whose pixels contain their row, and 200 more to the right of column 25."""
    rows = np.repeat(np.arange(40)[:, None], 30, axis=1)
    rows[:, 25:] += 200
    return np.kron(rows, np.ones((scale, scale), int)).astype(np.uint8)


@pytest.mark.parametrize("scale", [1, 3])
def test_the_grid_covers_what_the_processor_kept_of_a_picture(scale):
    m = picture_map(grid=PLACED)
    image = read_image(m, numbered(scale))
    assert image.pixels.shape == (20 * scale, 30 * scale, 3)
    assert image.pixels[:, 5 * scale :, 0].max() == 29
    assert image.pixels[:, 5 * scale :, 0].min() == 10
    assert (image.pixels[:, : 5 * scale] == 255).all()
    figure = m.show(picture=numbered(scale))
    assert "over the part of the picture that the model read" in " ".join(texts(figure))
    gray = next(axes.images[0] for axes in figure.axes if len(axes.images) == 2)
    assert gray.get_array().shape == image.pixels.shape
    assert data_of(lm.page(m, picture=numbered(scale)))["pictures"] == [encode_png(image.pixels)]


@pytest.mark.parametrize("size", [(40, 30), (30, 40), (90, 20)])
def test_a_figure_keeps_the_proportions_of_what_was_read(size):
    grid = dataclasses.replace(GRID, picture_size=size, window=(0, 0, *size))
    figure = picture_map(grid=grid).show(picture=np.zeros(size))
    width, height = figure.get_size_inches()
    for axes in (axes for axes in figure.axes if len(axes.images) == 2):
        box = axes.get_position()
        assert box.height * height / (box.width * width) == pytest.approx(size[0] / size[1], rel=1e-3)


def test_a_picture_whose_place_is_not_known_is_replaced_by_what_the_model_read():
    unplaced, placed = picture_map(), picture_map(grid=PLACED)
    for m, picture, words in (
        (unplaced, numbered(), "where it is in the picture is unknown"),
        (placed, np.zeros((40, 40)), "because the picture has 40 x 40 pixels"),
    ):
        image = read_image(m, picture)
        assert (image.pixels == read_image(m, True).pixels).all()
        assert words in image.words
        assert words in " ".join(texts(m.show(picture=picture)))
        assert data_of(lm.page(m, picture=picture))["picture_words"] == [image.words]
    with pytest.raises(ValueError, match="same aspect ratio"):
        read_image(picture_map(grid=PLACED, features=None), np.zeros((40, 40)))
    whole = dataclasses.replace(GRID, picture_size=(40, 30), window=(0, 0, 40, 30))
    assert read_image(picture_map(grid=whole), numbered()).words == "over the picture"


@pytest.mark.parametrize(
    "changes",
    [{"window": (0, 0, 4, 4)}, {"picture_size": (4, 4), "window": (4, 0, 0, 4)}, {"picture_size": (4,)}],
)
def test_a_window_that_does_not_fit_raises(changes):
    with pytest.raises(ValueError, match=r"(window|picture_size): expected"):
        dataclasses.replace(GRID, **changes)


@pytest.mark.parametrize("picture", [5, b"x", "/nope.png", np.zeros((8, 12))])
def test_a_map_of_sound_takes_no_picture(picture):
    bands = dataclasses.replace(GRID, seconds=0.01)
    for m in (wave_map(), picture_map(grid=bands, features=torch.rand(12, 8))):
        for take in (lm.page, lm.MixingMap.show):
            with pytest.raises(ValueError, match="take no picture"):
                take(m, picture=picture)


@pytest.mark.parametrize(
    ("picture", "error", "words"),
    [
        ("file.png", TypeError, "a PIL picture"),
        (np.zeros((2, 2, 2)), ValueError, "height, width"),
        (np.full((2, 2), 7.0), ValueError, "from 0 to 1"),
        (np.full((2, 2), np.nan), ValueError, "finite"),
        (np.full((2, 2), np.inf), ValueError, "finite"),
        (np.full((2, 2), 300, np.uint16), ValueError, "from 0 to 255"),
        (np.full((2, 2), -1), ValueError, "from 0 to 255"),
        (np.zeros((0, 0, 3)), ValueError, "at least one pixel"),
        (torch.zeros(3, 0, 4), ValueError, "at least one pixel"),
        (np.zeros((2, 2), complex), TypeError, "a PIL picture"),
        (pathlib.Path("nope.png"), TypeError, r"PIL\.Image\.open"),
    ],
)
def test_other_pictures_raise(picture, error, words):
    with pytest.raises(error, match=words):
        picture_map().show(picture=picture)
    with pytest.raises(error, match=words):
        lm.page(picture_map(), picture=picture)


def test_maps_without_a_grid_or_without_features_raise():
    with pytest.raises(ValueError, match="with a grid"):
        picture_map(grid=None).show(picture=True)
    with pytest.raises(ValueError, match="has no features"):
        picture_map(features=None).show(picture=True)
    with pytest.raises(ValueError, match="expected None beside picture="):
        picture_map().show(kind="layers", picture=True)


def test_a_map_of_a_picture_or_of_sound_is_shown_on_it():
    m = picture_map()
    assert len(overlays(m.show())) == 2
    assert len(overlays(m.show(layer=1, query="patch 1,0", cmap="viridis"))) == 1
    assert not overlays(m.show(picture=False))
    # These options belong to other figures.
    assert not overlays(m.show(scale="log"))
    assert not overlays(m.show(queries=[0]))
    assert not overlays(m.show("position"))
    assert not overlays(picture_map(features=None).show())
    wave = wave_map().show()
    assert any(axes.lines for axes in wave.axes), "the waveform"
    assert not any(axes.lines for axes in wave_map().show(picture=False).axes)


def test_pictures_have_the_same_scale_with_vmax():
    m = picture_map()
    figure = m.show(vmax=0.2)
    first, second = overlays(figure)
    # 0.4 is beyond the scale and as opaque as 0.2, and 0.1 is half of the scale.
    assert first[1, 1, 3] == pytest.approx(0.9)
    assert second[0, 0, 3] == pytest.approx(0.9)
    assert first[0, 1, 3] == pytest.approx(0.9 * 0.5**0.5)
    (bar,) = [axes for axes in figure.axes if axes.get_ylabel() == SHARE]
    assert bar.get_ylim() == (0, 0.2)
    wave = wave_map().show(vmax=0.1)
    (image,) = [axes.images[0] for axes in wave.axes if axes.images]
    assert image.get_clim() == (0, 0.1)
    assert image.colorbar.extend == "max"
    with pytest.raises(ValueError, match="vmax: expected a finite number, above 0, got 0"):
        m.show(vmax=0)


def test_a_picture_for_a_column_of_a_paper():
    for m in (picture_map(), wave_map()):
        figure = m.show(style="paper")
        assert figure.get_size_inches()[0] == pytest.approx(3.3)
        assert not any("sed" in text for text in texts(figure)), "no title"
    for image in overlays(picture_map().show(style="paper")):
        assert (image[..., 0] == image[..., 1]).all()
        assert (image[..., 1] == image[..., 2]).all()
    with pytest.raises(ValueError, match="style: expected 'screen' or 'paper', got 'print'"):
        picture_map().show(style="print")


def data_of(page):
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.html, re.DOTALL)
    return json.loads(found[1])


def test_a_page_has_the_picture_and_the_grid():
    picture = np.random.default_rng(0).integers(0, 255, (8, 12, 3), dtype=np.uint8)
    data = data_of(lm.page(picture_map(features=None), picture=picture))
    (address,) = data["pictures"]
    image = pytest.importorskip("PIL.Image").open(io.BytesIO(base64.b64decode(address.split(",")[1])))
    assert (np.asarray(image) == picture).all()
    grid = data["prompts"][0][0]["grid"]
    assert (grid["rows"], grid["columns"], grid["noun"]) == (2, 3, "patch")
    assert data["waves"] == [None]
    assert "http" not in address


def test_a_page_has_what_the_model_read_unless_it_gets_a_picture():
    m = picture_map()
    assert data_of(lm.page(m))["pictures"] == [encode_png(read_image(m, True).pixels)]
    assert data_of(lm.page(m, picture=False))["pictures"] == [None]
    assert data_of(m.show("page", picture=False))["pictures"] == [None]
    sound = data_of(lm.page(wave_map()))
    assert sound["pictures"] == [None]
    assert len(sound["waves"][0]) == 600
    assert max(high for _, high in sound["waves"][0]) == pytest.approx(1, abs=1e-3)


def test_pictures_of_a_page_belong_to_prompts_with_grids():
    with pytest.raises(ValueError, match="one per prompt"):
        lm.page([picture_map()], picture=[True, True])
    with pytest.raises(ValueError, match="with a grid"):
        lm.page(picture_map(grid=None), picture=True)
    assert data_of(lm.page(picture_map(grid=None)))["pictures"] == [None]


def test_headings_say_patch_or_frame():
    assert "patch" in data_of(lm.page(picture_map(method="value_zeroing")))["prompts"][0][0]["line"]
    assert "frame" in data_of(lm.page(wave_map(method="value_zeroing")))["prompts"][0][0]["line"]
    assert "token" not in " ".join(texts(picture_map().show("position")))


def test_a_color_map_of_the_user_is_used():
    red = colors.ListedColormap(["#ff0000"])
    first, _ = overlays(picture_map().show(picture=True, cmap=red))
    assert (first[..., :3] == (1, 0, 0)).all()


def test_a_layer_whose_patches_are_noise_is_not_colored():
    scores = torch.zeros(2, 7, 7)
    scores[:, :, 0] = 1
    scores[0, 0, :3] = torch.tensor([0.9990, 0.0006, 0.0004])
    scores[1, 0, :3] = torch.tensor([0.9, 0.06, 0.04])
    figure = picture_map(scores=scores).show(picture=True)
    noise, finding = overlays(figure)
    assert noise[..., 3].max() < 0.03
    assert finding[..., 3].max() == pytest.approx(0.9)
    written = texts(figure)
    # The lines are below each other, because one line is wider than the picture.
    assert {"layer 0", "layer 1"} <= set(written)
    assert {"a patch ≤ 0.06 % not colored [CLS] 100 %", "a patch ≤ 6 % [CLS] 90 %"} <= set(written)
    short = texts(picture_map(scores=scores[1:]).show(picture=True))
    assert "layer 0, a patch ≤ 6 %" in short


def test_titles_of_neighboring_pictures_do_not_overlap():
    scores = torch.zeros(4, 7, 7)
    scores[:, :, 0] = 1
    scores[:, 0, :3] = torch.tensor([0.9990, 0.0006, 0.0004])
    figure = picture_map(scores=scores).show(picture=True)
    figure.canvas.draw()
    boxes = [axes._left_title.get_window_extent() for axes in figure.axes if axes._left_title.get_text()]
    assert len(boxes) == 4
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
