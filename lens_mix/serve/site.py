"""Run a server on 127.0.0.1 that shows a form and answers with the page of the requested maps."""

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
from lens_mix.serve.answers import INPUT_MAP, Answer, make_message_answer, make_page
from lens_mix.serve.job_queue import JobQueue, TimeLimitError

# The names of this machine. A request with another name may come from a foreign page (DNS rebinding).
_NAMES = ("127.0.0.1", "localhost")
_PICKED = ("attention", "value_zeroing", INPUT_MAP)
_MOST_BYTES = 1 << 16
_MOST_FIELDS = 200
_POLL_SECONDS = 0.1  # the time between two checks whether the server has to end
_READ_SECONDS = 10.0  # the longest time for a request to arrive; browsers open connections without using them
_WRITE_SECONDS = 60.0  # the longest time for sending an answer
_REST_SECONDS = 2.0  # the longest time for reading unread data before the connection is closed
_GRACE_SECONDS = 10.0  # the time beyond the limit that a request waits for an operation of torch to end


class Limits(NamedTuple):
    """Limit what one request may ask for.

    Attributes:
        tokens: The largest number of tokens of a sentence.
        seconds: The longest time for the maps of a sentence.
        waiting: The largest number of requests that wait while one is computed, 1 or more.
    """

    tokens: int = 128
    seconds: float = 60.0
    waiting: int = 4

    def __str__(self) -> str:
        return (
            f"At most {self.tokens} tokens and {self.seconds:g} seconds; one sentence is computed at a time."
        )


class Site(ThreadingHTTPServer):
    """Bind a port on 127.0.0.1 when created; answer requests when `serve` is called.

    Args:
        port: The port; 0 for any that is free.
        limits: The limits of one request; None: the defaults of `Limits`.

    Raises:
        OSError: The port is in use, or may not be used.
    """

    # The number of connections that the system keeps until they are accepted. With the standard library's 5,
    # most of 200 simultaneous clients would have to try again, after 1, 3, 7, ... seconds.
    request_queue_size = 1024

    def __init__(self, port: int = 8000, limits: Limits | None = None) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.limits = limits or Limits()
        self.jobs: JobQueue[Answer] = JobQueue(self.limits.waiting, self.limits.seconds)
        self.model: TransformerLensModel  # set by `serve`
        self.form = ""

    @property
    def url(self) -> str:
        """Return the address of the form."""
        return f"http://127.0.0.1:{self.server_port}/"

    def serve(
        self,
        model: TransformerLensModel,
        announce: Callable[[str], object] = print,
        until: Callable[[], bool] = lambda: False,
    ) -> None:
        """Answer requests until `until` returns True. Must be called in the main thread.

        Args:
            model: Any TransformerLens model.
            announce: a function that shows one line with the address.
            until: a function that returns True when the server has to end.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed.
        """
        table = runner.support(model)
        reasons = {name: reason for name, _, reason in table} | {INPUT_MAP: ""}
        self.model, self.form = model, forms.make_form(table.model, reasons, _PICKED, str(self.limits))
        # Requests are read in another thread, because maps can only be interrupted in the main thread.
        threading.Thread(target=self.serve_forever, args=[_POLL_SECONDS], daemon=True).start()
        try:
            announce(f"{table.model}: {self.url} (Ctrl-C ends it)")
            self.jobs.run_jobs(until)
        finally:
            self.shutdown()

    def answer(self, text: str, methods: list[str]) -> Answer:
        """Return the page of a sentence, or a message about what went wrong.

        Args:
            text: The sentence.
            methods: Names of methods, or `INPUT_MAP`.
        """
        job = functools.partial(make_page, self.model, text, methods, self.limits.tokens)
        seconds, waiting = self.limits.seconds, self.limits.waiting
        # The jobs before this one may need their full time too.
        patience = (waiting + 1) * (seconds + _GRACE_SECONDS)
        try:
            future = self.jobs.submit(job)
        except queue.Full:
            return make_message_answer(503, f"Too many sentences wait already: {waiting}. Try again soon.")
        try:
            return future.result(patience)
        except TimeLimitError:
            advice = "Pick fewer methods, type less, or start the server with more --seconds."
            return make_message_answer(
                504, f"Stopped after {seconds:g} seconds, the limit for a page. {advice}"
            )
        except TimeoutError:
            future.cancel()
            return make_message_answer(
                504, f"No page within {patience:g} seconds: a computation could not be stopped."
            )
        except KeyboardInterrupt:
            return make_message_answer(503, "The server has been stopped.")
        except Exception as problem:
            traceback.print_exception(problem, file=sys.stderr)
            text = f"No page because of an unexpected error: {type(problem).__name__}: {problem}"
            return make_message_answer(500, f"{text}\nThe server's terminal shows the traceback.")

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Show an error in the terminal, unless a browser has closed its connection."""
        if not isinstance(sys.exception(), (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)


class _RequestError(Exception):
    """Report a request that is answered with a message; the arguments are the status and the message."""


class _TimedReader(io.RawIOBase):
    """Read the data of a connection, with a time limit for all reads together.

    After that time, reading raises a TimeoutError.
    """

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
    # This version is used for a request whose version cannot be read. In the standard library's default, 0.9,
    # answers have no status.
    default_request_version = "HTTP/1.0"

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        # With a limit per read only, a client could keep the connection for hours by sending single bytes.
        self.rfile = io.BufferedReader(_TimedReader(self.connection, _READ_SECONDS))

    def finish(self) -> None:
        super().finish()
        # If a connection is closed before all of its data is read, it is reset and the answer is lost.
        rest = _TimedReader(self.connection, _REST_SECONDS)
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            while rest.readinto(bytearray(_MOST_BYTES)):
                pass

    def do_GET(self) -> None:
        self._answer("/", lambda: Answer(200, self.server.form))

    do_HEAD = do_GET

    def do_POST(self) -> None:
        self._answer("/map", self._map_sentence)

    def _answer(self, path: str, answer: Callable[[], Answer]) -> None:
        """Send the answer, or a message if the request is not for this path or not allowed."""
        try:
            self._check(path)
            made = answer()
        except _RequestError as error:
            made = make_message_answer(*error.args)
        self._send(made)

    def _check(self, path: str) -> None:
        """Raise an error for a request with another path or host name, or from another site's page."""
        try:
            address = urlsplit(self.path)
        except ValueError:
            raise _RequestError(400, "The address of the request can't be read; the form is at /.") from None
        hosts = self.headers.get_all("Host", [])
        # The address of a request may repeat the server's name, as in requests to a proxy.
        names = [*hosts, address.netloc] if address.scheme else hosts
        is_local = all(name in _NAMES or name.rpartition(":")[0] in _NAMES for name in names)
        if len(hosts) != 1 or not is_local or address.scheme not in ("", "http"):
            raise _RequestError(403, "This server answers at http://127.0.0.1 and http://localhost only.")
        # Any port is accepted, because a tunnel may use another one.
        if self.headers.get("Origin", f"http://{hosts[0]}") != f"http://{hosts[0]}":
            raise _RequestError(403, "This server answers its own form only, and no other page.")
        if address.path != path:
            raise _RequestError(404, "There is nothing at this address; the form is at /.")

    def _map_sentence(self) -> Answer:
        try:
            fields = parse_qs(self._read_body().decode("utf-8", "replace"), max_num_fields=_MOST_FIELDS)
        except ValueError:
            raise _RequestError(400, f"The request has more than {_MOST_FIELDS} fields.") from None
        return self.server.answer(fields.get("text", [""])[0], fields.get("method", []))

    def _read_body(self) -> bytes:
        lengths = set(self.headers.get_all("Content-Length", []))
        length = lengths.pop().strip() if lengths else ""
        if lengths:
            raise _RequestError(400, "The request has two different lengths (Content-Length).")
        if "Transfer-Encoding" in self.headers or not (length.isascii() and length.isdigit()):
            raise _RequestError(411, "The request has no length (a Content-Length of digits).")
        # The number of digits is checked first, because Python cannot convert thousands of digits.
        digits = length.lstrip("0") or "0"
        if len(digits) > len(str(_MOST_BYTES)) or int(digits) > _MOST_BYTES:
            raise _RequestError(413, f"The sentence is too long: {self.server.limits}")
        try:
            body = self.rfile.read(int(digits))
        except TimeoutError:
            raise _RequestError(
                408, f"The request was not complete after {_READ_SECONDS:g} seconds."
            ) from None
        if len(body) < int(digits):
            raise _RequestError(400, f"The request ended after {len(body)} of {digits} bytes.")
        return body

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Send an error of the standard library as a page with a message."""
        text = message or http.HTTPStatus(code).phrase
        self._send(make_message_answer(code, text))

    def _send(self, answer: Answer) -> None:
        self.connection.settimeout(_WRITE_SECONDS)
        body = answer.html.encode("utf-8", "replace")
        self.send_response(answer.status)
        for name, value in {
            "Content-Type": "text/html; charset=utf-8",
            "Content-Length": str(len(body)),
            "Content-Security-Policy": answer.policy,
            "X-Content-Type-Options": "nosniff",
            # With "no-referrer" the requests of the form would have the Origin "null".
            "Referrer-Policy": "same-origin",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cache-Control": "no-store",
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log nothing, because the sentences are private."""
