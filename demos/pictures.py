"""Explain an encoder of pictures: which patches DINOv2-small used, drawn over a picture.

    python -m demos.pictures FOLDER

The picture is drawn here: a red ball and a house on a meadow. Into FOLDER the program writes the picture, one
figure per map, and a page with all maps.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

import lens_mix as lm
import lens_mix.maps
from demos.models import dinov2

SIZE = 224
# DINOv2's processor subtracts the mean color of ImageNet and divides by its standard deviation.
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def draw_picture(size: int = SIZE) -> np.ndarray:
    """Return a picture of a house and a red ball on a meadow, [size, size, 3], 0 to 255."""
    from PIL import Image, ImageDraw

    # It is drawn four times as large and then reduced, so that its edges are smooth.
    scale = 4 * size / 224
    image = Image.new("RGB", (4 * size, 4 * size), (150, 196, 235))
    pencil = ImageDraw.Draw(image)

    def at(*numbers: float) -> list[float]:
        return [number * scale for number in numbers]

    pencil.rectangle(at(0, 140, 224, 224), fill=(104, 159, 84))
    pencil.ellipse(at(170, 16, 206, 52), fill=(250, 220, 110))
    pencil.rectangle(at(24, 84, 104, 158), fill=(222, 196, 160))
    pencil.polygon(at(14, 86, 64, 44, 114, 86), fill=(140, 70, 56))
    pencil.rectangle(at(54, 116, 76, 158), fill=(96, 64, 44))
    pencil.rectangle(at(32, 98, 48, 114), fill=(120, 160, 190))
    pencil.rectangle(at(82, 98, 98, 114), fill=(120, 160, 190))
    pencil.ellipse(at(138, 142, 194, 198), fill=(206, 40, 44))
    pencil.ellipse(at(150, 150, 166, 164), fill=(236, 130, 128))
    return np.asarray(image.resize((size, size), Image.Resampling.LANCZOS))


def draw_shapes(seed: int, size: int = SIZE) -> np.ndarray:
    """Return a picture of four discs and boxes of random colors on a flat ground, [size, size, 3]."""
    from PIL import Image, ImageDraw

    random, side = np.random.default_rng(seed), 4 * size
    ground, *colors = (tuple(map(int, color)) for color in random.integers(40, 230, (5, 3)))
    image = Image.new("RGB", (side, side), ground)
    pencil = ImageDraw.Draw(image)
    for color in colors:
        left, top = random.uniform(0, 0.75, 2) * side
        width, height = random.uniform(0.12, 0.3, 2) * side
        shape = pencil.ellipse if random.random() < 0.5 else pencil.rectangle
        shape([left, top, left + width, top + height], fill=color)
    return np.asarray(image.resize((size, size), Image.Resampling.LANCZOS))


def is_flat(picture: np.ndarray, grid: lm.maps.Grid) -> list[bool]:
    """Return, for each cell of a grid, whether the picture has one color there."""
    boxes = (grid.box(position) or (0, 0, 1, 1) for position in grid.positions)
    cells = (picture[top:bottom, left:right].reshape(-1, 3) for top, left, bottom, right in boxes)
    return [bool(np.ptp(cell, axis=0).max() <= 2) for cell in cells]


def name_parts(grid: lm.maps.Grid) -> list[str]:
    """Return what is at the middle of each cell of a grid: sun, house, ball, sky or meadow."""
    names = []
    for position in grid.positions:
        top, left, bottom, right = (side * 224 / grid.size[0] for side in grid.box(position) or ())
        x, y = (left + right) / 2, (top + bottom) / 2
        if (x - 188) ** 2 + (y - 34) ** 2 <= 22**2:
            names.append("sun")
        elif (x - 166) ** 2 + (y - 170) ** 2 <= 30**2:
            names.append("ball")
        elif 20 <= x <= 108 and 44 <= y <= 158 and abs(x - 64) <= max(y - 40, 0) * 1.3:
            names.append("house")
        else:
            names.append("sky" if y < 140 else "meadow")
    return names


def as_pixels(picture: np.ndarray) -> torch.Tensor:
    """Return a picture as the pixels [channel, height, width] that DINOv2 reads."""
    colors = torch.from_numpy(picture.astype(np.float32) / 255)
    pixels = (colors - torch.tensor(MEAN)) / torch.tensor(DEVIATION)
    return pixels.permute(2, 0, 1).contiguous()


def likeness(pixels: torch.Tensor, model: Any) -> lm.targets.Target:
    """Return the target that says how much [CLS] is as it was: its cosine with that of the whole picture."""
    with torch.no_grad():
        own = model(pixels[None])[0, 0]

    def cosine_with_whole_picture(resid: torch.Tensor) -> torch.Tensor:
        return torch.cosine_similarity(resid[:, 0], own[None], dim=-1)

    return lm.targets.head(cosine_with_whole_picture, after_final_norm=True)


def main(folder: Path) -> None:
    """Write the picture, the figures and the page."""
    folder.mkdir(parents=True, exist_ok=True)
    model, picture = dinov2(), draw_picture()
    pixels = as_pixels(picture)
    maps = lm.run(model, pixels, ["attention", "value_norm", "value_zeroing", "attn_res_ln"], queries=[0])
    maps["rollout"] = lm.rollout(lm.run(model, pixels, "attention")).select_queries([0])[-1]
    occlusion = lm.methods.Occlusion(target=likeness(pixels, model), by="blur")
    maps["occlusion"] = lm.run(model, pixels, occlusion, queries=[0], progress=None)
    for name, m in maps.items():
        m.show(picture=True).savefig(folder / f"{name}.png")
    lm.page(maps, folder / "page.html", picture=True)
    print(f"Written to {folder}: {', '.join(maps)}, page.html")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "pictures"))
