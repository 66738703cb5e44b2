"""Test the audit on the page of a trace in a browser: choose a claim, and compare it with the audit."""

from __future__ import annotations

from pathlib import Path

import pytest

from lens_mix.measured import Fact
from lens_mix.traces.claims import VERDICTS
from tests.browser import NEEDS_CHROMIUM, chromium  # noqa: F401
from tests.matrix import slow
from tests.view.page.audits import find_sources, plant_audit
from tests.view.page.test_in_a_browser import all_of, doing, percent
from tests.view.page.test_trace_in_a_browser import chosen, clicked, open_traces  # noqa: F401
from tests.view.page.traces import make_trace

pytestmark = NEEDS_CHROMIUM


@pytest.fixture
def t():
    return make_trace()


def text_of(browser, selector):
    return browser.find_element("css selector", selector).get_property("textContent")


def framed(browser):
    """Return for each role the positions of the prompt that are framed for it."""
    boxes = browser.execute_script("return DATA.boxes")
    roles: dict[str, list[int]] = {}
    for piece in all_of(browser, "#prompt-text .piece.framed"):
        (role,) = {"needed", "one-is-enough", "against"} & set(piece.get_attribute("class").split())
        start, stop, *_ = boxes[int(piece.get_attribute("data-box"))]
        roles.setdefault(role, []).extend(range(start, stop))
    return roles


def listed(browser):
    """Return the role, the name and the text of each source of the chosen claim, and what was measured."""
    return [
        (item.get_attribute("data-role"), item.text.replace("\n", " "))
        for item in all_of(browser, "[data-role]")
    ]


def test_each_sentence_has_its_verdict(opened, t):
    audit = plant_audit(t)
    browser = opened(t)
    options = all_of(browser, "#written [role=option]")
    assert [option.accessible_name.strip() for option in options] == [
        f"{claim.span.text.strip()} {claim.verdict}" for claim in audit
    ]
    # The verdict is not a part of the text.
    assert chosen(browser) == t.spans[0].text


def test_a_claim_with_its_sources(opened, t):
    claim = plant_audit(t)[0]
    first, second, third = find_sources(t)
    browser = opened(t)
    whole = percent(claim.span.probability)
    why = claim.describe()
    assert text_of(browser, "#verdict") == f"conflicting {why[0].upper()}{why[1:]}."
    assert browser.find_element("css selector", "#span[aria-live] #verdict").is_displayed()
    found = listed(browser)
    expected = [
        ("needed", first, "+6.25 nats", 0.003, "93 %"),
        ("one is enough", first, "+6.25 nats", 0.003, "100 %"),
        ("one is enough", second, "+0.75 nats", 0.1, "61 %"),
        ("against", third, "−0.25 nats", 0.2, None),
    ]
    assert [role for role, _ in found] == [role for role, *_ in expected]
    for (_, text), (role, source, loss, probability, share) in zip(found, expected, strict=True):
        assert text.startswith(f"{role} {source.name} “{source.text.strip()}”"), text
        assert f"loss without it: {loss} · probability {whole} → {percent(probability)}" in text
        assert (f"with it alone {share} remains" in text) == (share is not None)
    shown = text_of(browser, "#claim")
    assert "Without it, “cat” loses 6.25 nats, and the model would write “dog barked”." in shown
    assert "Without all of them, “slept” loses 4.50 nats, and the model would write “ran”." in shown
    assert "It makes “bark” more probable by 3.50 nats." in shown
    assert f"without all sources: loss +9.50 nats · probability {whole} → {percent(0.002)}" in shown
    caption = text_of(browser, "#audited")
    assert "took 17 forward passes" in caption
    assert "Kept in all of them: instruction “Answer briefly.”, question “Question: Who slept?”." in caption


def test_how_often_a_verdict_is_right(opened, t, monkeypatch):
    plant_audit(t)
    rest = dict.fromkeys(("score", "date", "release", "command", "recorded_in"), "")
    fact = Fact(0.97, 0.91, 0.99, 80, "claims", model="Tiny", digits=2, **rest)
    facts = {"redundant": [fact]}
    monkeypatch.setattr("lens_mix.traces.audit.precision_of", lambda verdict: facts.get(verdict, []))
    browser = opened(t)
    assert "right in" not in text_of(browser, "#audited")
    clicked(browser, "#sentence-1")
    sentence = "The verdict “redundant” was right in 0.97 [0.91, 0.99] of 80 claims (Tiny)."
    assert text_of(browser, "#audited").startswith(sentence)


def test_the_sources_of_the_chosen_claim_are_framed(opened, t):
    plant_audit(t)
    # White space at the end of a source is not framed.
    first, second, third = (
        [place for place in source.positions if t.tokens[place].strip()] for source in find_sources(t)
    )
    browser = opened(t)
    # A source with two roles has the stronger one.
    assert framed(browser) == {"needed": first, "one-is-enough": second, "against": third}
    marks = [mark.text for mark in all_of(browser, "#prompt-text .role")]
    assert marks == ["needed", "one is enough", "against"]
    clicked(browser, "#sentence-1")
    assert text_of(browser, "#verdict").startswith("redundant ")
    assert framed(browser) == {"one-is-enough": first + second}
    assert [mark.text for mark in all_of(browser, "#prompt-text .role")] == ["one is enough"] * 2


def test_a_click_on_a_source_shows_it_in_the_prompt(opened, t):
    plant_audit(t)
    browser = opened(t)
    button = browser.find_element("css selector", "[data-role=against]")
    browser.execute_script("arguments[0].click()", button)
    text = "".join(piece.get_property("textContent") for piece in all_of(browser, ".flash"))
    assert text.strip() == find_sources(t)[2].text.strip()


def test_claims_that_are_parts_of_sentences(opened, t):
    audit = plant_audit(t, is_in_parts=True)
    browser = opened(t)
    # It opens on the first claim. Its name has the verdicts of both the sentence's claims.
    assert chosen(browser) == audit[0].span.text
    second = browser.find_element("id", "sentence-1").accessible_name.strip()
    assert second == "It did so redundant for from memory hours unclear !"
    buttons = {button.text: button for button in all_of(browser, "#parts button")}
    assert set(buttons) == {
        "everything",
        "redundant “cat slept”",
        "redundant “did so”",
        "from memory “for”",
        "unclear “hours”",
    }
    doing(browser, buttons["unclear “hours”"].click)
    assert chosen(browser) == audit[3].span.text
    assert text_of(browser, "#verdict") == "unclear The budget of passes was too small."
    assert text_of(browser, "#claim") == "Unknown."
    assert framed(browser) == {}
    clicked(browser, "#written .verdict[data-claim='2']")
    assert chosen(browser) == audit[2].span.text
    assert text_of(browser, "#verdict").startswith("from memory Its probability is")
    before = percent(audit[2].span.probability)
    expected = f"without all sources: probability {before} → {percent(0.3)}"
    assert text_of(browser, "#claim") == f"No source: it loses little without all of them.{expected}"


def test_a_claim_that_repeats_an_earlier_one(opened, t):
    audit = plant_audit(t, is_in_parts=True)
    browser = opened(t, f"start={audit[1].span.start}&stop={audit[1].span.stop}")
    assert "It repeats what the answer says before" in text_of(browser, "#verdict")
    # What was measured for the earlier claim is compared with its probability.
    before = percent(audit[0].span.probability)
    assert f"probability {before} → {percent(0.003)}" in text_of(browser, "#claim")
    doing(browser, browser.find_element("css selector", "#claim > button.claim").click)
    assert chosen(browser) == audit[0].span.text


def test_everything_has_all_claims(opened, t):
    audit = plant_audit(t)
    browser = opened(t, f"start=0&stop={t.reading.n_written}")
    assert text_of(browser, "#verdict") == ""
    assert framed(browser) == {}
    buttons = all_of(browser, "#claim button")
    assert [button.text for button in buttons] == [
        f"{claim.verdict} “{claim.span.text.strip()}”" for claim in audit
    ]
    doing(browser, buttons[1].click)
    assert chosen(browser) == audit[1].span.text


def test_a_token_has_the_verdict_of_its_claim(opened, t):
    plant_audit(t)
    assert t.steps is not None
    browser = opened(t, f"start={t.spans[1].start}&stop={t.spans[1].start + 1}&pick=token")
    assert text_of(browser, "#verdict").startswith(f"In the claim “{t.spans[1].text.strip()}”: redundant")
    assert [badge.text for badge in all_of(browser, "#written .badge")] == ["conflicting", "redundant"]
    clicked(browser, "#written .verdict[data-claim='0']")
    assert chosen(browser) == t.spans[0].text


def test_verdicts_differ_without_their_colors(opened, t):
    plant_audit(t)
    browser = opened(t)
    looks = []
    for verdict in VERDICTS:
        browser.execute_script("document.body.append(badge(arguments[0]))", verdict)
        made = browser.find_element("css selector", "body > .badge:last-child")
        assert made.text == verdict
        looks.append(
            [made.value_of_css_property(f"border-top-{part}") for part in ("style", "width", "color")]
        )
    assert len({(style, width) for style, width, _ in looks}) == len(VERDICTS)
    assert len({color for *_, color in looks}) == len(VERDICTS)


def test_without_an_audit_the_page_says_how_to_make_one(opened, t):
    browser = opened(t)
    assert not browser.find_element("id", "audit").is_displayed()
    assert not browser.find_element("id", "verdict").is_displayed()
    assert not all_of(browser, ".badge, .framed")
    assert "t.audit() measures what each claim rests on" in text_of(browser, "#measured")
    plant_audit(t)
    assert "t.audit()" not in text_of(opened(t), "#measured")


@pytest.mark.parametrize("scheme", ["light", slow("dark")])
@pytest.mark.parametrize("width", [1300, 390])
def test_it_is_accessible_and_fits(opened, browser, t, scheme, width):
    axe = pytest.importorskip("axe_core_python", reason="no axe-core-python: pip install axe-core-python")
    from tests.view.page.test_accessibility import RUN

    assert t.steps is not None
    source = (Path(axe.__file__).parent / "axe.min.js").read_text()
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        for is_in_parts in (False, True):
            plant_audit(t, is_in_parts)
            for place in ("", "start=0&stop=10", "start=6&stop=7&pick=token", "start=7&stop=8"):
                opened(t, place)
                browser.execute_script(source)
                assert browser.execute_async_script(RUN) == [], place
                assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
