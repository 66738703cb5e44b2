"""Test what every figure function shares: axes of a user, a size, a color map, and the style sheet."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import matplotlib
import matplotlib.style
import pandas as pd
import pytest
import torch
from matplotlib.figure import Figure

import lens_mix as lm
import lens_mix.view
from lens_mix.experiments import HeadImportance, PruningCurves, head_figures, norm_figures
from lens_mix.view import layer_maps, show_position, token_bars
from lens_mix.view.leaderboard_figure import leaderboard_figure
from lens_mix.view.tree_figure import tree_figure
from tests.experiments.test_norm_figures import ratios
from tests.random_maps import map_of


def _tables() -> dict[str, Any]:
    dots = pd.DataFrame({"layer": [0, 1], "token": ["a", "b"], "weight": [0.1, 0.2], "norm": [1.0, 2.0]})
    rates = pd.DataFrame({"layer": [0, 0, 1, 1], "head": [0, 1, 0, 1], "rate": [0.1, 0.2, 0.3, 0.4]})
    changes = pd.DataFrame({key: [0.1, 0.2] for key in ("feed_forward", "residual", "norm", "whole")})
    board = {"method": ["alti"], "aggregation": ["rollout"], "x": [0.5], "x_low": [0.4], "x_high": [0.6]}
    return {"dots": dots, "rates": rates, "changes": changes, "board": pd.DataFrame(board)}


def _figures() -> dict[str, Callable[..., Any]]:
    tables = _tables()
    values = {"a": (1.0, 0.0), "random": (1.0, 0.5)}
    curves = PruningCurves((0.0, 1.0), (0, 8), values, values, values, 8)
    tree = lm.attribution_tree(map_of(random_tree()))
    part = functools.partial
    return {
        "show_position": part(show_position, map_of()),
        "layer_maps": part(layer_maps, map_of(), layer=0),
        "show": part(map_of().show, layer=0),
        "token_bars": part(token_bars, {"a": torch.rand(6)}, map_of().tokens),
        "tree": part(tree_figure, tree, "title"),
        "heads": part(head_figures.head_map, HeadImportance(torch.rand(3, 4), "taylor", 7)),
        "pruning": part(head_figures.pruning_figure, curves),
        "leaderboard": part(leaderboard_figure, tables["board"], "x", "title"),
        "layers": part(norm_figures.mixing_by_layer, ratios()),
        "kinds": part(norm_figures.mixing_by_kind, ratios()),
        "weights": part(norm_figures.weights_against_norms, tables["dots"]),
        "rates": part(norm_figures.expansion_rates, tables["rates"]),
        "changes": part(norm_figures.contextualisation, tables["changes"]),
    }


def random_tree() -> torch.Tensor:
    return torch.rand(4, 6, 6, generator=torch.Generator().manual_seed(0)).tril()


FIGURES = _figures()
WITH_COLOURS = ("show_position", "layer_maps", "show", "heads", "rates")


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_drawn_in_the_axes_of_a_user(name: str) -> None:
    theirs = Figure(figsize=(8, 3))
    left, right = theirs.subplots(1, 2)
    assert FIGURES[name](ax=right) is theirs
    assert not left.has_data()
    assert right.has_data()
    theirs.canvas.draw()
    with pytest.raises(TypeError, match="ax: expected axes of matplotlib"):
        FIGURES[name](ax=theirs)
    with pytest.raises(ValueError, match="figsize: expected None beside ax="):
        FIGURES[name](ax=left, figsize=(4, 3))


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_has_the_size_that_was_asked_for(name: str) -> None:
    figure = FIGURES[name](figsize=(6.5, 4.5))
    assert figure.get_size_inches().tolist() == pytest.approx([6.5, 4.5])
    figure.canvas.draw()
    wrong: tuple[tuple[Any, type[Exception]], ...] = (
        ((0, 3), ValueError),
        ((1,), ValueError),
        (3, TypeError),
    )
    for size, error in wrong:
        with pytest.raises(error, match="figsize: expected"):
            FIGURES[name](figsize=size)


@pytest.mark.parametrize("name", WITH_COLOURS)
def test_a_figure_has_the_colors_that_were_asked_for(name: str) -> None:
    for cmap in ("viridis", matplotlib.colormaps["viridis"]):
        (image, *_) = [image for axes in FIGURES[name](cmap=cmap).axes for image in axes.images]
        assert image.get_cmap()(0.7) == matplotlib.colormaps["viridis"](0.7)
    with pytest.raises(ValueError, match=r"cmap: expected a name in matplotlib\.colormaps"):
        FIGURES[name](cmap="nothing")


def test_more_panels_than_axes_say_what_to_choose() -> None:
    axes = Figure().subplots()
    for draw, what in (
        (lambda: layer_maps(map_of(), ax=axes), "layer="),
        (lambda: show_position([map_of(), map_of()], ax=axes), "maps"),
        (lambda: token_bars({"a": torch.rand(6), "b": torch.rand(6)}, map_of().tokens, ax=axes), "rows"),
    ):
        with pytest.raises(ValueError, match=f"ax: expected a figure with one panel .*{what}.*leave ax= out"):
            draw()


def test_the_style_sheet_is_complete_and_keeps_text_as_text() -> None:
    with matplotlib.style.context(lens_mix.view.STYLE):
        assert matplotlib.rcParams["pdf.fonttype"] == 42
        figure = Figure()
        figure.subplots().plot([1, 2])
        figure.canvas.draw()
        show_position(map_of()).canvas.draw()
