"""Read labels, numbers and axes back from figures, and compare them with the maps."""

from __future__ import annotations

import io
import itertools
import subprocess
import sys
from typing import Any

import numpy
import pandas as pd
import pytest
import torch

import lens_mix as lm
from lens_mix.maps import MixingMap
from lens_mix.maps.explained import Explained
from lens_mix.view import layer_maps, token_bars
from lens_mix.view.figures import _break_name
from lens_mix.view.leaderboard_figure import leaderboard_figure
from tests.random_maps import map_of, random_attention
from tests.tiny_models import llama_like, tokens

TOKENS = RAW_TOKENS = ["<bos>", "The", " cat", "\n", " $at$"]
SHOWN = ["<bos>", "The", "·cat", "⏎", "·$at$"]


def raw_map(
    layers: int = 3, heads: int | None = None, tokens: list[str] = TOKENS, **fields: Any
) -> MixingMap:
    """Return a map with rows that sum to 2, which shows whether they were normalized."""
    return map_of(2 * random_attention(layers, heads, len(tokens)), tokens=tokens, **fields)


def heat_maps(figure: Any) -> list[Any]:
    """Return the axes with heat maps, in order, without the color bar."""
    return [axes for axes in figure.axes if axes.images]


def written(figure: Any) -> list[str]:
    return [text.get_text() for text in figure.texts]


def tick_labels(axis: Any) -> list[str]:
    return [label.get_text() for label in axis.get_ticklabels()]


def overlaps(figure: Any, labels: list[Any]) -> bool:
    renderer = figure.canvas.get_renderer()
    boxes = [label.get_window_extent(renderer) for label in labels]
    return any(a.overlaps(b) for a, b in itertools.pairwise(boxes))


def inside(figure: Any, artist: Any) -> bool:
    box = artist.get_window_extent(figure.canvas.get_renderer())
    width, height = figure.canvas.get_width_height()
    return box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height


class TestLayerMaps:
    def test_every_layer_is_drawn_with_its_own_numbers(self) -> None:
        mixing_map = raw_map(layers=8)
        figure = layer_maps(mixing_map)
        panels = heat_maps(figure)
        assert [axes.get_title() for axes in panels] == [f"layer {layer}" for layer in range(8)]
        for layer, axes in enumerate(panels):
            drawn = axes.images[0].get_array()
            assert numpy.allclose(drawn.filled(0), mixing_map.normalized().scores[layer], atol=1e-7)

    def test_keys_that_a_query_could_not_see_are_masked(self) -> None:
        for axes in heat_maps(layer_maps(raw_map())):
            mask = numpy.ma.getmaskarray(axes.images[0].get_array())
            assert (mask == ~numpy.tril(numpy.ones((5, 5), dtype=bool))).all()

    def test_all_panels_share_one_color_scale_that_reaches_the_largest(self) -> None:
        mixing_map = raw_map()
        panels = heat_maps(layer_maps(mixing_map, normalize=False))
        limits = {axes.images[0].get_clim() for axes in panels}
        assert limits == {(0.0, mixing_map.scores.max().item())}

    def test_tokens_stand_at_the_left_and_at_the_bottom_only(self) -> None:
        panels = heat_maps(layer_maps(raw_map(layers=5), columns=3))
        assert [tick_labels(axes.yaxis) for axes in panels] == [SHOWN, [], [], SHOWN, []]
        # In the third column only the first row has a panel.
        assert [tick_labels(axes.xaxis) for axes in panels] == [[], [], SHOWN, SHOWN, SHOWN]

    def test_a_dollar_sign_is_no_formula(self) -> None:
        figure = layer_maps(raw_map(), title="costs $5 or $6")
        figure.savefig(io.BytesIO())
        for text in [*heat_maps(figure)[0].get_yticklabels(), *figure.texts]:
            assert not text.get_parse_math()

    def test_labels_of_a_long_prompt_neither_overlap_nor_leave_the_figure(self) -> None:
        tokens = [f" word{i}" for i in range(60)] + [" internationalisation"]
        figure = layer_maps(raw_map(layers=7, tokens=tokens), title="a " + "long " * 12 + "title")
        figure.canvas.draw()
        for axes in heat_maps(figure):
            for axis in (axes.xaxis, axes.yaxis):
                labels = axis.get_ticklabels()
                assert len(labels) in range(2, 61) or labels == []
                assert not overlaps(figure, labels)
                assert all(inside(figure, label) for label in labels)
        assert all(inside(figure, text) for text in figure.texts)

    def test_the_scale_can_be_that_of_another_figure(self) -> None:
        for axes in heat_maps(layer_maps(raw_map(), vmax=0.3)):
            assert axes.images[0].get_clim() == (0, 0.3)
        assert axes.images[0].colorbar.extend == "max"
        wide = heat_maps(layer_maps(raw_map(), vmax=2))[-1].images[0]
        assert (wide.get_clim(), wide.colorbar.extend) == ((0, 2), "neither")
        with pytest.raises(ValueError, match="vmax: expected a finite number, above 0, got 0"):
            layer_maps(raw_map(), vmax=0)

    def test_a_column_of_a_paper_has_fewer_heat_maps_side_by_side(self) -> None:
        explained = [Explained(" Paris", 0.4, (), "", 0.0)] * 5
        figure = layer_maps(raw_map(layers=4).replace(explained=explained), style="paper")
        assert figure.get_size_inches()[0] == pytest.approx(3.3)
        panels = heat_maps(figure)
        assert len({axes.get_position().x0 for axes in panels}) < 4
        assert "Attention" not in written(figure)
        assert tick_labels(panels[0].yaxis)[0] == "<bos>"
        assert {label.get_fontsize() for label in panels[0].get_yticklabels()} == {8}
        figure.canvas.draw()
        for axes in panels:
            assert not overlaps(figure, axes.get_yticklabels())
            assert all(inside(figure, label) for label in axes.get_yticklabels())
        pdf = io.BytesIO()
        figure.savefig(pdf, format="pdf")
        # TrueType fonts have this type in a PDF file.
        assert b"/CIDFontType2" in pdf.getvalue()

    def test_layers_are_chosen_by_label(self) -> None:
        mixing_map = raw_map().replace(layers=[4, 6, 8])
        panels = heat_maps(layer_maps(mixing_map, layers=[8, 4]))
        assert [axes.get_title() for axes in panels] == ["layer 8", "layer 4"]
        expected = mixing_map.normalized().scores[0]
        assert numpy.allclose(panels[1].images[0].get_array().filled(0), expected, atol=1e-7)

    def test_heads_are_averaged_or_one_is_drawn(self) -> None:
        mixing_map = raw_map(heads=2)
        mean, one = layer_maps(mixing_map, normalize=False), layer_maps(mixing_map, head=1, normalize=False)
        for figure, expected in ((mean, mixing_map.scores.mean(1)), (one, mixing_map.scores[:, 1])):
            drawn = [axes.images[0].get_array().filled(0) for axes in heat_maps(figure)]
            assert numpy.allclose(drawn, expected, atol=1e-7)
        assert "Attention, mean over heads" in written(mean)
        assert "Attention, head 1" in written(one)

    def test_input_maps_say_that_they_reach_down_to_the_input(self) -> None:
        figure = layer_maps(raw_map(kind="input", provenance={"aggregation": {"name": "rollout"}}))
        assert heat_maps(figure)[1].get_title() == "up to layer 1"
        assert "Attention, rollout" in written(figure)

    def test_layers_of_input_maps_are_named_for_what_they_are(self) -> None:
        """The layers may add up, reach up to one layer, be the whole model, or be a mean of layers."""
        model = llama_like()
        prompt = tokens(model, 1, 7, 1)[0]
        maps = lm.run(model, prompt, ["alti_logit", "decompx", "attention"])
        both = {"up to layer 0", "up to layer 1"}
        plain = maps["attention"]
        for m, expected in (
            (maps["alti_logit"], {"added by layer 0", "added by layer 1"}),
            (maps["alti_logit"].layer(-1), {"added by layer 1"}),
            (maps["alti_logit"] - maps["alti_logit"], {"added by layer 0", "added by layer 1"}),
            (maps["decompx"], both),
            (plain, {"layer 0", "layer 1"}),
            (lm.rollout(plain), both),
            (lm.flow(plain), both),
            (lm.flow(plain, layer=-1), {"up to layer 1"}),
            (lm.layer_mean(plain), {"mean of the layers"}),
            (lm.input_map(model, prompt), {"whole model"}),
            (lm.run(model, prompt, "gim") - lm.run(model, prompt, "gim"), {"whole model"}),
            (lm.run(model, prompt, "occlusion"), {"whole model"}),
        ):
            assert {axes.get_title() for axes in heat_maps(layer_maps(m))} == expected

    def test_the_heads_of_one_layer_of_an_input_map_are_titled_for_what_they_are(self) -> None:
        plain = raw_map(heads=2)
        assert "Attention, layer 1" in written(layer_maps(plain, layer=1, head="all"))
        rolled = lm.rollout(plain, per_head=True)
        assert "Attention, rollout, up to layer 1" in written(layer_maps(rolled, layer=1, head="all"))

    def test_a_record_that_a_user_wrote_names_no_layers(self) -> None:
        for record in ({"aggregation": "mine"}, {"difference": 3}, {"aggregation": {"name": "layer_mean"}}):
            figure = layer_maps(raw_map(kind="input", provenance=record))
            assert heat_maps(figure)[1].get_title() == "up to layer 1"

    def test_scores_below_zero_get_a_scale_with_zero_in_the_middle(self) -> None:
        scores = torch.tensor([[[0.5, -2.0], [1.0, 0.0]]])
        figure = layer_maps(MixingMap(scores=scores, tokens=["a", "b"]), normalize=False)
        assert heat_maps(figure)[0].images[0].get_clim() == (-2.0, 2.0)

    def test_a_map_with_other_keys_than_tokens(self) -> None:
        scores = torch.rand(2, 3, 2)
        mixing_map = MixingMap(scores=scores, tokens=["a", "b", "c"], key_tokens=["x", "y"])
        axes = heat_maps(layer_maps(mixing_map))[0]
        assert tick_labels(axes.xaxis) == ["x", "y"]
        assert tick_labels(axes.yaxis) == ["a", "b", "c"]

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_any_dtype(self, dtype: torch.dtype) -> None:
        mixing_map = raw_map()
        figure = layer_maps(mixing_map.replace(scores=mixing_map.scores.to(dtype).requires_grad_()))
        assert len(heat_maps(figure)) == 3

    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"columns": 0}, ValueError, "columns: expected a whole number, 1 or more, got 0"),
            ({"layers": []}, ValueError, "layers: expected at least one"),
            ({"layers": [7]}, ValueError, "layers: layer 7 does not exist; expected 0 to 2, "),
            ({"head": 0}, ValueError, "head: expected a map with heads"),
        ],
    )
    def test_refusals(self, options: dict[str, Any], error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=message):
            layer_maps(raw_map(), **options)

    def test_refuses_what_is_no_map(self) -> None:
        with pytest.raises(TypeError, match="mixing_map: expected a MixingMap, got Tensor"):
            layer_maps(torch.rand(2, 3, 3))  # type: ignore[arg-type]

    def test_signed_maps_are_drawn_around_zero(self) -> None:
        scores = torch.tensor([[[1.0, 0.0], [-3.0, 2.0]]])
        signed = MixingMap(scores=scores, tokens=["a", "b"])
        assert layer_maps(signed).axes[0].images[0].get_clim() == (-3, 3)

    def test_refuses_to_call_negative_scores_shares(self) -> None:
        with pytest.raises(ValueError, match="normalize first"):
            layer_maps(MixingMap(scores=-torch.rand(1, 2, 2), tokens=["a", "b"]), normalize=True)


class TestTokenBars:
    def test_one_row_of_bars_per_method_with_its_numbers(self) -> None:
        rows = {"attention": torch.tensor([0.5, 0.2, 0.1, 0.1, 0.1]), "rollout": torch.arange(5.0)}
        figure = token_bars(rows, TOKENS, title="sources")
        assert len(figure.axes) == 2
        for axes, row in zip(figure.axes, rows.values(), strict=True):
            assert [bar.get_height() for bar in axes.patches] == pytest.approx(row.tolist())
            low, high = axes.get_ylim()
            assert low == 0
            assert high > row.max()
        assert {"attention", "rollout", "sources"} <= set(written(figure))

    def test_tokens_stand_below_the_last_row_only(self) -> None:
        figure = token_bars({"a": torch.rand(5), "b": torch.rand(5)}, TOKENS)
        assert [tick_labels(axes.xaxis) for axes in figure.axes] == [[], SHOWN]

    def test_the_largest_bars_carry_their_value(self) -> None:
        axes = token_bars({"a": torch.tensor([0.5, 0.25, 0.125, 0.1, 0.0])}, TOKENS).axes[0]
        assert [text.get_text() for text in axes.texts] == ["0.50", "0.25", "0.12"]

    def test_a_share_above_90_percent_is_written(self) -> None:
        rows = {
            "sink": torch.tensor([0.99999, 0.00001, 0, 0, 0]),
            "alone": torch.tensor([0.0, 0, 0, 0, 3]),
            "most": torch.tensor([0.08, 0.92, 0, 0, 0]),
            "less": torch.tensor([0.2, 0.8, 0, 0, 0]),
        }
        notes = [
            [text.get_text() for text in axes.texts if " has " in text.get_text()]
            for axes in token_bars(rows, TOKENS).axes
        ]
        assert notes == [
            ["<bos> has more than 99.9 % of this row"],
            ["·$at$ has 100 % of this row"],
            ["The has 92 % of this row"],
            [],
        ]

    def test_rows_of_maps_are_the_last_query_of_the_last_layer(self) -> None:
        mixing_map = raw_map(heads=2)
        axes = token_bars({"a": mixing_map}, TOKENS).axes[0]
        expected = mixing_map.scores[-1].mean(0)[-1]
        assert [bar.get_height() for bar in axes.patches] == pytest.approx(expected.tolist())

    def test_query_and_layer_can_be_chosen(self) -> None:
        mixing_map = raw_map().replace(layers=[3, 5, 7])
        axes = token_bars({"a": mixing_map}, TOKENS, query=1, layer=5).axes[0]
        assert [bar.get_height() for bar in axes.patches] == pytest.approx(mixing_map.scores[1, 1].tolist())

    def test_a_token_that_was_dropped_is_marked_and_the_rest_keeps_its_place(self) -> None:
        mixing_map = raw_map().drop_bos()
        axes = token_bars({"a": mixing_map}, TOKENS, query=2).axes[0]
        heights = [bar.get_height() for bar in axes.patches]
        assert heights == pytest.approx([0.0, *mixing_map.scores[-1, 1].tolist()])
        marks = [text for text in axes.texts if text.get_text() == "–"]
        assert [mark.get_position()[0] for mark in marks] == [0]

    def test_negative_scores_hang_below_zero(self) -> None:
        axes = token_bars({"a": torch.tensor([1.0, -3.0, 0, 0, 0])}, TOKENS).axes[0]
        assert axes.get_ylim()[0] < -3
        assert [text.get_text() for text in axes.texts] == ["-3.00", "1.00"]

    def test_a_row_of_zeros(self) -> None:
        assert token_bars({"a": torch.zeros(5)}, TOKENS).axes[0].texts[:] == []

    def test_labels_neither_overlap_nor_leave_the_figure(self) -> None:
        tokens = [f" word{i}" for i in range(200)]
        names = ["value zeroing rollout, first token dropped, receptive field", "a", "b" * 70]
        figure = token_bars({name: torch.rand(200) for name in names}, tokens, title="a " + "long " * 20)
        figure.canvas.draw()
        labels = figure.axes[-1].get_xticklabels()
        assert len(labels) > 50
        assert not overlaps(figure, labels)
        assert all(inside(figure, text) for text in [*labels, *figure.texts])

    @pytest.mark.parametrize(
        ("rows", "error", "message"),
        [
            ({}, ValueError, "rows: expected at least one row"),
            ({"a": torch.rand(4)}, ValueError, r"rows\['a'\]: expected shape \(5,\), got \(4,\)"),
            ({"a": torch.rand(5, 5)}, ValueError, r"got \(5, 5\)"),
            ({"a": torch.full((5,), torch.inf)}, ValueError, "finite"),
            ({"a": "many"}, TypeError, r"rows\['a'\]: expected scores \[key\] or a MixingMap, got str"),
            ({"a": raw_map(tokens=["x", "y"])}, ValueError, "expected a map over the tokens"),
        ],
    )
    def test_refusals(self, rows: Any, error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=message):
            token_bars(rows, TOKENS)

    def test_refuses_a_query_that_was_dropped(self) -> None:
        with pytest.raises(ValueError, match="query: expected a position that 'a' has, got 0"):
            token_bars({"a": raw_map().drop_bos()}, TOKENS, query=0)


def test_figures_show_themselves_in_notebooks_and_leave_pyplot_alone() -> None:
    code = (
        "import sys, torch, lens_mix.view as view\n"
        "assert 'matplotlib' not in sys.modules\n"
        "figure = view.token_bars({'a': torch.rand(3)}, ['x', 'y', 'z'])\n"
        "assert figure._repr_png_().startswith(b'\\x89PNG')\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_matplotlib_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "lens_mix.view.canvas", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    table = pd.DataFrame(
        {"method": ["attention"], "aggregation": ["-"], "x": [0.5], "x_low": [0], "x_high": [1]}
    )
    for draw in (lambda: layer_maps(raw_map()), lambda: leaderboard_figure(table, "x", "title")):
        with pytest.raises(ImportError, match=r"pip install 'lens_mix\[plots\]'"):
            draw()


def test_a_long_name_keeps_its_commas() -> None:
    name = "value zeroing of a long name, rollout, value zeroing of a long name, rollout"
    assert _break_name(name).replace("\n", " ") == name
