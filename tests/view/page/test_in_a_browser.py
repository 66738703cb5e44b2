"""Test the page in a real browser: click through every view, and compare its values with the tensors.

It needs Chromium with its driver (Debian: chromium, chromium-driver) and selenium, and is skipped without.
"""

from __future__ import annotations

import base64
import csv
import io
import json
import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

import lens_mix as lm
from lens_mix.measured import best_of_methods
from lens_mix.tables import read_cell
from lens_mix.view.page.data import _find_starts
from tests.matrix import slow
from tests.random_maps import map_of, random_attention
from tests.view.page.routes import routes_map
from tests.view.page.tokens import NASTY

pytest.importorskip("selenium", reason="no selenium: pip install selenium")
from selenium.common.exceptions import TimeoutException

from tests.browser import NEEDS_CHROMIUM, chromium  # noqa: F401

pytestmark = NEEDS_CHROMIUM


@pytest.fixture(name="opened")
def open_pages(browser, tmp_path):
    """Open maps in the browser at an address of the page; afterwards the console must be empty."""

    def open_page(maps, place="view=layers", **options):
        path = tmp_path / "page.html"
        lm.page(maps, path, **options)
        browser.get("about:blank")
        browser.get(f"file://{path}#{place}")
        wait(browser, 0)
        return browser

    yield open_page
    assert [entry["message"] for entry in browser.get_log("browser")] == []
    assert browser.execute_script("return window.hacked") is None


def ready(browser):
    return int(browser.execute_script("return document.body.dataset.ready || 0"))


def wait(browser, before):
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(browser, 90).until(lambda _: ready(browser) > before)


def doing(browser, act):
    before = ready(browser)
    act()
    wait(browser, before)


def clicked_until(browser, selector, there):
    """Click until an element exists: a frame may render again during a click, when its height changes."""
    from selenium.common.exceptions import StaleElementReferenceException
    from selenium.webdriver.support.ui import WebDriverWait

    def clicked(_):
        browser.find_element("css selector", selector).click()
        return WebDriverWait(browser, 1).until(lambda _: all_of(browser, there))

    ignored = (StaleElementReferenceException, TimeoutException)
    WebDriverWait(browser, 90, ignored_exceptions=ignored).until(clicked)


def all_of(browser, selector):
    return browser.find_elements("css selector", selector)


def tip_of(browser, element, x=None, y=None):
    """Return the text of the tooltip over an element, at a place of it."""
    browser.execute_script(
        "const box = arguments[0].getBoundingClientRect();"
        "arguments[0].dispatchEvent(new MouseEvent('mousemove', {bubbles: true,"
        "clientX: box.left + (arguments[1] ?? box.width / 2),"
        "clientY: box.top + (arguments[2] ?? box.height / 2)}))",
        element,
        x,
        y,
    )
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(browser, 30).until(lambda _: not browser.find_element("id", "tip").get_property("hidden"))
    return browser.find_element("id", "tip").get_property("textContent")


# This script returns the file that `offer` would give to the browser as a download.
EXPORT = """
const [kind, done] = arguments;
window.offer = (name, blob) => {
  const reader = new FileReader();
  reader.onload = () => done([name, reader.result]);
  reader.readAsDataURL(blob);
};
document.querySelector(`[data-export=${kind}]`).click();
"""


def exported(browser, kind):
    name, url = browser.execute_async_script(EXPORT, kind)
    assert name.endswith(f".{kind}")
    return base64.b64decode(url.partition(",")[2])


def rows_of(browser):
    """Return the rows of the exported CSV file."""
    return list(csv.DictReader(io.StringIO(exported(browser, "csv").decode(), newline="")))


def place(text):
    return tuple(map(int, text.split(",")))


def percent(share):
    """Return a share as the page writes it."""
    whole = 100 * float(share)
    if whole == 0:
        return "0 %"
    return f"{whole:.1g} %" if whole < 0.1 else f"{whole:.0f} %" if whole >= 9.95 else f"{whole:.1f} %"


def number_in(text, unit):
    return float(re.search(rf"(-?[\d.e+-]+|hidden) {unit}", text).group(1).replace("hidden", "nan"))


@pytest.fixture(scope="module")
def maps():
    signed = random_attention(heads=2, seed=3) - 0.2 * torch.ones(6, 6).tril()
    return {
        "attention": map_of(random_attention(heads=2)),
        "alti": map_of(random_attention(seed=1), method="alti", residual=0.0),
        "signed": map_of(signed, method="custom"),
    }


def test_text_shows_what_the_clicked_token_took(opened, maps):
    browser = opened(maps, "view=text&layer=2&unit=raw")
    rows = all_of(browser, ".row")
    assert [row.get_attribute("data-map") for row in rows] == list(maps)
    doing(browser, lambda: all_of(browser, ".row:nth-of-type(2) .token")[4].click())
    for row, m in zip(all_of(browser, ".row"), maps.values(), strict=True):
        expected = m.merge_heads().scores[2, 4]
        for key, token in enumerate(row.find_elements("css selector", ".token")):
            assert token.text.strip() == f"t{key}"
            if key > 4:
                assert "hidden" in token.get_attribute("class")
            else:
                said = number_in(tip_of(browser, token), "raw score")
                assert said == pytest.approx(expected[key].item(), abs=2e-3)


def test_units_words_and_heads(opened, maps):
    browser = opened(maps, "view=text&layer=1&head=1&unit=share&by=word&query=5")
    share = maps["attention"].head(1).normalized().scores[1, 5]
    for key, token in enumerate(all_of(browser, ".row:first-child .token")):
        said = number_in(tip_of(browser, token), "share of the row")
        assert said == pytest.approx(share[key].item(), abs=2e-3)


SPREADSHEET = [
    *("=1", "+1", "-1", "@a", "\t=1", "NA", "", "01", "\r", "a\rb", '"', '"NA"', "a,b", " x"),
    *("\ud83d", "\x00"),
]


def test_the_tokens_of_a_character_spell_it_together(opened):
    astronaut = [f"👩\u200d🚀[{number}/3]" for number in (1, 2, 3)]
    tokens = ["the", " caf", "é[1/2]", "é[2/2]", " ", *astronaut, "。[1/2]", "。[2/2]"]
    m = map_of(random_attention(size=len(tokens)), tokens=tokens)
    browser = opened(m, "view=text&by=word&query=3")
    shown = all_of(browser, ".row .token")
    assert [token.get_property("textContent") for token in shown] == tokens
    tips = [tip_of(browser, token).splitlines()[0] for token in shown]
    assert tips[2] == "1–3 “café”"
    assert tips[5] == "4–9 “👩\u200d🚀。”"
    assert [row["token"] for row in rows_of(browser)] == ["the", " café", " 👩\u200d🚀。"]
    assert "the café 👩\u200d🚀。" in browser.find_element("id", "prompt").get_property("textContent")
    assert _find_starts(tokens)["sentence"] == [0]


def test_csv_holds_no_formula_and_every_token(opened):
    m = map_of(random_attention(size=len(SPREADSHEET)), tokens=list(SPREADSHEET))
    browser = opened({"=1+1": m}, "view=grid&query=1")
    rows = rows_of(browser)
    assert {row["map"] for row in rows} == {'"=1+1"'}
    for row in rows:
        assert read_cell(row["token"]) == SPREADSHEET[int(row["key"])]
        assert row["token"].strip()[:1] not in {*"=+-@"}


SENTENCES = [" One", " two", ".", " Thr", "ee", "!", "\n", " Four"]


@pytest.mark.parametrize(
    ("by", "units"),
    [("word", [[0], [1, 2], [3, 4, 5], [6], [7]]), ("sentence", [[0, 1, 2], [3, 4, 5], [6], [7]])],
)
def test_words_and_sentences_merge_as_maps_do(opened, by, units):
    m = map_of(random_attention(heads=2, size=8) - 0.1 * torch.ones(8, 8).tril(), tokens=SENTENCES)
    merged = m.merge_words(None if by == "word" else units)
    assert len(merged.tokens) == len(units)
    for unit, query in enumerate(positions[-1] for positions in units):
        browser = opened(m, f"view=text&layer=1&head=0&by={by}&query={query}&unit=raw&first=1")
        chosen = [token.get_attribute("data-key") for token in all_of(browser, ".row .token.chosen")]
        assert chosen == [str(position) for position in units[unit]]
        tokens = all_of(browser, ".row .token")
        for key, positions in enumerate(units):
            for token in (tokens[position] for position in positions):
                said = number_in(tip_of(browser, token), "raw score")
                expected = merged.scores[1, 0, unit, key].item() if key <= unit else np.nan
                assert said == pytest.approx(expected, abs=2e-3, nan_ok=True)
        rows = rows_of(browser)
        assert [int(row["key"]) for row in rows] == [positions[0] for positions in units]
        held = [float(row["value"]) for row in rows if row["value"]]
        assert held == pytest.approx(merged.scores[1, 0, unit, : unit + 1].tolist(), abs=2e-3)
    assert by in browser.find_element("css selector", "[data-units]").text


def test_a_word_of_which_one_row_is_held(opened):
    m = map_of(random_attention(size=8), tokens=SENTENCES).select_queries([4])
    browser = opened(m, "view=text&by=word&layer=3&unit=raw")
    assert "does not have the other rows of its word" in all_of(browser, ".row h3")[0].text
    said = number_in(tip_of(browser, all_of(browser, ".row .token")[1]), "raw score")
    assert said == pytest.approx(m.scores[3, 0, 1:3].sum().item(), abs=2e-3)


def test_units_of_two_sequences_and_the_first_token_on_its_own(opened):
    scores = torch.rand(2, 3, 4, generator=torch.Generator().manual_seed(1))
    cross = lm.MixingMap(scores, ["a.", "b", "c"], key_tokens=[" v", "w.", " x", "y"], method="attention")
    browser = opened(cross, "view=text&by=sentence&query=2&layer=0&unit=raw")
    tokens = all_of(browser, "[data-map] .token")
    expected = scores[0, 1:].mean(0)
    for key, sentence in enumerate(([0, 1], [0, 1], [2, 3], [2, 3])):
        said = number_in(tip_of(browser, tokens[key]), "raw score")
        assert said == pytest.approx(expected[sentence].sum().item(), abs=2e-3)


def test_the_first_token_is_not_colored_and_leaves_its_word(opened):
    m = map_of(random_attention(size=4), tokens=["a", "b", " c", "d"])
    browser = opened(m, "view=text&by=word&query=3&layer=0&diagonal=1")
    tokens, share = all_of(browser, "[data-map] .token"), m.normalized().scores[0, 3]
    assert ["pale" in token.get_attribute("class") for token in tokens] == [True, False, False, False]
    row = (m.normalized().scores[0, 2] + share) / 2
    for key, word in enumerate(([0], [1], [2, 3], [2, 3])):
        said = number_in(tip_of(browser, tokens[key]), "share of the row")
        assert said == pytest.approx((row[word].sum() / row.sum()).item(), abs=2e-3)
    assert percent(row[0] / row.sum()) in browser.find_element("css selector", ".below").text
    switch = browser.find_element("css selector", "button[data-option=first]")
    assert switch.get_attribute("aria-pressed") == "true"
    doing(browser, switch.click)
    assert not all_of(browser, "[data-map] .token.pale")


@pytest.mark.parametrize(("query", "itself", "others"), [(7, [7], [3, 4, 5]), (5, [3, 4, 5], [1, 2])])
def test_the_sentence_of_the_position_is_not_colored(opened, query, itself, others):
    """As for a single token: the caption has its share, and the scale ends at another sentence."""
    m = map_of(random_attention(size=8) + 3 * torch.eye(8), tokens=SENTENCES)
    browser = opened(m, f"view=text&by=sentence&query={query}&layer=0")
    tokens = all_of(browser, "[data-map] .token")
    pale = [key for key, token in enumerate(tokens) if "pale" in token.get_attribute("class")]
    assert pale == [0, *itself]
    share = m.normalized().scores[0, itself].mean(0)
    below = browser.find_element("css selector", ".below").text
    name = "sentence" if len(itself) > 1 else "position"
    assert f"the {name} itself {percent(share[itself].sum())}, not colored" in below
    largest = max(share[unit].sum() for unit in ([1, 2], [3, 4, 5], [6]) if unit != itself)
    expected = ramp(browser, share[others].sum() / largest)
    said = tokens[others[0]].value_of_css_property("background-color")
    assert [int(channel) for channel in re.findall(r"\d+", said)[:3]] == expected
    # Its switch draws it as any other sentence.
    doing(browser, browser.find_element("css selector", "button[data-option=diagonal]").click)
    pale = [token.get_attribute("data-key") for token in all_of(browser, "[data-map] .token.pale")]
    assert pale == ["0"]


def geometry(canvas):
    """Return where the cells of a heat map are: the left and upper edge, and a cell's width and height."""
    found = json.loads(canvas.get_attribute("data-geometry"))
    return found["left"], found["top"], found["across"], found["down"]


def test_the_page_says_what_verified_means(opened, browser):
    opened(map_of(provenance={"model": "tiny", "verification_error": 2.1e-7}), "")
    model = browser.find_element("id", "model")
    assert model.text.endswith("verified to 2e-7")
    meaning = model.get_attribute("title")
    assert meaning.startswith("verified: every block was rebuilt from its components")
    assert meaning.endswith("the largest relative error was 2e-7")
    assert meaning in browser.find_element("id", "about").text
    opened(map_of(provenance={"model": "tiny"}), "")
    assert "verified" not in browser.find_element("tag name", "body").text


def test_the_grid_names_every_cell_and_enlarges_what_is_clicked(opened, maps):
    browser = opened(maps, "view=grid&map=0&layer=0")
    whole = browser.find_element("css selector", "canvas[data-grid=all]")
    doing(browser, lambda: whole.click())
    assert "head=" in browser.current_url
    large = browser.find_element("css selector", "canvas[data-grid=one]")
    left, top, side, _ = geometry(large)
    layer = int(re.search(r"layer=(\d+)", browser.current_url).group(1))
    head = int(re.search(r"head=(-?\d+)", browser.current_url).group(1))
    scores = maps["attention"].scores[layer, head]
    for query, key in ((3, 1), (5, 5), (5, 0)):
        said = tip_of(browser, large, left + (key + 0.5) * side, top + (query + 0.5) * side)
        assert f"{query} “t{query}” from {key} “t{key}”" in said
        assert number_in(said, "raw score") == pytest.approx(scores[query, key].item(), abs=2e-3)
        assert percent(scores[query, key]) in said
    hidden = tip_of(browser, large, left + 5.5 * side, top + 0.5 * side)
    assert hidden.endswith("hidden raw score")
    share = scores / scores.sum(-1, keepdim=True)
    beside = json.loads(large.get_attribute("data-numbers"))
    assert beside == [
        [f"{round(100 * float(x))}%" if x >= 0.005 else "<1%" for x in (row[0], row[query])]
        for query, row in enumerate(share)
    ]
    # Everything is drawn, so that the largest number of the map ends the scale of the colors.
    for option in ("first", "diagonal"):
        doing(browser, browser.find_element("css selector", f"button[data-option={option}]").click)
    doing(browser, browser.find_element("css selector", "button[data-value=raw]").click)
    large = browser.find_element("css selector", "canvas[data-grid=one]")
    left, top, side, _ = geometry(large)
    assert color_at(browser, large, left + 0.5 * side, top + 5.5 * side) == ramp(
        browser, scores[5, 0] / scores.max()
    )


@pytest.mark.parametrize("width", [1300, 800])
def test_the_enlarged_map_stays_in_sight(opened, browser, width):
    size = {"width": width, "height": 700, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        opened(map_of(random_attention(layers=30, heads=4)), "view=grid&layer=0&head=0")
        places = browser.execute_script(
            "const bottom = document.querySelector('canvas[data-grid=all]').getBoundingClientRect().bottom;"
            "scrollTo(0, bottom + scrollY - innerHeight);"
            "const box = document.querySelector('canvas[data-grid=one]').getBoundingClientRect();"
            "return [scrollY, box.top, box.bottom, innerHeight]"
        )
        assert places[0] > 500
        assert 0 <= places[1] < places[2] <= places[3]
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def color_at(browser, canvas, x, y):
    """Return the color of a canvas at a place in pixels of the page."""
    return browser.execute_script(
        "const [canvas, x, y] = arguments, sharp = canvas.width / canvas.getBoundingClientRect().width;"
        "const copy = document.createElement('canvas').getContext('2d', { willReadFrequently: true });"
        "copy.drawImage(canvas, x * sharp, y * sharp, 1, 1, 0, 0, 1, 1);"
        "return [...copy.getImageData(0, 0, 1, 1).data].slice(0, 3)",
        canvas,
        x,
        y,
    )


def ramp(browser, strength):
    """Return the color of a share of the largest number: the square root is the place on the ramp."""
    stops = browser.execute_script(
        "return ['--heat-0', '--heat-1', '--heat-2'].map(name => "
        "getComputedStyle(document.documentElement).getPropertyValue(name).split(',').map(Number))"
    )
    place = 2 * round(255 * float(strength) ** 0.5) / 255
    low = min(1, int(place))
    return [
        pytest.approx(a + (b - a) * (place - low), abs=4)
        for a, b in zip(stops[low], stops[low + 1], strict=True)
    ]


def test_a_tree_has_its_tab_where_there_is_one(opened):
    from selenium.webdriver.common.keys import Keys

    maps = [{"plain": map_of()}, {"plain": map_of(), "routes": routes_map()}]
    browser = opened(maps, "view=tree")
    tab = browser.find_element("css selector", "button[data-view=tree]")
    assert not tab.is_displayed()
    assert all_of(browser, "[data-panel]")
    browser = opened(maps, "prompt=1&view=text")
    tab = browser.find_element("css selector", "button[data-view=tree]")
    doing(browser, lambda: browser.find_element("tag name", "body").send_keys("6"))
    assert tab.get_attribute("aria-selected") == "true"
    assert browser.execute_script("return map().label") == "routes"
    doing(browser, lambda: browser.find_element("tag name", "body").send_keys(Keys.ARROW_LEFT))
    assert all_of(browser, "[data-pruned]")


DRAWN = {"svg", "g", "rect", "text", "image", "line", "circle"}
VIEWS = ("layers", "text", "grid", "flow", "methods", "tree")


@pytest.mark.parametrize("view", ["layers", *map(slow, VIEWS[1:])])
def test_every_view_goes_out(opened, maps, view, tmp_path):
    browser = opened(maps, f"view={view}&layer=2&query=5", trees=lm.attribution_tree(maps["signed"]))
    texts = [node.text for node in all_of(browser, "#view .token, #view th, #view svg text")]
    rows, whole = rows_of(browser), json.loads(exported(browser, "json"))
    assert [str(row["value"]) for row in whole["rows"]] == [row["value"] or "None" for row in rows]
    assert whole["state"]["view"] == view
    picture = exported(browser, "svg")
    drawn = ElementTree.fromstring(picture)
    namespace = "{http://www.w3.org/2000/svg}"
    written = ["".join(node.itertext()).strip() for node in drawn.iter(f"{namespace}text")]
    assert {text.strip() for text in texts} <= set(written)
    assert len(list(drawn.iter(f"{namespace}line"))) == len(all_of(browser, "#view svg line"))
    pictures = all_of(browser, "#answer canvas, #view canvas")
    assert len(list(drawn.iter(f"{namespace}image"))) == len(pictures)
    assert any("lens_mix" in text for text in written)
    width, height = pixels(exported(browser, "png")).shape[1::-1]
    assert [width, height] == [2 * int(drawn.get(side)) for side in ("width", "height")]
    # The SVG must open as a file of its own.
    alone = tmp_path / "alone.svg"
    alone.write_bytes(picture)
    browser.get(f"file://{alone}")
    assert len(all_of(browser, "text")) == len(written)


def pixels(png):
    image = pytest.importorskip("PIL.Image").open(io.BytesIO(png)).convert("RGB")
    assert len(image.getcolors(image.width * image.height)) > 20
    return np.asarray(image)


def test_methods_agree_as_spearman_says(opened, maps):
    browser = opened(maps, "view=methods&map=0&query=5")
    for name, m in maps.items():
        cells = all_of(browser, f"tr[data-map={name}] td[data-layer]")
        for layer, cell in enumerate(cells):
            ours, theirs = (one.merge_heads().scores[layer, 5].abs() for one in (maps["attention"], m))
            said = cell.text.replace("−", "-")
            assert float(said) == pytest.approx(spearmanr(ours, theirs).statistic, abs=0.051)
            assert not said.lstrip("-").startswith("0.")
    assert len(all_of(browser, ".row")) == 2


def test_the_agreement_of_thirty_layers_fits_or_scrolls(opened, browser):
    deep = {
        name: map_of(random_attention(30, seed=seed), method=name)
        for seed, name in enumerate(["attention", "alti"])
    }
    opened(deep, "view=methods&map=0&query=5")
    table = browser.find_element("css selector", "table.agreement")
    pane = browser.find_element("css selector", "#view .pane")
    assert table.rect["width"] <= pane.rect["width"]
    heads = [cell.text for cell in all_of(browser, ".agreement tr:first-child th")]
    assert heads == ["agreement with Attention", "leaderboard", *map(str, range(30))]
    # On a narrow screen the table scrolls, and the names stay.
    size = {"width": 390, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        opened(deep, "view=methods&map=0&query=5")
        browser.execute_script("document.querySelector('#view .pane').scrollLeft = 9999")
        name, last = (
            browser.find_element("css selector", f".agreement tr:last-child {cell}")
            for cell in ("th", "td:last-child")
        )
        pane = browser.find_element("css selector", "#view .pane")
        assert name.rect["x"] == pytest.approx(pane.rect["x"], abs=1)
        assert last.rect["x"] + last.rect["width"] <= pane.rect["x"] + pane.rect["width"] + 1
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_the_leaderboards_score_is_a_methods_best_and_no_given_rollouts(opened, maps):
    rolled = lm.rollout(maps["alti"])
    browser = opened({"alti": maps["alti"], "rollout": rolled}, "view=methods&map=0&query=5")
    said = [all_of(browser, f"tr[data-map={name}] td")[0].text for name in ("alti", "rollout")]
    assert said == [f"{best_of_methods()['alti'].value:.2f}", "–"]


def test_keys_move_through_tokens_layers_heads_and_views(opened, maps):
    from selenium.webdriver.common.keys import Keys

    browser = opened(maps, "view=text&query=3&layer=3")
    body = browser.find_element("tag name", "body")
    keys = (
        (Keys.ARROW_LEFT, "query=2"),
        (Keys.ARROW_UP, "layer=2"),
        (Keys.ARROW_DOWN, "layer=3"),
        ("h", "head=0"),
        ("4", "view=flow"),
        # The layers of a flow are drawn upward, and the arrow keys move as it is drawn.
        (Keys.ARROW_DOWN, "layer=2"),
    )
    for key, says in keys:
        doing(browser, lambda key=key: body.send_keys(key))
        assert says in browser.current_url


def test_several_prompts_cross_attention_and_single_rows(opened, maps):
    cross = lm.MixingMap(torch.rand(2, 3, 5), ["a", "b", "c"], key_tokens=list("vwxyz"), method="attention")
    one_row = maps["alti"].select_queries(-1)
    browser = opened([maps, {"cross": cross}, {"one": one_row}], "prompt=1&view=text&query=1")
    assert [len(row.find_elements("css selector", ".token")) for row in all_of(browser, ".row")] == [5]
    assert [token.text for token in all_of(browser, "#tokens .token")] == ["a", "b", "c"]
    # A map of one row has no view of all positions, so that the page shows its layers.
    browser = opened([maps, {"cross": cross}, {"one": one_row}], "prompt=2&view=grid")
    assert len(all_of(browser, "canvas[data-panel]")) == 1
    assert not browser.find_element("css selector", "button[data-view=grid]").is_displayed()


@pytest.mark.slow
def test_tokens_are_shown_and_never_run(opened):
    hostile = "\x01</script>\ud800<b>"
    attribution = {"notes": (hostile,), "provenance": {"has_tree": True}}
    m = map_of(random_attention(size=len(NASTY)), tokens=list(NASTY), **attribution)
    for view in VIEWS:
        browser = opened({hostile: m}, f"view={view}&threshold=0.01")
        drawn = ElementTree.fromstring(exported(browser, "svg"))
        assert {node.tag.partition("}")[2] for node in drawn.iter()} <= DRAWN
        assert "\ufffd</script>\ufffd<b>" in "".join(drawn.itertext())
        assert pixels(exported(browser, "png")).size
    browser = opened(m, "view=text")
    shown = [token.get_property("textContent") for token in all_of(browser, "#tokens .token")]
    assert shown[:4] == list(NASTY[:4])
    assert shown[7] == "⟨0⟩⟨7⟩⟨1b⟩"
    assert len(shown) == len(NASTY)


@pytest.mark.slow
def test_a_page_of_ten_thousand_tokens_opens(opened):
    m = map_of(
        torch.rand(1, 1, 10_000), tokens=[f"<{i}>" for i in range(10_000)], queries=[9_999], causal=False
    )
    assert len(all_of(opened(m), "#tokens .token")) == 10_000


@pytest.mark.slow
def test_a_notebooks_frame_answers_clicks(browser, maps, tmp_path):
    """The page is shown twice in one document, as by two cells of a notebook."""
    shown = lm.page(maps)._repr_html_()
    path = tmp_path / "notebook.html"
    path.write_text(f"<!DOCTYPE html><meta charset=utf-8><body>{shown}{lm.page(maps)._repr_html_()}</body>")
    browser.get(f"file://{path}")
    frames = all_of(browser, "iframe")
    assert len({frame.get_attribute("id") for frame in frames}) == 2
    for frame in frames:
        browser.switch_to.frame(frame)
        wait(browser, 0)
        token = "#tokens [data-key='2']"
        clicked_until(browser, token, f"{token}.chosen")
        clicked_until(browser, "button[data-view=methods]", "tr[data-map=alti]")
        assert pixels(exported(browser, "png")).size
        browser.switch_to.default_content()
    assert [entry["message"] for entry in browser.get_log("browser")] == []


def test_layers_of_input_maps_are_named_for_what_they_are(opened, maps):
    """Each view names a layer of a rollout "up to layer", and a map of the whole model without a layer."""
    rolled = lm.rollout(maps["attention"])
    whole = maps["alti"].select_layers([3])
    whole = whole.replace(kind="input", residual=None, provenance={"whole_model": True})
    browser = opened({"rolled": rolled, "whole": whole}, "view=grid&map=0&layer=2&query=5")
    assert browser.find_element("css selector", ".large .caption").text.startswith("rolled · up to layer 2.")
    canvas = browser.find_element("css selector", "canvas[data-grid=all]")
    assert tip_of(browser, canvas, 40, 40).startswith("up to layer ")
    browser = opened({"rolled": rolled, "whole": whole}, "view=grid&map=1&layer=3&query=5")
    assert browser.find_element("css selector", ".large .caption").text.startswith("whole · whole model.")
    # A map of one layer has one picture, so that there is none to choose, and no layer either.
    assert not all_of(browser, "canvas[data-grid=all]")
    assert not browser.find_element("id", "layer").is_displayed()
    browser = opened({"one": rolled.select_queries([5])}, "view=layers&query=5")
    canvas = browser.find_element("css selector", "canvas[data-panel]")
    left, top, across, down = geometry(canvas)
    assert tip_of(browser, canvas, left + across / 2, top + down / 2).startswith("up to layer 0\n")
    browser = opened({"rolled": rolled, "whole": whole}, "view=methods&map=1&query=5")
    assert [cell.text for cell in all_of(browser, "th")][2] == "whole model"
    assert "difference of shares · whole model" in browser.find_element("id", "view").text


def test_layers_that_a_map_lacks_are_not_replaced_by_others(opened, maps):
    one = maps["alti"].select_layers([2])
    browser = opened({"a": maps["attention"], "b": one}, "view=methods&layer=3&query=5")
    assert [cell.text for cell in all_of(browser, "tr[data-map=b] td[data-layer]")][:2] == ["–", "–"]
    assert not all_of(browser, ".row")
    browser = opened({"a": maps["attention"], "b": one}, "view=text&layer=3&query=5")
    assert "no layer 3" in all_of(browser, ".row")[1].text
    gaps = maps["alti"].select_layers([0, 2])
    browser = opened(gaps, "view=flow")
    assert not browser.find_element("css selector", "button[data-view=flow]").is_displayed()
    assert not all_of(browser, "line.edge")


def test_an_address_that_names_no_view(opened, maps):
    assert len(all_of(opened(maps, "view=toString"), "canvas[data-panel]")) == 3


# Properties that every object in JavaScript has.
OF_EVERY_OBJECT = "constructor __proto__ toString hasOwnProperty valueOf __defineGetter__".split()


@pytest.mark.parametrize("view", VIEWS)
def test_names_that_every_object_has_are_names(opened, view):
    """The names are used for methods, labels, tokens, nodes, graphs, attributes, and in the address."""
    tokens = OF_EVERY_OBJECT
    maps = {
        name: map_of(random_attention(seed=seed), method=name, tokens=tokens)
        for seed, name in enumerate(tokens)
    }
    graph = lm.attribution_tree(map_of(method="attention_attribution", tokens=tokens))
    for place, node in enumerate(graph.nodes.values()):
        node["kind"] = tokens[place % len(tokens)]
    for values in graph.edges.values():
        values |= dict.fromkeys(tokens, 0.5)
    address = "&".join(f"{name}=1" for name in tokens)
    browser = opened(maps, f"view={view}&{address}", trees=dict.fromkeys(tokens, graph))
    shown = browser.find_element("id", "view").get_property("textContent")
    assert "Error" not in shown
    assert "native code" not in shown
    assert "[object" not in shown
    if view == "methods":
        for name in tokens:
            cells = all_of(browser, f"tr[data-map={name}] :is(th, td)")
            assert (cells[0].text, cells[1].text) == (name, "–")
            assert len(cells) == 6
    elif view == "text":
        assert [row.get_attribute("data-map") for row in all_of(browser, ".row")] == tokens
        assert [token.text for token in all_of(browser, ".row:first-of-type .token")][:6] == tokens
    elif view == "tree":
        said = [tip_of(browser, mark) for mark in all_of(browser, "#view circle[data-node]")]
        assert not any("native code" in one or "[object" in one for one in said)
        kinds = {one.split(",")[0] for one in said if ", layer" in one}
        assert kinds <= set(tokens)
        assert "constructor" in kinds
    for kind in ("csv", "json", "svg"):
        assert exported(browser, kind)
    assert browser.execute_script("return typeof state.constructor") == "function"
    doing(browser, lambda: browser.execute_script("set({ view: 'methods', map: 1 })"))
    assert browser.execute_script("return map().label") == tokens[1]


# ------------------------------------------------------------------ notes


COLOUR = "return getComputedStyle(document.querySelector(arguments[0])).color"


def test_a_note_on_the_tokens_is_no_warning_and_one_note_is_singular(opened):
    calm = "prepend_bos: the model read 3 tokens"
    browser = opened(map_of(notes=(calm,)))
    assert browser.find_element("id", "notes").text == f"Note: {calm}"
    assert "6 tokens" in browser.find_element("id", "model").text
    text, note = (browser.execute_script(COLOUR, at) for at in ("#about", "#notes span"))
    assert note == text
    browser = opened(map_of(notes=(calm, "the rows collapsed")))
    assert browser.find_element("id", "notes").text == f"Notes: {calm}; the rows collapsed"
    assert browser.execute_script(COLOUR, "#notes span") == text
    assert browser.execute_script(COLOUR, "#notes span.warning") != text


def test_one_token_is_singular(opened):
    browser = opened(map_of(torch.ones(2, 1, 1)))
    assert "1 token" in browser.find_element("id", "model").text
    assert "1 tokens" not in browser.find_element("id", "model").text


def test_the_first_position_has_only_a_number(opened):
    """Check a row without cells: its only key, the first token, is shown as a number."""
    browser = opened(map_of(), "view=layers&query=0")
    canvas = browser.find_element("css selector", "canvas[data-geometry]")
    assert json.loads(canvas.get_attribute("data-geometry"))["keys"] == []


# ------------------------------------------------------------------ noise


def noise_map(largest, layers=2, **fields):
    """Return a map whose last row has at most `largest` for a token, and the rest for the first token."""
    scores = torch.zeros(layers, 8, 8)
    scores[:, :, 0] = 1
    scores[:, -1] = largest * torch.tensor([0, 1, 0.5, 0.2, 0.2, 0.1, 0.1, 0.0])
    scores[:, -1, 0] = 1 - scores[:, -1, 1:].sum(-1)
    tokens = ["<s>", *(f" {letter}" for letter in "abcdefg")]
    return lm.MixingMap(scores=scores, tokens=tokens, causal=True, **fields)


BOXES = """
const colors = [...document.querySelectorAll(arguments[0])]
  .map(box => getComputedStyle(box).backgroundColor.match(/[\\d.]+/g).map(Number));
return Math.max(...colors.filter(([r, g, b, a]) => a !== 0).map(([r, g, b]) => b - r), 0);
"""


@pytest.mark.parametrize("view", ["layers", "text", "grid", "methods"])
def test_noise_is_not_colored_and_the_page_says_so(opened, view):
    maps = {"noise": noise_map(0.0005), "again": noise_map(0.0004)}
    browser = opened(maps, f"view={view}&range=row&layer=1")
    text = browser.find_element("css selector", "body").text
    assert "no other token has more than 0.05 %, so none is colored" in text
    assert browser.execute_script(BOXES, "#tokens .token") < 15
    assert browser.execute_script(BOXES, "#view .token") < 15
    if view in ("layers", "grid"):
        canvas = all_of(browser, "#view canvas[data-geometry]")[0]
        edge, rows = json.loads(canvas.get_attribute("data-geometry")), 2 if view == "layers" else 8
        colors = browser.execute_script(
            "const [canvas, g, rows] = arguments, k = canvas.width / parseFloat(canvas.style.width);"
            "const y = Math.floor((g.top + (rows - .5) * g.down) * k), x = Math.floor(g.left * k) + 3;"
            "const { data } = canvas.getContext('2d').getImageData(x, y, Math.floor(3 * g.across * k), 1);"
            "const blue = (_, i) => data[4 * i + 2] - data[4 * i];"
            "return Math.max(...Array.from({ length: data.length / 4 }, blue))",
            canvas,
            edge,
            rows,
        )
        assert colors < 60


def test_a_finding_beside_the_first_token_is_colored(opened):
    browser = opened({"finding": noise_map(0.05)}, "view=text&layer=1")
    assert "none is colored" not in browser.find_element("css selector", "body").text
    assert browser.execute_script(BOXES, "#tokens .token") > 80
    assert browser.execute_script(BOXES, "#view .token") > 80


def test_panels_beside_each_other_label_the_same_tokens(opened):
    one, two = (map_of(random_attention(layers=3, heads=None, size=120, seed=seed)) for seed in (1, 2))
    browser = opened({"one": one, "two": two}, "view=layers")
    labels = browser.execute_script(
        "return comparedRows().then(rows => compared().map(m => placePanel(m, largestShares(rows, m),"
        "asNumbers(m, state.query), -1, null, 500).labels.map(label => label.text)))"
    )
    assert labels[0] == labels[1]
    assert len(labels[0]) > 5
