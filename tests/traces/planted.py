"""Replace the passes of an audit by tables, which say what each written token loses without which sources.

t = trace_of(4, " Ann has a cat.")
claim = audit_planted(monkeypatch, t, [Word("cat", {(0,): 12.0})])[0]
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

import lens_mix as lm
from lens_mix.traces.audit import audit_trace
from lens_mix.traces.removals import Passes
from tests.traces.readers import reader

QUESTION = "Who has what?"
# The log probability of a written token with all sources, and of a token that the table does not have.
SURE, NEVER = -0.01, -30.0
Table = Mapping[tuple[int, ...], float]


@functools.cache
def model_of() -> Any:
    return reader()


def sentence(number: int) -> str:
    """Return the sentence that is the source of a number."""
    return f"The plan {number} has a model."


@functools.cache
def _trace_once(prompt: str, answer: str) -> lm.Trace:
    t = lm.trace(model_of(), prompt, answer=answer, method="attention")
    t.sources()
    return t


def trace_of(n_sources: int, answer: str = " Ann has a cat.", order: Sequence[int] | None = None) -> lm.Trace:
    """Return the trace of a prompt of so many sentences and a question, with scores in a given order.

    Args:
        n_sources: The number of sentences before the question.
        answer: What was written.
        order: The numbers of the sentences, the strongest first. None: as in the prompt.
    """
    text = " ".join(map(sentence, range(n_sources)))
    once = _trace_once(f"{text} {QUESTION}", answer)
    t = dataclasses.replace(once, _computed=dict(once._computed))
    order = range(n_sources) if order is None else order
    contents = [source for source in t.sources() if source.is_content]
    scores = torch.zeros(len(t.tokens))
    for place, number in enumerate(order):
        scores[contents[number].positions[0]] = 1 / (1 + place)
    # Earlier sentences of the answer are weak sources, too.
    scores[t.n_prompt :] = 1e-6
    for start in range(t.reading.n_written):
        for stop in range(start + 1, t.reading.n_written + 1):
            t._computed[start, stop] = scores
    return t


@dataclasses.dataclass(frozen=True)
class Word:
    """What one token loses without which sources.

    Attributes:
        place: The written text, of which the first token counts.
        losses: For each set of numbers of sources, the loss in nats if all of them are removed.
        token: The token that may be written in this place. None: the one that was written.
        log_probability: Its log probability with all sources.
        misfit: What the rest of the claim loses with it.
    """

    place: str
    losses: Table = dataclasses.field(default_factory=dict)
    token: int | None = None
    log_probability: float = SURE
    misfit: float = 0.0


class PlantedPasses(Passes):
    """Passes whose log probabilities come from a table. What they count is as in other passes."""

    words: Sequence[Word] = ()

    def _rows_of(self, removed: Collection[int]) -> torch.Tensor:
        rows = torch.full((len(self.written), len(self.model.tokenizer)), NEVER, dtype=torch.float64)
        rows[range(len(self.written)), self.written] = SURE
        for word in self.words:
            place = self.trace[word.place].start
            token = self.written[place] if word.token is None else word.token
            lost = sum(loss for group, loss in word.losses.items() if set(group) <= set(removed))
            rows[place, token] = word.log_probability - lost
        for number in removed:
            for position in self.sources[number].positions:
                if position >= self.trace.n_prompt:
                    rows[position - self.trace.n_prompt] = torch.nan
        return rows

    def _run(self, removed: Any) -> torch.Tensor:
        self._count()
        return self._rows_of(removed)

    def write_instead(self, place: int, removed: Any, count: int) -> str:
        self._count()
        return f" written {place} without {sorted(removed)}"

    def misfit(
        self, span: Any, word: tuple[int, int], tokens: Sequence[int], decisive: Sequence[int]
    ) -> float:
        self._count()
        return next(each.misfit for each in self.words if [each.token] == list(tokens))

    def other_word(self, place: int, removed: Any, first: int | None = None) -> list[int]:
        # The tables have single tokens only; words of several are tested on a model.
        return [] if first is None else [first]


def audit_planted(monkeypatch: Any, t: lm.Trace, words: Sequence[Word], **options: Any) -> lm.Audit:
    """Return the audit of a trace whose passes come from a table; options as in `Trace.audit`."""
    made = type("Made", (PlantedPasses,), {"words": tuple(words)})
    with monkeypatch.context() as patch:
        patch.setattr("lens_mix.traces.audit.Passes", made)
        return audit_trace(t, options.get("spans"), options.get("keep"), options.get("passes"))
