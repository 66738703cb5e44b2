"""Test the first view of the page in a browser: the prediction, the colored text, and layers by tokens."""

from __future__ import annotations

import functools
import itertools
import json

import pytest
import torch

import lens_mix as lm
from lens_mix.maps.explained import Explained
from tests.browser import NEEDS_CHROMIUM, chromium  # noqa: F401
from tests.random_maps import map_of, random_attention
from tests.view.page.test_in_a_browser import (
    all_of,
    color_at,
    doing,
    exported,
    geometry,
    number_in,
    open_pages,  # noqa: F401
    percent,
    ramp,
    rows_of,
    tip_of,
)

pytestmark = NEEDS_CHROMIUM

TARGET = "log probability of ' next5'"


def explained(size=6, target=None):
    """Return one entry per row; only the last one has a target."""
    return tuple(
        Explained(
            f" next{position}",
            (position + 1) / 10,
            ((" a", 0.05), (" b", 0.04), (" c", 0.003)),
            *((target, -0.51) if target and position == size - 1 else ()),
        )
        for position in range(size)
    )


@pytest.fixture(scope="module")
def maps():
    """Return two layer maps, the recommended input map of the last row, and a rollout."""
    attention = map_of(random_attention(heads=2), explained=explained(), provenance={"model": "tiny"})
    zeroing = map_of(random_attention(seed=1), method="value_zeroing", explained=explained())
    recommended = lm.MixingMap(
        torch.tensor([[[0.5, 0.1, 0.8, 0.0, 0.2, 0.4]]]),
        attention.tokens,
        method="token_patching",
        causal=True,
        kind="input",
        queries=[5],
        provenance={"whole_model": True, "input_map": {"recipe": "token_patching", "figures": "0.5"}},
        explained=explained(target=TARGET)[5:],
    )
    maps = {"attention": attention, "value_zeroing": zeroing, "recommended": recommended}
    return {**maps, "rollout": lm.rollout(attention)}


def text(browser, selector):
    return browser.find_element("css selector", selector).get_property("textContent")


def strongest_cell(m, query):
    """Return the share, the layer and the key of the strongest cell without the first token and `query`."""
    rows = m.merge_heads().normalized().scores[:, query].clone()
    rows[:, [0, query]] = 0
    layer, key = divmod(int(rows.argmax()), rows.shape[1])
    return rows[layer, key].item(), layer, key


def test_it_opens_on_the_prediction_and_the_target(opened, maps):
    browser = opened(maps, "")
    assert text(browser, "#asked") == "The model continues with"
    assert text(browser, "#prediction") == "“ next5” 60 %"
    assert text(browser, "#others").startswith(
        f"then “ a” 5.0 % · “ b” 4.0 % · “ c” 0.3 % — explained: {TARGET} = −0.51"
    )
    assert text(browser, "#model") == "tiny · 4 layers · 6 tokens"
    # The predicted token has its box after the last token of the text.
    assert text(browser, "#tokens .next") == "next5"
    order = "return [...document.querySelectorAll('#tokens .token, #tokens .next')].pop().className"
    assert browser.execute_script(order) == "next"


def test_the_text_has_the_colors_of_the_recommended_map(opened, maps):
    browser = opened(maps, "")
    share = maps["recommended"].normalized().scores[0, 0]
    boxes = all_of(browser, "#tokens .token")
    assert "recommended map: token patching" in text(browser, "#text-legend")
    assert f"first token {percent(share[0])}, not colored" in text(browser, "#text-legend")
    assert f"most: “ t2” {percent(share[2])}, “ t5” {percent(share[5])}" in text(browser, "#text-legend")
    for key, box in enumerate(boxes):
        assert f"{percent(share[key])} of the row" in tip_of(browser, box)
        assert (f", {percent(share[key])}" in box.get_attribute("aria-label")) is True
        if key:
            # The scale ends at the largest number besides the first token and the position itself.
            expected = ramp(browser, min(1.0, share[key] / share[2]))
            assert background(browser, box) == expected
    assert "pale" in boxes[0].get_attribute("class")


def background(browser, box):
    color = browser.execute_script("return getComputedStyle(arguments[0]).backgroundColor", box)
    return [int(channel) for channel in color[4:-1].split(",")]


def test_another_position_is_explained_by_a_click(opened, maps):
    browser = opened(maps, "")
    doing(browser, all_of(browser, "#tokens .token")[3].click)
    assert text(browser, "#asked") == "After “ t3” (token 3) the model continues with"
    assert text(browser, "#prediction") == "“ next3” 40 %"
    assert "explained:" not in text(browser, "#others")
    # The recommended map has no such row, and a rollout has no score, so that a layer map colors the text.
    mean = maps["value_zeroing"].normalized().scores[:, 3].mean(0)
    legend = text(browser, "#text-legend")
    assert "Value Zeroing, mean of the layers" in legend
    assert legend.endswith(
        " · the recommended map has only the last position: "
        "lm.input_map(model, prompt, queries=[3]) computes this one"
    )
    boxes = all_of(browser, "#tokens .token")
    assert_shares(browser, mean, 3)
    chosen = [box.get_attribute("aria-selected") for box in boxes]
    assert chosen == ["true" if key == 3 else "false" for key in range(6)]
    # Attention colors the text only if there is no other layer map.
    alti = map_of(random_attention(seed=2), method="alti", residual=0.0)
    for name, others in (("ALTI", {"alti": alti}), ("Attention", {})):
        browser = opened({"attention": maps["attention"], **others}, "query=3")
        assert f"{name}, mean of the layers" in text(browser, "#text-legend")
        assert "recommended" not in text(browser, "#text-legend")
    only = {"rollout": maps["rollout"]}
    browser = opened(only, "query=3")
    assert "rollout, up to layer 3" in text(browser, "#text-legend")
    assert_shares(browser, maps["rollout"].normalized().scores[-1, 3], 3)
    # An input map of a method with a score is preferred to a layer map.
    gim = maps["rollout"].replace(method="gim", provenance={"whole_model": True}).select_layers([3])
    browser = opened({"attention": maps["attention"], "gim": gim}, "query=3")
    assert "GIM, whole model" in text(browser, "#text-legend")
    assert_shares(browser, gim.normalized().scores[0, 3], 3)


def assert_shares(browser, share, query):
    """Assert that the text has these shares, and no number for the keys after the query."""
    for key, box in enumerate(all_of(browser, "#tokens .token")):
        said = tip_of(browser, box)
        assert (percent(share[key]) if key <= query else "cannot see") in said


@pytest.mark.parametrize("query", [5, 3])
def test_one_sentence_says_the_strongest_thing(opened, maps, query):
    browser = opened(maps, f"query={query}")
    both = [maps["attention"], maps["value_zeroing"]]
    found = [strongest_cell(m, query) for m in both]
    best = 0 if found[0][0] > found[1][0] else 1
    share, layer, key = found[best]
    title, other = ("Attention", "Value Zeroing")[best], ("Attention", "Value Zeroing")[1 - best]
    position = "the last position" if query == 5 else "“ t3” (token 3)"
    head = " (mean of heads)" if best == 0 else ""
    row = both[1 - best].merge_heads().normalized().scores[layer, query]
    rest = max((row[0], "the first token"), (row[query], "the position itself"))
    assert text(browser, "#finding") == (
        f"In layer {layer} {position} takes {percent(share)} of its {title} row{head} "
        f"from “ t{key}” (token {key}). "
        f"{other} gives it {percent(row[key])} there and {percent(rest[0])} to {rest[1]}."
    )
    # The layer of the sentence is the one that the control shows.
    assert text(browser, "#layer-name") == str(layer)


def test_panels_have_the_values_of_the_maps(opened, maps):
    browser = opened(maps, "query=5")
    panels = all_of(browser, "canvas[data-panel]")
    assert [panel.get_attribute("data-panel") for panel in panels] == ["attention", "value_zeroing"]
    lines = [line.text for line in all_of(browser, ".panel .line")]
    assert lines[0] == "how much a position attends to each token"
    for panel, name in zip(panels, ("attention", "value_zeroing"), strict=True):
        raw, share = (
            m.merge_heads().scores[:, 5] for m in (maps[name], maps[name].merge_heads().normalized())
        )
        left, top, across, down = geometry(panel)
        keys = json.loads(panel.get_attribute("data-geometry"))["keys"]
        # The first token and the position itself are numbers beside the map, and not drawn.
        assert keys == [1, 2, 3, 4]
        largest = share[:, 1:5].max()
        for layer in range(4):
            for column, key in enumerate(keys):
                x, y = left + (column + 0.5) * across, top + (layer + 0.5) * down
                said = tip_of(browser, panel, x, y)
                assert said.startswith(f"layer {layer}")
                assert f"{key} “t{key}”" in said
                assert number_in(said, "raw score") == pytest.approx(raw[layer, key].item(), abs=2e-3)
                whole = 100 * share[layer, key].item()
                assert number_in(said, "% share") == pytest.approx(whole, abs=0.06 if whole < 9.9 else 0.51)
                inside = left + (column + 0.25) * across
                assert color_at(browser, panel, inside, y) == ramp(browser, share[layer, key] / largest)
        written = json.loads(panel.get_attribute("data-numbers"))
        assert written == [[whole_percent(row[0]), whole_percent(row[5])] for row in share]
    table = rows_of(browser)
    assert len(table) == 2 * 4 * 6
    for row in table:
        m = maps[row["map"]].merge_heads()
        layer, key = int(row["layer"]), int(row["key"])
        assert float(row["value"]) == pytest.approx(m.scores[layer, 5, key].item(), abs=2e-3)
        assert float(row["share"]) == pytest.approx(m.normalized().scores[layer, 5, key].item(), abs=2e-3)


def whole_percent(share):
    """Return a share as it is written beside a map."""
    whole = round(100 * float(share))
    return f"{whole}%" if whole or not share else "<1%"


def test_switches_draw_the_first_token_and_the_position_itself(opened, maps):
    browser = opened(maps, "query=4")
    for option, expected in (("first", [0, 1, 2, 3]), ("diagonal", [0, 1, 2, 3, 4])):
        switch = browser.find_element("css selector", f"button[data-option={option}]")
        assert switch.get_attribute("aria-pressed") == "true"
        doing(browser, switch.click)
        panel = browser.find_element("css selector", "canvas[data-panel=value_zeroing]")
        assert json.loads(panel.get_attribute("data-geometry"))["keys"] == expected
    doing(browser, browser.find_element("css selector", "button[data-value=raw]").click)
    panel = browser.find_element("css selector", "canvas[data-panel=value_zeroing]")
    left, top, across, down = geometry(panel)
    raw = maps["value_zeroing"].scores[:, 4]
    for layer in range(4):
        found = color_at(browser, panel, left + 0.25 * across, top + (layer + 0.5) * down)
        assert found == ramp(browser, raw[layer, 0] / raw.max())


def test_a_click_reads_a_cell_by_every_method(opened, maps):
    browser = opened(maps, "query=5")
    panel = browser.find_element("css selector", "canvas[data-panel=value_zeroing]")
    left, top, across, down = geometry(panel)
    click = (
        "const [canvas, x, y] = arguments, box = canvas.getBoundingClientRect();"
        "canvas.dispatchEvent(new MouseEvent('click', {clientX: box.left + x, clientY: box.top + y}))"
    )
    doing(browser, lambda: browser.execute_script(click, panel, left + 1.5 * across, top + 2.5 * down))
    shares = [
        maps[name].merge_heads().normalized().scores[2, 5, 2] for name in ("attention", "value_zeroing")
    ]
    heads = maps["attention"].normalized().scores[2, :, 5, 2]
    best = int(heads.argmax())
    reading = (
        f"Layer 2, “ t2” (token 2): Attention {percent(shares[0])} (head {best}: {percent(heads[best])}) "
        f"· Value Zeroing {percent(shares[1])}."
    )
    assert text(browser, "#reading") == reading
    assert text(browser, "#layer-name") == "2"
    assert "layer=2" in browser.current_url
    # The sentence still has the strongest thing.
    assert text(browser, "#finding").startswith("In layer")


def test_arrow_keys_move_the_cell_of_a_panel(opened, maps):
    from selenium.webdriver.common.keys import Keys

    browser = opened(maps, "query=5&layer=1&key=2")
    panel = browser.find_element("css selector", "canvas[data-panel=attention]")
    for key, layer, token in ((Keys.ARROW_DOWN, 2, 2), (Keys.ARROW_RIGHT, 2, 3), (Keys.ARROW_UP, 1, 3)):
        doing(browser, lambda key=key: panel.send_keys(key))
        assert text(browser, "#reading").startswith(f"Layer {layer}, “ t{token}” (token {token}):")
        assert f"Chosen: layer {layer}, t{token}," in panel.get_attribute("aria-label")
    share, layer, key = strongest_cell(maps["attention"], 5)
    words = browser.find_element("id", panel.get_attribute("aria-describedby")).get_property("textContent")
    assert words.startswith(f"Strongest: layer {layer}, t{key}, token {key}, {percent(share)};")


def test_the_pointer_links_the_text_and_the_panels(opened, maps):
    browser = opened(maps, "query=5")
    tip_of(browser, all_of(browser, "#tokens .token")[3])
    guides = all_of(browser, ".guide")
    assert len(guides) == 2
    for guide, panel in zip(guides, all_of(browser, "canvas[data-panel]"), strict=True):
        left, top, across, down = geometry(panel)
        # The columns are those of tokens 1 to 4, so that token 3 has the third one.
        assert guide.rect["x"] == pytest.approx(panel.rect["x"] + left + 2 * across, abs=1.5)
        assert guide.rect["width"] == pytest.approx(across, abs=1.5)
    tip_of(browser, panel, left + 1.5 * across, top + 0.5 * down)
    assert [box.get_attribute("data-key") for box in all_of(browser, "#tokens .linked")] == ["2"]


def test_no_column_stays_marked_after_another_position_is_chosen(opened, maps):
    browser = opened(maps, "query=5")
    token = all_of(browser, "#tokens .token")[3]
    shown = "return [...document.querySelectorAll('.guide')].map(guide => !guide.hidden)"
    tip_of(browser, token)
    assert browser.execute_script(shown) == [True, True]
    doing(browser, lambda: browser.execute_script("arguments[0].click()", token))
    assert browser.execute_script(shown) == [False, False]
    # The pointer marks a column again at its next move, of the same token too.
    tip_of(browser, all_of(browser, "#tokens .token")[2])
    assert browser.execute_script(shown) == [True, True]
    doing(browser, lambda: browser.execute_script("set({ unit: 'raw' })"))
    assert browser.execute_script(shown) == [False, False]
    tip_of(browser, all_of(browser, "#tokens .token")[2])
    assert browser.execute_script(shown) == [True, True]


@pytest.mark.parametrize(
    ("scale", "parts"), [("root", (0, 0.25)), ("linear", (0, 0.5)), ("log", (1e-4, 0.01))]
)
def test_the_legend_has_the_numbers_of_its_colors(opened, maps, scale, parts):
    only = {"value_zeroing": maps["value_zeroing"]}
    browser = opened(only, f"query=5&scale={scale}")
    largest = maps["value_zeroing"].normalized().scores[:, 5, 1:5].max()
    low, middle = (percent(part * largest) for part in parts)
    expected = ["0" if scale != "log" else f"≤ {low}", middle, percent(largest)]
    assert [tick.text for tick in all_of(browser, ".panel .ticks span")] == expected
    assert browser.find_element("css selector", ".panel .scale").text.endswith("of the row")


def test_heads_and_compared_methods_are_chosen(opened, maps):
    browser = opened(maps, "query=5&head=1")
    share = maps["attention"].head(1).normalized().scores[:, 5]
    panel = browser.find_element("css selector", "canvas[data-panel=attention]")
    left, top, across, down = geometry(panel)
    said = tip_of(browser, panel, left + 0.5 * across, top + 0.5 * down)
    assert "head 1" in said
    assert f"{percent(share[0, 1])} share of the row" in said
    buttons = all_of(browser, "[data-compare]")
    assert [button.text for button in buttons] == ["Attention", "Value Zeroing", "rollout"]
    assert [button.get_attribute("aria-pressed") for button in buttons] == ["true", "true", "false"]
    doing(browser, buttons[2].click)
    doing(browser, all_of(browser, "[data-compare]")[0].click)
    panels = all_of(browser, "canvas[data-panel]")
    assert [panel.get_attribute("data-panel") for panel in panels] == ["value_zeroing", "rollout"]
    left, top, across, down = geometry(panels[1])
    assert tip_of(browser, panels[1], left + 1, top + 1).startswith("up to layer 0\n")


def test_a_space_is_on_the_line_of_its_token(opened):
    """No box of a token is broken, or begins a line with the end of another line's token."""
    words = [" ", *(f" word{i}" if i % 3 else f"part{i}" for i in range(60))]
    browser = opened(map_of(random_attention(layers=1, size=len(words)), tokens=words), "")
    boxes = all_of(browser, "#tokens .token")
    for box in boxes:
        assert len(browser.execute_script("return [...arguments[0].getClientRects()]", box)) == 1
    assert len({box.rect["y"] for box in boxes}) > 1


def test_an_encoder_is_explained_at_a_position(opened):
    tokens = ["[CLS]", "a", "[MASK]", "film", "##s", "[SEP]"]
    classes = (Explained("positive", 0.9, (("negative", 0.1),), "logit of class 'positive'", 2.5),)
    m = lm.MixingMap(
        random_attention(heads=2, causal=False),
        tokens,
        method="attention",
        default_query=0,
        explained=[*classes, None, Explained(" good", 0.7), None, None, None],
    )
    browser = opened(m, "")
    assert text(browser, "#question") == "Which tokens did the model use?"
    assert text(browser, "#asked") == "At “[CLS]” (token 0) the model predicts"
    assert text(browser, "#prediction") == "“positive” 90 %"
    assert "explained: logit of class 'positive' = 2.5" in text(browser, "#others")
    # Special tokens are numbers beside the map, as the first token of a decoder is.
    panel = browser.find_element("css selector", "canvas[data-panel]")
    assert json.loads(panel.get_attribute("data-geometry"))["keys"] == [1, 3, 4]
    rest = m.merge_heads().normalized().scores[:, 0]
    share, place = rest[:, [1, 3, 4]].max(-1)[0].max(0)
    assert text(browser, "#finding").startswith(
        f"In layer {int(place)} “[CLS]” (token 0) takes {percent(share)} of its Attention row (mean of heads)"
    )
    doing(browser, all_of(browser, "#tokens .token")[2].click)
    assert text(browser, "#prediction") == "“ good” 70 %"
    doing(browser, all_of(browser, "#tokens .token")[3].click)
    assert text(browser, "#asked") == "This page explains"
    assert text(browser, "#prediction") == "“film” token 3"
    assert not all_of(browser, "#tokens .next")
    # WordPiece tokens have no spaces, so that the words are set apart, and pieces of a word are not.
    boxes = [box.rect for box in all_of(browser, "#tokens .token")]
    gaps = [right["x"] - left["x"] - left["width"] for left, right in itertools.pairwise(boxes)]
    assert [gap > 3 for gap in gaps] == [True, True, True, False, True]


def test_cross_attention_colors_the_other_text(opened):
    scores = torch.rand(3, 2, 4, generator=torch.Generator().manual_seed(1))
    cross = lm.MixingMap(
        scores, ["<s>", " le"], key_tokens=[" the", " cat", " sat", "</s>"], method="attention"
    )
    browser = opened({"cross": cross.replace(provenance={"part": "cross"})}, "")
    share = cross.normalized().scores[:, 1]
    boxes = all_of(browser, "#sources .token")
    assert [box.text.strip() for box in boxes] == ["the", "cat", "sat", "</s>"]
    for key, box in enumerate(boxes):
        assert f"{percent(share.mean(0)[key])} of the row" in tip_of(browser, box)
    panel = browser.find_element("css selector", "canvas[data-panel]")
    assert json.loads(panel.get_attribute("data-geometry"))["keys"] == [0, 1, 2]
    best = share[:, :3].max()
    layer, key = divmod(int(share[:, :3].argmax()), 3)
    assert text(browser, "#finding").startswith(f"In layer {layer} the last position takes {percent(best)}")
    assert f"(token {key})" in text(browser, "#finding")


def test_several_texts_of_one_prompt_are_listed(opened):
    m = map_of()
    encoder = lm.MixingMap(
        random_attention(size=3, causal=False), ["x", "y", "z"], provenance={"part": "encoder"}
    )
    browser = opened({"decoder": m.replace(provenance={"part": "decoder"}), "encoder": encoder}, "")
    options = [option.text for option in all_of(browser, "#prompt option")]
    assert options == ["prompt 1 of 1, decoder: t0 t1 t2 t3 t4 t5", "prompt 1 of 1, encoder: x y z"]
    choose = "const box = arguments[0]; box.value = 1; box.dispatchEvent(new Event('change'))"
    doing(browser, lambda: browser.execute_script(choose, browser.find_element("id", "prompt")))
    assert [box.text for box in all_of(browser, "#tokens .token")] == ["x", "y", "z"]
    assert [panel.get_attribute("data-panel") for panel in all_of(browser, "canvas[data-panel]")] == [
        "encoder"
    ]


def test_signed_maps_have_two_colors_and_a_negative_sign(opened):
    m = map_of(random_attention() - 0.3 * torch.ones(6, 6).tril(), method="attention_attribution")
    browser = opened(m, "query=5", trees={})
    rows = m.scores[:, 5] / m.scores[:, 5].abs().sum(-1, keepdim=True)
    cells = rows[:, 1:5]
    layer, key = divmod(int(cells.abs().argmax()), 4)
    best = cells[layer, key]
    sign = ", with a negative sign" if best < 0 else ""
    assert f"takes {percent(best.abs())} of its" in text(browser, "#finding")
    assert text(browser, "#finding").endswith(f"(token {key + 1}){sign}.")
    panel = browser.find_element("css selector", "canvas[data-panel]")
    left, top, across, down = geometry(panel)
    for place in range(4):
        for column in range(4):
            red, _, blue = color_at(
                browser, panel, left + (column + 0.25) * across, top + (place + 0.5) * down
            )
            assert (blue > red) == (cells[place, column] > 0)


def test_a_map_without_a_prediction_or_of_one_row(opened, maps):
    browser = opened(map_of(), "")
    assert text(browser, "#asked") == "This page explains"
    assert text(browser, "#prediction") == "“ t5” token 5"
    one = {name: maps[name].select_queries([4]) for name in ("attention", "value_zeroing")}
    browser = opened(one, "")
    assert text(browser, "#prediction") == "“ next4” 50 %"
    assert len(all_of(browser, "canvas[data-panel]")) == 2
    disabled = [box.get_attribute("aria-disabled") for box in all_of(browser, "#tokens .token")]
    assert disabled == ["true"] * 4 + [None, "true"]
    assert "click a token" not in text(browser, "#others")
    # The recommended map alone has no layers to compare, so that the page shows its text.
    browser = opened({"recommended": maps["recommended"]}, "")
    assert all_of(browser, ".row[data-map=recommended]")
    assert not browser.find_element("id", "views").is_displayed()


def test_the_page_lists_only_keys_that_do_something(opened, maps):
    everything = "Keys: ← → token · ↑ ↓ layer · h head · 1–5 view"
    assert text(opened(maps, ""), "#keys") == everything
    headless = {"value_zeroing": maps["value_zeroing"]}
    assert text(opened(headless, ""), "#keys") == "Keys: ← → token · ↑ ↓ layer · 1–4 view"
    assert text(opened({"recommended": maps["recommended"]}, ""), "#keys") == ""


def test_the_unit_of_signed_rows_is_named_truly(opened, maps):
    signed = map_of(random_attention() - 0.1 * torch.ones(6, 6).tril(), method="custom")
    unit = "button[data-option=unit][data-value=share]"
    for shown, name in (
        (maps, "rows sum to 1"),
        ({"a": maps["attention"], "s": signed}, "magnitudes of a row sum to 1"),
    ):
        browser = opened(shown, "view=layers")
        assert browser.find_element("css selector", unit).text == name
    # In a view of one map, it is that of the map.
    browser = opened({"a": maps["attention"], "s": signed}, "view=grid&map=0")
    assert browser.find_element("css selector", unit).text == "rows sum to 1"


def test_words_that_are_merged(opened):
    tokens = ["The", " Ei", "ffel", " Tower", " is", " in"]
    m = map_of(random_attention(), tokens=tokens, explained=explained()).merge_words()
    browser = opened(m, "")
    assert [box.text.strip() for box in all_of(browser, "#tokens .token")] == [
        "The",
        "Eiffel",
        "Tower",
        "is",
        "in",
    ]
    share, layer, key = strongest_cell(m, 4)
    assert f"In layer {layer} the last position takes {percent(share)}" in text(browser, "#finding")
    assert f"(token {key})" in text(browser, "#finding")


def test_exports_have_what_was_explained(opened, maps):
    browser = opened(maps, "query=5")
    for row in rows_of(browser):
        assert (row["prediction"], float(row["probability"])) == (" next5", 0.6)
        assert (row["target"], float(row["target_value"])) == (TARGET, -0.51)
    whole = json.loads(exported(browser, "json"))
    assert whole["explained"] == {
        "query": 5,
        "token": " t5",
        "prediction": " next5",
        "probability": 0.6,
        "others": [[" a", 0.05], [" b", 0.04], [" c", 0.003]],
        "target": TARGET,
        "value": -0.51,
    }
    picture = exported(browser, "svg").decode()
    for part in ("next5", "60 %", TARGET, "tiny · 4 layers"):
        assert part in picture.replace("\u00a0", " ")
    # In a table of all positions, each row has its own prediction.
    browser = opened(maps, "view=grid&map=1&query=5")
    assert {(row["query"], row["prediction"]) for row in rows_of(browser)} == {
        (str(position), f" next{position}") for position in range(6)
    }


def test_the_model_has_its_own_name_and_no_path(opened):
    m = map_of(provenance={"model": "/home/somebody/models--org--small/snapshots/0123456789abcdef0123"})
    page = lm.page(m)
    assert "somebody" not in page.html
    browser = opened(m, "")
    assert text(browser, "#model").startswith("org/small · ")


def test_the_explanation_stays_closed(opened, maps):
    browser = opened(maps, "")
    browser.execute_script("localStorage.clear(); location.reload()")
    browser = opened(maps, "")
    tour = browser.find_element("id", "tour")
    assert tour.is_displayed()
    browser.find_element("id", "close-tour").click()
    assert not tour.is_displayed()
    browser = opened(maps, "")
    assert not browser.find_element("id", "tour").is_displayed()
    browser.execute_script("localStorage.clear()")


def test_the_first_click_closes_the_explanation(opened, maps):
    browser = opened(maps, "")
    try:
        browser.execute_script("localStorage.clear(); location.reload()")
        browser = opened(maps, "")
        assert browser.find_element("id", "tour").is_displayed()
        doing(browser, all_of(browser, "#tokens .token")[3].click)
        assert not browser.find_element("id", "tour").is_displayed()
        browser = opened(maps, "")
        assert not browser.find_element("id", "tour").is_displayed()
    finally:
        browser.execute_script("localStorage.clear()")


@pytest.fixture
def low_window(browser):
    """Make the window so low that the views start below its middle, and without motion."""
    size = {"width": 1300, "height": 420, "deviceScaleFactor": 1, "mobile": False}
    still = {"features": [{"name": "prefers-reduced-motion", "value": "reduce"}]}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", still)
    yield
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


TABS = "const box = document.getElementById('views').getBoundingClientRect(); return [scrollY, box.top]"


@pytest.mark.usefixtures("low_window")
def test_another_view_starts_at_the_top_of_a_low_window(opened, browser, maps):
    opened(maps, "view=layers")
    # Nothing moves when the page opens.
    assert browser.execute_script(TABS)[0] == 0
    assert browser.execute_script(TABS)[1] > 210
    for view in ("text", "grid"):
        tab = browser.find_element("css selector", f"button[data-view={view}]")
        browser.execute_script("scrollTo(0, 0)")
        doing(browser, lambda tab=tab: browser.execute_script("arguments[0].click()", tab))
        wait_until_tabs_are_at_the_top(browser)
    # A digit moves the page, but not away from what has the focus.
    body = browser.find_element("tag name", "body")
    browser.execute_script("scrollTo(0, 0); document.activeElement.blur()")
    doing(browser, lambda: body.send_keys("2"))
    wait_until_tabs_are_at_the_top(browser)
    browser.execute_script("scrollTo(0, 0)")
    line = browser.find_element("id", "tokens")
    doing(browser, lambda: line.send_keys("3"))
    browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
    assert browser.execute_script(TABS)[0] == 0
    assert browser.switch_to.active_element == line


def wait_until_tabs_are_at_the_top(browser):
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(browser, 10).until(lambda _: abs(browser.execute_script(TABS)[1]) < 1)


def test_a_high_window_does_not_move(opened, browser, maps):
    opened(maps, "view=layers")
    doing(browser, browser.find_element("css selector", "button[data-view=text]").click)
    browser.execute_async_script("setTimeout(arguments[0], 300)")
    assert browser.execute_script(TABS)[0] == 0


CONTROLS = "#options button, #options select, #options input"
CHANGE = """
const box = arguments[0];
if (box.matches("select")) box.selectedIndex = (box.selectedIndex + 1) % box.options.length;
else if (box.matches("input")) box.value = +box.value === +box.min ? box.max : box.min;
else return box.click();
box.dispatchEvent(new Event(box.matches("select") ? "change" : "input"));
"""


@pytest.mark.parametrize("view", ["layers", "text", "grid", "methods"])
def test_every_shown_control_changes_something(opened, maps, view):
    """A control is shown only if the view takes account of it."""
    browser = opened(maps, f"view={view}&query=5&map=1&layer=1")
    place, names = 0, set()
    while place < len(controls := [one for one in all_of(browser, CONTROLS) if one.is_displayed()]):
        control = controls[place]
        place += 1
        names.add(control.get_attribute("data-option") or control.get_attribute("id"))
        # A pressed button of several is the choice already.
        if control.get_attribute("data-value") and control.get_attribute("aria-pressed") == "true":
            continue
        before, described = picture(browser), control.get_attribute("outerHTML")
        doing(browser, functools.partial(browser.execute_script, CHANGE, control))
        assert picture(browser) != before, described
    # The agreement with an input map, which was chosen last, has no layers to choose from.
    assert {"first", "diagonal", *(["layer"] if view != "methods" else [])} <= names


def picture(browser):
    """Return everything that the view shows, as text."""
    return browser.execute_script(
        "return document.getElementById('headline').textContent + document.getElementById('view').innerHTML"
        " + [...document.querySelectorAll('#view canvas')].map(canvas => canvas.toDataURL()).join()"
    )
