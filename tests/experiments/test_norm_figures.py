"""Compare the figures of norm-based tables with the tables."""

import pandas as pd
import pytest

from lens_mix.experiments import norm_figures


def ratios():
    rows = [
        (layer, stage, token, 0.1 * layer + 0.2, 0, position)
        for layer in (0, 1)
        for stage in ("attn_w", "attn_res_ln")
        for position, token in enumerate(("[CLS]", "cat", "$."))
    ]
    return pd.DataFrame(rows, columns=["layer", "stage", "token", "ratio", "prompt", "position"])


def test_mixing_by_layer_draws_a_line_per_stage():
    table = ratios()
    table.loc[table["stage"] == "attn_w", "ratio"] += 0.5
    axes = norm_figures.mixing_by_layer(table).axes[0]
    assert [list(line.get_ydata()) for line in axes.lines] == [
        pytest.approx([0.7, 0.8]),
        pytest.approx([0.2, 0.3]),
    ]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "weights (AttnW)",
        "… + norm (AttnResLn)",
    ]


def test_stages_that_are_one_and_the_same_share_a_line():
    table = ratios()
    table = pd.concat([table, table[table["stage"] == "attn_res_ln"].assign(stage="attn_res")])
    table.loc[table["stage"] == "attn_w", "ratio"] += 0.5
    axes = norm_figures.mixing_by_layer(table).axes[0]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "weights (AttnW)",
        "vectors + residual (AttnRes)\n= … + norm (AttnResLn)",
    ]
    assert [list(line.get_ydata()) for line in axes.lines] == [
        pytest.approx([0.7, 0.8]),
        pytest.approx([0.2, 0.3]),
    ]


def test_mixing_by_kind_draws_a_bar_per_kind_and_stage():
    axes = norm_figures.mixing_by_kind(ratios()).axes[0]
    assert len(axes.patches) == 6
    assert [text.get_text() for text in axes.get_xticklabels()] == [
        "other (1)",
        "punctuation (1)",
        "special (1)",
    ]


def test_weights_against_norms_names_the_heaviest_token():
    table = pd.DataFrame({"layer": [0, 0], "token": ["$x", "b"], "weight": [0.9, 0.1], "norm": [0.1, 3.0]})
    figure = norm_figures.weights_against_norms(table, named=1)
    assert [text.get_text() for text in figure.axes[0].texts] == ["$x, layer 0"]
    dots, rings = figure.axes[0].collections
    assert dots.get_offsets().tolist() == [[0.1, 0.9], [3.0, 0.1]]
    assert rings.get_offsets().tolist() == [[0.1, 0.9]]


def test_dots_of_one_token_share_what_is_written():
    table = pd.DataFrame(
        {"layer": [3, 1, 0], "token": ["a", "a", "b"], "weight": [0.9, 0.8, 0.1], "norm": [0.1, 0.2, 3.0]}
    )
    axes = norm_figures.weights_against_norms(table, named=2).axes[0]
    assert [text.get_text() for text in axes.texts] == ["a, layers 1, 3"]
    assert tuple(axes.texts[0].xy) == pytest.approx((0.2, 0.85))


def test_expansion_rates_and_contextualisation_draw_their_tables():
    rates = pd.DataFrame({"layer": [0, 0, 0], "head": [0, 1, "all"], "rate": [0.5, 0.7, 1.2]})
    image = norm_figures.expansion_rates(rates).axes[0].images[0]
    assert image.get_array().tolist() == [[0.5, 0.7]]
    parts = pd.DataFrame({name: [0.1, 0.2] for name in ("feed_forward", "residual", "norm", "whole")})
    assert len(norm_figures.contextualisation(parts).axes[0].lines) == 4


def test_a_kind_with_dollar_signs_is_no_formula():
    table = pd.DataFrame({"layer": [0, 0], "token": ["x", "b"], "weight": [0.9, 0.1], "norm": [0.1, 3.0]})
    figure = norm_figures.weights_against_norms(table, kind=lambda token: f"$x^{{{token}}}$")
    assert not any(text.get_parse_math() for text in figure.axes[0].get_legend().get_texts())
    figure.canvas.draw()


def test_a_table_of_something_else_is_refused():
    with pytest.raises(ValueError, match=r"table: expected a table with the columns .*, missing \['ratio'\]"):
        norm_figures.mixing_by_layer(pd.DataFrame({"layer": [0], "stage": ["attn_w"]}))
