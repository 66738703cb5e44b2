"""Draw a row of a map over the picture that the model read, or under the waveform."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix.arguments import check_choice, check_instance, check_whole_number
from lens_mix.maps import MixingMap
from lens_mix.maps.arithmetic import normalize_by_magnitude
from lens_mix.maps.grid import Grid
from lens_mix.view.colors import MARK
from lens_mix.view.heat_maps import check_vmax, finish_bar, make_norm
from lens_mix.view.images import check_picture, read_image, require_grid
from lens_mix.view.labels import (
    FONT,
    INK,
    NAME_FONT,
    PAPER_FONT,
    QUIET,
    Style,
    count_labels,
    name_map,
    name_model,
    quote,
)
from lens_mix.view.layers import name_layers
from lens_mix.view.lazy import load_canvas
from lens_mix.view.position import RAW, SHARE
from lens_mix.view.strongest import find_noise, find_sinks

if TYPE_CHECKING:
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

    from lens_mix.view.canvas import DrawnPicture

_LARGE, _SMALL = 3.4, 1.65  # the width in inches of a picture, alone and among several
_HEADING, _BESIDE = 0.36, 0.85
_DARKEST = 0.9  # how opaque the largest score is over a picture
_MOST_OUTSIDE = 2  # so many positions outside of the grid are written one by one: [CLS] and [DIST]
_LIGHTER = 0.55  # how much of its contrast the gray picture keeps


def show_picture(
    mixing_map: MixingMap,
    picture: Any = True,
    query: int | str | None = None,
    *,
    layers: Sequence[int] | None = None,
    layer: int | None = None,
    head: int | None = None,
    columns: int = 4,
    normalize: bool | None = None,
    title: str | None = None,
    cmap: str | Colormap | None = None,
    vmax: float | None = None,
    style: Style = "screen",
) -> Figure:
    """Return a figure of what one position used, over the picture that the model read, layer by layer.

        >>> method = lm.methods.InputGradients(target=lm.targets.class_(1))
        >>> m = lm.run(model, pixels, method, queries=[0])
        >>> lm.view.show_picture(m).savefig("picture.png")

    The picture is gray, and the more a patch has of the row, the stronger its color. Each layer has its own
    scale, up to the largest score of a patch, which is written above the picture with what the positions
    without a place ([CLS], [DIST]) have. A frame marks the position itself. The scores of a waveform
    are drawn below it, layers x time, on one scale.

    Args:
        mixing_map: A map of a picture or of sound, with a grid.
        picture: True for what the model read, or the picture that was run, as in
            `lens_mix.view.images.read_image`: the figure shows the part of it that the model's processor
            kept, or what the model read if that part is not known. True for sound.
        query: The position (negative: from the end), or its label ("[CLS]"). None: the map's default row.
        layers: The labels of the layers to draw; None: all.
        layer: One layer, instead of `layers`.
        head: The head; None: the mean over heads.
        columns: The largest number of pictures side by side, 1 or more.
        normalize: True: the row is divided by its sum. False: raw scores. None: True without negative scores.
        title: The title; None: what is explained.
        cmap: A matplotlib color map or its name; None: blues, and orange to purple for negative scores.
        vmax: The score of the strongest color, above 0, on one scale for all layers and figures:
            `m.show(vmax=0.1)`. Larger scores have the same color, and the color bar then ends in a point.
            None: the largest score of a patch, in each layer.
        style: "paper" is for a column of a printed page: 3.3 inches wide with text of 8 points, two pictures
            side by side, without a title, and in greys, in which negative scores are white.
            `m.show(style="paper").savefig("m.pdf")`

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: The map has no grid, or does not have the row, the layer or the head; the picture has no
            pixels, or is given for sound; `vmax` is not above 0.
        ImportError: Matplotlib is not installed.
    """
    check_instance("mixing_map", mixing_map, MixingMap, "a MixingMap")
    require_grid(mixing_map)
    check_picture(mixing_map, picture)
    columns, vmax = check_whole_number("columns", columns, 1), check_vmax(vmax)
    if layer is not None and layers is not None:
        raise ValueError(f"layer: expected None beside layers={layers!r}, got {layer!r}")
    wanted = layers if layer is None else [layer]
    chosen = mixing_map if wanted is None else mixing_map.select_layers(wanted)
    chosen = (chosen if head is None else chosen.head(head)).merge_heads()
    row = chosen.row_index(query)
    scores = chosen.scores[:, row].detach().to("cpu", torch.float64)
    is_signed = bool((scores < 0).any())
    if normalize and is_signed:
        raise ValueError("normalize: expected a row without negative scores for True, got some")
    is_share = not is_signed if normalize is None else normalize
    scores = normalize_by_magnitude(scores) if is_share else scores
    position = chosen.query_positions[row]
    check_choice("style", style, get_args(Style))
    is_paper = style == "paper"
    if is_paper:
        title, cmap, columns = title or "", cmap or "Greys", min(columns, 2)
    if title is None:
        title = chosen.explanation(position)
        title = title[:1].upper() + title[1:] or f"What {quote(chosen.tokens[position])} used"
    view = _View(chosen, scores, position, title, SHARE if is_share else RAW, cmap, vmax)
    view.mark = INK if is_paper else MARK
    canvas = load_canvas()
    size = canvas.choose_size(None, style)
    width = None if size is None else size[0]
    if view.grid.noun == "frame":
        view.subtitle = "" if is_paper else " · ".join(filter(None, (view.subtitle, view.padding())))
        drawn = _draw_waveform(view, width)
    else:
        image = read_image(mixing_map, picture)
        view.subtitle = "" if is_paper else f"{view.subtitle} · {image.words}"
        drawn = _draw_pictures(view, image.pixels, columns, width)
    finished: Figure = canvas.finish_style(drawn, style)
    return finished


class _View:
    """One row of a map, layer by layer, and the texts of its figure.

    Attributes:
        cells: The scores at the places of the grid, [layer, row, column]: as they are on a common scale, as a
            waveform has, else as shares of the layer's largest.
        scale: What the ends of the color scale are of, as the color bar says.
        largest: The largest magnitude of a cell, by layer.
        noise: For pictures, whether a layer has no colors (`lens_mix.view.strongest.find_noise`).
        norm: The color scale.
        mark: The color of the frame around the position itself.
    """

    mark = MARK

    def __init__(
        self,
        mixing_map: MixingMap,
        scores: Float[Tensor, "layer key"],
        position: int,
        title: str,
        unit: str,
        cmap: Any,
        vmax: float | None,
    ) -> None:
        assert mixing_map.grid is not None
        self.map, self.scores, self.position, self.title = mixing_map, scores, position, title
        self.grid: Grid = mixing_map.grid
        self.unit, self.names = unit, name_layers(mixing_map)
        self.cells = self.grid.lay_out(scores)
        # Pictures show shares of each layer's largest score, or of the whole row if that is noise.
        self.largest, self.scale = self.cells.abs().flatten(1).amax(1), unit
        self.noise = self.cells.new_zeros(len(self.cells), dtype=torch.bool)
        if self.grid.noun != "frame" and vmax is None:
            self.scale = "of the largest patch"
            sinks = {*find_sinks(mixing_map), *([position] if mixing_map.keys_are_tokens else [])}
            self.noise = find_noise(scores, sinks)
            ends = torch.where(self.noise, scores.abs().sum(-1), self.largest)
            self.cells = self.cells / ends.clamp_min(1e-300)[:, None, None]
        self.norm = make_norm([self.cells], logarithmic=False, vmax=vmax)
        self.colors = load_canvas().choose_color_map(self.norm.vmin < 0, cmap)
        parts = (name_map(mixing_map), name_model(mixing_map.provenance), unit)
        self.subtitle = " · ".join(filter(None, parts))

    def outside(self, layer: int) -> str:
        """Return what positions without a place have: "[CLS] 12 %", or for a text "all tokens 60 %"."""
        places = set(self.grid.positions)
        outside = {key: label for key, label in enumerate(self.map.key_labels) if key not in places}
        if len(outside) > _MOST_OUTSIDE:
            return f"all tokens {self.write(float(self.scores[layer, list(outside)].nansum()))}"
        return ", ".join(
            f"{label} {self.write(float(self.scores[layer, key]))}" for key, label in outside.items()
        )

    def padding(self) -> str:
        """Return the least and the most that positions outside of a sound have in a layer, as text."""
        count, places = self.scores.shape[-1], set(self.grid.positions)
        outside = [key for key in range(count) if key not in places]
        if not outside or self.unit != SHARE:
            return ""
        sums = self.scores[:, outside].nansum(-1)
        low, high = (self.write(float(each)) for each in (sums.min(), sums.max()))
        return f"outside of the sound {low if low == high else f'{low} to {high}'}"

    def write(self, score: float) -> str:
        """Return a score as text, with two digits."""
        if self.unit != SHARE:
            return f"{score:.2g}"
        # Two digits of 99.9 would be written as 1e+02.
        return f"{100 * score:.0f} %" if score >= 0.1 else f"{100 * score:.2g} %"


def _draw_pictures(view: _View, image: np.ndarray, columns: int, whole: float | None) -> DrawnPicture:
    """Return a figure of one picture per layer, with the scores over it, in a width in inches if given."""
    count = len(view.names)
    rows = math.ceil(count / columns)
    columns = math.ceil(count / rows)
    width = _LARGE if count == 1 else _SMALL
    if whole is not None:
        width = (whole - 0.24 - _BESIDE) / columns - 0.12
    canvas = load_canvas()
    largest = [f"a patch ≤ {view.write(float(each))}" for each in view.largest]
    largest = [
        f"{most}, not colored" if noise else most for most, noise in zip(largest, view.noise, strict=True)
    ]
    titles = [f"{name}, {most}" for name, most in zip(view.names, largest, strict=True)]
    # The texts above a narrow picture are in lines.
    is_narrow = whole is not None or canvas.measure_longest(titles, NAME_FONT) > width
    heading = 0.2 + 0.13 * (3 if bool(view.noise.any()) else 2) if is_narrow else _HEADING
    ratio = image.shape[0] / image.shape[1]
    # A picture that is more than twice as high as it is wide is narrower than its place.
    height = min(width * ratio, 2 * width)
    size = (0.24 + columns * (width + 0.12) + _BESIDE, rows * (height + heading) + 0.1)
    title, subtitle = _wrap(view, size[0])
    head = _measure_head(title, subtitle)
    drawn: DrawnPicture = canvas.DrawnPicture(size[0], size[1] + head)
    gray = 255 - _LIGHTER * (255 - image.mean(-1, keepdims=True))
    gray = np.repeat(gray.astype(np.uint8), 3, axis=-1)
    for place, (name, cells) in enumerate(zip(view.names, view.cells, strict=True)):
        row, column = divmod(place, columns)
        left, bottom = 0.14 + column * (width + 0.12), 0.1 + (rows - 1 - row) * (height + heading)
        axes = drawn.add_box(left, bottom, height / ratio, height)
        axes.imshow(gray, extent=(0, view.grid.size[1], view.grid.size[0], 0), aspect="auto")
        shown = _draw_cells(axes, view, cells)
        axes.set(xticks=[], yticks=[])
        canvas.draw_thin_frame(axes, ticks=0)
        outside = view.outside(place)
        if is_narrow:
            outside = "\n".join(filter(None, (*largest[place].split(", "), outside)))
        else:
            name = titles[place]
        lines = outside.count("\n") + 1
        pad = 3 + 1.2 * (PAPER_FONT if whole is not None else FONT) * lines if is_narrow else 11
        axes.set_title(name, size=NAME_FONT, color=INK, loc="left", pad=pad, parse_math=False)
        look = {"size": FONT - 0.5, "color": QUIET, "va": "bottom", "annotation_clip": False}
        above = {"xycoords": "axes fraction", "xytext": (0, 2), "textcoords": "offset points"}
        axes.annotate(outside, (0, 1), **above, **look)
    bar_height = min(height, 1.8)
    bottom = 0.1 + (rows - 1) * (height + heading) + height - bar_height
    bar = drawn.add_color_bar(shown, 0.14 + columns * (width + 0.12), bottom, bar_height)
    finish_bar(bar, view.norm, view.scale)
    drawn.write_title(title, subtitle)
    return drawn


def _draw_cells(axes: Any, view: _View, cells: Float[Tensor, "row column"]) -> Any:
    """Draw the scores of the cells over a picture, and return what a color bar needs."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.patches import Rectangle

    numbers = cells.numpy()
    colors = view.colors(view.norm(numbers))
    strength = np.minimum(np.abs(numbers) / max(view.norm.vmax, 1e-300), 1)
    # The square root keeps weak scores visible over a picture.
    colors[..., -1] = _DARKEST * np.sqrt(strength)
    grid = view.grid
    down, right = (
        min((count - 1) * step + patch, size)
        for count, step, patch, size in zip(
            (grid.rows, grid.columns), grid.step, grid.patch, grid.size, strict=True
        )
    )
    # The lowest band of a spectrogram is at the bottom.
    edges = (grid.size[0], grid.size[0] - down) if grid.is_sound else (down, 0)
    origin = "lower" if grid.is_sound else "upper"
    axes.imshow(colors, extent=(0, right, *edges), origin=origin, aspect="auto", interpolation="nearest")
    axes.set(xlim=(0, grid.size[1]), ylim=(grid.size[0], 0))
    box = grid.box(view.position)
    if box is not None and view.map.keys_are_tokens:
        top, left, bottom, edge = box
        corner = (left, grid.size[0] - bottom if grid.is_sound else top)
        axes.add_patch(Rectangle(corner, edge - left, bottom - top, fill=False, ec=view.mark, lw=1.4))
    return ScalarMappable(view.norm, view.colors)


def _draw_waveform(view: _View, whole: float | None) -> DrawnPicture:
    """Return a figure of the waveform and, below it, the scores, layers x time, in a width if given."""
    canvas, grid = load_canvas(), view.grid
    layers = len(view.names)
    width, wave = 5.6, 0.9
    height = max(min(0.17 * layers, 3.5), 0.35)
    left = 0.4 + canvas.measure_longest(view.names, FONT)
    width = width if whole is None else whole - left - _BESIDE
    title, subtitle = _wrap(view, left + width + _BESIDE)
    head = _measure_head(title, subtitle)
    drawn: DrawnPicture = canvas.DrawnPicture(left + width + _BESIDE, 0.42 + height + 0.1 + wave + head)
    seconds = (grid.seconds or 0) * grid.size[1]
    above = drawn.add_box(left, 0.42 + height + 0.1, width, wave)
    features = view.map.features
    if features is not None and features.ndim == 2:
        bands = features[: grid.size[1]].detach().to("cpu", torch.float32).T.numpy()
        above.imshow(bands, cmap="Greys", extent=(0, seconds, 0, 1), origin="lower", aspect="auto")
    elif features is not None:
        samples = features.detach().to("cpu", torch.float32).numpy()
        above.plot(np.linspace(0, seconds, len(samples)), samples, color=INK, lw=0.4)
    above.set(xlim=(0, seconds), xticks=[], yticks=[])
    below = drawn.add_box(left, 0.42, width, height)
    end = ((grid.columns - 1) * grid.step[1] + grid.step[1]) * (grid.seconds or 0)
    image = below.imshow(
        view.cells[:, 0].numpy(),
        cmap=view.colors,
        norm=view.norm,
        extent=(0, min(end, seconds), layers - 0.5, -0.5),
        aspect="auto",
        interpolation="nearest",
    )
    below.set_xlim(0, seconds)
    below.tick_params(labelsize=FONT, colors=QUIET, length=1.5)
    below.set_xlabel("seconds", size=FONT, color=QUIET, labelpad=2)
    canvas.label_ticks(below.yaxis, view.names, count_labels(height, FONT))
    for axes in (above, below):
        canvas.draw_thin_frame(axes, ticks=1.5)
        box = grid.box(view.position) if view.map.keys_are_tokens else None
        if box is not None:
            for edge in (box[1], box[1] + grid.step[1]):
                axes.axvline(edge * (grid.seconds or 0), color=view.mark, lw=0.7)
    bar = drawn.add_color_bar(image, left + width + 0.12, 0.42, max(height, 0.8))
    finish_bar(bar, view.norm, view.unit)
    drawn.write_title(title, subtitle)
    return drawn


def _wrap(view: _View, width: float) -> tuple[str, str]:
    """Return the title and the subtitle in lines that fit a width in inches."""
    canvas = load_canvas()
    return canvas.wrap(view.title, 11, (width - 0.24) / 1.15), canvas.wrap(
        view.subtitle, FONT, (width - 0.24) / 1.1
    )


def _measure_head(title: str, subtitle: str) -> float:
    """Return the height in inches of the title and the subtitle."""
    lines, small = (text.count("\n") + 1 if text else 0 for text in (title, subtitle))
    return 0.1 + 0.2 * lines + 0.14 * small
