"""Test the form in a real browser: a prompt with two methods, the busy sign, cancelling, the estimate."""

from __future__ import annotations

import dataclasses
import threading
import time
import traceback
from pathlib import Path

import pytest

from lens_mix import registry
from lens_mix.method import Method
from lens_mix.serve import Limits, Site, site
from lens_mix.serve.estimate import Pace
from tests.demos.tiny_folder import save_tiny_llama
from tests.tiny_models import available, bridge

pytest.importorskip("selenium", reason="no selenium: pip install selenium")
from selenium.common.exceptions import NoSuchElementException, StaleElementReferenceException
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from tests.browser import NEEDS_CHROMIUM, chromium  # noqa: F401

pytest.importorskip("typer")
pytestmark = NEEDS_CHROMIUM


def visit(url, browser, place):
    """Request two maps and click through them, then request none and read the message."""
    wait = open_form(url, browser)
    pick(browser, "alti", "attention")
    assert browser.find_element("id", "picked").text == ": attention, alti"
    wait.until(lambda _: " tokens, less than a second" in browser.find_element("id", "estimate").text)
    browser.find_element("css selector", "button").click()
    assert browser.find_element("css selector", "details").get_attribute("open") is None
    browser.switch_to.frame("page")
    wait.until(lambda _: len(all_of(browser, "[data-map], canvas, svg")) > 0)
    assert "alti" in browser.find_element("css selector", "body").text
    browser.switch_to.default_content()
    browser.save_screenshot(str(place))
    assert [entry["message"] for entry in browser.get_log("browser")] == []
    browser.find_element("css selector", "summary").click()
    pick(browser)
    browser.find_element("css selector", "button").click()
    browser.switch_to.frame("page")
    wait.until(lambda _: "No method is picked" in browser.find_element("css selector", "body").text)


def cancel(url, browser, place):
    """Request a map that never ends, watch the seconds, and cancel it with the keyboard."""
    wait = open_form(url, browser)
    pick(browser, "endless")
    browser.find_element("css selector", "button").click()
    browser.switch_to.frame("page")
    wait.until(lambda _: int(browser.find_element("id", "state").text.partition(" s")[0]) >= 2)
    browser.switch_to.default_content()
    browser.save_screenshot(str(place))
    browser.switch_to.frame("page")
    browser.find_element("css selector", "button").send_keys(Keys.ENTER)
    wait.until(lambda _: "Cancelled" in browser.find_element("css selector", "body").text)
    browser.switch_to.default_content()
    assert [entry["message"] for entry in browser.get_log("browser")] == []


def without_javascript(url, browser, place):
    """Do the same without JavaScript: the busy page is loaded again, and shows more seconds."""
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        cancel(url, browser, place)
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


def ask(url, browser, place):
    """Request a map that is expected to take long, read the estimate, and start it."""
    wait = open_form(url, browser)
    pick(browser, "alti")
    browser.find_element("css selector", "button").click()
    browser.switch_to.frame("page")
    wait.until(lambda _: "This takes about" in browser.find_element("css selector", "body").text)
    browser.switch_to.default_content()
    browser.save_screenshot(str(place))
    browser.switch_to.frame("page")
    browser.find_element("css selector", "button").click()
    wait.until(lambda _: len(all_of(browser, "[data-map], canvas, svg")) > 0)


def open_form(url, browser):
    """Load the form, type a prompt, and return what waits in it."""
    browser.switch_to.default_content()
    browser.get(url)
    browser.get_log("browser")  # The messages of the test before are not of interest.
    browser.find_element("name", "text").send_keys("My grandmother was born in <i>Italy</i>")
    ignored = [StaleElementReferenceException, NoSuchElementException]
    return WebDriverWait(browser, 30, ignored_exceptions=ignored)


def pick(browser, *names):
    """Pick these methods and no others."""
    for box in browser.find_elements("css selector", "[name=method]"):
        if box.is_selected() != (box.get_attribute("value") in names):
            box.click()


def all_of(browser, selector):
    return browser.find_elements("css selector", selector)


@dataclasses.dataclass(frozen=True)
class Endless(Method):
    """Compute without end."""

    name = "endless"
    residual = 0.0
    engines = ("recorded",)

    def __call__(self, block):
        while True:
            time.sleep(0.001)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    if not available(bridge, "llama"):
        pytest.skip("no bridge in this TransformerLens")
    from lens_mix.cli import _load

    return _load(str(save_tiny_llama(tmp_path_factory.mktemp("model"))))


def serve_a_visit(model, visitor, *arguments):
    """Serve the form in this thread, where maps are computed, while a visitor uses it in another one."""
    problems: list[BaseException] = []

    def click_through():
        try:
            visitor(*arguments)
        except BaseException as problem:
            traceback.print_exc()
            problems.append(problem)

    with Site(0, Limits()) as server:
        arguments = (server.url, *arguments)
        thread = threading.Thread(target=click_through)
        server.serve(model, lambda _: thread.start(), lambda: not thread.is_alive())
    assert problems == []


@pytest.fixture
def endless(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {"endless": Endless})


@pytest.mark.parametrize("visitor", [visit, cancel, without_javascript, ask])
@pytest.mark.usefixtures("endless")
def test_the_form(browser, model, tmp_path, monkeypatch, visitor):
    if visitor is ask:
        monkeypatch.setattr(site, "measure_pace", lambda model: Pace(12.0, 0.0, 3))
    serve_a_visit(model, visitor, browser, tmp_path / f"{visitor.__name__}.png")


@pytest.mark.usefixtures("endless")
def test_axe_finds_nothing(browser, model):
    """Check the form, the busy sign and a message for faults of accessibility."""
    axe = pytest.importorskip("axe_core_python", reason="no axe-core-python: pip install axe-core-python")
    source = (Path(axe.__file__).parent / "axe.min.js").read_text()

    def find_faults():
        browser.execute_script(source)
        return browser.execute_async_script(
            "const done = arguments[0];"
            "axe.run({iframes: false}).then(found => done(found.violations.map(one => one.id)))"
        )

    def look(url):
        wait = open_form(url, browser)
        assert find_faults() == []
        pick(browser, "endless")
        browser.find_element("css selector", "button").click()
        browser.switch_to.frame("page")
        wait.until(lambda _: browser.find_element("id", "state").text)
        assert find_faults() == []
        browser.find_element("css selector", "button").click()
        wait.until(lambda _: "Cancelled" in browser.find_element("css selector", "body").text)
        assert find_faults() == []
        browser.switch_to.default_content()

    serve_a_visit(model, look)
