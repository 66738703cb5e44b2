"""Make the answer to a request: the page of the requested maps, or a message about what is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lens_mix import runner
from lens_mix.lens.model_classes import TransformerLensModel, UnsupportedModelError
from lens_mix.recommended import input_map
from lens_mix.serve import forms
from lens_mix.session import Session
from lens_mix.view.page import page

INPUT_MAP = "input_map"  # the name for `lens_mix.input_map` in the form, next to the methods' names


class Answer(NamedTuple):
    """Contain the answer to one request.

    Attributes:
        status: The HTTP status.
        html: The HTML file.
        policy: The Content-Security-Policy, which limits what the file may do in a browser.
    """

    status: int
    html: str
    policy: str = forms.POLICY


def make_message_answer(status: int, text: str) -> Answer:
    """Return an answer whose page shows a message."""
    return Answer(status, forms.make_message(text))


def make_page(model: TransformerLensModel, text: str, names: Sequence[str], tokens: int) -> Answer:
    """Return the page of a sentence with the named methods, or a message about what is wrong.

    Args:
        model: Any TransformerLens model.
        text: The sentence.
        names: Names of methods, or `INPUT_MAP`.
        tokens: The largest number of tokens that the sentence may have.

    Returns:
        The page; or a message with the status 413 for too many tokens, and with 400 if there is no sentence
        or no method, or if `lens_mix.run` raises an error.
    """
    if not text.strip():
        return make_message_answer(400, "There is no sentence: type one.")
    if not names:
        return make_message_answer(400, "No method is picked: pick one or several.")
    methods = [name for name in names if name != INPUT_MAP]
    try:
        if methods:
            runner.read_methods(methods)
        count = len(Session(model, {}).read(text).tokens)
        if count > tokens:
            reason = f"The sentence has {count} tokens, and this server takes {tokens} at most."
            return make_message_answer(413, reason)
        maps = runner.run(model, text, methods, progress=None) if methods else {}
        if INPUT_MAP in names:
            maps[INPUT_MAP] = input_map(model, text)
    except (ValueError, UnsupportedModelError) as problem:
        return make_message_answer(400, str(problem))
    return Answer(200, page(maps).html, forms.PAGE_POLICY)
