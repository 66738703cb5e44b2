"""Read the picture that a row of a map is drawn over, as an image."""

from __future__ import annotations

import base64
import struct
import zlib
from typing import Any

import numpy as np
import torch

from lens_mix.arguments import describe_value
from lens_mix.maps import MixingMap


def require_grid(mixing_map: MixingMap) -> None:
    """Raise a ValueError if the map has no grid, so that nothing can be drawn over a picture."""
    if mixing_map.grid is None:
        raise ValueError(
            "picture: expected a map of a picture or of sound, with a grid (m.grid), got a map of "
            f"{len(mixing_map.key_labels)} keys without one"
        )


def read_image(mixing_map: MixingMap, picture: Any) -> np.ndarray:
    """Return an image [height, width, 3] of numbers from 0 to 255.

    Args:
        mixing_map: The map, with a grid.
        picture: True for what the model read (`MixingMap.features`), whose numbers are stretched from black
            to white. Or the picture itself, which covers what the model read: a PIL picture, an array
            [height, width] or [height, width, channel] (0 to 255, or 0 to 1 as real numbers), or a tensor
            [channel, height, width].

    Raises:
        TypeError: If it is none of these.
        ValueError: If it has another shape, or the map has no features.
    """
    if picture is True:
        return _read_features(mixing_map)
    if hasattr(picture, "convert"):
        return np.asarray(picture.convert("RGB"), dtype=np.uint8)
    if torch.is_tensor(picture):
        picture = picture.detach().cpu().numpy()
        picture = np.moveaxis(picture, 0, -1) if picture.ndim == 3 and len(picture) in (1, 3) else picture
    if not isinstance(picture, np.ndarray) or picture.dtype.kind not in "uif":
        raise TypeError(
            f"picture: expected True, a PIL picture, an array or a tensor, got {describe_value(picture)}"
        )
    if picture.ndim == 2:
        picture = picture[..., None]
    if picture.ndim != 3 or picture.shape[-1] not in (1, 3, 4):
        raise ValueError(
            f"picture: expected [height, width] or [height, width, channel], got {list(picture.shape)}"
        )
    if picture.dtype.kind == "f":
        if float(picture.min()) < 0 or float(picture.max()) > 1:
            raise ValueError(
                f"picture: expected real numbers from 0 to 1, got {picture.min():.3g} to "
                f"{picture.max():.3g}; picture=True draws the pixels that the model read"
            )
        picture = 255 * picture
    return np.broadcast_to(picture[..., :3], (*picture.shape[:2], 3)).astype(np.uint8)


def _read_features(mixing_map: MixingMap) -> np.ndarray:
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
