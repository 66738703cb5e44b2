"""What a request gets: the page of the maps that it asked for, or the reason in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lens_mix import runner
from lens_mix.lens.model_classes import TransformerLensModel, UnsupportedModelError
from lens_mix.recommended import input_map
from lens_mix.serve import forms
from lens_mix.session import Session
from lens_mix.view.page import page

INPUT_MAP = "input_map"  # beside the methods' names: `lm.input_map`


class Answer(NamedTuple):
    """A status of HTTP, an HTML file, and what a browser may do with it (a Content-Security-Policy)."""

    status: int
    html: str
    policy: str = forms.POLICY


def refusal(status: int, words: str) -> Answer:
    """A page that says why there is none."""
    return Answer(status, forms.message(words))


def page_of(model: TransformerLensModel, text: str, asked: Sequence[str], tokens: int) -> Answer:
    """The page of a sentence under the methods that are named, or why there is none.

    Args:
        model: any TransformerLens model.
        text: the sentence.
        asked: names of methods, or `INPUT_MAP`.
        tokens: so many the sentence may have.

    Returns:
        A refusal (400, or 413) where nothing was asked, of too many tokens, and of what `lm.run` refuses.
    """
    if not text.strip():
        return refusal(400, "There is no sentence: type one.")
    if not asked:
        return refusal(400, "No method is picked: pick one or several.")
    methods = [name for name in asked if name != INPUT_MAP]
    try:
        if methods:
            runner.read_methods(methods)
        count = len(Session(model, {}).read(text).tokens)
        if count > tokens:
            return refusal(413, f"The sentence has {count} tokens, and this server takes {tokens} at most.")
        maps = runner.run(model, text, methods, progress=None) if methods else {}
        if INPUT_MAP in asked:
            maps[INPUT_MAP] = input_map(model, text)
    except (ValueError, UnsupportedModelError) as problem:
        return refusal(400, str(problem))
    return Answer(200, page(maps).html, forms.PAGE_POLICY)
