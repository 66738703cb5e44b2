"""Make traces without a model, for the tests of their page."""

from __future__ import annotations

import re
from typing import Any

import torch

from lens_mix._inputs.batches import Prompt
from lens_mix.maps.explained import Explained
from lens_mix.traces.documents import Documents
from lens_mix.traces.reading import Reading
from lens_mix.traces.sources import PlacedText, split_sentences
from lens_mix.traces.trace import Trace

DOCUMENTS = Documents(
    {"report": "A cat sat on a mat. It slept for hours.", "press note": "Dogs bark at night."},
    question="Who slept?",
    instruction="Answer briefly.",
)
WRITTEN = " The cat slept. It did so for hours!"


class RandomExplainer:
    """Explain each written token by random scores, and a span by the sum of its tokens' scores."""

    def __init__(self, n_prompt: int, n_written: int, signed: bool = False) -> None:
        generator = torch.Generator().manual_seed(0)
        rows = torch.rand(n_written, n_prompt + n_written, generator=generator) ** 3 - (0.1 if signed else 0)
        self.rows = rows.tril(n_prompt - 1)

    def explain_each(self) -> torch.Tensor:
        return self.rows

    def explain_span(self, start: int, stop: int) -> torch.Tensor:
        return self.rows[start:stop].sum(0)


def place(text: str, first: int, sections: Any = ()) -> tuple[list[str], PlacedText]:
    """Return the tokens of a text, words with the space before them, and where they are.

    A character beyond the basic plane has two tokens, as in a vocabulary of bytes.
    """
    tokens, offsets = [], []
    for found in re.finditer(r"[\U00010000-\U0010ffff]| ?\w+|\s|[^\w\s]", text):
        pieces = 2 if found.group() > "\U0000ffff" else 1
        names = [f"{found.group()}[{i + 1}/2]" for i in range(2)] if pieces == 2 else [found.group()]
        tokens += names
        offsets += [found.span()] * pieces
    return tokens, PlacedText(text, sections, first, offsets)


def make_trace(
    documents: Documents = DOCUMENTS, written: str = WRITTEN, signed: bool = False, **options: Any
) -> Trace:
    """Return a trace with random scores, whose prompt starts with a token that spells nothing."""
    text, sections = documents.to_text()
    tokens, placed = place(text, 0, sections)
    placed = placed._replace(offsets=[(0, 0), *placed.offsets])
    own, placed_own = place(written, len(tokens) + 1)
    tokens = ["<s>", *tokens]
    count = len(own)
    numbers = -torch.linspace(0.05, 1.5, count)
    explained = tuple(Explained(f" next{index}", 0.5) for index in range(count))
    reading = Reading(
        Prompt(torch.arange(len(tokens) + count)), 0, len(tokens), [*tokens, *own], placed, placed_own
    )
    given = {
        "unit": "sentence",
        "method_name": "gim",
        "parameters": {},
        "provenance": {"model": "/home/somebody/tiny"},
        "_explainer": RandomExplainer(len(tokens), count, signed),
        "_split": split_sentences(),
        **options,
    }
    return Trace(reading=reading, log_probabilities=numbers, explained=explained, **given)
