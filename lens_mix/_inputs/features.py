"""Prompts of models that read pictures or sound instead of tokens.

Such a prompt is one tensor of real numbers. Its positions are patches of a picture or of a spectrogram, or
frames of a waveform, and a few positions without a place, such as [CLS].
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lens_mix._classes.model_classes import TransformerLensModel, UnsupportedModelError, reads_features
from lens_mix._inputs.batches import Prompt
from lens_mix._inputs.processor import is_pil_picture, process_picture
from lens_mix._inputs.speech import (
    SPEECH,
    check_waveform,
    count_columns,
    find_extractor,
    is_speech_model,
    model_type_of,
)
from lens_mix.arguments import check_dense_tensor, describe_value
from lens_mix.maps.grid import Grid

# Samples from -1 to 1 may be a little louder after they were resampled.
_LOUDEST = 2.0
# What replaces a stretch of sound that is removed.
Fill = Literal["silence", "noise"]
# A position of a picture or of sound has no token. No vocabulary has this number, so it can't be read as one.
_NO_TOKEN = -1
# The processors of wav2vec2, HuBERT and AST read sound of this many samples per second. AST's spectrogram has
# 100 columns per second. The configurations of the models have neither number.
_SAMPLING_RATE = 16_000
_SPECTROGRAM_RATE = 100
# The positions without a place, by the model type of transformers. They come first.
_OUTSIDE = {
    "vit": ("[CLS]",),
    "deit": ("[CLS]", "[DIST]"),
    "audio-spectrogram-transformer": ("[CLS]", "[DIST]"),
    "hubert": (),
    "wav2vec2": (),
    SPEECH: (),
}
_WAVEFORMS = ("hubert", "wav2vec2")
# A frame of Whisper is made of so many columns of its spectrogram.
_FRAME_COLUMNS = 2
_AXES = {
    "picture": "pixels [channel, height, width]",
    "spectrogram": "a spectrogram [time, band]",
    "waveform": "a waveform [sample]",
    "speech": "a waveform [sample] or a log-mel spectrogram [band, time]",
}


def require_known_features(model: TransformerLensModel) -> None:
    """Raise an UnsupportedModelError unless it is known how this model reads pictures or sound."""
    if model_type_of(model) not in _OUTSIDE:
        raise UnsupportedModelError(
            f"model: expected tokens, or pictures or sound of {sorted(_OUTSIDE)}, got a model of type "
            f"{model_type_of(model)!r}, whose positions have no known places"
        )


def require_tokens(model: TransformerLensModel, name: str) -> None:
    """Raise an UnsupportedModelError if the model reads pictures or sound, where only text can be given.

    Args:
        model: The model.
        name: The name of the argument, for the error.
    """
    if reads_features(model):
        raise UnsupportedModelError(
            f"{name}: expected a model that reads text, because no picture or sound can be given here, got "
            f"one of type {model_type_of(model)!r}; in Python, use lm.run(model, pixels, ...)"
        )


def find_feature_name(model: TransformerLensModel) -> str:
    """Return the name of the input that is read instead of tokens, as in transformers."""
    names = {"picture": "pixel_values", "speech": "input_features"}
    return names.get(_kind(model), "input_values")


def read_features(
    model: TransformerLensModel,
    prompt: Any,
    device: torch.device,
    attention_mask: Any = None,
    inputs: Mapping[str, Any] | None = None,
) -> Prompt:
    """Return the prompt of a picture or of sound.

    Args:
        model: The model.
        prompt: The tensor or NumPy array: pixels [channel, height, width], a waveform [sample], or a
            spectrogram [time, band] (with or without a first axis of length 1); for Whisper a waveform, or a
            log-mel spectrogram [band, time]; what the model's processor returns; or a PIL picture, if the
            model has its processor as `model.processor`.
        device: The device of the model.
        attention_mask: For a waveform, [sample] or [1, sample], 0 for padding, which is removed.
        inputs: Further inputs, of which there are none.

    Raises:
        TypeError: If the prompt is none of these.
        ValueError: If it has another shape than the model reads, or there are further inputs.
    """
    name, kind = find_feature_name(model), _kind(model)
    if inputs:
        raise ValueError(f"model inputs: expected none besides {name}, got {sorted(inputs)}")
    placed: dict[str, Any] = {}
    notes: tuple[str, ...] = ()
    if is_pil_picture(prompt):
        _require_processor(model)
        encoding, window, notes = process_picture(
            model.processor,  # type: ignore[attr-defined]
            prompt,
            _config(model).num_channels,
        )
        if window is not None:
            placed = {"picture_size": (prompt.height, prompt.width), "window": window}
        prompt = encoding
    if isinstance(prompt, Mapping):
        if name not in prompt:
            raise TypeError(f"prompt: expected {name}, which the model reads, got {sorted(prompt)}")
        # Whisper reads its padding, so it takes no mask.
        own_mask = None if kind == "speech" else prompt.get("attention_mask")
        attention_mask = own_mask if attention_mask is None else attention_mask
        prompt = prompt[name]
    features = _as_tensor(prompt, kind)
    n_axes = {"picture": 3, "waveform": 1}.get(kind, 2)
    if features.ndim == n_axes + 1 and len(features) == 1:
        features = features[0]
    if kind == "speech" and (features.ndim == 1 or len(features) == 1):
        features, n_axes = features.flatten(), 1
    if features.ndim != n_axes:
        raise ValueError(
            f"prompt: expected {_AXES[kind]}, or one more axis of length 1, got "
            f"shape {list(features.shape)}; for several prompts use run_many"
        )
    if attention_mask is not None:
        features = _without_padding(features, attention_mask, kind)
    if not bool(torch.isfinite(features).all()):
        raise ValueError("prompt: expected finite numbers, got NaN or infinity")
    if kind == "speech" and n_axes == 2:
        features = _turn_log_mel(model, features)
    dtype = next(p.dtype for p in model.parameters() if p.dtype.is_floating_point)
    if kind == "speech" and n_axes == 1:
        # The spectrogram is computed in this precision, and then rounded.
        dtype = torch.float32
        notes += _note_loudness(features)
    made = _make_prompt(model, features.detach().to(device, dtype))
    grid = dataclasses.replace(made.grid, **placed)  # type: ignore[type-var]
    return dataclasses.replace(made, grid=grid, notes=(*made.notes, *notes))


def any_features(model: TransformerLensModel, device: torch.device) -> Tensor:
    """Return random numbers of a shape that the model reads, the same in each call."""
    config, kind = _config(model), _kind(model)
    shape: tuple[int, ...]
    if kind == "picture":
        shape = (config.num_channels, *_pair(config.image_size))
    elif kind == "spectrogram":
        shape = (config.max_length, config.num_mel_bins)
    elif kind == "speech":
        shape = (config.num_mel_bins, _FRAME_COLUMNS * config.max_source_positions)
    else:
        step, patch = _frames(config)
        shape = (15 * step + patch,)
    generator = torch.Generator().manual_seed(0)
    return torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu").to(device)


def shorten(model: TransformerLensModel, prompt: Prompt, count: int) -> Prompt:
    """Return the beginning of a waveform, of `count` frames. A picture or a spectrogram has one size only."""
    if prompt.features is None or prompt.grid is None or _kind(model) != "waveform":
        return prompt
    if len(prompt.tokens) <= count:
        return prompt
    return _make_prompt(model, prompt.features[: (count - 1) * prompt.grid.step[1] + prompt.grid.patch[1]])


def covered_cells(grid: Grid, removed: Bool[Tensor, "copy pos"]) -> Bool[Tensor, "copy height width"]:
    """Return what the cells of removed positions cover, in the unit of `grid.size`."""
    height, width = grid.size
    boxes = torch.tensor(
        [grid.box(position) for position in grid.positions], dtype=torch.long, device=removed.device
    )
    top, left, bottom, right = boxes.unbind(1)
    cells = removed[:, list(grid.positions)].int()
    # Each cell adds 1 from its top and left on, and takes it away from its bottom and right on.
    changes = cells.new_zeros(len(removed), (height + 1) * (width + 1))
    for row, column, sign in ((top, left, 1), (bottom, left, -1), (top, right, -1), (bottom, right, 1)):
        changes.index_add_(1, row * (width + 1) + column, sign * cells)
    counts: Tensor = changes.unflatten(1, (height + 1, width + 1)).cumsum(1).cumsum(2)
    return counts[:, :height, :width] > 0


def as_features(covered: Bool[Tensor, "copy height width"], features: Tensor) -> Bool[Tensor, " copy *axes"]:
    """Return a mask [copy, height, width] in the axes of features, with one entry per copy."""
    if features.ndim == 4:
        return covered[:, None]
    # The padding of a window of sound is outside of the grid.
    covered = torch.nn.functional.pad(covered, (0, features.shape[1] - covered.shape[2]))
    transposed: Tensor = covered.mT
    return covered[:, 0] if features.ndim == 2 else transposed


def mean_of(features: Tensor) -> Tensor:
    """Return a picture that has its mean in each channel, or sound that has its mean, everywhere."""
    axes = (1, 2) if features.ndim == 3 else tuple(range(features.ndim))
    mean: Tensor = features.mean(axes, keepdim=True)
    return mean.expand_as(features)


def replace_frames(prompt: Prompt, positions: Sequence[int], fill: Fill) -> Prompt:
    """Return a prompt of sound in which frames are silent, or noise of their own level.

    The noise is Gaussian, with the root mean square of what it replaces, and the same in each call.

    Args:
        prompt: The prompt.
        positions: The frames.
        fill: "silence" or "noise". The silence of a spectrogram is its smallest number.

    Raises:
        UnsupportedModelError: If some of the positions have no sound, or noise is to replace the frames of a
            spectrogram.
    """
    grid, features = prompt.grid, prompt.features
    assert grid is not None
    assert features is not None
    boxes = [box for box in map(grid.box, positions) if box is not None]
    if len(boxes) < len(positions):
        raise UnsupportedModelError("expected frames of the sound alone, got some of padding or tokens")
    if fill == "noise" and features.ndim > 1:
        raise UnsupportedModelError(
            "fill: expected 'silence' for a spectrogram, got 'noise'; give the waveform for noise"
        )
    covered = torch.zeros(len(features), dtype=torch.bool, device=features.device)
    for _, left, _, right in boxes:
        covered[left:right] = True
    changed = features.clone()
    if fill == "silence":
        changed[covered] = 0 if features.ndim == 1 else features.min()
    else:
        own = features[covered]
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(len(own), generator=generator, dtype=torch.float64, device="cpu")
        changed[covered] = own.square().mean().sqrt() * noise.to(own)
    return dataclasses.replace(prompt, features=changed)


def blurred(features: Tensor, grid: Grid) -> Tensor:
    """Return a picture or sound after a Gaussian blur with the size of a cell as its standard deviation.

    Beyond its edges, its outermost numbers are repeated.
    """
    # A spectrogram is [time, band], and a grid is of bands x time.
    image = features.mT if features.ndim == 2 else features
    image = image.reshape(-1, *image.shape[-2:]) if image.ndim > 1 else image[None, None]
    for axis in (0, 1):
        size, sigma = grid.size[axis], grid.patch[axis]
        if size == 1:
            continue
        radius = min(3 * sigma, 3 * size)
        distance = torch.arange(-radius, radius + 1, device=image.device, dtype=image.dtype)
        kernel = torch.exp(-0.5 * (distance / sigma) ** 2)
        turned = (image if axis else image.mT).flatten(0, 1)[:, None]
        padded = torch.nn.functional.pad(turned, (radius, radius), mode="replicate")
        smooth = torch.nn.functional.conv1d(padded, (kernel / kernel.sum())[None, None])
        smooth = smooth[:, 0].unflatten(0, (len(image), -1))
        image = smooth if axis else smooth.mT
    image = image[0] if features.ndim < 3 else image
    return image.mT if features.ndim == 2 else image.reshape(features.shape)


def _make_prompt(model: TransformerLensModel, features: Tensor) -> Prompt:
    outside = _OUTSIDE[model_type_of(model)]
    grid = _find_grid(model, features, len(outside))
    labels = [*outside, *(str(grid.label(position)) for position in grid.positions)]
    notes: tuple[str, ...] = ()
    if is_speech_model(model):
        labels, notes = _add_padding(model, grid, labels)
    tokens = torch.full((len(labels),), _NO_TOKEN, dtype=torch.long, device=features.device)
    return Prompt(tokens, features=features, grid=grid, labels=tuple(labels), notes=notes)


def _add_padding(
    model: TransformerLensModel, grid: Grid, labels: list[str]
) -> tuple[list[str], tuple[str, ...]]:
    """Return the labels of all frames of a window of sound, and a note if some of them are padding."""
    count = _config(model).max_source_positions
    times = [number * grid.step[1] * (grid.seconds or 0) for number in range(len(labels), count)]
    if not times:
        return labels, ()
    window = count * grid.step[1] * (grid.seconds or 0)
    note = (
        f"prompt: the model reads a window of {window:.4g} s; the sound ends at {times[0]:.2f} s, and the "
        "frames after it are padding, to which the model attends, too"
    )
    return labels + [f"padding {time:.2f} s" for time in times], (note,)


def _note_loudness(samples: Float[Tensor, " sample"]) -> tuple[str, ...]:
    loudest = float(samples.abs().max()) if len(samples) else 0.0
    if loudest <= _LOUDEST:
        return ()
    return (
        f"prompt: the samples reach {loudest:.4g}, and the model was trained with samples from -1 to 1; "
        "divide 16-bit ones by 32768",
    )


def _turn_log_mel(model: TransformerLensModel, features: Tensor) -> Float[Tensor, "time band"]:
    """Return a log-mel spectrogram [band, time] as other spectrograms; one that is so already stays.

    Raises:
        ValueError: If it has another size than the model reads.
    """
    config = _config(model)
    expected = (config.num_mel_bins, _FRAME_COLUMNS * config.max_source_positions)
    if tuple(features.shape) == expected:
        return features.mT
    if tuple(features.shape) != expected[::-1]:
        raise ValueError(
            f"prompt: expected a log-mel spectrogram {list(expected)}, the size that the model reads, got "
            f"{list(features.shape)}; the model's processor pads sound to it, and a waveform has one "
            "channel"
        )
    return features


def _find_grid(model: TransformerLensModel, features: Tensor, outside: int) -> Grid:
    """Return the grid of a prompt; `outside` is the number of positions before it."""
    config, kind = _config(model), _kind(model)
    seconds = None
    if kind == "picture":
        patch = step = _pair(config.patch_size)
        size = (features.shape[-2], features.shape[-1])
        expected = (config.num_channels, *_pair(config.image_size))
        if tuple(features.shape) != expected:
            raise ValueError(
                f"prompt: expected pixels {list(expected)}, the size that the model reads, got "
                f"{list(features.shape)}; the model's processor resizes pictures"
            )
    elif kind == "spectrogram":
        patch, step = _pair(config.patch_size), (config.frequency_stride, config.time_stride)
        size, seconds = (features.shape[1], features.shape[0]), 1 / _SPECTROGRAM_RATE
        if tuple(features.shape) != (config.max_length, config.num_mel_bins):
            raise ValueError(
                f"prompt: expected a spectrogram [{config.max_length}, {config.num_mel_bins}], the size that "
                f"the model reads, got {list(features.shape)}; the model's processor pads it"
            )
    elif kind == "speech":
        # The first convolutions also read what is beside a frame. Frames of padding are outside of the grid.
        if features.ndim == 2:
            width, unit, length = _FRAME_COLUMNS, 1 / _SPECTROGRAM_RATE, count_columns(features)
        else:
            check_waveform(model, features)
            extractor = find_extractor(model)
            width, unit = _FRAME_COLUMNS * extractor.hop_length, 1 / extractor.sampling_rate
            length = len(features)
        columns = -(-length // width)
        positions = tuple(range(columns))
        return Grid(1, columns, positions, (1, length), (1, width), (1, width), unit)
    else:
        width, receptive_field = _frames(config)
        patch, step, size = (1, receptive_field), (1, width), (1, len(features))
        seconds = 1 / _find_sampling_rate(model)
        if len(features) < receptive_field:
            raise ValueError(
                f"prompt: expected at least {receptive_field} samples, the length of a frame, got "
                f"{len(features)}"
            )
    rows, columns = ((size[axis] - patch[axis]) // step[axis] + 1 for axis in (0, 1))
    positions = tuple(range(outside, outside + rows * columns))
    return Grid(rows, columns, positions, size, patch, step, seconds)


def _frames(config: Any) -> tuple[int, int]:
    """Return the number of samples from one frame to the next, and that of the samples that a frame reads."""
    step = patch = 1
    for kernel, stride in zip(config.conv_kernel, config.conv_stride, strict=True):
        patch += (kernel - 1) * step
        step *= stride
    return step, patch


def _find_sampling_rate(model: TransformerLensModel) -> float:
    processor = getattr(model, "processor", None)
    processor = getattr(processor, "feature_extractor", processor)
    return float(getattr(processor, "sampling_rate", None) or _SAMPLING_RATE)


def _require_processor(model: TransformerLensModel) -> None:
    """Raise a TypeError if the model has no processor that converts a PIL picture."""
    if getattr(model, "processor", None) is None or _kind(model) != "picture":
        raise TypeError(
            f"prompt: expected {_AXES[_kind(model)]}, got a PIL picture and a model without a processor; set "
            "model.processor = AutoImageProcessor.from_pretrained(name), or give what it returns"
        )


def _as_tensor(prompt: Any, kind: str) -> Tensor:
    """Return real numbers as a tensor.

    Raises:
        TypeError: If they are not real numbers of a tensor or an array.
    """
    if isinstance(prompt, (list, tuple)) and len(prompt) == 1:
        # Processors return lists of arrays unless they are asked for tensors.
        prompt = prompt[0]
    if isinstance(prompt, np.ndarray) and prompt.dtype.kind == "f":
        prompt = torch.from_numpy(np.ascontiguousarray(prompt, dtype=prompt.dtype.newbyteorder("=")))
    if not torch.is_tensor(prompt):
        raise TypeError(
            f"prompt: expected {_AXES[kind]} as real numbers, because the model reads no tokens, got "
            f"{describe_value(prompt)}; give what the model's processor returns{_hint_numbers(prompt, kind)}"
        )
    check_dense_tensor("prompt", prompt)
    if not prompt.is_floating_point():
        raise TypeError(
            f"prompt: expected {_AXES[kind]} as real numbers, got a tensor of {prompt.dtype}; "
            + (
                "divide 16-bit samples by 32768"
                if kind == "speech"
                else "the model's processor scales whole numbers"
            )
        )
    return prompt


def _hint_numbers(prompt: Any, kind: str) -> str:
    is_picture, is_wave = kind == "picture", kind in ("waveform", "speech")
    if isinstance(prompt, (str, os.PathLike)):
        read = "PIL.Image.open(path) with model.processor set" if is_picture else ""
        read = "the samples that scipy.io.wavfile.read returns, divided by 32768" if is_wave else read
        return f", or {read}" if read else ""
    is_whole = isinstance(prompt, np.ndarray) and prompt.dtype.kind in "iu"
    return ", or samples from -1 to 1: divide 16-bit ones by 32768" if is_whole and is_wave else ""


def _without_padding(features: Tensor, attention_mask: Any, kind: str) -> Tensor:
    """Return a waveform without padding at its beginning or end."""
    mask = torch.as_tensor(attention_mask, dtype=torch.long, device="cpu")
    mask = mask[0] if mask.ndim == 2 and len(mask) == 1 else mask
    if kind != "waveform" or mask.shape != features.shape:
        raise ValueError(
            f"attention_mask: expected one number per sample of a waveform, got {list(mask.shape)} for "
            f"{_AXES[kind]} of shape {list(features.shape)}"
        )
    real = mask.to(features.device).bool()
    inside = real.nonzero()[:, 0]
    if not len(inside) or not bool(real[inside[0] : inside[-1] + 1].all()):
        raise ValueError("attention_mask: expected padding on the left or on the right only, got other zeros")
    return features[real]


def _kind(model: TransformerLensModel) -> str:
    if model_type_of(model) in _WAVEFORMS:
        return "waveform"
    if is_speech_model(model):
        return "speech"
    return "picture" if getattr(model.cfg, "is_visual_model", False) else "spectrogram"


def _config(model: TransformerLensModel) -> Any:
    return model.original_model.config  # type: ignore[attr-defined]


def _pair(size: Any) -> tuple[int, int]:
    return (int(size), int(size)) if isinstance(size, int) else (int(size[0]), int(size[1]))
