"""The server: 127.0.0.1 only, a form, and the page of what it asks for."""

from __future__ import annotations

import contextlib
import functools
import http
import io
import queue
import socket
import sys
import threading
import time
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
_READ_SECONDS = 10.0  # how long a request may take to arrive: browsers open connections and say nothing
_WRITE_SECONDS = 60.0  # how long an answer may take to leave
_REST_SECONDS = 2.0  # how long unread data is read before the connection is closed
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

    # Connections that the system keeps until they are accepted. With the standard library's 5, most of 200
    # clients at once would have to try again, after 1, 3, 7, ... seconds.
    request_queue_size = 1024

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


class _Refused(Exception):
    """A request that is answered with a status and a message, its arguments."""


class _Bounded(io.RawIOBase):
    """The data of a connection; after some seconds in all, reading raises TimeoutError."""

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        self._connection, self._end = connection, time.monotonic() + seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._connection.settimeout(left)
        return self._connection.recv_into(buffer)


class _Handler(BaseHTTPRequestHandler):
    server: Site
    server_version, sys_version = "lens_mix", ""
    # For a request whose version can't be read. Answers in the standard library's 0.9 have no status.
    default_request_version = "HTTP/1.0"

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        # With a limit for each read alone, a client could send a byte now and then for hours.
        self.rfile = io.BufferedReader(_Bounded(self.connection, _READ_SECONDS))

    def finish(self) -> None:
        super().finish()
        # A connection that is closed before all of it is read is reset, and the answer is lost.
        rest = _Bounded(self.connection, _REST_SECONDS)
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            while rest.readinto(bytearray(_MOST_BYTES)):
                pass

    def do_GET(self) -> None:
        self._answer("/", lambda: Answer(200, self.server.form))

    do_HEAD = do_GET

    def do_POST(self) -> None:
        self._answer("/map", self._mapped)

    def _answer(self, path: str, answer: Callable[[], Answer]) -> None:
        """Send the answer, if the request is for this path and may be answered."""
        try:
            self._check(path)
            found = answer()
        except _Refused as refused:
            found = refusal(*refused.args)
        self._send(found)

    def _check(self, path: str) -> None:
        """Refuse a request for another path, to another name of this machine, or from another site's page."""
        try:
            address = urlsplit(self.path)
        except ValueError:
            raise _Refused(400, "The address of the request can't be read; the form is at /.") from None
        hosts = self.headers.get_all("Host", [])
        # A request may repeat the server's name in its address, as those to a proxy do.
        names = [*hosts, address.netloc] if address.scheme else hosts
        ours = all(name in _NAMES or name.rpartition(":")[0] in _NAMES for name in names)
        if len(hosts) != 1 or not ours or address.scheme not in ("", "http"):
            raise _Refused(403, "This server answers at http://127.0.0.1 and http://localhost only.")
        # The port may be another one, of a tunnel.
        if self.headers.get("Origin", f"http://{hosts[0]}") != f"http://{hosts[0]}":
            raise _Refused(403, "This server answers its own form only, and no other page.")
        if address.path != path:
            raise _Refused(404, "There is nothing at this address; the form is at /.")

    def _mapped(self) -> Answer:
        try:
            fields = parse_qs(self._body().decode("utf-8", "replace"), max_num_fields=_MOST_FIELDS)
        except ValueError:
            raise _Refused(400, f"The request has more than {_MOST_FIELDS} fields.") from None
        return self.server.answer(fields.get("text", [""])[0], fields.get("method", []))

    def _body(self) -> bytes:
        lengths = set(self.headers.get_all("Content-Length", []))
        given = lengths.pop().strip() if lengths else ""
        if lengths:
            raise _Refused(400, "The request has two lengths that differ (Content-Length).")
        if "Transfer-Encoding" in self.headers or not (given.isascii() and given.isdigit()):
            raise _Refused(411, "The request does not say how long it is (a Content-Length of digits).")
        # The number of digits comes first, because Python can't read a number of thousands of digits.
        digits = given.lstrip("0") or "0"
        if len(digits) > len(str(_MOST_BYTES)) or int(digits) > _MOST_BYTES:
            raise _Refused(413, f"The sentence is too long: {self.server.limits}")
        try:
            body = self.rfile.read(int(digits))
        except TimeoutError:
            raise _Refused(408, f"The request was not complete after {_READ_SECONDS:g} seconds.") from None
        if len(body) < int(digits):
            raise _Refused(400, f"The request ended after {len(body)} of {digits} bytes.")
        return body

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """The same, in words on a page; also for what the standard library refuses."""
        words = message or http.HTTPStatus(code).phrase
        self._send(refusal(code, words))

    def _send(self, answer: Answer) -> None:
        self.connection.settimeout(_WRITE_SECONDS)
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
        if self.command != "UNEMBEDDING":
            self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nothing: what was typed is nobody else's business."""
