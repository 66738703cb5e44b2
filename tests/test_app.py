"""Test the app of `lens-mix serve` with the Python client, and in a browser.

`make test-space` runs this file. It is skipped where gradio is not installed.
"""

from __future__ import annotations

import html
import json
import re
import socket
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

import pytest

pytest.importorskip("gradio", reason="no gradio: make test-space")
pytest.importorskip("typer")
from gradio_client import Client
from gradio_client.exceptions import AppError
from selenium.webdriver.support.ui import WebDriverWait

import lens_mix as lm
from lens_mix import app, registry
from lens_mix.cli import _load
from lens_mix.traces.auditor import Auditor
from tests.browser import NEEDS_CHROMIUM, chromium  # noqa: F401
from tests.demos.tiny_folder import WORDS, save_tiny_bert, save_tiny_llama, save_tiny_t5
from tests.test_cli import called, error_of

PROMPT = "My grandmother was born in Italy"
DOCUMENTS = (PROMPT + ".", "They live in Japan.", "")
QUESTION = "She left"
MAP_TOKENS, TRACE_TOKENS = 12, 80

# gradio asks pandas for what newer releases of pandas no longer need.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:gradio")

_contacted: set[str] = set()


def _note_contact(event, arguments):
    if event == "socket.connect" and isinstance(arguments[1], tuple):
        _contacted.add(str(arguments[1][0]))
    if event == "socket.getaddrinfo":
        _contacted.add(str(arguments[0]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("llama"), context=256)


@pytest.fixture(scope="module")
def url(folder):
    """Start the app of a tiny model."""
    sys.addaudithook(_note_contact)
    started, url = app.launch(_load(str(folder)), map_tokens=MAP_TOKENS, trace_tokens=TRACE_TOKENS)
    yield url
    started.close()


@pytest.fixture(scope="module")
def client(url):
    return Client(url, verbose=False)


def ask_for_maps(client, prompt=PROMPT, target="", others=("attention",), all_rows=False):
    return client.predict(prompt, target, list(others), all_rows, api_name="/map")


def ask_for_trace(
    client, documents=DOCUMENTS, question=QUESTION, answer="", is_measured=False, is_audited=False
):
    return client.predict(*documents, question, answer, is_measured, is_audited, api_name="/trace")


def read_page(frame):
    """Return the HTML of the page in a frame."""
    (page,) = re.findall(r'srcdoc="([^"]*)"', frame)
    return html.unescape(page)


def test_the_page_has_the_recommended_map_first(client):
    frame, text = ask_for_maps(client, others=("value_zeroing", "attention"))
    assert re.search(r"after ' Italy': '.+' 0\.\d+\n", text)
    places = [text.index(f"\n{name}") for name in ("input_map, by", "value_zeroing:", "attention:")]
    assert places == sorted(places)
    page = read_page(frame)
    assert page.startswith("<!DOCTYPE html>")
    assert "Value Zeroing" in page
    # Nothing is fetched when the page is viewed, and the frame may not reach the site around it.
    assert not re.search(r"""(?:src|href)=["']?https?:|@import|url\(\s*["']?https?:""", page)
    assert re.search(r'sandbox="([^"]*)"', frame)[1] == "allow-scripts allow-downloads"


def test_a_target_is_explained_by_the_methods_that_have_one(client):
    frame, text = ask_for_maps(client, target=" Japan", others=("attention", "gim"))
    assert read_page(frame).count("probability of ' Japan'") >= 2
    assert "\nattention: " in text


def test_all_positions_are_explained_if_asked_for(client):
    (one, every) = (read_page(ask_for_maps(client, all_rows=rows)[0]) for rows in (False, True))
    assert len(every) > len(one)


def test_a_trace_of_what_the_model_writes(client):
    frame, text = ask_for_trace(client)
    assert read_page(frame).startswith("<!DOCTYPE html>")
    assert ", 64 written: " in text
    assert "document 1: 'My grandmother was born in Italy.'" in text
    assert "document 2: 'They live in Japan.'" in text


def test_a_trace_of_an_answer_with_measured_losses(client):
    _, text = ask_for_trace(client, answer=" the country of her life", is_measured=True)
    assert ", 5 written: the country of her life" in text
    assert re.search(r"[+-]\d+\.\d+ nats  document 1: ", text)


def test_a_trace_with_the_audit_of_each_sentence(client, folder):
    answer = " They live in Japan. She left."
    frame, text = ask_for_trace(client, answer=answer, is_audited=True)
    assert read_page(frame).startswith("<!DOCTYPE html>")
    documents = {"document 1": DOCUMENTS[0], "document 2": DOCUMENTS[1]}
    audit = lm.audit(_load(str(folder)), lm.Documents(documents, QUESTION), answer=answer)
    assert len(audit) == 2
    assert text.endswith(repr(audit))
    assert "\n2 claims: " in text
    assert " claims: " not in ask_for_trace(client, answer=answer)[1]


def test_a_cancelled_audit_ends_after_the_sentence_that_runs(client, monkeypatch):
    audited, audit = [], Auditor.audit

    def audit_slowly(self, span):
        audited.append(span.text)
        time.sleep(0.5)
        return audit(self, span)

    monkeypatch.setattr(Auditor, "audit", audit_slowly)
    fields = (*DOCUMENTS, QUESTION, " She left." * 6, False, True)
    job = client.submit(*fields, api_name="/trace")
    WebDriverWait(None, 30, poll_frequency=0.1).until(lambda _: audited)
    shown = [step[0] for step in job.outputs()]
    assert '<p role="status">Computing: audit of sentence 1 of 6</p>' in shown
    assert job.cancel()
    # This request waits only until the sentence that runs is audited.
    ask_for_maps(client, others=())
    assert len(audited) < 6


def test_a_mistake_is_a_sentence(client):
    with pytest.raises(AppError, match=r"^The prompt is empty\. Type a text\.$"):
        ask_for_maps(client, "  ")
    with pytest.raises(AppError, match=r"^The prompt has 27 tokens, and the limit is 12\. Shorten it\.$"):
        ask_for_maps(client, PROMPT * 5)
    with pytest.raises(AppError, match=r"^target: expected the text of one token"):
        ask_for_maps(client, target=" Japan war")
    with pytest.raises(AppError, match=r"^All documents are empty\. Type or paste a text\.$"):
        ask_for_trace(client, ("", " ", ""))
    with pytest.raises(AppError, match=r"^The text has \d+ tokens, and the limit is 80\. Shorten it\.$"):
        ask_for_trace(client, (PROMPT * 20, "", ""))
    with pytest.raises(AppError, match=r"^The text has \d+ tokens, and the limit is 80\. Shorten it\.$"):
        ask_for_trace(client, answer=" They live" * 40)


def test_an_unexpected_error_has_no_traceback(client, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("<s> is unknown")

    monkeypatch.setattr(app, "compute_maps", fail)
    with pytest.raises(AppError) as caught:
        ask_for_maps(client)
    assert html.unescape(str(caught.value)) == "RuntimeError: <s> is unknown"


def test_a_cancelled_request_ends_after_the_method_that_runs(client, monkeypatch):
    started, running, compute = [], [], app.compute_maps

    def compute_slowly(model, prompt, names, **options):
        started.append(*names)
        running.append(1)
        time.sleep(0.5)
        assert len(running) == 1, "expected one request in the model at a time"
        try:
            return compute(model, prompt, names, **options)
        finally:
            running.pop()

    monkeypatch.setattr(app, "compute_maps", compute_slowly)
    job = client.submit(PROMPT, "", ["attention", "alti", "gim", "decompx"], False, api_name="/map")
    WebDriverWait(None, 30, poll_frequency=0.1).until(lambda _: started)
    assert job.cancel()
    # gradio starts this request at once, and the lock lets it wait until the map of the other is computed.
    frame, _ = ask_for_maps(client, others=())
    assert read_page(frame).startswith("<!DOCTYPE html>")
    assert started[-1] == "input_map"
    assert "decompx" not in started


def test_a_model_that_writes_no_text_has_no_tab_for_traces(tmp_path):
    made = app._build(_load(str(save_tiny_bert(tmp_path / "bert"))), MAP_TOKENS, TRACE_TOKENS)
    assert list(made.get_api_info()["named_endpoints"]) == ["/map"]
    written = json.dumps(made.get_config_file())
    assert "- `alti_logit`: alti_logit can't run on this model: " in written


def test_the_map_of_an_encoder_decoder_is_that_of_its_encoder(tmp_path):
    folder = save_tiny_t5(tmp_path / "t5", [*WORDS, "Question:", "Answer:"])
    started, url = app.launch(_load(str(folder)), map_tokens=MAP_TOKENS, trace_tokens=TRACE_TOKENS)
    client = Client(url, verbose=False)
    try:
        assert "\nattention: " in ask_for_maps(client)[1]
        assert "document 1: '" in ask_for_trace(client)[1]
        with pytest.raises(AppError, match=r"^No method is chosen\. Choose one or several\.$"):
            ask_for_maps(client, others=())
    finally:
        started.close()


def test_every_method_is_listed_with_its_cost(client):
    fields = client.view_api(return_format="dict")["named_endpoints"]["/map"]["parameters"]
    (others,) = [field for field in fields if field["parameter_name"] == "other_methods"]
    assert "value_zeroing" in str(others["type"])
    assert registry.describe("gim").cost_in_words in json.dumps(client.config)


def test_nobody_else_is_asked_and_nobody_else_is_answered(client):
    with urllib.request.urlopen(client.src) as response:
        assert b"fonts.googleapis.com/css" not in response.read()
    ask_for_maps(client)
    assert _contacted <= {"127.0.0.1", "localhost"}
    foreign = urllib.request.Request(client.src, headers={"Host": "example.org"})
    with pytest.raises(urllib.error.HTTPError, match="400"):
        urllib.request.urlopen(foreign)


def test_serve_starts_the_app_and_checks_its_arguments_first(folder, monkeypatch):
    served = {}

    class Served:
        def block_thread(self):
            served["blocks"] = True

    def launch(model, **options):
        served.update(options)
        return Served(), "http://127.0.0.1:7860/"

    monkeypatch.setattr(app, "launch", launch)
    output = called("serve", folder, "--tokens", 9).output
    assert output.endswith("http://127.0.0.1:7860/ (Ctrl-C ends it)\n")
    assert served == {"map_tokens": 9, "trace_tokens": 512, "port": None, "blocks": True}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"--port: expected one that is free, got {port}" in error_of("serve", "m", "--port", port)
    assert "MODEL" in error_of("serve", "nobody/nothing")


@NEEDS_CHROMIUM
@pytest.mark.parametrize("width", [1300, 390])
def test_in_a_browser(url, browser, width):
    """Make a map, a mistake and a trace, on a desktop and on a phone; nothing else is fetched."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(url)
    wait = WebDriverWait(browser, 60)
    click(wait, "Show the map")
    read_frame(browser, wait, "Where did the next word come from?")
    assert_fits(browser, width)

    (target,) = [one for one in find(browser, "input[type=text], textarea") if "predicts" in str(hint(one))]
    target.send_keys(" Japan war")
    click(wait, "Show the map")
    message = wait.until(lambda _: find(browser, ".toast-body"))[0].text
    assert "target: expected the text of one token" in message
    assert "Traceback" not in message
    # On a phone the message covers the tabs.
    find(browser, ".toast-close")[0].click()
    wait.until_not(lambda _: find(browser, ".toast-body"))

    click(wait, "Trace")
    click(wait, "Trace the answer")
    read_frame(browser, wait, "Where did this text come from?")
    assert_fits(browser, width)
    names = browser.execute_script("return performance.getEntriesByType('resource').map(one => one.name)")
    assert {urlsplit(name).hostname for name in names if name.startswith("http")} == {"127.0.0.1"}
    assert [entry["message"] for entry in browser.get_log("browser")] == []


@NEEDS_CHROMIUM
def test_axe_finds_nothing(url, browser):
    """Check both tabs for faults of accessibility; the page in the frame has a test of its own."""
    axe = pytest.importorskip("axe_core_python", reason="no axe-core-python: pip install axe-core-python")
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    browser.get(url)
    wait = WebDriverWait(browser, 60)
    for button in ("Show the map", "Trace the answer"):
        wait.until(lambda browser, text=button: [one for one in find(browser, "button") if one.text == text])
        browser.execute_script((Path(axe.__file__).parent / "axe.min.js").read_text())
        found = browser.execute_async_script(
            "const done = arguments[0];"
            "axe.run({iframes: false}).then(found => done(found.violations.map("
            "one => [one.id, ...one.nodes.map(node => node.html)])))"
        )
        assert found == []
        click(wait, "Trace")


def find(browser, selector):
    """Return the elements that can be seen."""
    return [one for one in browser.find_elements("css selector", selector) if one.is_displayed()]


def hint(field):
    return field.get_attribute("placeholder")


def click(wait, text):
    """Click the button with a text once it can be seen."""
    wait.until(lambda browser: [one for one in find(browser, "button") if one.text == text])[0].click()


def read_frame(browser, wait, title):
    """Wait until a page with this title is in the frame that can be seen."""
    browser.switch_to.frame(wait.until(lambda _: find(browser, ".page iframe"))[0])
    wait.until(lambda _: title in browser.find_element("css selector", "body").text)
    browser.switch_to.default_content()


def assert_fits(browser, width):
    """Check that nothing is wider than the window, and that the frame has the height of its page."""
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    (frame,) = find(browser, ".page iframe")
    assert frame.rect["width"] > 0.85 * min(width, 1200)
    assert re.fullmatch(r"\d+px", frame.get_attribute("style").split("height:")[1].strip(" ;"))
