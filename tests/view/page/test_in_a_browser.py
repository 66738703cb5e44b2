"""The page in a real browser: every view is clicked through, its values are the tensors', nothing complains.

Needs Chromium with its driver (Debian: chromium, chromium-driver) and selenium; skipped without.
"""

from __future__ import annotations

import re
import shutil

import pytest
import torch
from scipy.stats import spearmanr

import lens_mix as lm
from tests.random_maps import map_of, random_attention
from tests.view.page.tokens import NASTY

webdriver = pytest.importorskip("selenium.webdriver", reason="no selenium: pip install selenium")
from selenium.common.exceptions import TimeoutException, WebDriverException  # noqa: E402

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (BROWSER and DRIVER),
    reason="no chromium with a chromedriver: apt-get install chromium chromium-driver",
)


@pytest.fixture(scope="module")
def browser():
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for argument in (
        "headless=new",
        "no-sandbox",
        "disable-gpu",
        "disable-dev-shm-usage",
        "window-size=1300,900",
    ):
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    try:
        started = webdriver.Chrome(service=webdriver.ChromeService(DRIVER), options=options)
    except WebDriverException as problem:
        pytest.skip(f"Chromium does not start here: {problem.msg}")
    yield started
    started.quit()


@pytest.fixture
def opened(browser, tmp_path):
    """Opens maps in the browser, at a place of the page; afterwards its console has to be empty."""

    def open_page(maps, place="view=text"):
        path = tmp_path / "page.html"
        lm.page(maps, path)
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
    """Click until something is there: a frame draws anew when its height settles, maybe under the click."""
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
    """What the tooltip says over an element, at a place of it."""
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
    browser = opened(maps, "view=text&layer=2")
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
    browser = opened(maps, "view=text&layer=1&head=1&unit=share&words=1&query=5")
    share = maps["attention"].head(1).normalized().scores[1, 5]
    for key, token in enumerate(all_of(browser, ".row:first-child .token")):
        said = number_in(tip_of(browser, token), "share of the row")
        assert said == pytest.approx(share[key].item(), abs=2e-3)


def test_the_grid_names_every_cell_and_enlarges_what_is_clicked(opened, maps):
    browser = opened(maps, "view=grid&map=0&layer=0")
    whole = browser.find_element("css selector", "canvas[data-grid=all]")
    doing(browser, lambda: whole.click())
    assert "head=" in browser.current_url
    large = browser.find_element("css selector", "canvas[data-grid=one]")
    side, labels = browser.execute_script(
        "const c = arguments[0]; return [26, c.getBoundingClientRect().width - 8 - 6 * 26]", large
    )
    layer = int(re.search(r"layer=(\d+)", browser.current_url).group(1))
    head = int(re.search(r"head=(-?\d+)", browser.current_url).group(1))
    scores = maps["attention"].scores[layer, head]
    for query, key in ((3, 1), (5, 5), (5, 0)):
        said = tip_of(browser, large, labels + (key + 0.5) * side, labels + (query + 0.5) * side)
        assert f"{query} “t{query}” from {key} “t{key}”" in said
        assert number_in(said, "raw score") == pytest.approx(scores[query, key].item(), abs=2e-3)
    hidden = tip_of(browser, large, labels + 5.5 * side, labels + 0.5 * side)
    assert hidden.endswith("hidden raw score")
    for box in all_of(browser, "#options input[type=checkbox]"):
        doing(browser, box.click)


def test_flow_is_a_rollout_without_small_edges(opened, maps):
    for number, name in enumerate(("attention", "alti")):
        browser = opened(maps, f"view=flow&map={number}&threshold=0.000001&query=5")
        expected = lm.rollout(maps[name]).scores[-1, -1]
        bottom = {}
        for edge in all_of(browser, "line.edge[data-layer='0']"):
            key = round((float(edge.get_attribute("x1")) - 50 - 32) / 64)
            bottom[key] = bottom.get(key, 0) + float(edge.get_attribute("data-weight"))
        assert [bottom.get(key, 0) for key in range(6)] == pytest.approx(expected.tolist(), abs=3e-3)
        share = float(browser.find_element("css selector", "p[data-share]").get_attribute("data-share"))
        assert share == pytest.approx(1, abs=1e-2)
    browser = opened(maps, "view=flow&map=0&threshold=0.3&query=5")
    assert all(float(edge.get_attribute("data-weight")) >= 0.3 for edge in all_of(browser, "line.edge"))
    browser = opened(maps, "view=flow&map=2")
    assert "signed" in browser.find_element("id", "view").text


def test_methods_agree_as_spearman_says(opened, maps):
    browser = opened(maps, "view=methods&map=0&query=5")
    for name, m in maps.items():
        cells = all_of(browser, f"tr[data-map={name}] td[data-layer]")
        for layer, cell in enumerate(cells):
            ours, theirs = (one.merge_heads().scores[layer, 5].abs() for one in (maps["attention"], m))
            assert float(cell.text) == pytest.approx(spearmanr(ours, theirs).statistic, abs=0.051)
    assert len(all_of(browser, ".row")) == 2


def test_keys_move_through_tokens_layers_heads_and_views(opened, maps):
    from selenium.webdriver.common.keys import Keys

    browser = opened(maps, "view=text&query=3&layer=3")
    body = browser.find_element("tag name", "body")
    keys = ((Keys.ARROW_LEFT, "query=2"), (Keys.ARROW_DOWN, "layer=2"), ("h", "head=0"), ("3", "view=flow"))
    for key, says in keys:
        doing(browser, lambda key=key: body.send_keys(key))
        assert says in browser.current_url


def test_several_prompts_cross_attention_and_single_rows(opened, maps):
    cross = lm.MixingMap(torch.rand(2, 3, 5), ["a", "b", "c"], key_tokens=list("vwxyz"), method="attention")
    one_row = maps["alti"].select_queries(-1)
    browser = opened([maps, {"cross": cross}, {"one": one_row}], "prompt=1&view=text&query=1")
    assert [len(row.find_elements("css selector", ".token")) for row in all_of(browser, ".row")] == [3, 5]
    browser = opened([maps, {"cross": cross}, {"one": one_row}], "prompt=2&view=grid")
    assert len(all_of(browser, "canvas[data-grid=rows]")) == 1


def test_tokens_are_shown_and_never_run(opened):
    m = map_of(random_attention(size=len(NASTY)), tokens=list(NASTY))
    for view in ("text", "grid", "flow", "methods"):
        browser = opened(m, f"view={view}")
    browser = opened(m, "view=text")
    shown = [token.get_property("textContent") for token in all_of(browser, ".token")]
    assert shown[:4] == list(NASTY[:4])
    assert shown[7] == "⟨0⟩⟨7⟩⟨1b⟩"
    assert len(shown) == len(NASTY)


def test_a_page_of_ten_thousand_tokens_opens(opened):
    m = map_of(
        torch.rand(1, 1, 10_000), tokens=[f"<{i}>" for i in range(10_000)], queries=[9_999], causal=False
    )
    assert len(all_of(opened(m), ".token")) == 10_000


def test_a_notebooks_frame_answers_clicks(browser, maps, tmp_path):
    """Twice in one document, as two cells that show the same page."""
    shown = lm.page(maps)._repr_html_()
    path = tmp_path / "notebook.html"
    path.write_text(f"<!DOCTYPE html><meta charset=utf-8><body>{shown}{lm.page(maps)._repr_html_()}</body>")
    browser.get(f"file://{path}")
    frames = all_of(browser, "iframe")
    assert len({frame.get_attribute("id") for frame in frames}) == 2
    for frame in frames:
        browser.switch_to.frame(frame)
        wait(browser, 0)
        token = ".row:nth-of-type(2) .token:nth-of-type(3)"
        clicked_until(browser, token, f"{token}.chosen")
        clicked_until(browser, "button[data-view=methods]", "tr[data-map=alti]")
        browser.switch_to.default_content()
    assert [entry["message"] for entry in browser.get_log("browser")] == []


def test_layers_that_a_map_lacks_are_not_replaced_by_others(opened, maps):
    one = maps["alti"].select_layers([2])
    browser = opened({"a": maps["attention"], "b": one}, "view=methods&layer=3&query=5")
    assert [cell.text for cell in all_of(browser, "tr[data-map=b] td[data-layer]")][:2] == ["–", "–"]
    assert not all_of(browser, ".row")
    browser = opened({"a": maps["attention"], "b": one}, "view=text&layer=3&query=5")
    assert "no layer 3" in all_of(browser, ".row")[1].text
    gaps = maps["alti"].select_layers([0, 2])
    browser = opened(gaps, "view=flow")
    assert "follow one another" in browser.find_element("id", "view").text
    assert not all_of(browser, "line.edge")


def test_an_address_that_names_no_view(opened, maps):
    assert len(all_of(opened(maps, "view=toString"), ".row")) == 3
