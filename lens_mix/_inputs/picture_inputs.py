"""Find the patches of pictures beside the tokens of a decoder, cut them out, and join their inputs.

This file is imported for prompts with pictures only.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from lens_mix._classes.model_classes import TransformerLensModel, UnsupportedModelError
from lens_mix._inputs.pictures import Picture, image_token, only_grid
from lens_mix.maps.grid import Grid


class _Patches(NamedTuple):
    """The patches of one picture: rows and columns, and the height and width of its pixels."""

    rows: int
    columns: int
    height: int
    width: int

    @property
    def n_patches(self) -> int:
        """Return the number of patches."""
        return self.rows * self.columns

    def place(self, positions: tuple[int, ...]) -> Grid:
        """Return the grid of the patches at these positions, row by row."""
        patch = (max(1, self.height // self.rows), max(1, self.width // self.columns))
        return Grid(self.rows, self.columns, positions, (self.height, self.width), patch, patch)


_Layouts = list[_Patches]


def find_pictures(
    model: TransformerLensModel, tokens: Int[Tensor, " pos"], inputs: Mapping[str, Tensor]
) -> tuple[tuple[Picture, ...], tuple[str, ...]]:
    """Return the pictures of a prompt, and notes.

    The numbers of rows and columns are computed from the configuration and the inputs, and compared with the
    number of image tokens. If they do not agree, each run of image tokens is a picture without a grid.

    Args:
        model: The model.
        tokens: The tokens of the prompt.
        inputs: The inputs of its pictures.

    Raises:
        ValueError: If the prompt has no image tokens.
    """
    token = image_token(model)
    positions = [] if token is None else (tokens == token).nonzero()[:, 0].tolist()
    if not positions:
        raise ValueError(
            f"prompt: expected the image token {token} at the position of each patch, got none; the model's "
            "processor returns such tokens (processor(images=..., text=...))"
        )
    layouts = _find_layouts(model, inputs)
    if layouts is not None and sum(layout.n_patches for layout in layouts) == len(positions):
        remaining = iter(positions)
        own = [tuple(itertools.islice(remaining, layout.n_patches)) for layout in layouts]
        return tuple(
            Picture(number, patches, layout.place(patches))
            for number, (patches, layout) in enumerate(zip(own, layouts, strict=True), 1)
        ), ()
    shapes = None if layouts is None else [layout[:2] for layout in layouts]
    reason = "are not known" if shapes is None else f"{shapes} do not fit {len(positions)} image tokens"
    note = (
        f"pictures: the rows and columns of patches {reason}, so image positions are numbered within each "
        "run of image tokens"
    )
    return tuple(Picture(number + 1, run) for number, run in enumerate(_runs(positions))), (note,)


def _runs(positions: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the runs of neighboring positions."""
    runs: list[list[int]] = []
    for position in positions:
        if not runs or runs[-1][-1] != position - 1:
            runs.append([])
        runs[-1].append(position)
    return [tuple(run) for run in runs]


def _find_layouts(model: TransformerLensModel, inputs: Mapping[str, Tensor]) -> _Layouts | None:
    """Return the patches of each picture; None if they are not known."""
    config: Any = getattr(getattr(model, "original_model", None), "config", None)
    find = _LAYOUTS.get(getattr(config, "model_type", ""))
    return None if find is None or "pixel_values" not in inputs else find(config, inputs)


def _by_pixels(config: Any, inputs: Mapping[str, Tensor]) -> _Layouts:
    """Return a patch per square of the vision encoder (LLaVA)."""
    patch = config.vision_config.patch_size
    count, _, height, width = inputs["pixel_values"].shape
    sizes = inputs["image_sizes"].tolist() if "image_sizes" in inputs else [(height, width)] * count
    return [_Patches(rows // patch, columns // patch, rows, columns) for rows, columns in sizes]


def _by_pooling(config: Any, inputs: Mapping[str, Tensor]) -> _Layouts:
    """Return the averages of square groups of patches (Gemma 3)."""
    side = math.isqrt(config.mm_tokens_per_image)
    count, _, height, width = inputs["pixel_values"].shape
    return [_Patches(side, side, height, width)] * count


def _by_shuffle(config: Any, inputs: Mapping[str, Tensor]) -> _Layouts:
    """Return square groups of patches, for each picture or tile that is not padding (Idefics 3)."""
    pixels = inputs["pixel_values"]
    count = int((pixels != 0).flatten(2).any(-1).sum())
    patch, height, width = config.vision_config.patch_size * config.scale_factor, *pixels.shape[-2:]
    return [_Patches(height // patch, width // patch, height, width)] * count


def _by_grid(config: Any, inputs: Mapping[str, Tensor]) -> _Layouts | None:
    """Return square groups of the processor's grid (Qwen-VL, GLM-4V); several times are below each other."""
    grids, vision = inputs.get("image_grid_thw"), config.vision_config
    if grids is None:
        return None
    merged, patch = vision.spatial_merge_size, vision.patch_size
    return [
        _Patches(time * (rows // merged), columns // merged, time * rows * patch, columns * patch)
        for time, rows, columns in grids.tolist()
    ]


def _by_sizes(config: Any, inputs: Mapping[str, Tensor]) -> _Layouts | None:
    """Return square groups of patches of each picture's own size (Mistral 3)."""
    sizes, patch = inputs.get("image_sizes"), config.vision_config.patch_size * config.spatial_merge_size
    if sizes is None:
        return None
    return [_Patches(height // patch, width // patch, height, width) for height, width in sizes.tolist()]


_LAYOUTS: dict[str, Callable[[Any, Mapping[str, Tensor]], _Layouts | None]] = {
    "llava": _by_pixels,
    "gemma3": _by_pooling,
    "idefics3": _by_shuffle,
    "qwen2_5_vl": _by_grid,
    "qwen3_vl": _by_grid,
    "glm4v": _by_grid,
    "mistral3": _by_sizes,
}


def find_pixels(pictures: Sequence[Picture], inputs: Mapping[str, Tensor]) -> Tensor | None:
    """Return the pixels [channel, height, width] that the only picture of a prompt was read as.

    None if there are several pictures or none, if the places of the patches are not known, or if the inputs
    have other axes.
    """
    grid, pixels = only_grid(pictures), inputs.get("pixel_values")
    if grid is None or pixels is None:
        return None
    height, width = grid.size
    if pixels.ndim == 2 and "image_grid_thw" in inputs:
        return _join_patches(pixels, inputs["image_grid_thw"], grid)
    if pixels.ndim < 4:
        return None
    tiles = pixels.flatten(0, -4)
    # Padded tiles of Idefics 3 are zero.
    filled = tiles[(tiles != 0).flatten(1).any(1)]
    tile: Tensor = (filled if len(filled) else tiles)[0]
    return tile[:, :height, :width] if tile.shape[1] >= height and tile.shape[2] >= width else None


def _join_patches(patches: Tensor, grid_thw: Tensor, grid: Grid) -> Tensor | None:
    """Return the pixels of patches [patch, number] in the order of Qwen-VL's processor.

    A patch is [channel, time, row, column], and the patches of one group follow each other.
    """
    time, rows, columns = (int(number) for number in grid_thw[0])
    side, group = grid.size[1] // columns, columns // grid.columns
    count = 3 * side * side
    if side == 0 or len(patches) != time * rows * columns or patches.shape[1] % count:
        return None
    shape = (time, rows // group, columns // group, group, group, 3, -1, side, side)
    # A picture is repeated in time.
    first = patches.reshape(shape)[:, :, :, :, :, :, 0]
    pixels: Tensor = first.permute(5, 0, 1, 3, 6, 2, 4, 7).reshape(3, time * rows * side, columns * side)
    return pixels


def drop_pictures(
    pictures: Sequence[Picture], inputs: Mapping[str, Tensor], keeps: Bool[Tensor, " pos"]
) -> tuple[tuple[Picture, ...], dict[str, Tensor]]:
    """Return the pictures of a prompt that is cut, at their new positions, and their inputs.

    Args:
        pictures: The pictures.
        inputs: Their inputs.
        keeps: Which positions of the prompt remain.

    Raises:
        UnsupportedModelError: If only some patches of a picture remain, because a model reads whole pictures;
            or if it is not known which inputs belong to which picture.
    """
    kept, places = keeps.tolist(), (keeps.cumsum(0) - 1).tolist()
    counts = [sum(kept[position] for position in picture.positions) for picture in pictures]
    for picture, count in zip(pictures, counts, strict=True):
        if count not in (0, len(picture.positions)):
            raise UnsupportedModelError(
                f"pictures: expected to delete all patches of {picture.name} or none, because the model "
                f"reads whole pictures, got {len(picture.positions) - count} of {len(picture.positions)}; to "
                "remove patches, use lm.methods.Occlusion (by='replace', 'mask' or 'values')"
            )
    moved = tuple(
        Picture(
            picture.number,
            tuple(places[position] for position in picture.positions),
            picture.grid and picture.grid.moved(dict(enumerate(places))),
        )
        for picture, count in zip(pictures, counts, strict=True)
        if count
    )
    if len(moved) == len(pictures):
        return moved, dict(inputs)
    return moved, _select_inputs(inputs, [count > 0 for count in counts]) if moved else {}


def check_neighbors(before: Sequence[Picture], pictures: Sequence[Picture]) -> None:
    """Raise an UnsupportedModelError if pictures become neighbors, for models that read the types of tokens.

    Such a model takes a run of image tokens for one picture.

    Args:
        before: The pictures of the whole prompt.
        pictures: Those that remain, at their new positions.
    """
    ends = {picture.number: (picture.positions[0], picture.positions[-1]) for picture in before}
    for one, next_one in itertools.pairwise(pictures):
        were_neighbors = ends[one.number][1] + 1 == ends[next_one.number][0]
        if one.positions[-1] + 1 == next_one.positions[0] and not were_neighbors:
            raise UnsupportedModelError(
                f"pictures {one.number} and {next_one.number} would be neighbors, which the model reads as "
                "one picture: expected some text to remain between them"
            )


def _select_inputs(inputs: Mapping[str, Tensor], chosen: Sequence[bool]) -> dict[str, Tensor]:
    """Return the inputs of the chosen pictures.

    Raises:
        UnsupportedModelError: If no axis of an input has one entry per picture.
    """
    count = len(chosen)
    index = torch.tensor(chosen, dtype=torch.bool, device="cpu")
    grids = inputs.get("image_grid_thw")
    selected = {}
    for name, value in inputs.items():
        own = index.to(value.device)
        if grids is not None and name == "pixel_values" and len(grids) == count:
            selected[name] = value[own.repeat_interleave(grids.prod(-1).to(value.device))]
        elif len(value) == count:
            selected[name] = value[own]
        elif value.ndim > 3 and value.shape[:2] == (1, count):
            selected[name] = value[:, own]
        else:
            raise UnsupportedModelError(
                f"{name}: expected an entry for each of {count} pictures, to delete some of them, got "
                f"{list(value.shape)}"
            )
    return selected


def join_inputs(
    prompts: Sequence[Mapping[str, Tensor]], dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """Return the inputs of the pictures of several examples as those of one batch.

    Raises:
        UnsupportedModelError: If only some of the examples have pictures.
    """
    names = set().union(*prompts)
    if any(set(inputs) != names for inputs in prompts):
        raise UnsupportedModelError(
            f"pictures: expected {sorted(names)} for every example of a pass, got none for some"
        )
    joined = {}
    for name in sorted(names):
        value = torch.cat([inputs[name] for inputs in prompts])
        joined[name] = value.to(device, dtype if value.is_floating_point() else value.dtype)
    return joined
