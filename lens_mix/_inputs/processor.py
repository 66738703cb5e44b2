"""Read a PIL picture with the model's processor, and find which part of the picture the model reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int, UInt8

# Gray of 16 bits. PIL's own conversion to 8 bits may make everything above 255 white.
_SIXTEEN_BITS = ("I;16", "I;16L", "I;16B", "I;16N")
_NUMBERS_WITHOUT_RANGE = ("I", "F")
# The largest distance of a place from the straight line through all places: this share of the picture, and
# half a pixel. Ramps have 256 steps, and a resize mixes the outermost pixels with their neighbors.
_MOST_OFF_LINE = 0.03
# An edge that is this close to the picture's own, as a share of the picture, is the picture's own.
_SAME_EDGE = 0.006


class Window(NamedTuple):
    """The part of a picture that a model reads: its edges in pixels, which padding moves outside of it."""

    top: float
    left: float
    bottom: float
    right: float


def is_pil_picture(value: Any) -> bool:
    """Return whether this is a picture of PIL, which need not be installed."""
    return any(base.__module__.startswith("PIL.") for base in type(value).__mro__)


def convert_picture(name: str, picture: Any, channels: int = 3) -> tuple[Any, tuple[str, ...]]:
    """Return a PIL picture as RGB, or as 8-bit gray for a model of one channel, and notes.

    Args:
        name: The name of the argument, for errors.
        picture: The picture: gray, with a palette, with or without transparency, of 1, 8 or 16 bits, or CMYK.
        channels: How many channels the model reads, 1 or 3.

    Raises:
        ValueError: The picture has no pixels, its numbers have no known range, or its file cannot be read.
    """
    width, height = picture.size
    if not width or not height:
        raise ValueError(f"{name}: expected a picture with pixels, got {height} x {width} (height x width)")
    if picture.mode in _NUMBERS_WITHOUT_RANGE:
        raise ValueError(
            f"{name}: expected 8 or 16 bits per pixel, got a picture of mode {picture.mode!r}, whose numbers "
            "have no known black and white; scale it to 0..255 and convert it to mode 'L'"
        )
    if channels not in (1, 3):
        raise ValueError(
            f"{name}: expected a model of 1 or 3 channels for a PIL picture, got one of {channels}; give "
            "what its processor returns"
        )
    notes: tuple[str, ...] = ()
    try:
        if picture.mode in _SIXTEEN_BITS:
            picture = picture.convert("I").point(lambda number: number * (1 / 256)).convert("L")
        if picture.mode.lower() in ("rgba", "la", "pa") or "transparency" in picture.info:
            picture = picture.convert("RGBA")
            if picture.getextrema()[-1][0] < 255:
                notes = (f"{name}: transparent pixels were read in the color that is stored for them",)
        return picture.convert("L" if channels == 1 else "RGB"), notes
    except (OSError, ValueError) as problem:
        raise ValueError(
            f"{name}: expected a picture that PIL converts to RGB, got one of mode {picture.mode!r} and "
            f"{type(problem).__name__}: {problem}"
        ) from problem


def process_picture(
    processor: Any, picture: Any, channels: int
) -> tuple[Mapping[str, Any], Window | None, tuple[str, ...]]:
    """Return what the processor makes of a PIL picture, the part of it that it keeps, and notes.

    Args:
        processor: The model's processor.
        picture: The picture.
        channels: How many channels the model reads.

    Raises:
        ValueError: The picture cannot be converted, or the processor raises an error.
    """
    converted, notes = convert_picture("prompt", picture, channels)
    try:
        encoding: Mapping[str, Any] = processor(images=converted, return_tensors="pt")
    except Exception as problem:
        raise ValueError(
            f"prompt: expected a picture that model.processor reads, got {converted.height} x "
            f"{converted.width} pixels and {type(problem).__name__}: {problem}"
        ) from problem
    window = _find_window(processor, converted)
    return encoding, window, (*notes, *_note_window(window, converted.height, converted.width))


def _note_window(window: Window | None, height: int, width: int) -> tuple[str, ...]:
    """Return a note if the model reads another part than the whole picture, or if the part is not known."""
    if window is None:
        return (
            "picture: model.processor does more than resize, crop and pad, so the part of the picture that "
            "the model read is not known; figures are drawn over the pixels that it read",
        )
    if window == (0, 0, height, width):
        return ()
    rows, columns = (f"{round(low)} to {round(high)}" for low, high in (window[::2], window[1::2]))
    is_cropped = max(window.top, window.left, height - window.bottom, width - window.right) > 0
    is_padded = min(window.top, window.left, height - window.bottom, width - window.right) < 0
    done = " and ".join(["cropped"] * is_cropped + ["padded"] * is_padded)
    return (
        f"picture: model.processor {done} it: of {height} x {width} pixels (height x width) the model read "
        f"rows {rows} and columns {columns}",
    )


def _find_window(processor: Any, picture: Any) -> Window | None:
    """Return which part of a picture a processor keeps; None if it does more than resize, crop and pad.

    It reads four pictures of the same size: black, white, and a ramp along each axis. Where a pixel of the
    result comes from is then the place of its number between those of black and of white, whatever the mean
    and the deviation that the processor uses. Padding has the same number in all of them.

    Args:
        processor: The processor.
        picture: The picture, of mode "RGB" or "L".
    """
    height, width = picture.height, picture.width
    drawn = (
        np.zeros((height, width), np.uint8),
        np.full((height, width), 255, np.uint8),
        _draw_ramp(height, width),
        _draw_ramp(width, height).T,
    )
    read = []
    for gray in drawn:
        probe = picture.convert("L")
        probe.frombytes(gray.tobytes())
        probe = probe.convert(picture.mode)
        try:
            numbers = np.asarray(processor(images=probe, return_tensors="pt")["pixel_values"], np.float64)
        except Exception:  # The processor has read the user's picture; only its geometry remains unknown.
            return None
        if numbers.ndim != 4 or len(numbers) != 1:
            return None
        read.append(numbers[0].mean(0))
    black, white, *ramped = read
    if any(each.shape != black.shape for each in read):
        return None
    span = white - black
    is_real = np.abs(span) > 0.5 * np.abs(span).max()
    rows, columns = is_real.any(1), is_real.any(0)
    if not np.abs(span).max() or not is_real[np.ix_(rows, columns)].all():
        return None
    edges = []
    for axis, (ramp, known, count) in enumerate(zip(ramped, (rows, columns), (height, width), strict=True)):
        places = (ramp - black)[np.ix_(rows, columns)] / span[np.ix_(rows, columns)]
        line = _fit_line(places if axis == 0 else places.T, known.nonzero()[0], count)
        if line is None:
            return None
        first, step = line
        ends = (first - 0.5 * step, first + (len(known) - 0.5) * step)
        edges.append([_snap(end) * count for end in ends])
    (top, bottom), (left, right) = edges
    return Window(top, left, bottom, right)


def _draw_ramp(count: int, other: int) -> UInt8[np.ndarray, "count other"]:
    """Return numbers that grow from 0 to 255 along the first axis.

    Along the other axis they are rounded at different places, so that their mean has no steps.
    """
    places = 255 * (np.arange(count, dtype=np.float32) + 0.5) / count
    shifts = np.arange(other, dtype=np.float32) * 0.618 % 1
    return (places[:, None] + shifts).astype(np.uint8)


def _fit_line(
    places: Float[np.ndarray, "index other"], indices: Int[np.ndarray, " index"], count: int
) -> tuple[float, float] | None:
    """Return the place of index 0 and the step to the next index; None if they are not on one line."""
    # The outermost pixels of an enlarged picture all come from its outermost pixel.
    without = len(indices) // 10
    inner = slice(without, len(indices) - without)
    if len(indices) < 2:
        return None
    step, first = np.polyfit(indices[inner], places.mean(1)[inner], 1)
    distance = np.abs(places - (first + step * indices)[:, None]).max()
    if step <= 0 or distance > _MOST_OFF_LINE + 0.5 / count:
        return None
    return float(first), float(step)


def _snap(edge: float) -> float:
    """Return 0 or 1 for an edge that is the picture's own."""
    return next((own for own in (0.0, 1.0) if abs(edge - own) < _SAME_EDGE), edge)
