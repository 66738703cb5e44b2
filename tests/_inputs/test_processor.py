"""Test which part of a picture a processor keeps, and how pictures of every kind are converted."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import lens_mix as lm
from lens_mix._inputs.processor import _find_window, convert_picture
from tests.tiny_models import available, bridge

Image = pytest.importorskip("PIL.Image")
transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.once,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not available(bridge, "vit"), reason="this TransformerLens has no models of pictures"),
]


def cropping(edge, size):
    crop = {"height": size, "width": size}
    return transformers.BitImageProcessor(size={"shortest_edge": edge}, crop_size=crop)


def stretching(size):
    return transformers.ViTImageProcessor(size={"height": size, "width": size})


def padding(size):
    """Return a processor that makes pictures square with a margin of 20 on each side, and resizes them."""

    def process(images, return_tensors):
        width, height = images.size
        side = max(width, height) + 40
        square = Image.new("RGB", (side, side), (90, 40, 10))
        square.paste(images, ((side - width) // 2, (side - height) // 2))
        pixels = np.asarray(square.resize((size, size), Image.Resampling.BILINEAR), np.float32) / 255 - 0.4
        return {"pixel_values": torch.from_numpy(pixels).permute(2, 0, 1)[None]}

    return process


def picture_of(height, width, mode="RGB"):
    numbers = np.random.default_rng(0).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(numbers).convert(mode)


@pytest.mark.parametrize(
    ("processor", "size", "window"),
    [
        (cropping(64, 56), (152, 128), (20, 8, 132, 120)),
        (cropping(64, 64), (100, 200), (0, 50, 100, 150)),
        (cropping(64, 56), (64, 64), (4, 4, 60, 60)),
        (cropping(64, 100), (64, 64), (-18, -18, 82, 82)),
        (stretching(32), (90, 40), (0, 0, 90, 40)),
        (stretching(32), (9, 5), (0, 0, 9, 5)),
        (padding(48), (100, 60), (-20, -40, 120, 100)),
    ],
)
def test_the_window_is_what_a_processor_keeps(processor, size, window):
    assert _find_window(processor, picture_of(*size)) == pytest.approx(window, abs=0.7)
    assert _find_window(processor, picture_of(*size, "L").convert("RGB")) == pytest.approx(window, abs=0.7)


def mirrored(images, return_tensors):
    pixels = np.asarray(images.resize((16, 16)), np.float32)[:, ::-1].copy() / 255
    return {"pixel_values": torch.from_numpy(pixels).permute(2, 0, 1)[None]}


@pytest.mark.parametrize(
    "processor",
    [
        mirrored,
        lambda images, return_tensors: {"pixel_values": torch.ones(1, 3, 16, 16)},
        lambda images, return_tensors: {"pixel_values": torch.ones(1, 4, 3, 16, 16)},
        lambda images, return_tensors: 1 / 0,
    ],
    ids=["mirrored", "constant", "tiles", "error"],
)
def test_a_window_that_cannot_be_found_is_none(processor):
    assert _find_window(processor, picture_of(20, 30)) is None


def test_a_map_knows_what_its_processor_did(tmp_path):
    model = bridge("vit")
    model.processor = cropping(20, 16)
    picture = picture_of(60, 40)
    m = lm.run(model, picture, "attention")
    assert m.grid.picture_size == (60, 40)
    assert m.grid.window == pytest.approx((14, 4, 46, 36), abs=0.3)
    assert any("cropped it: of 60 x 40 pixels" in note for note in m.notes)
    m.save(tmp_path / "map.safetensors")
    assert lm.MixingMap.load(tmp_path / "map.safetensors").grid == m.grid
    (many,) = lm.run_many(model, [picture], "attention")
    assert many.grid == m.grid
    encoded = lm.run(model, model.processor(picture, return_tensors="pt"), "attention")
    assert encoded.grid.window is None
    torch.testing.assert_close(encoded.scores, m.scores)
    model.processor = stretching(16)
    whole = lm.run(model, picture, "attention")
    assert (whole.grid.window, whole.notes) == ((0, 0, 60, 40), ())
    model.processor = mirrored
    unknown = lm.run(model, picture, "attention")
    assert unknown.grid.window is None
    assert any("is not known" in note for note in unknown.notes)


@pytest.mark.parametrize("mode", ["L", "1", "P", "RGBA", "LA", "PA", "CMYK", "YCbCr", "I;16"])
def test_pictures_of_every_mode_are_converted(mode):
    model = bridge("vit")
    model.processor = stretching(16)
    gray = Image.fromarray(np.where(np.arange(400).reshape(20, 20) % 20 < 10, 0, 255).astype(np.uint8))
    if mode == "I;16":
        picture = Image.fromarray(np.asarray(gray).astype(np.uint16) * 257)
    else:
        picture = gray.convert("RGB").convert(mode)
    expected = lm.run(model, gray.convert("RGB"), "attention")
    found = lm.run(model, picture, "attention")
    torch.testing.assert_close(found.features, expected.features, atol=0.03, rtol=0)


def test_sixteen_bits_are_not_cut_off():
    numbers = np.array([[0, 300, 32768, 65535]], np.uint16)
    converted, _ = convert_picture("prompt", Image.fromarray(numbers))
    assert np.asarray(converted)[0, :, 0].tolist() == [0, 1, 128, 255]


def test_transparent_pixels_are_noted():
    model = bridge("vit")
    model.processor = stretching(16)
    opaque, clear = picture_of(16, 16, "RGBA"), picture_of(16, 16, "RGBA")
    clear.putalpha(100)
    assert lm.run(model, opaque, "attention").notes == ()
    assert any("transparent pixels" in note for note in lm.run(model, clear, "attention").notes)


def cut_file(folder):
    path = folder / "cut.png"
    picture_of(50, 50).save(path)
    path.write_bytes(path.read_bytes()[:900])
    return Image.open(path)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda folder: Image.new("RGB", (0, 7)), "expected a picture with pixels, got 7 x 0"),
        (lambda folder: Image.new("F", (4, 4)), "mode 'F'"),
        (lambda folder: Image.new("I", (4, 4)), "mode 'I'"),
        (cut_file, "that PIL converts to RGB"),
    ],
)
def test_pictures_that_cannot_be_read_raise(tmp_path, make, words):
    model, picture = bridge("vit"), make(tmp_path)
    model.processor = stretching(16)
    m = lm.run(model, picture_of(16, 16), "attention")
    with pytest.raises(ValueError, match=f"prompt: .*{words}"):
        lm.run(model, picture, "attention")
    with pytest.raises(ValueError, match=f"picture: .*{words}"):
        lm.page(m, picture=picture)


def test_a_path_is_not_a_picture():
    with pytest.raises(TypeError, match=r"PIL\.Image\.open\(path\)"):
        lm.run(bridge("vit"), "cat.jpg", "attention")


def test_a_processor_that_fails_is_named():
    model = bridge("vit")
    model.processor = lambda images, return_tensors: 1 / 0
    with pytest.raises(ValueError, match=r"model\.processor reads, got 8 x 9 pixels and ZeroDivisionError"):
        lm.run(model, picture_of(8, 9), "attention")
