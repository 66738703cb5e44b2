"""Test `lens-mix serve` with real requests to a server on a free port.

The requests come from other threads; the maps are computed in the test's thread.
"""

from __future__ import annotations

import base64
import concurrent.futures
import dataclasses
import hashlib
import html
import http.client
import json
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import zlib

import numpy as np
import pytest

import lens_mix as lm
from lens_mix import named_maps, registry, supported_methods
from lens_mix._blocks.cost import COSTS, Cost
from lens_mix._verification.support import Support
from lens_mix.method import Method
from lens_mix.serve import Limits, Site, answers, site
from lens_mix.serve.estimate import Pace
from lens_mix.serve.forms import Request
from tests._care.test_state import assert_same, state_of
from tests.demos.tiny_folder import save_tiny_llama
from tests.tiny_models import available, bridge

pytest.importorskip("typer")

TEXT = "My grandmother was born in Italy"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    if not available(bridge, "llama"):
        pytest.skip("no bridge in this TransformerLens")
    from lens_mix.cli import _load

    model = _load(str(save_tiny_llama(tmp_path_factory.mktemp("model"))))
    # TransformerLens adds hooks of its own in the first pass of a model.
    model(TEXT)
    return model


@dataclasses.dataclass(frozen=True)
class Endless(Method):
    """Compute without end."""

    name = "endless"
    residual = 0.0
    engines = ("recorded",)

    def __call__(self, block):
        while True:
            time.sleep(0.001)


@dataclasses.dataclass(frozen=True)
class Broken(Method):
    """Raise an unexpected error."""

    name = "broken"
    residual = 0.0
    engines = ("recorded",)

    def __call__(self, block):
        raise RuntimeError("<b>no such file</b>")


@pytest.fixture(autouse=True)
def methods_of_the_tests(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {"endless": Endless, "broken": Broken})


class Visited:
    """Send requests from threads to a site that computes in this thread."""

    def __init__(self, model, **limits):
        self.site = Site(0, Limits(**limits))
        self.model, self.pool = model, concurrent.futures.ThreadPoolExecutor(8)

    def answers(self, *requests, fetch=None):
        """Return (status, headers, text) of the answer to each request, once all are answered.

        A sign that a page is being computed is no answer yet.
        """
        futures: list[concurrent.futures.Future] = []

        def send(_):
            futures.extend(self.pool.submit(fetch or fetched_page, request) for request in requests)

        self.site.serve(self.model, send, lambda: all(future.done() for future in futures))
        return [future.result() for future in futures]

    def map(self, *methods, text=TEXT):
        ((status, headers, text),) = self.answers(self.request(text, *methods))
        return status, headers, text

    def request(self, text, *methods, to="map", **fields):
        listed = [("text", text), *(("method", name) for name in methods), *fields.items()]
        return urllib.request.Request(f"{self.site.url}{to}", urllib.parse.urlencode(listed).encode())


def fetched_page(request):
    """Load a page as a browser without JavaScript does: again while it is computed."""
    while True:
        status, headers, text = fetched(request)
        if 'http-equiv="refresh"' not in text:
            return status, headers, text
        request = headers["test-url"]


def fetched(request):
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=60) as answer:
            answer.headers["test-url"] = answer.url
            return answer.status, answer.headers, answer.read().decode()
    except urllib.error.HTTPError as problem:
        return problem.code, problem.headers, problem.read().decode()


@pytest.fixture
def visited(model):
    # All requests that the pool sends at once may wait, so that none gets a 503.
    made = Visited(model, waiting=8)
    with made.site:
        yield made
    made.pool.shutdown()


def maps_in(text):
    """Return the maps of a page by label, with the numbers of each layer."""
    data, numbers = (
        re.search(rf'<script type="[a-z/]+" id="{name}">(.*?)</script>', text, re.DOTALL).group(1)
        for name in ("data", "numbers")
    )
    maps = {one["label"]: one for one in json.loads(data)["prompts"][0]}
    for layer in (layer for one in maps.values() for layer in one["layers"]):
        layer["data"] = numbers[slice(*layer["data"])]
    return maps


def scores_of(packed):
    """Return the visible numbers of each layer, row by row, stored as float16."""
    assert packed["code"] == "float16"
    return [
        np.frombuffer(zlib.decompress(base64.b64decode(layer["data"])), "<f2") * layer["largest"]
        for layer in packed["layers"]
    ]


def message_in(text):
    (words,) = re.findall(r'<div role="alert">(.*?)</div>', text, re.DOTALL)
    assert "Traceback" not in text
    assert "<script" not in text
    assert re.match(r"<h1>.+</h1><p>.+</p>", words, re.DOTALL)
    return html.unescape(re.sub(r"</?(h1|p)>", " ", words))


# ---------------------------------------------------------------------- the form and the page


def test_the_page_holds_the_maps_of_a_run(visited, model):
    status, headers, text = visited.map("alti", "attention", "input_map")
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    expected = {**lm.run(model, TEXT, ["alti", "attention"]), "input_map": lm.input_map(model, TEXT)}
    found = maps_in(text)
    assert list(found) == ["alti", "attention", "input_map"]
    for label, m in expected.items():
        assert found[label]["tokens"] == m.tokens
        for layer, seen, numbers in zip(m.scores, m.visible(), scores_of(found[label]), strict=True):
            assert numbers == pytest.approx(
                layer[..., seen].flatten().numpy(), abs=1e-3 * float(layer.abs().max())
            )


def test_the_form_offers_each_method_and_says_why_not(visited, monkeypatch):
    reasons = {"alti": 'not on a <b>"toy"</b>'}
    rows = tuple(
        (name, None if name in reasons else "hooks", reasons.get(name, "")) for name in registry.all_methods()
    )
    monkeypatch.setattr(supported_methods, "support", lambda model: Support("<i>toy", rows))
    ((status, _, text),) = visited.answers(visited.site.url)
    assert status == 200
    states = dict(re.findall(r'name="method" value="(\w+)"( checked| disabled|)>', text))
    # The order is that of the groups: the recommended one is the first, other people's are the last.
    assert list(states) == registry.list_names()
    assert list(states)[-2:] == ["endless", "broken"]
    assert [name for name, state in states.items() if state == " disabled"] == ["alti"]
    assert [name for name, state in states.items() if state == " checked"] == list(named_maps.DEFAULT_METHODS)
    assert "Not on this model: not on a &lt;b&gt;&quot;toy&quot;&lt;/b&gt;" in text
    assert "<h1>&lt;i&gt;toy</h1>" in text
    assert "128 tokens and 60 seconds" in text


def test_the_form_describes_each_method_and_its_cost(visited):
    ((_, _, text),) = visited.answers(visited.site.url)
    groups = re.findall(r"<legend>(.*?)</legend>(.*?)</fieldset>", text)
    assert groups[0][0] == "Recommended"
    assert [group for group, _ in groups] == list(
        dict.fromkeys(registry.describe(name).group for name in registry.list_names())
    )
    labels = {
        name: label for _, list_ in groups for name, label in re.findall(r'value="(\w+)"(.*?)</label>', list_)
    }
    for name, label in labels.items():
        described = registry.describe(name)
        assert html.escape(described.line) in label
        assert described.cost_in_words in label
    assert "Compute without end" in labels["endless"]
    assert "an unknown number of forward passes" in labels["endless"]
    assert 'for="text"' in text


def test_the_name_of_the_model_is_no_path(visited, monkeypatch):
    rows = (("alti", "algebra", ""),)
    folder = "/home/me/models--org--small/snapshots/0123456789abcdef0123"
    monkeypatch.setattr(supported_methods, "support", lambda model: Support(folder, rows))
    ((_, _, text),) = visited.answers(visited.site.url)
    assert "<h1>org/small</h1>" in text
    assert "/home" not in text


def test_answers_are_for_this_machines_own_page_alone(visited):
    form, page, none = visited.answers(
        visited.site.url, visited.request(TEXT, "alti"), f"{visited.site.url}none"
    )
    assert [status for status, _, _ in (form, page, none)] == [200, 200, 404]
    for _, headers, text in (form, none):
        allowed = {
            f"{name}-src": base64.b64encode(hashlib.sha256(found.encode()).digest()).decode()
            for name, tag in (("script", "script"), ("style", "style"))
            for found in re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        }
        rules = dict(rule.split(" ", 1) for rule in headers["Content-Security-Policy"].split("; "))
        expected = {name: f"'sha256-{digest}'" for name, digest in allowed.items()}
        expected |= {"default-src": "'none'", "base-uri": "'none'"}
        own = ("connect-src", "frame-src", "form-action", "frame-ancestors")
        assert rules == expected | dict.fromkeys(own, "'self'")
    assert "<script>" in form[2]
    assert "<script>" not in none[2]
    assert page[1]["Content-Security-Policy"].startswith("sandbox allow-scripts allow-downloads; frame-")
    assert "content=\"default-src 'none'; script-src 'sha256-" in page[2]
    for _, headers, _ in (form, page, none):
        assert "frame-ancestors 'self'" in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cache-Control"] == "no-store"


def test_costly_methods_have_the_last_row_unless_every_position_is_asked_for(visited, model):
    last, every = visited.answers(
        visited.request(TEXT, "gim", "attention"), visited.request(TEXT, "gim", "attention", all_rows="1")
    )
    count = len(lm.run(model, TEXT, "attention").tokens)
    rows = [
        {name: len(m["queries"] or m["tokens"]) for name, m in maps_in(text).items()}
        for _, _, text in (last, every)
    ]
    assert rows == [{"gim": 1, "attention": count}, {"gim": count, "attention": count}]


# ---------------------------------------------------------------------- the busy sign, and estimates


def posted(visited, text, *methods, **fields):
    """Send the form, and return the address of the page, without loading it."""
    connection = http.client.HTTPConnection("127.0.0.1", visited.site.server_port, timeout=30)
    request = visited.request(text, *methods, **fields)
    connection.request("POST", "/map", request.data)
    answer = connection.getresponse()
    assert answer.status == 303
    return f"{visited.site.url[:-1]}{answer.headers['Location']}"


def test_a_busy_sign_with_seconds_until_the_computation_is_cancelled(visited, model):
    before = state_of(model)

    def look(_):
        page = posted(visited, TEXT, "endless")
        waiting = posted(visited, "They live", "attention")
        busy, second = fetched(page), fetched(waiting)
        states = [json.loads(fetched(url.replace("/page/", "/state/"))[2]) for url in (page, waiting)]
        (cancel,) = re.findall(r'action="(/cancel/.*?)"', busy[2])
        cancelled = fetched(urllib.request.Request(f"{visited.site.url[:-1]}{cancel}", b""))
        return busy, second, states, cancelled, fetched(page), fetched_page(waiting)

    ((busy, second, states, cancelled, again, after),) = visited.answers(None, fetch=look)
    assert busy[0] == second[0] == cancelled[0] == after[0] == 200
    assert "<h1>Computing</h1>" in busy[2]
    assert re.search(r'role="timer">[0-9]+ s', busy[2])
    assert TEXT in busy[2]
    assert 'role="timer">Waiting for 1 other prompt: ' in second[2]
    assert [state["done"] for state in states] == [False, False]
    assert states[0]["seconds"] > 0.5
    assert re.search(
        r"Cancelled After [0-9.]+ seconds. The model is as it was",
        message_in(cancelled[2]).replace("  ", " "),
    )
    assert message_in(again[2]) == message_in(cancelled[2])
    assert list(maps_in(after[2])) == ["attention"]
    assert_same(before, state_of(model))


def test_a_waiting_prompt_can_be_cancelled(visited):
    def look(_):
        page, waiting = posted(visited, TEXT, "endless"), posted(visited, TEXT, "attention")
        cancelled = fetched(urllib.request.Request(waiting.replace("/page/", "/cancel/"), b""))
        return cancelled, fetched(urllib.request.Request(page.replace("/page/", "/cancel/"), b""))

    for status, _, text in visited.answers(None, fetch=look)[0]:
        assert status == 200
        assert "Cancelled" in message_in(text)


def test_a_new_prompt_of_the_same_form_replaces_the_one_before(visited):
    def look(_):
        first = posted(visited, TEXT, "endless", form="mine")
        other = posted(visited, TEXT, "alti", form="other")
        second = posted(visited, TEXT, "attention", form="mine")
        return [fetched_page(url) for url in (first, other, second)]

    first, other, second = visited.answers(None, fetch=look)[0]
    assert "Cancelled" in message_in(first[2])
    assert list(maps_in(other[2])) == ["alti"]
    assert list(maps_in(second[2])) == ["attention"]


def test_the_newest_pages_can_be_loaded_again(visited, monkeypatch):
    monkeypatch.setattr(site, "_KEPT_PAGES", 2)

    def look(_):
        pages = [posted(visited, TEXT, "attention") for _ in range(1)]
        for _ in range(4):
            fetched_page(pages[-1])
            pages.append(posted(visited, TEXT, "attention"))
        return [fetched_page(page) for page in pages]

    (found,) = visited.answers(None, fetch=look)
    statuses = [status for status, _, _ in found]
    assert statuses[0] == 404
    assert statuses[-2:] == [200, 200]
    assert "not there any more" in message_in(found[0][2])
    assert "Send the prompt again" in message_in(found[0][2])


def test_pages_that_nobody_has_loaded_are_kept_for_a_while(visited, monkeypatch):
    monkeypatch.setattr(site, "_KEPT_PAGES", 1)

    def look(_):
        pages = [posted(visited, TEXT, "attention") for _ in range(4)]
        while not visited.site.jobs.is_idle:
            time.sleep(0.01)
        found = [fetched(page)[0] for page in (pages[0], pages[2])]
        # Now the two others are old, and the next prompt removes all but the newest.
        monkeypatch.setattr(site, "_UNREAD_SECONDS", 0.0)
        posted(visited, TEXT, "attention")
        return found, [fetched(page)[0] for page in pages]

    assert visited.answers(None, fetch=look) == [([200, 200], [404, 404, 404, 200])]


def slow_pace(monkeypatch, forward):
    """Let the server believe that a forward pass takes some seconds, and methods some forward passes."""
    costs = {"attention": Cost(1), "alti": Cost(2), "occlusion": Cost(1, per_token=3)}
    for name, cost in costs.items():
        monkeypatch.setitem(COSTS, name, cost)
    monkeypatch.setattr(site, "measure_pace", lambda model: Pace(forward, 0.0, 3))


def test_a_long_computation_is_asked_about_first(visited, monkeypatch):
    slow_pace(monkeypatch, 10.0)
    ((status, _, text),) = visited.answers(visited.request(TEXT, "alti", "attention", all_rows="1"))
    assert status == 200
    assert "This takes about 30 seconds" in text
    assert "7 tokens, about 30 seconds; the slowest method is alti, about 20 seconds" in text
    assert "pick fewer methods" in text
    fields = re.findall(r'type="hidden" name="(\w+)" value="(.*?)"', text)
    assert ("all_rows", "1") in fields
    sent = {name: [html.unescape(value) for other, value in fields if other == name] for name, _ in fields}
    assert Request.read(sent) == Request(TEXT, ("alti", "attention"), True, True)
    again = urllib.request.Request(
        f"{visited.site.url}map", urllib.parse.urlencode(sent, doseq=True).encode()
    )
    ((status, _, text),) = visited.answers(again)
    assert list(maps_in(text)) == ["alti", "attention"]


def test_a_computation_beyond_the_limit_says_so(visited, monkeypatch):
    slow_pace(monkeypatch, 50.0)
    ((_, _, text),) = visited.answers(visited.request(TEXT, "alti"))
    assert "This takes about 2 minutes" in text
    assert "stops a computation after 60 seconds" in text


def test_the_estimate_while_typing(visited, monkeypatch):
    slow_pace(monkeypatch, 5.0)
    requests = {
        "7 tokens, about 10 seconds": visited.request(TEXT, "alti", to="estimate"),
        "7 tokens, about 2 minutes, more than the limit of 60 seconds": visited.request(
            TEXT, "occlusion", all_rows="1", to="estimate"
        ),
        "7 tokens": visited.request(TEXT, to="estimate"),
        "": visited.request("  ", "alti", to="estimate"),
        "202 tokens, more than the limit of 128": visited.request("She left " * 100, "alti", to="estimate"),
    }
    answered = [visited.answers(request)[0] for request in requests.values()]
    assert [text for _, _, text in answered] == list(requests)
    for status, headers, _ in answered:
        assert (status, headers["Content-Type"]) == (200, "text/plain; charset=utf-8")


def test_an_estimate_follows_the_time_that_pages_took(visited, monkeypatch):
    slow_pace(monkeypatch, 5.0)
    requests = [visited.request(TEXT, "alti", to="estimate"), visited.request(TEXT, "alti")]
    found = [visited.answers(request) for request in requests * 2]
    assert found[0][0][2] == "7 tokens, about 10 seconds"
    assert visited.site.workshop.correction < 0.5


def test_no_estimate_while_a_page_is_computed(visited):
    def look(_):
        page = posted(visited, TEXT, "endless")
        while not visited.site.jobs._running:
            time.sleep(0.01)
        answer = fetched(visited.request(TEXT, "alti", to="estimate"))
        fetched(urllib.request.Request(page.replace("/page/", "/cancel/"), b""))
        return answer

    ((status, _, text),) = visited.answers(None, fetch=look)
    assert (status, text) == (200, "")


# ---------------------------------------------------------------------- messages


def test_mistakes_are_answered_with_a_message(visited):
    requests = {
        "There is no prompt": visited.request("  ", "alti"),
        "No method is picked": visited.request(TEXT),
        "did you mean 'alti'?": visited.request(TEXT, "altii"),
        "got one twice": visited.request(TEXT, "alti", "alti"),
        "per_head": visited.request(TEXT, "attention_attribution(per_head=True)"),
    }
    for words, (status, _, text) in zip(requests, visited.answers(*requests.values()), strict=True):
        assert status == 400
        assert words in message_in(text)


def test_a_sentence_that_is_too_long(model):
    visited = Visited(model, tokens=7)
    with visited.site:
        # The first has <s> and six words, the second one word more.
        fits, long, longer = visited.answers(
            visited.request(TEXT, "alti"),
            visited.request(f"{TEXT} Japan", "alti"),
            visited.request("She left " * 10_000, "alti"),
        )
    assert (fits[0], long[0], longer[0]) == (200, 413, 413)
    assert "has 8 tokens, and this server takes 7 at most" in message_in(long[2])
    assert "too long  At most 7 tokens" in message_in(longer[2])


def test_a_hostile_sentence_and_method_stay_text(visited):
    hostile = "</script><script>alert(1)</script>&<img src=x onerror=alert(1)>"
    status, _, text = visited.map("alti", text=hostile)
    assert status == 200
    assert text.count("<script>") == 1
    assert "alert(1)" not in text.replace("\\u003c", "<").split('id="data">')[0]
    assert "<img" not in text
    status, _, text = visited.map(hostile)
    assert status == 400
    assert "got '</script><script>" in message_in(text)


def test_an_unexpected_error_is_a_message_and_a_traceback_in_the_terminal(visited, capsys):
    status, _, text = visited.map("broken")
    assert status == 500
    assert "RuntimeError: <b>no such file</b>" in message_in(text)
    assert "Traceback" in capsys.readouterr().err
    assert visited.map("alti")[0] == 200


# ---------------------------------------------------------------------- bounds


def test_a_time_limit_leaves_the_model_as_it_was(model):
    visited, before = Visited(model, seconds=0.5), state_of(model)
    handler = signal.getsignal(signal.SIGINT)
    with visited.site:
        started = time.monotonic()
        late, next_one = visited.answers(visited.request(TEXT, "endless"), visited.request(TEXT, "attention"))
    assert time.monotonic() - started < 20
    assert sorted((late[0], next_one[0])) == [200, 504]
    assert "Stopped after 0.5 seconds" in message_in(late[2])
    assert_same(before, state_of(model))
    assert signal.getsignal(signal.SIGINT) is handler


def test_more_than_may_wait_are_sent_away(model):
    visited = Visited(model, waiting=2)
    with visited.site:
        # No jobs run yet, so all of them wait, and a request beyond the limit is answered at once.
        visited.site.workshop = answers.Workshop(model, visited.site.limits, None)
        taken = [visited.site.order(Request(TEXT, ("alti",))) for _ in range(2)]
        assert [answer.status for answer in taken] == [303, 303]
        answer = visited.site.order(Request(TEXT, ("alti",)))
        assert answer.status == 503
        assert "2 of them wait" in message_in(answer.body)
        visited.site.jobs.run_jobs(until=lambda: visited.site.jobs.is_idle)
        assert visited.map("alti")[0] == 200


def test_several_at_once_get_their_own(visited, model):
    texts = [TEXT, "She left the country", "They live"]
    found = visited.answers(*(visited.request(text, "attention") for text in texts))
    for text, (status, _, page) in zip(texts, found, strict=True):
        assert status == 200
        assert maps_in(page)["attention"]["tokens"] == lm.run(model, text, "attention").tokens


def test_the_server_can_be_reached_from_this_machine_only(visited):
    assert visited.site.server_address[0] == "127.0.0.1"
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.2", visited.site.server_port), 2)


@pytest.mark.parametrize(("method", "expected"), [("GET", 200), ("POST", 404)])
def test_other_names_and_other_pages_get_an_error(visited, method, expected):
    port = visited.site.server_port

    def asked(headers):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.putrequest(method, "/", skip_host=True)
        for name, value in headers:
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.read().decode()

    own = [f"127.0.0.1:{port}", f"localhost:{port}", "localhost", "localhost:9999"]
    welcome = [[("Host", host)] for host in own]
    welcome += [[("Host", host), ("Origin", f"http://{host}")] for host in own]
    answers = visited.answers(*welcome, fetch=asked)
    assert [status for status, _ in answers] == [expected] * len(welcome)
    foreign = [["evil.example"], [f"evil.example:{port}"], ["localhost.evil.example"], [], ["localhost"] * 2]
    answers = visited.answers(*([("Host", host) for host in hosts] for hosts in foreign), fetch=asked)
    for status, text in answers:
        assert status == 403
        assert "http://localhost only" in message_in(text)
    origins = ["http://evil.example", "null", f"https://{own[0]}", "http://localhost.evil.example"]
    answers = visited.answers(*([("Host", own[0]), ("Origin", origin)] for origin in origins), fetch=asked)
    for status, text in answers:
        assert status == 403
        assert "its own form only" in message_in(text)


def test_unusable_requests(visited):
    def send_raw(words):
        with socket.create_connection(("127.0.0.1", visited.site.server_port), 30) as connection:
            connection.sendall(words)
            connection.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: connection.recv(65536), b"")).decode()

    post = b"POST /map HTTP/1.0\r\nHost: localhost\r\n"
    cases = {
        b"DELETE / HTTP/1.0\r\nHost: localhost\r\n\r\n": "501",
        post + b"\r\n": "411",
        post + b"Content-Length: -1\r\n\r\n": "411",
        # No text; a text that is not UTF-8, without a method; too many fields.
        post + b"Content-Length: 9\r\n\r\n": "400",
        post + b"Content-Length: 8\r\n\r\ntext=%ff": "400",
        post + b"Content-Length: 401\r\n\r\n" + b"a&" * 200 + b"a": "400",
    }
    answers = visited.answers(*cases, fetch=send_raw)
    for words, status, text in zip(cases, cases.values(), answers, strict=True):
        assert text.startswith(f"HTTP/1.0 {status}"), words
        assert message_in(text)


def test_malformed_requests_get_an_answer(visited, capsys):
    """The client keeps the connection open and waits, as most clients do."""
    port = visited.site.server_port

    def send_raw(words):
        with socket.create_connection(("127.0.0.1", port), 30) as connection:
            connection.sendall(words)
            return b"".join(iter(lambda: connection.recv(65536), b"")).decode("utf-8", "replace")

    host, post = b"Host: localhost\r\n", b"POST /map HTTP/1.1\r\nHost: localhost\r\n"
    long = b"Content-Length: " + b"9" * 5_000 + b"\r\n\r\n"
    cases = {
        b"GET http://[ HTTP/1.1\r\n" + host + b"\r\n": "400",
        b"GET http://[::1 HTTP/1.0\r\n" + host + b"\r\n": "400",
        b"GET http://[/ HTTP/1.0\r\n\r\n": "400",
        b"POST http://] HTTP/1.1\r\n" + host + b"Content-Length: 0\r\n\r\n": "400",
        b"GET http://localhost/ HTTP/1.1\r\n" + host + b"\r\n": "200",
        b"GET http://127.0.0.1:99999999/ HTTP/1.1\r\n" + host + b"\r\n": "200",
        b"GET http://evil.example/ HTTP/1.1\r\n" + host + b"\r\n": "403",
        b"GET https://localhost/ HTTP/1.1\r\n" + host + b"\r\n": "403",
        b"GET file:///etc/passwd HTTP/1.1\r\n" + host + b"\r\n": "403",
        b"GET * HTTP/1.1\r\n" + host + b"\r\n": "404",
        b"GET /\x00 HTTP/1.1\r\n" + host + b"\r\n": "404",
        b"GET /%00%ff HTTP/1.1\r\n" + host + b"\r\n": "404",
        b"GET /\xff\xfe HTTP/1.1\r\n" + host + b"\r\n": "404",
        b"GET / HTTP/1.1\r\nHost: localhost\x00\r\n\r\n": "403",
        b"GET / HTTP/1.1\r\nHost: \xff\r\n\r\n": "403",
        b"HEAD / HTTP/1.1\r\n" + host + b"\r\n": "200",
        b"\x00\xff\x16\x03 / HTTP/1.1\r\n" + host + b"\r\n": "501",
        b"BREW / HTTP/1.1\r\n" + host + b"\r\n": "501",
        b"constructor / HTTP/1.1\r\n" + host + b"\r\n": "501",
        b"CONNECT localhost:80 HTTP/1.1\r\n" + host + b"\r\n": "501",
        b"GET / HTTP/one\r\n\r\n": "400",
        b"GET / HTTP/1." + b"9" * 5_000 + b"\r\n\r\n": "400",
        b"GET\r\n\r\n": "400",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n": "400",
        b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n" + host + b"\r\n": "414",
        b"GET / HTTP/1.1\r\n" + host + b"X: " + b"a" * 70_000 + b"\r\n\r\n": "431",
        b"GET / HTTP/1.1\r\n" + host + b"X: a\r\n" * 200 + b"\r\n": "431",
        post + long: "413",
        post + b"Content-Length: 65537\r\n\r\n": "413",
        post + b"Content-Length: 1048576\r\n\r\n" + b"a" * 1048576: "413",
        post + b"Content-Length: " + b"0" * 5_000 + b"\r\n\r\n": "400",  # no prompt
        post + b"Content-Length: -" + b"9" * 5_000 + b"\r\n\r\n": "411",
        post + b"Content-Length: +5\r\n\r\ntext=": "411",
        post + b"Content-Length: 5_0\r\n\r\n": "411",
        post + b"Content-Length: five\r\n\r\n": "411",
        post + b"Content-Length: \xb2\r\n\r\n": "411",
        post + b"Content-Length:\r\n\r\n": "411",
        post + b"Content-Length: 5, 5\r\n\r\ntext=": "411",
        post + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\ntext=a": "400",
        post + b"Content-Length: 5\r\nContent-Length: 5\r\n\r\ntext=": "400",  # no prompt
        post + b"Transfer-Encoding: chunked\r\n\r\n5\r\ntext=\r\n0\r\n\r\n": "411",
        post + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\ntext=": "411",
        post + b"Content-Length: 9\r\n\r\ntext=%00a": "400",  # no method
        post + b"Content-Length: 25\r\n\r\n\xff\xfe\x00=\x00&text=%ff&method=%00": "400",
    }
    started = time.monotonic()
    answers = visited.answers(*cases, fetch=send_raw)
    for words, status, text in zip(cases, cases.values(), answers, strict=True):
        assert text.startswith(f"HTTP/1.0 {status}"), (words[:80], text[:80])
        assert words.startswith((b"HEAD", b"GET http://localhost", b"GET http://127")) or message_in(text)
    # The server must not wait for bytes that are never sent.
    assert time.monotonic() - started < 8
    assert "Traceback" not in capsys.readouterr().err
    assert visited.map("alti")[0] == 200


def test_requests_that_do_not_end(visited, monkeypatch, capsys):
    """Send an incomplete body, single bytes, nothing at all, and reset connections."""
    monkeypatch.setattr(site, "_READ_SECONDS", 0.5)
    port = visited.site.server_port

    def dripping(words):
        with socket.create_connection(("127.0.0.1", port), 30) as connection:
            connection.sendall(words)
            received, started = b"", time.monotonic()
            connection.settimeout(0.1)
            while time.monotonic() - started < 20:
                try:
                    connection.sendall(b"a")
                    if not (more := connection.recv(65536)):
                        return received.decode()
                    received += more
                except TimeoutError:
                    continue
                except ConnectionError:
                    return received.decode()
            return "still open"

    def reset(words):
        with socket.create_connection(("127.0.0.1", port), 30) as connection:
            connection.sendall(words)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return ""

    post = b"POST /map HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5000\r\n\r\ntext="
    late, *silent = visited.answers(post, b"GET / HTTP/1.1\r\nX: ", b"", fetch=dripping)
    assert late.startswith("HTTP/1.0 408")
    assert "not complete after 0.5 seconds" in message_in(late)
    assert silent == ["", ""]
    visited.answers(post, b"GET / HT", b"", post[:-5], fetch=reset)
    assert visited.map("alti")[0] == 200
    assert "Traceback" not in capsys.readouterr().err


def test_two_hundred_clients_at_once(model):
    """Each gets an answer within seconds: the form, its page, or a message that too many wait already."""
    visited = Visited(model, waiting=4)
    visited.pool = concurrent.futures.ThreadPoolExecutor(200)
    together, seconds = threading.Barrier(200), []

    def at_once(request):
        together.wait(60)
        started = time.monotonic()
        answer = fetched(request)
        seconds.append(time.monotonic() - started)
        return answer

    asked = [visited.request(TEXT, "attention") if number % 2 else visited.site.url for number in range(200)]
    with visited.site:
        found = visited.answers(*asked, fetch=at_once)
    forms, pages = found[::2], found[1::2]
    assert {status for status, _, _ in forms} == {200}
    assert {status for status, _, _ in pages} == {200, 503}
    assert sum(status == 200 for status, _, _ in pages) >= 4
    assert max(seconds) < 30
    # With a short backlog, most clients would be answered only after 1, 3, 7 or 15 seconds.
    assert sorted(seconds)[100] < 10


# ---------------------------------------------------------------------- the command


@pytest.mark.slow
def test_the_command_answers_until_ctrl_c(tmp_path):
    if not available(bridge, "llama"):
        pytest.skip("no bridge in this TransformerLens")
    folder = save_tiny_llama(tmp_path)
    command = [sys.executable, "-m", "lens_mix", "serve", str(folder), "--port", "0", "--tokens", "20"]
    # The command gets its own process group, so that Ctrl-C does not reach the tests.
    started = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    with started:
        try:
            line = next(line for line in started.stdout if "http://" in line)
            url = re.search(r"http://127\.0\.0\.1:\d+/", line)[0]
            status, _, text = fetched(url)
            assert status == 200
            assert "20 tokens" in text
            data = urllib.parse.urlencode({"text": TEXT, "method": "alti"}).encode()
            status, _, text = fetched_page(urllib.request.Request(f"{url}map", data))
            assert (status, list(maps_in(text))) == (200, ["alti"])
            started.send_signal(signal.SIGINT)
            rest, _ = started.communicate(timeout=60)
        finally:
            started.kill()
    assert started.returncode == 0
    assert rest.strip() == "The server has ended."


def test_a_port_in_use_is_an_error_before_the_model_is_loaded(tmp_path):
    from typer.testing import CliRunner

    from lens_mix.cli import app

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        found = CliRunner().invoke(app, ["serve", str(tmp_path / "no model"), "--port", str(port)])
    assert found.exit_code == 2
    assert f"expected one that is free, got {port}" in found.output.replace("\n", " ")
