"""Read the picture that a row of a map is drawn over, as an image that its patches cover."""

from __future__ import annotations

import base64
import os
import struct
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import UInt8

from lens_mix._inputs.processor import convert_picture, is_pil_picture
from lens_mix.arguments import check_dense_tensor, describe_value
from lens_mix.maps import MixingMap

_READ = "pixels that the model read"
# Two pictures whose height and width differ by factors that are this close have the same aspect ratio. The
# sides of a small copy are rounded to whole pixels.
_SAME_ASPECT = 1.03


def require_grid(mixing_map: MixingMap) -> None:
    """Raise a ValueError if the map has no grid, so that nothing can be drawn over a picture."""
    if mixing_map.grid is None:
        raise ValueError(
            "picture: expected a map of a picture or of sound, with a grid (m.grid), got a map of "
            f"{len(mixing_map.key_labels)} keys without one"
        )


class Image(NamedTuple):
    """What a row is drawn over.

    Attributes:
        pixels: [height, width, 3], 0 to 255. The cells of the map's grid cover all of it.
        words: What it is, for the text of a figure: "over the picture".
    """

    pixels: UInt8[np.ndarray, "height width 3"]
    words: str


def check_picture(mixing_map: MixingMap, picture: Any) -> None:
    """Raise a ValueError if a picture is given for a map of sound; True and False are for what it read."""
    if mixing_map.grid is not None and mixing_map.grid.is_sound and not isinstance(picture, bool):
        raise ValueError(
            "picture: expected True or False for a map of sound, whose page and figures show the sound that "
            f"the model read and take no picture, got {describe_value(picture)}"
        )


def read_image(mixing_map: MixingMap, picture: Any) -> Image:
    """Return the image that the cells of a map cover.

    Args:
        mixing_map: The map, with a grid.
        picture: True for what the model read (`MixingMap.features`), whose numbers are stretched from black
            to white. Or the picture that the model read, in any resolution: a PIL picture, an array
            [height, width] or [height, width, channel] (0 to 255, or 0 to 1 as real numbers), or a tensor
            [channel, height, width]. The image is the part of it that the processor kept (`Grid.window`). If
            this is not known, it is what the model read; and if that is not known either, the whole picture.

    Raises:
        TypeError: If it is none of these.
        ValueError: If it has another shape or range, has no pixels, is given for sound, or the map has no
            features.
    """
    require_grid(mixing_map)
    check_picture(mixing_map, picture)
    grid, has_features = mixing_map.grid, mixing_map.features is not None
    assert grid is not None
    if picture is True:
        return Image(_read_features(mixing_map), f"over the {_READ}")
    pixels = _as_pixels(picture)
    if grid.window is None or grid.picture_size is None:
        if has_features:
            return Image(
                _read_features(mixing_map), f"over the {_READ}; where it is in the picture is unknown"
            )
        return Image(pixels, "over the whole picture, as if nothing of it had been cropped or padded")
    scales = [own / given for own, given in zip(pixels.shape, grid.picture_size, strict=False)]
    if max(scales) > _SAME_ASPECT * min(scales):
        drawn, run = _write_size(pixels.shape), _write_size(grid.picture_size)
        sizes = f"{drawn} pixels, and the picture that was run {run}"
        if has_features:
            return Image(_read_features(mixing_map), f"over the {_READ}, because the picture has {sizes}")
        raise ValueError(f"picture: expected one of the same aspect ratio as that of the run, got {sizes}")
    box = [round(edge * scale) for edge, scale in zip(grid.window, 2 * scales, strict=True)]
    if box == [0, 0, *pixels.shape[:2]]:
        return Image(pixels, "over the picture")
    return Image(_cut(pixels, box), "over the part of the picture that the model read")


def _write_size(shape: Sequence[int]) -> str:
    return f"{shape[0]} x {shape[1]}"


def _cut(pixels: UInt8[np.ndarray, "height width 3"], box: Sequence[int]) -> UInt8[np.ndarray, "_ _ 3"]:
    """Return the pixels from top and left to bottom and right; what is outside of the picture is white."""
    top, left, bottom, right = box
    cut = np.full((max(1, bottom - top), max(1, right - left), 3), 255, np.uint8)
    inside = pixels[max(top, 0) : max(bottom, 0), max(left, 0) : max(right, 0)]
    down, across = max(-top, 0), max(-left, 0)
    cut[down : down + inside.shape[0], across : across + inside.shape[1]] = inside
    return cut


def _as_pixels(picture: Any) -> UInt8[np.ndarray, "height width 3"]:
    """Return a picture that a user gave as numbers from 0 to 255; see `read_image`."""
    if is_pil_picture(picture):
        converted, _ = convert_picture("picture", picture)
        return np.asarray(converted, dtype=np.uint8)
    if torch.is_tensor(picture):
        picture = check_dense_tensor("picture", picture).detach().cpu()
        picture = (picture.to(torch.float64) if picture.is_floating_point() else picture).numpy()
        picture = np.moveaxis(picture, 0, -1) if picture.ndim == 3 and len(picture) in (1, 3) else picture
    if not isinstance(picture, np.ndarray) or picture.dtype.kind not in "buif":
        hint = "; PIL.Image.open(path) reads a file" if isinstance(picture, (str, os.PathLike)) else ""
        raise TypeError(
            "picture: expected True, a PIL picture, an array or a tensor, got "
            f"{describe_value(picture)}{hint}"
        )
    if picture.ndim == 2:
        picture = picture[..., None]
    if picture.ndim != 3 or picture.shape[-1] not in (1, 3, 4) or not picture.size:
        raise ValueError(
            "picture: expected [height, width] or [height, width, channel] with 1, 3 or 4 channels and at "
            f"least one pixel, got {list(picture.shape)}"
        )
    if not np.isfinite(picture).all():
        raise ValueError("picture: expected finite numbers, got NaN or infinity")
    largest = 255 if picture.dtype.kind in "ui" else 1
    if float(picture.min()) < 0 or float(picture.max()) > largest:
        kind = "whole numbers from 0 to 255" if largest == 255 else "real numbers from 0 to 1"
        raise ValueError(
            f"picture: expected {kind}, got {picture.min():.3g} to {picture.max():.3g}; picture=True draws "
            "the pixels that the model read"
        )
    scaled = picture[..., :3] if largest == 255 else 255 * picture[..., :3].astype(np.float64)
    return np.broadcast_to(scaled, (*picture.shape[:2], 3)).astype(np.uint8)


def _read_features(mixing_map: MixingMap) -> UInt8[np.ndarray, "height width 3"]:
    features = mixing_map.features
    if features is None:
        raise ValueError("picture: expected the picture itself, because the map has no features, got True")
    numbers = features.detach().to("cpu", torch.float32)
    low, high = numbers.min(), numbers.max()
    numbers = 255 * (numbers - low) / (high - low if high > low else 1)
    # A spectrogram is drawn with time to the right and its lowest band at the bottom.
    image = numbers.movedim(0, -1) if features.ndim == 3 else numbers.T.flip(0)[..., None]
    return image[..., :3].expand(*image.shape[:2], 3).numpy().astype(np.uint8)


def encode_png(image: np.ndarray) -> str:
    """Return an image [height, width, 3] of numbers from 0 to 255 as the address of a PNG, "data:...".

    A page needs it without any other library (PNG specification, W3C 2003).
    """
    height, width, _ = image.shape
    # Each line starts with the number of its filter, of which 0 is none.
    lines = np.concatenate([np.zeros((height, 1), np.uint8), image.reshape(height, -1)], axis=1)
    chunks = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(lines.tobytes(), 9)),
        (b"IEND", b""),
    ]
    parts = [
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in chunks
    ]
    file = b"".join([bytes.fromhex("89504e470d0a1a0a"), *parts])
    return f"data:image/png;base64,{base64.b64encode(file).decode()}"
