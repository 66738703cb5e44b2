"""Pictures beside the tokens of a decoder: their inputs, and the positions of their patches among the tokens.

A model of pictures and text replaces the embedding of each image token by a patch's features from its vision
encoder. The features of all pictures replace the image tokens in order, row by row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from lens_mix._classes.model_classes import TransformerLensModel
from lens_mix.maps.grid import Grid

# The inputs of pictures, by the names of transformers. Their axes are not those of the tokens.
PICTURE_INPUTS = frozenset(
    {"pixel_values", "pixel_attention_mask", "image_grid_thw", "image_sizes", "batch_num_images"}
)
# The numbers that distinguish image tokens from text, by the names of transformers.
_TYPES = ("token_type_ids", "mm_token_type_ids")


@dataclasses.dataclass(frozen=True)
class Picture:
    """One picture in the sequence of image positions and text.

    Attributes:
        number: Its number in the prompt, from 1.
        positions: The positions of its patches, row by row.
        grid: The places of its patches; None if they are not known.
    """

    number: int
    positions: tuple[int, ...]
    grid: Grid | None = None

    @property
    def name(self) -> str:
        """Return the name of the picture: "picture 1"."""
        return f"picture {self.number}"

    @property
    def labels(self) -> list[str]:
        """Return a label per patch: "picture 1, 3,5" (row 3, column 5), or "picture 1, 17" without a grid."""
        columns = None if self.grid is None else self.grid.columns
        numbers = range(len(self.positions))
        if columns is None:
            return [f"{self.name}, {number}" for number in numbers]
        return [f"{self.name}, {number // columns},{number % columns}" for number in numbers]

    def record(self) -> dict[str, Any]:
        """Return the fields as values that JSON can represent."""
        grid = None if self.grid is None else self.grid.record()
        return {"number": self.number, "positions": list(self.positions), "grid": grid}

    @staticmethod
    def from_record(record: Mapping[str, Any]) -> Picture:
        """Return the picture of a record."""
        grid = None if record["grid"] is None else Grid(**record["grid"])
        return Picture(record["number"], tuple(record["positions"]), grid)


def image_token(model: TransformerLensModel) -> int | None:
    """Return the token whose embedding the model replaces by a picture's features; None if there is none."""
    config = getattr(getattr(model, "original_model", None), "config", None)
    for name in ("image_token_id", "image_token_index"):
        token = getattr(config, name, None)
        if isinstance(token, int):
            return token
    return None


def note_missing_types(taken: Sequence[str], inputs: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Return a note if the model takes the types of tokens, and the prompt has none.

    Args:
        taken: The inputs that the model takes.
        inputs: The inputs that were given.
    """
    missing = [name for name in _TYPES if name in taken]
    if not missing or set(missing) & set(inputs):
        return ()
    return (
        f"{missing[0]}: not given, so the model gives image positions the attention mask and the positions "
        "of text; its processor returns them, with 1 at image tokens",
    )


def note_missing_pixels(model: TransformerLensModel, tokens: Int[Tensor, " pos"]) -> tuple[str, ...]:
    """Return a note if a prompt has image tokens, but no pictures."""
    token = image_token(model)
    count = 0 if token is None else int((tokens == token).sum())
    if count == 0:
        return ()
    return (f"pixel_values: not given, so {count} image tokens have the embedding of that token",)


def only_grid(pictures: Sequence[Picture]) -> Grid | None:
    """Return the grid of the only picture of a prompt; None if there are several, or none."""
    return pictures[0].grid if len(pictures) == 1 else None


def label_pictures(strings: Sequence[str], pictures: Sequence[Picture]) -> list[str]:
    """Return the strings of tokens, with the labels of pictures at the positions of their patches."""
    labels = list(strings)
    for picture in pictures:
        for position, label in zip(picture.positions, picture.labels, strict=True):
            labels[position] = label
    return labels


def is_picture(pictures: Sequence[Picture], count: int, device: torch.device) -> Bool[Tensor, " pos"]:
    """Return which of `count` positions are patches."""
    mask = torch.zeros(count, dtype=torch.bool, device=device)
    mask[[position for picture in pictures for position in picture.positions]] = True
    return mask
