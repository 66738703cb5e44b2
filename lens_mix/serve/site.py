"""The server: 127.0.0.1 only, a form, and the page of what it asks for."""

from __future__ import annotations

import functools
import http
import queue
import sys
import threading
import traceback
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

from lens_mix import runner
from lens_mix.lens.model_classes import TransformerLensModel
from lens_mix.serve import forms
from lens_mix.serve.answers import INPUT_MAP, Answer, page_of, refusal
from lens_mix.serve.desk import Desk, OutOfTime

# Names of this machine; a name that a foreign page has led here (DNS rebinding) is another.
_NAMES = ("127.0.0.1", "localhost")
_PICKED = ("attention", "value_zeroing", INPUT_MAP)
_MOST_BYTES = 1 << 16
_MOST_FIELDS = 200
_POLL_SECONDS = 0.1  # how often the server looks whether it is to end
_GRACE_SECONDS = 10.0  # how long a step of torch may go on after the limit until nobody waits for it any more


class Limits(NamedTuple):
    """What one request may ask for.

    Attributes:
        tokens: of the sentence.
        seconds: for its maps.
        waiting: requests that may wait while one is computed, 1 or more.
    """

    tokens: int = 128
    seconds: float = 60.0
    waiting: int = 4

    def __str__(self) -> str:
        return f"At most {self.tokens} tokens and {self.seconds:g} seconds; one sentence at a time."


class Site(ThreadingHTTPServer):
    """A server on 127.0.0.1; made, it holds the port, and `serve` answers.

    Args:
        port: 0 for any that is free.
        limits: of one request; None: those of `Limits`.

    Raises:
        OSError: the port is taken, or not ours to take.
    """

    def __init__(self, port: int = 8000, limits: Limits | None = None) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.limits = limits or Limits()
        self.desk: Desk[Answer] = Desk(self.limits.waiting, self.limits.seconds)
        self.model: TransformerLensModel  # that of `serve`
        self.form = ""

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self.server_port}/"

    def serve(
        self,
        model: TransformerLensModel,
        announce: Callable[[str], object] = print,
        until: Callable[[], bool] = lambda: False,
    ) -> None:
        """Answer until Ctrl-C, a KeyboardInterrupt, or until `until` says so. In the main thread only."""
        table = runner.support(model)
        refusals = {name: reason for name, _, reason in table} | {INPUT_MAP: ""}
        self.model, self.form = model, forms.form(table.model, refusals, _PICKED, str(self.limits))
        # The main thread is kept for the work: there alone it can be interrupted (`Desk`).
        threading.Thread(target=self.serve_forever, args=[_POLL_SECONDS], daemon=True).start()
        try:
            announce(f"{table.model}: {self.url} (Ctrl-C ends it)")
            self.desk.work(until)
        finally:
            self.shutdown()

    def answer(self, text: str, methods: list[str]) -> Answer:
        """The page, or a message that says why there is none."""
        job = functools.partial(page_of, self.model, text, methods, self.limits.tokens)
        seconds, waiting = self.limits.seconds, self.limits.waiting
        # All before it may need their time too.
        patience = (waiting + 1) * (seconds + _GRACE_SECONDS)
        try:
            future = self.desk.submit(job)
        except queue.Full:
            return refusal(503, f"Sentences that wait already: {waiting}, and no more may. Try again soon.")
        try:
            return future.result(patience)
        except OutOfTime:
            advice = "Pick fewer methods, type less, or start the server with more --seconds."
            return refusal(504, f"Stopped after {seconds:g} seconds, which is what a page may take. {advice}")
        except TimeoutError:
            future.cancel()
            return refusal(
                504, f"No page within {patience:g} seconds: a computation has not let itself be stopped."
            )
        except KeyboardInterrupt:
            return refusal(503, "The server has been stopped.")
        except Exception as problem:
            traceback.print_exception(problem, file=sys.stderr)
            words = f"No page, for a reason that was not foreseen: {type(problem).__name__}: {problem}"
            return refusal(500, f"{words}\nThe terminal of the server says where.")

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that went away is none."""
        if not isinstance(sys.exception(), (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: Site
    server_version, sys_version = "lens_mix", ""
    # For a browser that opens a connection and says nothing.
    timeout = 10

    def do_GET(self) -> None:
        if self._is_ours("/"):
            self._send(Answer(200, self.server.form))

    def do_POST(self) -> None:
        if not self._is_ours("/map"):
            return
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()):
            return self.send_error(411, "The request does not say how long it is.")
        # Some of what is too long is read all the same: a browser listens once it has spoken.
        body = self.rfile.read(min(int(length), 16 * _MOST_BYTES))
        if len(body) > _MOST_BYTES:
            return self.send_error(413, f"The sentence is too long: {self.server.limits}")
        try:
            fields = parse_qs(body.decode("utf-8", "replace"), max_num_fields=_MOST_FIELDS)
        except ValueError:
            return self.send_error(400, f"The request has more than {_MOST_FIELDS} fields.")
        self._send(self.server.answer(fields.get("text", [""])[0], fields.get("method", [])))

    def _is_ours(self, path: str) -> bool:
        """Whether a request is for this path, speaks to this machine by name, and is from no foreign page."""
        hosts = self.headers.get_all("Host", [])
        host = hosts[0] if len(hosts) == 1 else ""
        if host.rpartition(":")[0] not in _NAMES and host not in _NAMES:
            self.send_error(403, "This server answers at http://127.0.0.1 and http://localhost only.")
            return False
        # The port may be another one, of a tunnel.
        if self.headers.get("Origin", f"http://{host}") != f"http://{host}":
            self.send_error(403, "This server answers its own form only, and no other page.")
            return False
        if urlsplit(self.path).path != path:
            self.send_error(404, "There is nothing at this address; the form is at /.")
            return False
        return True

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """The same, in words on a page; also for what the standard library refuses."""
        words = message or http.HTTPStatus(code).phrase
        self._send(refusal(code, words))

    def _send(self, answer: Answer) -> None:
        body = answer.html.encode("utf-8", "replace")
        self.send_response(answer.status)
        for name, value in {
            "Content-Type": "text/html; charset=utf-8",
            "Content-Length": str(len(body)),
            "Content-Security-Policy": answer.policy,
            "X-Content-Type-Options": "nosniff",
            # With "no-referrer" the form's own Origin would be "null".
            "Referrer-Policy": "same-origin",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cache-Control": "no-store",
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nothing: what was typed is nobody else's business."""
