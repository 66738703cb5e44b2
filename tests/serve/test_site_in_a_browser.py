"""Test the form in a real browser: send a sentence with two methods, and click in the page in its frame."""

from __future__ import annotations

import threading

import pytest

from lens_mix.serve import Limits, Site
from tests.demos.tiny_folder import save_tiny_llama
from tests.tiny_models import available, bridge

pytest.importorskip("selenium", reason="no selenium: pip install selenium")
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.support.ui import WebDriverWait

from tests.browser import NEEDS_CHROMIUM, chromium  # noqa: F401

pytest.importorskip("typer")
pytestmark = NEEDS_CHROMIUM


def visit(browser, url, place):
    """Request two maps and click through them, then request none and read the message."""
    browser.get(url)
    browser.find_element("name", "text").send_keys("My grandmother was born in <i>Italy</i>")
    for box in browser.find_elements("css selector", "input:checked"):
        box.click()
    for name in ("alti", "attention"):
        browser.find_element("css selector", f"input[value={name}]").click()
    browser.find_element("css selector", "button").click()
    browser.switch_to.frame("page")
    wait = WebDriverWait(browser, 90, ignored_exceptions=[StaleElementReferenceException])
    wait.until(
        lambda _: [row.get_attribute("data-map") for row in all_of(browser, ".row")] == ["alti", "attention"]
    )
    token = ".row:nth-of-type(2) .token:nth-of-type(3)"
    wait.until(lambda _: clicked(browser, token) and all_of(browser, f"{token}.chosen"))
    wait.until(lambda _: clicked(browser, "button[data-view=grid]") and all_of(browser, "canvas"))
    browser.switch_to.default_content()
    browser.save_screenshot(str(place))
    assert [entry["message"] for entry in browser.get_log("browser")] == []
    for name in ("alti", "attention"):
        browser.find_element("css selector", f"input[value={name}]").click()
    browser.find_element("css selector", "button").click()
    browser.switch_to.frame("page")
    wait.until(lambda _: "No method is picked" in browser.find_element("css selector", "body").text)


def all_of(browser, selector):
    return browser.find_elements("css selector", selector)


def clicked(browser, selector):
    browser.find_element("css selector", selector).click()
    return True


def test_a_sentence_two_methods_and_the_page(browser, tmp_path):
    if not available(bridge, "llama"):
        pytest.skip("no bridge in this TransformerLens")
    from lens_mix.cli import _load

    problems: list[BaseException] = []

    def click_through():
        try:
            visit(browser, site.url, tmp_path / "form.png")
        except BaseException as problem:
            problems.append(problem)

    with Site(0, Limits()) as site:
        visitor = threading.Thread(target=click_through)
        # The maps are computed here, in the main thread.
        site.serve(
            _load(str(save_tiny_llama(tmp_path))), lambda _: visitor.start(), lambda: not visitor.is_alive()
        )
    assert problems == []
