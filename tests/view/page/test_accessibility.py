"""Test that the page can be used without seeing it, and without a mouse: axe-core, focus, labels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import lens_mix as lm
from lens_mix.maps.explained import Explained
from tests.browser import NEEDS_CHROMIUM, chromium  # noqa: F401
from tests.matrix import slow
from tests.random_maps import map_of, random_attention
from tests.view.page.routes import routes_map
from tests.view.page.test_in_a_browser import VIEWS, all_of, doing, open_pages  # noqa: F401

axe = pytest.importorskip("axe_core_python", reason="no axe-core-python: pip install axe-core-python")
pytestmark = NEEDS_CHROMIUM

RUN = """
const done = arguments[0];
axe.run(document, { resultTypes: ["violations"] }).then(found => done(found.violations.map(
  one => [one.id, one.impact, one.nodes.map(node => node.html.slice(0, 200) + " " + node.failureSummary)])));
"""


@pytest.fixture(scope="module")
def prompts():
    """Return a decoder's maps with an input map, heads, signs and routes; an encoder; and cross-attention."""
    explained = [Explained(" next", 0.5, ((" a", 0.1),))] * 6
    attention = map_of(random_attention(heads=2), explained=explained, notes=("a note",))
    signed = map_of(random_attention() - 0.1 * torch.ones(6, 6).tril(), provenance={"has_tree": True})
    decoder = {
        "attention": attention,
        "signed": signed,
        "rollout": lm.rollout(attention),
        "routes": routes_map(),
    }
    tokens = ["[CLS]", "a", "[MASK]", "film", "##s", "[SEP]"]
    encoder = lm.MixingMap(random_attention(causal=False), tokens, method="alti", default_query=2)
    cross = lm.MixingMap(torch.rand(2, 3, 5), ["a", "b", "c"], key_tokens=list("vwxyz"), method="attention")
    return [decoder, {"encoder": encoder}, {"cross": cross, "decoder": map_of(random_attention(size=3))}]


@pytest.mark.parametrize("scheme", ["light", slow("dark")])
@pytest.mark.parametrize("width", [1300, slow(390)])
def test_axe_finds_nothing(opened, browser, prompts, scheme, width):
    source = (Path(axe.__file__).parent / "axe.min.js").read_text()
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        places = [f"prompt=0&view={view}" for view in VIEWS] + [
            "prompt=1",
            "prompt=2",
            "prompt=0&query=2&head=1",
        ]
        for place in places:
            opened(prompts, place)
            browser.execute_script(source)
            assert browser.execute_async_script(RUN) == [], place
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


FOCUSED = """
const one = document.activeElement, style = getComputedStyle(one);
const { panel, option, compare, export: kind } = one.dataset, isOutlined = style.outlineStyle !== "none";
return [one.id || panel || option || compare || kind || one.className,
  one.matches(":focus-visible") && isOutlined && parseFloat(style.outlineWidth) >= 2];
"""


def test_the_tab_key_goes_through_the_page_in_order_and_shows_the_focus(opened, prompts):
    from selenium.webdriver.common.keys import Keys

    browser = opened(prompts, "view=layers")
    browser.execute_script("localStorage.clear()")
    order = []
    for _ in range(40):
        browser.switch_to.active_element.send_keys(Keys.TAB)
        name, is_visible = browser.execute_script(FOCUSED)
        if name in order and name == order[0]:
            break
        if name:
            assert is_visible, name
            order.append(name)
    wanted = ["prompt", "tokens", "tab-layers", "unit", "scale", "first", "layer", "attention", "csv"]
    places = [order.index(name) for name in wanted]
    assert places == sorted(places), order
    # One stop for all tokens, and one for all tabs.
    assert sum(name.startswith("tab-") for name in order) == 1


def test_tabs_are_chosen_by_arrow_keys(opened, prompts):
    from selenium.webdriver.common.keys import Keys

    browser = opened(prompts, "view=layers")
    tab = browser.find_element("id", "tab-layers")
    doing(browser, lambda: tab.send_keys(Keys.ARROW_RIGHT))
    assert browser.switch_to.active_element.get_attribute("id") == "tab-text"
    assert browser.find_element("id", "tab-text").get_attribute("aria-selected") == "true"
    assert browser.find_element("id", "panel").get_attribute("aria-labelledby") == "tab-text"
    # The query is as before, although the arrow keys choose tokens elsewhere.
    assert "query=5" in browser.current_url


def test_the_chosen_token_is_the_active_one_of_its_list(opened, prompts):
    from selenium.webdriver.common.keys import Keys

    browser = opened(prompts, "view=layers")
    line = browser.find_element("id", "tokens")
    doing(browser, lambda: line.send_keys(Keys.ARROW_LEFT))
    assert line.get_attribute("aria-activedescendant") == "token-4"
    assert browser.find_element("id", "token-4").get_attribute("aria-selected") == "true"
    assert browser.switch_to.active_element == line
    for live in ("finding", "reading"):
        assert browser.find_element("id", live).get_attribute("aria-live") == "polite"


def test_a_control_keeps_the_focus_while_it_is_used(opened, prompts):
    from selenium.webdriver.common.keys import Keys

    browser = opened(prompts, "view=layers")
    slider = browser.find_element("id", "layer")
    for _ in range(2):
        doing(browser, lambda: slider.send_keys(Keys.ARROW_LEFT))
    assert browser.switch_to.active_element == slider
    button = all_of(browser, "[data-compare]")[1]
    doing(browser, lambda: button.send_keys(Keys.ENTER))
    assert browser.switch_to.active_element.get_attribute("data-compare") == "signed"
