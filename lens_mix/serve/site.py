"""Run a server on 127.0.0.1 that shows a form and answers with the page of the requested maps."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import http
import io
import json
import queue
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from lens_mix import registry, supported_methods
from lens_mix._classes.model_classes import TransformerLensModel, UnsupportedModelError
from lens_mix._classes.model_names import strip_path
from lens_mix._inputs.features import require_tokens
from lens_mix.named_maps import DEFAULT_METHODS, INPUT_MAP
from lens_mix.serve import forms
from lens_mix.serve.answers import (
    Answer,
    Limits,
    Workshop,
    find_mistake,
    make_message_answer,
    make_stopped_answer,
)
from lens_mix.serve.estimate import Estimate, in_words, measure_pace
from lens_mix.serve.forms import Request
from lens_mix.serve.job_queue import CancelledJobError, JobQueue, QueuedJob, TimeLimitError

# The names of this machine. A request with another name may come from a foreign page (DNS rebinding).
_NAMES = ("127.0.0.1", "localhost")
_MOST_BYTES = 1 << 16
_MOST_FIELDS = 200
_POLL_SECONDS = 0.1  # the time between two checks whether the server has to end
_READ_SECONDS = 10.0  # the longest time for a request to arrive; browsers open connections without using them
_WRITE_SECONDS = 60.0  # the longest time for sending an answer
_REST_SECONDS = 2.0  # the longest time for reading unread data before the connection is closed
_GRACE_SECONDS = 10.0  # the longest time that a request waits for an operation of torch to end
_SOON_SECONDS = 0.7  # the time after which a sign that the page is being computed is shown
_KEPT_PAGES = 20  # the number of pages that can be loaded again
_UNREAD_SECONDS = 600.0  # the time for which a page is kept that no browser has loaded


@dataclasses.dataclass(eq=False)
class _Order:
    """A request whose page is computed.

    Attributes:
        request: The request.
        job: Its job.
        expected: The estimates of the job, at most one, which the job adds when it has read the prompt.
        is_read: Whether the answer has been sent.
    """

    request: Request
    job: QueuedJob[Answer]
    expected: list[Estimate]
    is_read: bool = False


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
        self.workshop: Workshop  # set by `serve`
        self._form = ""
        # The newest orders by their names, which nobody can guess.
        self._orders: dict[str, _Order] = {}
        self._lock = threading.Lock()

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
            announce: A function that shows one line with the address.
            until: A function that returns True when the server has to end.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed.
        """
        require_tokens(model, "model")
        table = supported_methods.support(model)
        name = strip_path(table.model)
        reasons = {INPUT_MAP: ""} | {method: reason for method, _, reason in table}
        ordered = {method: reasons[method] for method in registry.list_names() if method in reasons}
        self._form = forms.make_form(name, ordered, DEFAULT_METHODS, str(self.limits))
        self.workshop = Workshop(model, self.limits, measure_pace(model))
        # Requests are read in another thread, because maps can only be interrupted in the main thread.
        threading.Thread(target=self.serve_forever, args=[_POLL_SECONDS], daemon=True).start()
        try:
            announce(f"{name}: {self.url} (Ctrl-C ends it)")
            self.jobs.run_jobs(until)
        finally:
            self.shutdown()

    def show_form(self) -> Answer:
        """Return the form, with a number of its own."""
        return Answer(200, self._form.replace(forms.FORM, secrets.token_urlsafe(8)), forms.FORM_POLICY)

    def order(self, request: Request) -> Answer:
        """Add a request to the queue, and send the browser to the address of its page.

        A request that the same form has sent before is cancelled, because nobody waits for it any more.
        """
        mistake = find_mistake(request)
        if mistake is not None:
            return mistake
        with self._lock:
            before = [each for each in self._orders.values() if each.request.form == request.form]
        for each in before if request.form else ():
            self.jobs.cancel(each.job)
        expected: list[Estimate] = []
        work = functools.partial(self.workshop.make_page, request, expected.append)
        try:
            job = self.jobs.submit(work)
        except queue.Full:
            return _too_many(self.limits)
        name = secrets.token_urlsafe(16)
        with self._lock:
            self._orders[name] = _Order(request, job, expected)
            dispensable = [key for key, order in self._orders.items() if _is_dispensable(order)]
            for key in dispensable[:-_KEPT_PAGES]:
                del self._orders[key]
        return Answer(303, "", location=f"/page/{name}")

    def show_page(self, name: str) -> Answer:
        """Return the page of an order, or a sign that it is being computed."""
        order = self._find(name)
        with contextlib.suppress(TimeoutError, concurrent.futures.CancelledError):
            # A page that is soon ready is shown at once, without a sign before it.
            order.job.future.exception(_SOON_SECONDS)
        if order.job.future.done():
            return self._make_answer(order)
        state = self._make_state(order)
        return Answer(200, forms.make_busy(name, state["text"], order.request), forms.BUSY_POLICY)

    def show_state(self, name: str) -> Answer:
        """Return what an order does at this moment, as JSON."""
        return Answer(200, json.dumps(self._make_state(self._find(name))), kind="application/json")

    def cancel(self, name: str) -> Answer:
        """Cancel an order, and say when it has ended."""
        order = self._find(name)
        self.jobs.cancel(order.job)
        with contextlib.suppress(TimeoutError, concurrent.futures.CancelledError):
            order.job.future.exception(_GRACE_SECONDS)
        if order.job.future.done():
            return self._make_answer(order)
        return make_message_answer(
            202, "Cancelling", "The computation ends after the operation of torch that runs now."
        )

    def estimate(self, request: Request) -> Answer:
        """Return a sentence with the length and the expected time of a prompt; empty during a computation."""
        if not self.jobs.is_idle:
            return Answer(200, "", kind="text/plain")
        try:
            job = self.jobs.submit(lambda: Answer(200, self.workshop.describe(request), kind="text/plain"))
            return job.future.result(_GRACE_SECONDS)
        except (queue.Full, TimeoutError, ValueError, UnsupportedModelError, KeyboardInterrupt):
            return Answer(200, "", kind="text/plain")

    def _find(self, name: str) -> _Order:
        with self._lock:
            order = self._orders.get(name)
        if order is None:
            raise _RequestError(
                404,
                "This page is not there any more",
                f"The server keeps the {_KEPT_PAGES} newest pages.",
                "Send the prompt again.",
            )
        return order

    def _make_state(self, order: _Order) -> dict[str, Any]:
        """Return the state of an order as JSON can represent it: strings and numbers."""
        job, before = order.job, self.jobs.count_before(order.job)
        seconds = f"{job.seconds:.0f} s"
        if job.started is None:
            text = f"Waiting for {before} other prompt{'s' * (before != 1)}: {seconds}"
        elif order.expected:
            text = f"{seconds}; expected: {in_words(order.expected[0].total)}"
        else:
            text = seconds
        expected = order.expected[0].total if order.expected else 0.0
        return {"done": job.future.done(), "text": text, "seconds": job.seconds, "expected": expected}

    def _make_answer(self, order: _Order) -> Answer:
        """Return the answer of an order that has ended."""
        job, order.is_read = order.job, True
        try:
            return job.future.result()
        except (CancelledJobError, concurrent.futures.CancelledError):
            text = f"After {job.seconds:.1f} seconds. The model is as it was before."
            return make_message_answer(200, "Cancelled", text, "Send the prompt again, or another one.")
        except TimeLimitError:
            return make_stopped_answer(self.limits)
        except KeyboardInterrupt:
            return make_message_answer(503, "The server has been stopped", "Start it again in its terminal.")

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Show an error in the terminal, unless a browser has closed its connection."""
        if not isinstance(sys.exception(), (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)


class _RequestError(Exception):
    """Report a request that is answered with a message; the arguments are those of `make_message_answer`."""


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
        site = self.server
        self._answer({"": lambda _: site.show_form(), "page": site.show_page, "state": site.show_state})

    do_HEAD = do_GET

    def do_POST(self) -> None:
        site = self.server
        self._answer(
            {
                "map": lambda _: site.order(self._read_request()),
                "estimate": lambda _: site.estimate(self._read_request()),
                "cancel": site.cancel,
            }
        )

    def _answer(self, answers: Mapping[str, Callable[[str], Answer]]) -> None:
        """Send an answer, or a message if the request is not for one of these addresses or not allowed.

        Args:
            answers: For the first word of each address, the function that makes the answer from the rest.
        """
        try:
            place, _, rest = self._check().removeprefix("/").partition("/")
            if place not in answers or (rest and place not in ("page", "state", "cancel")):
                raise _RequestError(404, "Nothing is at this address", "The form is at /.")
            made = answers[place](rest)
        except _RequestError as error:
            made = make_message_answer(*error.args)
        self._send(made)

    def _check(self) -> str:
        """Return the path; raise an error for a request with another host name, or from another site."""
        try:
            address = urlsplit(self.path)
        except ValueError:
            raise _RequestError(400, "The address can't be read", "The form is at /.") from None
        hosts = self.headers.get_all("Host", [])
        # The address of a request may repeat the server's name, as in requests to a proxy.
        names = [*hosts, address.netloc] if address.scheme else hosts
        is_local = all(name in _NAMES or name.rpartition(":")[0] in _NAMES for name in names)
        if len(hosts) != 1 or not is_local or address.scheme not in ("", "http"):
            raise _RequestError(
                403,
                "Not at this address",
                "This server answers at http://127.0.0.1 and http://localhost only.",
            )
        # Any port is accepted, because a tunnel may use another one.
        if self.headers.get("Origin", f"http://{hosts[0]}") != f"http://{hosts[0]}":
            raise _RequestError(
                403, "Not from another page", "This server answers its own form only, and no other page."
            )
        return address.path

    def _read_request(self) -> Request:
        """Return what the form has sent."""
        try:
            fields = parse_qs(self._read_body().decode("utf-8", "replace"), max_num_fields=_MOST_FIELDS)
        except ValueError:
            raise _RequestError(
                400, "The request can't be read", f"It has more than {_MOST_FIELDS} fields."
            ) from None
        return Request.read(fields)

    def _read_body(self) -> bytes:
        unreadable = "The request can't be read"
        lengths = set(self.headers.get_all("Content-Length", []))
        length = lengths.pop().strip() if lengths else ""
        if lengths:
            raise _RequestError(400, unreadable, "It has two different lengths (Content-Length).")
        if "Transfer-Encoding" in self.headers or not (length.isascii() and length.isdigit()):
            raise _RequestError(411, unreadable, "It has no length (a Content-Length of digits).")
        # The number of digits is checked first, because Python cannot convert thousands of digits.
        digits = length.lstrip("0") or "0"
        if len(digits) > len(str(_MOST_BYTES)) or int(digits) > _MOST_BYTES:
            raise _RequestError(413, "The prompt is too long", str(self.server.limits), "Shorten it.")
        try:
            body = self.rfile.read(int(digits))
        except TimeoutError:
            raise _RequestError(
                408, unreadable, f"It was not complete after {_READ_SECONDS:g} seconds.", "Send it again."
            ) from None
        if len(body) < int(digits):
            raise _RequestError(400, unreadable, f"It ended after {len(body)} of {digits} bytes.")
        return body

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Send an error of the standard library as a page with a message."""
        text = message or http.HTTPStatus(code).phrase
        self._send(make_message_answer(code, "The request can't be answered", text, "The form is at /."))

    def _send(self, answer: Answer) -> None:
        self.connection.settimeout(_WRITE_SECONDS)
        body = answer.body.encode("utf-8", "replace")
        self.send_response(answer.status)
        location = {"Location": answer.location} if answer.location else {}
        for name, value in {
            **location,
            "Content-Type": f"{answer.kind}; charset=utf-8",
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
        """Log nothing, because the prompts are private."""


def _is_dispensable(order: _Order) -> bool:
    """Return whether an order has ended, and its answer has been sent or nobody has asked for it for long."""
    ended = order.job.ended
    return ended is not None and (order.is_read or time.monotonic() - ended > _UNREAD_SECONDS)


def _too_many(limits: Limits) -> Answer:
    """Return the message that the queue is full."""
    return make_message_answer(
        503, "Too many prompts wait already", f"{limits.waiting} of them wait.", "Send yours again soon."
    )
