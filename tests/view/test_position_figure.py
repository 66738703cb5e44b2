"""Read one position back from the figure of `lm.show_position`, and compare it with the maps."""

from __future__ import annotations

from typing import Any

import matplotlib
import numpy
import pytest
import torch

import lens_mix as lm
from lens_mix.maps.explained import Explained
from lens_mix.method import RESIDUAL_KEY
from lens_mix.view import show_position
from lens_mix.view.position import PositionView
from tests.random_maps import map_of, random_attention
from tests.view.test_figures import RAW_TOKENS, heat_maps, inside, overlaps, raw_map, tick_labels, written

ITALIAN = Explained(" Italian", 0.66, (), "log probability of ' Italian'", -0.42)


def explained_map(**fields: Any) -> lm.MixingMap:
    m = raw_map(**fields)
    return m.replace(explained=[ITALIAN] * len(m.query_positions))


def data(axes: Any) -> Any:
    return axes.images[0].get_array()


def numbers(axes: Any, heading: str) -> list[str]:
    """Return the numbers below a heading beside a heat map."""
    (column,) = [text.get_position()[0] for text in axes.texts if text.get_text() == heading]
    below = [text for text in axes.texts if text.get_position()[0] == column and text.get_text() != heading]
    return [text.get_text() for text in below]


def test_each_row_is_the_position_in_one_layer_and_two_keys_are_numbers() -> None:
    first, second = raw_map(), raw_map(heads=2)
    figure = show_position({"one": first, "two": second}, query=3)
    for axes, mixing_map in zip(heat_maps(figure), (first, second.merge_heads()), strict=True):
        shares = mixing_map.normalized().scores[:, 3]
        # Key 0 is the first token, key 3 the position itself, and key 4 is not visible.
        assert numpy.allclose(data(axes).filled(-1), shares[:, 1:3], atol=1e-7)
        assert tick_labels(axes.xaxis) == ["The", "·cat"]
        assert numbers(axes, "first") == [f"{100 * share:.0f}%" for share in shares[:, 0].tolist()]
        assert numbers(axes, "own") == [f"{100 * share:.0f}%" for share in shares[:, 3].tolist()]
    assert [axes.get_title("left") for axes in heat_maps(figure)] == ["one", "two"]
    assert [tick_labels(axes.yaxis) for axes in heat_maps(figure)] == [["0", "1", "2"], []]
    assert "What position 3, '\\n', used" in written(figure)


def test_all_keys_can_be_columns() -> None:
    (axes,) = heat_maps(show_position(raw_map(), query=3, as_numbers=False))
    assert numpy.allclose(data(axes).filled(-1), raw_map().normalized().scores[:, 3, :4], atol=1e-7)
    assert axes.texts[:] == []
    # The first position sees itself alone, which is then a column.
    (axes,) = heat_maps(show_position(raw_map(), query=0))
    assert data(axes).tolist() == [[1.0]] * 3


def test_the_title_says_what_is_explained_and_the_sentence_names_the_largest_score() -> None:
    scores = torch.full((3, 5, 5), 0.1).tril()
    scores[:, 4, 0] = scores[:, 4, 4] = 6  # the first token and the position itself do not count
    scores[1, 4, 2] = 5
    m = lm.MixingMap(scores=scores, tokens=RAW_TOKENS, method="value_zeroing", causal=True)
    other = m.replace(scores=torch.ones(3, 5, 5).tril(), method="attention")
    m = m.replace(explained=[ITALIAN] * 5)
    figure = show_position([m, other])
    share = 5 / (12 + 5 + 0.2)
    sentence = (
        f"Layer 1: {100 * share:.0f} % of the Value Zeroing row is from ' cat' (token 2); Attention: 20 %."
    )
    assert {"After ' $at$': ' Italian' 0.66", sentence} <= set(written(figure))
    marks = [[patch.get_xy() for patch in axes.patches] for axes in heat_maps(figure)]
    assert marks == [[(0.5, 0.5)], []]
    assert PositionView.from_maps(m, 0).sentence == ""


def test_a_map_with_one_layer_is_a_colored_text_above_the_others() -> None:
    layers = explained_map()
    whole = layers.layer(-1).replace(kind="input", method="gim", provenance={"whole_model": True})
    figure = show_position({"layers": layers, "input": whole})
    assert len(heat_maps(figure)) == 1
    (text,) = [axes for axes in figure.axes if len(axes.texts) == 6 and not axes.images]
    assert [entry.get_text() for entry in text.texts] == ["<bos>", "The", "cat", "⏎", "$at$", "Italian"]
    shares = whole.normalized().scores[0, -1, 1:4]
    faces = torch.tensor([patch.get_facecolor()[:3] for patch in text.patches[1:4]]).sum(1)
    assert faces.argsort().tolist() == shares.argsort(descending=True).tolist()
    # The first token and the position itself are numbers in the heading, so they have no color.
    assert [text.patches[place].get_facecolor()[:3] for place in (0, 4)] == [(1, 1, 1)] * 2
    heading = next(line for line in written(figure) if line.startswith("input, share of the row"))
    row = whole.normalized().scores[0, -1]
    assert f"first {100 * row[0]:.0f} %, own {100 * row[-1]:.0f} %" in heading
    alone = show_position(whole)
    assert heat_maps(alone) == []
    best = int(shares.argmax())
    sentence = (
        f"{100 * shares[best]:.0f} % of the GIM row is from {RAW_TOKENS[best + 1]!r} (token {best + 1})."
    )
    assert sentence in written(alone)


def test_one_scale_for_shares_of_the_same_size_else_one_for_each() -> None:
    small, large = raw_map(), raw_map()
    large = large.replace(scores=large.scores * 5)
    # Rows of both have the same shares, so the scale is the same.
    limits = {axes.images[0].get_clim() for axes in heat_maps(show_position([small, large]))}
    assert len(limits) == 1
    raw = [axes.images[0].get_clim()[1] for axes in heat_maps(show_position([small, large], normalize=False))]
    assert raw[1] == pytest.approx(5 * raw[0])
    common = show_position([small, large], normalize=False, common_scale=True)
    assert {axes.images[0].get_clim()[1] for axes in heat_maps(common)} == {raw[1]}
    assert "share of the row" in {axes.get_ylabel() for axes in show_position(small).axes}


def test_signed_scores_are_drawn_around_zero() -> None:
    signed = lm.MixingMap(
        scores=torch.tensor([[[1.0, 0, 0], [0, 1, 0], [1, -3.0, 2.0]]] * 2), tokens=list("abc")
    )
    (axes,) = heat_maps(show_position({"signed": signed}))
    assert axes.images[0].get_clim() == (-3, 3)
    assert numbers(axes, "own") == ["2", "2"]
    with pytest.raises(ValueError, match="normalize first"):
        show_position(signed, normalize=True)


def test_a_share_that_rounds_to_nothing_is_named_as_less_than_one_per_cent() -> None:
    scores = [[[0.5, 0.004, 0.496]], [[0.5, 0.003, 0.497]]]
    m = lm.MixingMap(scores=scores, tokens=list("abc"), queries=[2], method="attention", causal=True)
    expected = "Layer 0: less than 1 % of the Attention row is from 'b' (token 1)."
    assert PositionView.from_maps(m).sentence == expected


def test_the_special_tokens_of_an_encoder_are_one_number() -> None:
    tokens = ["[CLS]", "a", "b", "c", "d", "[SEP]"]
    scores = torch.tensor([[[0.3, 0.1, 0.1, 0.06, 0.04, 0.4]], [[0.2, 0.2, 0.1, 0.05, 0.05, 0.4]]])
    m = lm.MixingMap(scores=scores, tokens=tokens, queries=[2], method="attention")
    view = PositionView.from_maps(m)
    assert view.numbers == {"special": [0, 5], "own": [2]}
    assert view.panels[0].total([0, 5]).tolist() == pytest.approx([0.7, 0.6])
    assert view.sentence == "Layer 1: 20 % of the Attention row is from 'a' (token 1)."
    (axes,) = heat_maps(show_position(m))
    assert numbers(axes, "special") == ["70%", "60%"]


def test_the_largest_of_signed_scores_is_named_by_magnitude() -> None:
    m = lm.MixingMap(scores=[[[0.0, 1.0, -3.0, 0.0]]], tokens=list("abcd"), queries=[3], method="gim")
    expected = "Layer 0: the largest score of GIM by magnitude is -3, from 'c' (token 2)."
    assert PositionView.from_maps(m).sentence == expected


def test_the_title_and_the_prediction_are_those_of_the_position() -> None:
    entries = [Explained(f" {name}", 0.5) for name in "vwxyz"]
    m = raw_map().replace(explained=entries)
    some = m.select_queries([3, 1])
    for query, name in ((1, "w"), (3, "y")):
        view = PositionView.from_maps([m, some.replace(method="some")], query)
        assert (view.prediction, view.title.endswith(f"' {name}' 0.50")) == (f" {name}", True)
    target = raw_map().replace(explained=[entry._replace(target="loss", value=2.0) for entry in entries])
    assert PositionView.from_maps([m, target.replace(method="b")]).title.endswith("0.50; loss = 2")


def test_a_position_that_sees_no_key() -> None:
    mask = torch.tensor([[True, True], [False, False]])
    m = lm.MixingMap(scores=[[[1.0, 1.0], [0.0, 0.0]]] * 2, tokens=["a", "b"], mask=mask)
    (axes,) = heat_maps(show_position(m))
    assert numpy.ma.getmaskarray(data(axes)).all()
    assert "<img" in m._repr_html_()
    assert PositionView.from_maps(m).sentence == ""


def test_the_residual_stream_of_a_decoders_position_is_not_its_largest_source() -> None:
    scores = torch.tensor([[[0.1, 0.2, 0.7]]])
    cross = lm.MixingMap(scores, tokens=["a"], key_tokens=["x", "y", RESIDUAL_KEY], method="alti")
    assert PositionView.from_maps(cross).sentence == "Layer 0: 20 % of the ALTI row is from 'y' (key 1)."


def test_an_encoder_and_other_keys_than_tokens() -> None:
    encoder = raw_map(causal=False, default_query=0)
    (axes,) = heat_maps(show_position(encoder))
    assert tick_labels(axes.xaxis) == ["The", "·cat", "⏎", "·$at$"]
    assert axes.texts[0].get_text() == "own"
    cross = lm.MixingMap(scores=torch.rand(2, 3, 2), tokens=["a", "b", "c"], key_tokens=["x", "y"])
    (axes,) = heat_maps(figure := show_position(cross))
    assert tick_labels(axes.xaxis) == ["x", "y"]
    assert axes.texts[:] == []
    assert any("(key " in line for line in written(figure))


def test_words_and_a_crop() -> None:
    tokens = ["<s>", "▁un", "believ", "able", "▁is", "▁it"]
    m = map_of().replace(tokens=tokens)
    (axes,) = heat_maps(show_position(m, words=True))
    assert tick_labels(axes.xaxis) == ["·unbelievable", "·is"]
    expected = m.normalized().merge_words().scores[:, -1, 1:3]
    assert numpy.allclose(data(axes).filled(-1), expected, atol=1e-7)
    (axes,) = heat_maps(show_position(m, keys=[2, 4]))
    assert tick_labels(axes.xaxis) == ["believ", "·is"]
    with pytest.raises(ValueError, match="keys: expected a position from -6 to 5, got 6"):
        show_position(m, keys=[6])


def test_many_methods_are_wrapped_and_names_stand_apart() -> None:
    maps = {f"a method with a long name {index} " * 2: raw_map() for index in range(5)}
    figure = show_position(maps, columns=2)
    figure.canvas.draw()
    lefts = {round(axes.get_position().x0, 3) for axes in heat_maps(figure)}
    assert len(lefts) == 2
    titles = [axes.get_children() and axes._left_title for axes in heat_maps(figure)]
    assert not overlaps(figure, titles[:2])


@pytest.mark.parametrize("size", [2, 8, 60, 200])
@pytest.mark.parametrize("count", [1, 3])
def test_nothing_leaves_the_figure_and_no_labels_overlap(size: int, count: int) -> None:
    tokens = [f" word{index}" for index in range(size - 1)] + [" internationalisation"]
    maps = {f"method {index}": explained_map(layers=12, tokens=tokens) for index in range(count)}
    figure = show_position({**maps, "input": explained_map(layers=1, tokens=tokens)})
    figure.canvas.draw()
    for axes in heat_maps(figure):
        for axis in (axes.xaxis, axes.yaxis):
            labels = axis.get_ticklabels()
            assert not overlaps(figure, labels)
            assert all(inside(figure, label) for label in labels)
        assert all(inside(figure, text) for text in axes.texts)
    assert all(inside(figure, text) for text in figure.texts)
    blocks = [axes for axes in figure.axes if axes.patches and axes not in heat_maps(figure)]
    assert all(inside(figure, text) for axes in blocks for text in axes.texts)


def test_axes_of_a_user_a_size_and_a_color_map() -> None:
    from matplotlib.figure import Figure

    theirs = Figure()
    left, right = theirs.subplots(1, 2)
    assert show_position(raw_map(), ax=right) is theirs
    assert (len(left.images), len(right.images)) == (0, 1)
    with pytest.raises(
        ValueError, match="ax: expected a figure with one panel to draw in axes, got 2 panels"
    ):
        show_position([raw_map(), raw_map()], ax=left)
    with pytest.raises(TypeError, match="ax: expected axes of matplotlib"):
        show_position(raw_map(), ax=theirs)
    with pytest.raises(ValueError, match="figsize: expected None beside ax="):
        show_position(raw_map(), ax=left, figsize=(3, 3))
    assert show_position(raw_map(), figsize=(5, 4)).get_size_inches().tolist() == [5, 4]
    with pytest.raises(ValueError, match=r"figsize: expected at least .* inches for these labels, got 1"):
        show_position(raw_map(), figsize=(1, 1))
    (axes,) = heat_maps(show_position(raw_map(), cmap="viridis"))
    assert axes.images[0].get_cmap()(1.0) == matplotlib.colormaps["viridis"](1.0)
    with pytest.raises(ValueError, match=r"cmap: expected a name in matplotlib\.colormaps"):
        show_position(raw_map(), cmap="nothing")


@pytest.mark.parametrize("query", [5, -6, True, 2.5])
def test_refuses_positions_that_are_not_there(query: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="query: expected a position from -5 to 4"):
        show_position({"one": raw_map()}, query=query)


def test_a_query_can_be_a_token() -> None:
    by_token = data(heat_maps(show_position(raw_map(), query=" cat"))[0])
    assert by_token.tolist() == data(heat_maps(show_position(raw_map(), query=2))[0]).tolist()
    with pytest.raises(ValueError, match="query: expected a text that the prompt contains"):
        show_position(raw_map(), query=" dog")


def test_refuses_maps_that_do_not_match() -> None:
    with pytest.raises(ValueError, match=r"maps\['two'\]: expected the same tokens .* got \['a', 'b'\]"):
        show_position({"one": raw_map(), "two": raw_map(tokens=["a", "b"])})
    with pytest.raises(ValueError, match=r"maps\['two'\]: expected the same layers .* got \[0, 1\]"):
        show_position({"one": raw_map(), "two": raw_map(layers=2)})
    with pytest.raises(ValueError, match=r"maps\['two'\], query: expected one of the rows"):
        show_position({"one": raw_map(), "two": raw_map().select_queries([1])}, query=2)
    for nothing in ({}, []):
        with pytest.raises(ValueError, match="maps: expected at least one"):
            show_position(nothing)
    with pytest.raises(TypeError, match=r"maps\['one'\]: expected a MixingMap"):
        show_position({"one": torch.rand(3, 3)})  # type: ignore[dict-item]


def test_names_of_a_list_are_those_of_the_methods() -> None:
    zeroing = raw_map().replace(method="value_zeroing")
    figure = show_position([zeroing, zeroing, raw_map()])
    names = [axes.get_title("left") for axes in heat_maps(figure)]
    assert names == ["Value Zeroing (1)", "Value Zeroing (2)", "Attention"]


def test_the_row_that_is_meant() -> None:
    meant = map_of(default_query=2)
    assert "What position 2, ' t2', used" in written(show_position({"a": map_of(), "b": meant}))


def test_a_map_of_the_whole_model_has_no_layer_in_its_sentence() -> None:
    one = raw_map(kind="input", method="gim", provenance={"whole_model": True}).layer(-1)
    assert PositionView.from_maps(one).sentence.split(" of the GIM row")[0].endswith(" %")
    assert PositionView.from_maps(raw_map(kind="input")).sentence.startswith("Up to layer ")


def sink_map(share: float, layers: int = 2, name: str = "attention") -> lm.MixingMap:
    """Return a map whose last row has a share for a token, half of it for two, and the rest for the first."""
    scores = torch.zeros(layers, 6, 6, dtype=torch.float64)
    scores[:, range(6), range(6)] = 1
    scores[:, -1] = torch.tensor([0, share / 2, share, share / 2, 0, 0], dtype=torch.float64)
    scores[:, -1, 0] = 1 - 2 * share
    return lm.MixingMap(scores=scores, tokens=list("abcdef"), causal=True, method=name)


@pytest.mark.parametrize("layers", [1, 2])
def test_noise_beside_a_first_token_with_nearly_everything_is_not_colored(layers: int) -> None:
    def drawn(share: float) -> tuple[float, str]:
        figure = show_position(sink_map(share, layers))
        text = " ".join(written(figure)).replace("\n", " ")
        if layers > 1:
            (axes,) = heat_maps(figure)
            return axes.images[0].norm(data(axes)).max(), text
        boxes = figure.findobj(matplotlib.patches.FancyBboxPatch)
        return max(1 - min(box.get_facecolor()[:3]) for box in boxes), text

    strength, text = drawn(0.0005)
    assert strength < 0.03
    assert "no other token has more than 0.05 %, so none is colored" in text
    strength, text = drawn(0.02)
    assert strength > 0.9
    assert "none is colored" not in text


def test_noise_has_a_scale_of_its_own_beside_a_map_with_findings() -> None:
    maps = {"noise": sink_map(0.0005), "finding": sink_map(0.3)}
    noise, finding = heat_maps(show_position(maps))
    assert noise.images[0].norm.vmax == pytest.approx(1)
    assert finding.images[0].norm.vmax == pytest.approx(0.3)


def test_heat_maps_beside_each_other_label_the_same_tokens() -> None:
    one, two = (map_of(random_attention(layers=3, heads=None, size=90, seed=seed)) for seed in (1, 2))
    first, second = heat_maps(show_position({"one": one, "two": two}))
    assert tick_labels(first.xaxis) == tick_labels(second.xaxis)
    assert 5 < len(tick_labels(first.xaxis)) < 60
    # The strongest token of each map is among them.
    for m in (one, two):
        column = int(m.scores[:, -1, 1:-1].amax(0).argmax()) + 1
        assert any(m.tokens[column].strip() in label for label in tick_labels(first.xaxis))


def test_figures_have_the_same_scale_with_vmax() -> None:
    m = explained_map()
    figure = show_position(m, vmax=0.05)
    (panel,) = heat_maps(figure)
    assert panel.images[0].get_clim() == (0, 0.05)
    assert panel.images[0].colorbar.extend == "max"
    wide = heat_maps(show_position(m, vmax=2))[0].images[0]
    assert (wide.get_clim(), wide.colorbar.extend) == ((0, 2), "neither")
    signed = heat_maps(show_position(m.replace(scores=(m.scores - 0.3).tril()), vmax=0.05))[0].images[0]
    assert (signed.get_clim(), signed.colorbar.extend) == ((-0.05, 0.05), "both")
    two = show_position({"one": m, "two": m}, vmax=0.05, common_scale=False)
    assert [panel.images[0].get_clim() for panel in heat_maps(two)] == [(0, 0.05)] * 2
    assert sum(text.get_text() == "≥ 0.05" for text in two.texts) == 2
    logarithmic = heat_maps(show_position(m, vmax=0.05, scale="log"))[0].images[0]
    assert logarithmic.get_clim() == pytest.approx((0.05e-4, 0.05))
    with pytest.raises(ValueError, match="vmax: expected a finite number, above 0, got -1"):
        show_position(m, vmax=-1)


def test_a_figure_for_a_column_of_a_paper() -> None:
    m = explained_map()
    figure = show_position({"one": m, "two": m.replace(scores=(m.scores - 0.3).tril())}, style="paper")
    assert figure.get_size_inches()[0] == pytest.approx(3.3)
    first, second = heat_maps(figure)
    assert first.get_position().x0 == second.get_position().x0
    assert not first.patches, "no frame"
    assert not [text for text in figure.texts if "After" in text.get_text()]
    for axes in (first, second):
        colors = axes.images[0].get_cmap()(torch.linspace(0, 1, 9).numpy())
        # A printer without colors loses nothing: each color is gray, and no two are the same.
        assert (colors[:, 0] == colors[:, 1]).all()
        assert (colors[:, 1] == colors[:, 2]).all()
        assert (colors[1:, 0] < colors[:-1, 0]).all()
        assert {label.get_fontsize() for label in axes.get_yticklabels()} == {8}
    assert show_position(m, style="paper", title="mine").texts[0].get_text() == "mine"
    assert tuple(show_position(m, style="paper", figsize=(5, 3)).get_size_inches()) == pytest.approx((5, 3))
