"""Test the page of a trace in a browser: click what was written, and compare the sources with the trace."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.browser import NEEDS_CHROMIUM, chromium  # noqa: F401
from tests.matrix import slow
from tests.view.page.test_embedding import VS_CODE, show
from tests.view.page.test_in_a_browser import all_of, doing, percent, wait
from tests.view.page.traces import make_trace

pytestmark = NEEDS_CHROMIUM


@pytest.fixture(name="opened")
def open_traces(browser, tmp_path):
    """Open traces in the browser at an address of the page; afterwards the console must be empty."""

    def open_trace(trace, place=""):
        path = trace.show().save(tmp_path / "page.html")
        browser.get("about:blank")
        browser.get(f"file://{path}#{place}")
        wait(browser, 0)
        return browser

    yield open_trace
    assert [entry["message"] for entry in browser.get_log("browser")] == []


@pytest.fixture
def t():
    return make_trace()


@pytest.fixture
def stepped(t):
    assert t.steps is not None
    return t


def clicked(browser, selector):
    doing(browser, lambda: browser.find_element("css selector", selector).click())


def listed(browser):
    """Return the shares and the texts of the list of sources."""
    return [
        (item.find_element("css selector", ".share").text, item.text.replace("\n", " "))
        for item in all_of(browser, "#strongest [data-source]")
    ]


def chosen(browser):
    """Return the text that is marked as the explained one."""
    return "".join(piece.get_property("textContent") for piece in all_of(browser, "#written .chosen"))


def check_list(browser, span, **options):
    """Compare the list and the heading of the page with a span of the trace."""
    expected = span.top(5, **options)
    found = listed(browser)
    assert [share for share, _ in found] == [percent(abs(each.share)) for each in expected]
    for (_, text), each in zip(found, expected, strict=True):
        assert " ".join(each.source.text.split())[:40] in text
    assert browser.find_element("id", "span-text").text.strip("“”") == span.text.strip()
    count = span.stop - span.start
    if count > 1:
        text = browser.find_element("id", "probability").text
        assert f" of {count} tokens, {percent(span.probability ** (1 / count))} per token" in text


def background(piece):
    return piece.value_of_css_property("background-color")


def test_a_click_on_a_sentence_colors_its_sources(opened, t):
    browser = opened(t)
    check_list(browser, t.spans[0])
    clicked(browser, "#sentence-1")
    check_list(browser, t.spans[1])
    assert chosen(browser) == t.spans[1].text
    assert browser.find_element("id", "sentence-1").get_attribute("aria-selected") == "true"
    pieces = all_of(browser, "#prompt-text .piece")
    # All tokens of a source have one color, and that of the strongest source has the end of the scale.
    strongest = max(
        (each for each in t.spans[1].top(99, everything=True) if each.source.kind != "template"),
        key=lambda each: each.share,
    )
    for source in t.sources():
        if source.is_content:
            colors = {
                background(piece)
                for piece, (start, *_) in zip(pieces, _prompt_boxes(browser), strict=True)
                if start in source.positions
            }
            assert len(colors) == 1, source
            assert (colors == {"rgba(8, 72, 140, 1)"}) == (source == strongest.source)
    kinds = browser.find_element("id", "kinds").text
    shares: dict[str, float] = {}
    for each in t.spans[1].top(99, everything=True):
        shares[each.source.kind] = shares.get(each.source.kind, 0) + each.share
    for kind, name in (("template", "template"), ("written", "own text"), ("document", "documents")):
        assert f"{name} {percent(shares[kind])}" in kinds


def _prompt_boxes(browser):
    return browser.execute_script("return DATA.boxes.filter(([start]) => start < DATA.n_prompt)")


def test_the_unit_of_the_sources(opened, t):
    browser = opened(t, "start=4&stop=10")
    for unit in ("document", "word", "token", "sentence"):
        clicked(browser, f"[data-option=unit][data-value={unit}]")
        check_list(browser, t.by(unit)[4:10])
        assert f"unit={unit}" in browser.current_url
    clicked(browser, "#everything")
    check_list(browser, t[4:10], everything=True)
    clicked(browser, "[data-option=unit][data-value=token]")
    clicked(browser, "#more")
    assert len(listed(browser)) == 15


def test_without_steps_single_tokens_cannot_be_chosen(opened, t):
    browser = opened(t)
    assert "computed by t.steps" in browser.find_element("id", "token-hint").text
    assert not all_of(browser, "[data-option=pick]")
    browser = opened(t, "start=2&stop=3&pick=token")
    check_list(browser, t.spans[0])


def test_tokens_are_chosen_by_clicks_drags_and_keys(opened, stepped):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    browser = opened(stepped)
    assert browser.find_element("id", "token-hint").text == ""
    clicked(browser, "[data-option=pick][data-value=token]")
    clicked(browser, "#token-2")
    check_list(browser, stepped[2])
    assert "“ next2”" in browser.find_element("id", "probability").text
    line = browser.find_element("id", "written-list")
    assert line.get_attribute("aria-activedescendant") == "token-2"
    doing(browser, lambda: line.send_keys(Keys.ARROW_LEFT))
    check_list(browser, stepped[1])
    doing(browser, lambda: line.send_keys(Keys.SHIFT, Keys.ARROW_RIGHT))
    check_list(browser, stepped[1:3])
    assert "t[1:3] explains it as one" in browser.find_element("id", "probability").text
    for pick in ("token", "sentence"):
        clicked(browser, f"[data-option=pick][data-value={pick}]")
        pieces = all_of(browser, "#written .piece")
        drag = ActionChains(browser).click_and_hold(pieces[1]).move_to_element(pieces[2])
        doing(browser, drag.move_to_element(pieces[4]).release().perform)
        check_list(browser, stepped[1:5])
        assert chosen(browser) == stepped[1:5].text
    # The click after a drag is a click again.
    clicked(browser, "#sentence-1")
    check_list(browser, stepped.spans[1])
    doing(browser, lambda: browser.find_element("id", "written-list").send_keys(Keys.ARROW_LEFT))
    check_list(browser, stepped.spans[0])
    doing(browser, lambda: browser.find_element("id", "written-list").send_keys("e"))
    check_list(browser, stepped[:])


def test_a_part_and_its_measured_losses(opened, t):
    part = t["cat slept"]
    first, second = part.top(2)
    t.keep_loss(part.start, part.stop, first.source.positions, 2.5)
    t.keep_loss(part.start, part.stop, second.source.positions, -0.25)
    browser = opened(t)
    # It opens on the part that the user asked for.
    check_list(browser, part)
    found = [item.text for item in all_of(browser, "#strongest .loss")]
    # The page has the sign and the word of the console and of the JSON.
    assert found == ["loss without it: +2.50 nats", "loss without it: −0.25 nats"]
    assert "log probability that the span loses" in browser.find_element("id", "measured").text
    assert "deleted" in browser.find_element("id", "measured").text
    clicked(browser, "#sentence-0")
    assert not all_of(browser, "#strongest .loss")
    assert "verify()" in browser.find_element("id", "measured").text
    clicked(browser, f"[data-part='{part.start}:{part.stop}']")
    check_list(browser, part)


def test_a_source_of_the_list_is_shown_in_the_text(opened, t):
    browser = opened(t, "all=1")
    size = {"width": 1300, "height": 300, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        (button,) = [item for item in all_of(browser, "#strongest button") if "template" in item.text]
        assert not any(text.is_displayed() for text in all_of(browser, ".template-block .running"))
        browser.execute_script("arguments[0].click()", button)
        assert all(text.is_displayed() for text in all_of(browser, ".template-block .running"))
        assert all_of(browser, ".template-block .flash")
        source = next(item for item in all_of(browser, "#strongest button") if "template" not in item.text)
        browser.execute_script("arguments[0].click()", source)
        flashed = all_of(browser, ".flash")
        text = "".join(piece.get_property("textContent") for piece in flashed).strip()
        assert text in source.text.replace("\n", " ")
        toggle = browser.find_element("css selector", ".template-block button")
        browser.execute_script("arguments[0].click()", toggle)
        assert toggle.get_attribute("aria-expanded") == "false"
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_negative_scores_are_orange(opened):
    t = make_trace(signed=True)
    browser = opened(t, "unit=token")
    found = dict(
        zip(
            [start for start, *_ in _prompt_boxes(browser)],
            all_of(browser, "#prompt-text .piece"),
            strict=True,
        )
    )
    for each in t.by("token").spans[0].top(99):
        red, _, blue = map(int, background(found[each.source.positions[0]])[5:-1].split(", ")[:3])
        assert (red > blue) == (each.score < 0)


@pytest.mark.parametrize("scheme", ["light", slow("dark")])
@pytest.mark.parametrize("width", [1300, 390])
def test_it_is_accessible_and_fits(opened, browser, stepped, scheme, width):
    axe = pytest.importorskip("axe_core_python", reason="no axe-core-python: pip install axe-core-python")
    from tests.view.page.test_accessibility import RUN

    source = (Path(axe.__file__).parent / "axe.min.js").read_text()
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        for place in ("", "unit=token&pick=token&all=1", "start=1&stop=4"):
            opened(stepped, place)
            for toggle in all_of(browser, ".template-block button"):
                browser.execute_script("arguments[0].click()", toggle)
            browser.execute_script(source)
            assert browser.execute_async_script(RUN) == [], place
            assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_it_is_alive_in_the_frame_of_a_notebook(browser, tmp_path, t):
    show(browser, tmp_path, VS_CODE, t.show()._repr_html_())
    try:
        wait(browser, 0)
        clicked(browser, "#sentence-1")
        check_list(browser, t.spans[1])
    finally:
        browser.switch_to.default_content()
    assert [entry["message"] for entry in browser.get_log("browser")] == []
