"""Make the answer to a request: the page of the requested maps, or what is wrong and what to do."""

from __future__ import annotations

import dataclasses
import sys
import time
import traceback
from collections.abc import Callable
from typing import NamedTuple

from lens_mix._classes.model_classes import TransformerLensModel, UnsupportedModelError
from lens_mix.named_maps import compute_maps, read_names
from lens_mix.serve import forms
from lens_mix.serve.estimate import Estimate, Pace, estimate, in_words
from lens_mix.serve.forms import Request
from lens_mix.session import Session
from lens_mix.view.page import page

_ADVICE = "For a faster answer, pick fewer methods, those with a lower cost, or shorten the prompt."
_LEARN_SECONDS = 2.0  # shorter pages say little about the time of long ones
_ASK_SECONDS = 20.0  # the user confirms a computation that is expected to take longer


class Limits(NamedTuple):
    """Limit what one request may ask for.

    Attributes:
        tokens: The largest number of tokens of a prompt.
        seconds: The longest time for the maps of a prompt.
        waiting: The largest number of requests that wait while one is computed, 1 or more.
    """

    tokens: int = 128
    seconds: float = 60.0
    waiting: int = 4

    def __str__(self) -> str:
        return f"At most {self.tokens} tokens and {self.seconds:g} seconds; one prompt is computed at a time."


class Answer(NamedTuple):
    """Contain the answer to one request.

    Attributes:
        status: The HTTP status.
        body: The HTML file, or other text.
        policy: The Content-Security-Policy, which limits what the file may do in a browser.
        kind: The type of the body.
        location: The address to which the browser is sent, with the status 303.
    """

    status: int
    body: str
    policy: str = forms.MESSAGE_POLICY
    kind: str = "text/html"
    location: str = ""


def make_message_answer(status: int, title: str, text: str, advice: str = "") -> Answer:
    """Return an answer whose page shows what happened, and what to do."""
    return Answer(status, forms.make_message(title, text, advice))


def find_mistake(request: Request) -> Answer | None:
    """Return a message about a request that no model can answer; None if there is no mistake."""
    if not request.text.strip():
        return make_message_answer(400, "There is no prompt", "Type one in the field above.")
    if not request.methods:
        return make_message_answer(400, "No method is picked", "Pick one or several in the list above.")
    try:
        read_names(request.methods)
    except ValueError as problem:
        return _make_refusal(problem)
    return None


def _make_refusal(problem: Exception) -> Answer:
    advice = "Change the prompt or the methods above."
    return make_message_answer(400, "This can't be computed", str(problem), advice)


@dataclasses.dataclass
class Workshop:
    """Make answers with one model.

    Attributes:
        model: Any TransformerLens model.
        limits: The limits of one request.
        pace: The time of a forward pass; None: it is unknown, so nothing is estimated.
        correction: The factor of estimates. It follows the times that pages took, because the costs of
            methods differ between models, and other programs may slow down this one.
    """

    model: TransformerLensModel
    limits: Limits
    pace: Pace | None
    correction: float = 1.0

    def estimate(self, request: Request) -> Estimate:
        """Return the number of tokens of a request, and its expected time."""
        tokens = len(Session(self.model, {}).read(request.text).tokens)
        if self.pace is None:
            return Estimate(tokens, {})
        expected = estimate(self.pace, tokens, request.methods, request.all_rows)
        seconds = {name: self.correction * number for name, number in expected.seconds.items()}
        return Estimate(tokens, seconds)

    def describe(self, request: Request) -> str:
        """Return a sentence with the estimate of a request, which says if it is beyond the limits."""
        if not request.text.strip():
            return ""
        expected = self.estimate(request)
        if expected.tokens > self.limits.tokens:
            return f"{expected.tokens} tokens, more than the limit of {self.limits.tokens}"
        return expected.describe(self.limits.seconds)

    def make_page(self, request: Request, announce: Callable[[Estimate], object]) -> Answer:
        """Return the page of a prompt with the named methods, or a page about what is wrong.

        Args:
            request: The request.
            announce: A function that gets the estimate before the maps are computed.

        Returns:
            The page; a question, if the maps are expected to take long and the request is not confirmed; or
            a message with the status 413 for too many tokens, and with 400 if `lens_mix.run` raises an error.
        """
        try:
            expected = self.estimate(request)
            if expected.tokens > self.limits.tokens:
                return make_message_answer(
                    413,
                    "The prompt is too long",
                    f"It has {expected.tokens} tokens, and this server takes {self.limits.tokens} at most.",
                    f"Shorten it, or start the server with --tokens {expected.tokens}.",
                )
            if expected.total > min(_ASK_SECONDS, self.limits.seconds) and not request.is_confirmed:
                return self._ask(request, expected)
            announce(expected)
            started = time.monotonic()
            maps = compute_maps(
                self.model, request.text, request.methods, all_rows=request.all_rows, progress=None
            )
        except (ValueError, UnsupportedModelError) as problem:
            return _make_refusal(problem)
        except Exception as problem:
            traceback.print_exception(problem, file=sys.stderr)
            return make_message_answer(
                500,
                "No page because of an unexpected error",
                f"{type(problem).__name__}: {problem}",
                "The server's terminal shows the traceback.",
            )
        answer = Answer(200, page(maps).html, forms.PAGE_POLICY)
        seconds = time.monotonic() - started
        if expected.total and max(seconds, expected.total) > _LEARN_SECONDS:
            # A single page may be an exception, so an estimate follows it only half of the way.
            self.correction *= (seconds / expected.total) ** 0.5
        return answer

    def _ask(self, request: Request, expected: Estimate) -> Answer:
        """Return a page that asks whether to start a long computation."""
        text = f"Expected: {expected.describe()}. This is an estimate, and can be wrong by a factor of two."
        if expected.total > self.limits.seconds:
            text += f" This server stops a computation after {self.limits.seconds:g} seconds."
        title = f"This takes {in_words(expected.total)}"
        return Answer(200, forms.make_confirmation(title, text, _ADVICE, request))


def make_stopped_answer(limits: Limits) -> Answer:
    """Return the message that the time limit has stopped a computation."""
    return make_message_answer(
        504,
        f"Stopped after {limits.seconds:g} seconds",
        "That is the limit of this server for one prompt.",
        f"{_ADVICE} Or start the server with more --seconds.",
    )
