"""Pack the pictures and waveforms that the rows of maps are drawn over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lens_mix.maps import MixingMap
from lens_mix.view.images import Image, check_picture, encode_png, read_image, require_grid

# A waveform is drawn as the smallest and the largest sample of this many equal times.
_TIMES = 600


def pack_pictures(prompts: Sequence[Mapping[str, MixingMap]], picture: Any) -> dict[str, Any]:
    """Return the picture, what it is, and the waveform of each prompt; None for a prompt without one.

    Args:
        prompts: The maps of each prompt.
        picture: As in `lens_mix.page`.

    Raises:
        ValueError: There is a picture for maps without a grid or for sound, or another number of pictures
            than prompts.
    """
    given = list(picture) if isinstance(picture, (list, tuple)) else [picture] * len(prompts)
    if len(given) != len(prompts):
        raise ValueError(f"picture: expected one per prompt ({len(prompts)}), got {len(given)}")
    placed = [next((m for m in maps.values() if m.grid is not None), None) for maps in prompts]
    pairs = list(zip(placed, prompts, given, strict=True))
    images = [_read_picture(found, maps, one) for found, maps, one in pairs]
    return {
        "pictures": [image and encode_png(image.pixels) for image in images],
        "picture_words": [image and image.words for image in images],
        "waves": [None if found is None else _pack_wave(found) for found in placed],
    }


def _read_picture(found: MixingMap | None, maps: Mapping[str, MixingMap], picture: Any) -> Image | None:
    if found is None:
        if picture is not None and picture is not False:
            require_grid(next(iter(maps.values())))
        return None
    if picture is None:
        picture = found.features is not None
    check_picture(found, picture)
    if picture is False or (found.grid is not None and found.grid.noun == "frame"):
        return None
    return read_image(found, picture)


def _pack_wave(found: MixingMap) -> list[list[float]] | None:
    """Return the smallest and the largest sample of equal times, with three digits."""
    if found.features is None or found.features.ndim != 1:
        return None
    samples = found.features.detach().to("cpu", torch.float32)
    pieces = samples.tensor_split(min(_TIMES, len(samples)))
    return [[float(f"{piece.min():.3g}"), float(f"{piece.max():.3g}")] for piece in pieces]
