"""A written span, its sources, and what removing the sources does to its probability."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from lens_mix._classes.model_classes import UnsupportedModelError
from lens_mix._inputs.features import Fill
from lens_mix.arguments import check_choice, check_flags, check_whole_number
from lens_mix.maps import MixingMap
from lens_mix.maps.explained import Explained
from lens_mix.traces.attribution import read_written
from lens_mix.traces.sources import TextSource

if TYPE_CHECKING:
    from lens_mix.maps import Maps
    from lens_mix.runner import MethodLike
    from lens_mix.traces.trace import Trace


class SourceScore(NamedTuple):
    """One source of a written span.

    Attributes:
        source: The source.
        score: The sum of its tokens' scores, in the unit of the method.
        share: The magnitude of the score, divided by the sum of magnitudes over all sources.
        loss: The log probability in nats that the span loses without the source; negative if it gains. None:
            `verify` has not measured it, or cannot.
        reason: Why `verify` cannot measure the loss; "" if it can.
    """

    source: TextSource
    score: float
    share: float
    loss: float | None = None
    reason: str = ""


class SourceScores(list[SourceScore]):
    """A list of sources that prints one line for each of them, below the span that they explain.

    Attributes:
        explanation: The span and its probability.
    """

    def __init__(self, scores: Iterable[SourceScore], explanation: str = "") -> None:
        super().__init__(scores)
        self.explanation = explanation

    def __repr__(self) -> str:
        """Return the explanation and one line per source: its share, what the span loses, and its text."""
        has_losses = any(each.loss is not None for each in self)
        blank = " " * 15 if has_losses else ""
        lines = [
            f"{each.share:>6.0%}  "
            + (f"{each.loss:>+8.2f} nats  " if each.loss is not None else blank)
            + str(each.source)
            + (f" (cannot be removed: {each.reason})" if each.reason else "")
            for each in self
        ]
        return "\n".join([self.explanation, *lines])


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class WrittenSpan:
    """Neighboring tokens that were written after a prompt.

    Attributes:
        trace: The trace that the span belongs to.
        start: The index of its first token among the written tokens.
        stop: The index after its last token.
    """

    trace: Trace
    start: int
    stop: int

    @property
    def positions(self) -> range:
        """Return the positions of its tokens among `Trace.tokens`."""
        return range(self.trace.n_prompt + self.start, self.trace.n_prompt + self.stop)

    @property
    def text(self) -> str:
        """Return its text."""
        return self.trace.text_of(self.start, self.stop)

    @property
    def log_probability(self) -> float:
        """Return the log probability of the span after the prompt and what was written before it, in nats."""
        return float(self.trace.log_probabilities[self.start : self.stop].double().sum())

    @property
    def probability(self) -> float:
        """Return the probability of the whole span after what is before it, 0 to 1."""
        return math.exp(self.log_probability)

    @property
    def scores(self) -> Float[Tensor, " key"]:
        """Return the score of each token of `Trace.tokens`, computed when it is first read.

        Tokens from the span's last one on have the score 0.
        """
        return self.trace.scores_of(self.start, self.stop)

    @functools.cached_property
    def _by_source(self) -> list[SourceScore]:
        """Return the scores of all sources before the end of the span."""
        last, scores = self.positions[-1], self.scores
        sources = [source for source in self.trace.sources() if source.positions[0] < last]
        totals = [float(scores[list(source.positions)].sum()) for source in sources]
        size = sum(map(abs, totals)) or 1.0
        return [
            SourceScore(source, total, abs(total) / size)
            for source, total in zip(sources, totals, strict=True)
        ]

    @property
    def map(self) -> MixingMap:
        """Return a map of one row, the span, whose keys are the trace's sources."""
        scored = self._by_source
        explained = Explained(target=f"log probability of {self.text!r}", value=self.log_probability)
        return MixingMap(
            scores=torch.tensor([[[each.score for each in scored]]], dtype=torch.float64, device="cpu"),
            tokens=[self.text],
            key_tokens=[str(each.source) for each in scored],
            method=self.trace.method_name,
            parameters=dict(self.trace.parameters),
            kind="input",
            explained=(explained,),
            provenance={**self.trace.provenance, "predicts_next": False},
            notes=self.trace.notes,
        )

    def maps(self, methods: MethodLike | Sequence[MethodLike], **options: Any) -> MixingMap | Maps:
        """Return the maps of `Trace.maps` with the rows that predict the span's tokens.

            >>> t[" Rome"].maps("value_zeroing").top(3)

        Args:
            methods: As in `Trace.maps`.
            options: As in `Trace.maps`.

        Raises:
            TypeError: As in `Trace.maps`.
            ValueError: As in `Trace.maps`.
            UnsupportedModelError: As in `Trace.maps`.
        """
        return self.trace.maps_of(self.start, self.stop, methods, options)

    def top(self, k: int = 5, everything: bool = False) -> SourceScores:
        """Return the `k` strongest sources, the strongest first, with their shares.

        Args:
            k: The number of sources, 1 or more.
            everything: Whether the template and the text that the model wrote itself are among them. Their
                shares count in any case, and the first line of the list says what they are.

        Raises:
            ValueError: If `k` is below 1.
        """
        k = check_whole_number("k", k, 1)
        check_flags(everything=everything)
        listed = [each for each in self._by_source if everything or each.source.is_content]
        strongest = sorted(listed, key=lambda each: -abs(each.score))[:k]
        losses = self.trace.losses_of(self.start, self.stop)
        strongest = [each._replace(loss=losses.get(each.source.positions)) for each in strongest]
        return SourceScores(strongest, self._explain(everything))

    def verify(self, k: int = 5, *, fill: Fill | None = None) -> SourceScores:
        """Return the `k` strongest sources with what the span's log probability loses without each of them.

        A source is removed by deleting its tokens from the prompt, so that the text after it moves up. What
        was written stays the same. It takes one forward pass per source that was not measured before; the log
        probability with all sources is that of the trace. `top`, the page and a saved trace have the losses.
        A source that cannot be removed, such as a part of a picture, has the loss None and the reason.

        A stretch of sound is not deleted, but replaced, and the rest keeps its time.

        Args:
            k: The number of sources, 1 or more.
            fill: What replaces a stretch of sound: "silence", or "noise" of the same level, whose losses only
                this list and a saved trace have. None: silence.

        Raises:
            ValueError: If `k` is below 1, there is a fill for a text, or the trace was loaded from a file and
                has no model.
        """
        if fill is not None:
            check_choice("fill", fill, get_args(Fill))
            if self.trace.reading.sound_grid is None:
                raise ValueError(f"fill: expected None for a text, whose tokens are deleted, got {fill!r}")
        known = self.trace.losses_of(self.start, self.stop, fill)
        missing = [each.source.positions for each in self.top(k) if each.source.positions not in known]
        model = self.trace.require_model() if missing else None
        reasons: dict[tuple[int, ...], str] = {}
        for positions in tqdm(missing, desc="passes without a source", delay=2, leave=False):
            try:
                rest = self.trace.reading.without(positions, fill)
            except (UnsupportedModelError, ValueError) as problem:
                reasons[positions] = str(problem)
                continue
            if rest is None:
                reasons[positions] = "the prompt has no other token"
            elif model is not None:
                without = read_written(model, self.trace.reading, rest).log_probabilities
                lost = self.log_probability - float(without[self.start : self.stop].double().sum())
                self.trace.keep_loss(self.start, self.stop, positions, lost, fill)
        measured, losses = self.top(k), self.trace.losses_of(self.start, self.stop, fill)
        measured[:] = [
            each._replace(
                loss=losses.get(each.source.positions), reason=reasons.get(each.source.positions, "")
            )
            for each in measured
        ]
        return measured

    def _explain(self, everything: bool) -> str:
        """Return the span with its probability, and the shares of what is not listed."""
        mean = math.exp(self.log_probability / (self.stop - self.start))
        line = f"{self.text!r}: probability {self.probability:.2g}"
        line += f" ({mean:.2f} per token)" if self.stop > self.start + 1 else ""
        if everything:
            return line
        shares: dict[str, float] = {}
        for each in self._by_source:
            if not each.source.is_content:
                shares[each.source.kind] = shares.get(each.source.kind, 0.0) + each.share
        rest = [f"{share:.0%} {kind}" for kind, share in shares.items() if share >= 0.005]
        return f"{line}; not listed: {', '.join(rest)}" if rest else line

    def __repr__(self) -> str:
        """Return the span and its three strongest sources."""
        return f"WrittenSpan {self.top(3)!r}"


def find_span(text: str, offsets: Sequence[tuple[int, int]], wanted: str) -> tuple[int, int]:
    """Return the first token of a substring and the token after its last one.

    Args:
        text: What was written.
        offsets: The first character of each token and the one after its last.
        wanted: The substring. Tokens that it cuts belong to it as a whole.

    Raises:
        ValueError: If the text does not contain it exactly once.
    """
    starts = [place for place in range(len(text)) if wanted.strip() and text.startswith(wanted, place)]
    count = len(starts)
    if count != 1:
        found = "which is not in" if count == 0 else f"which occurs {count} times in"
        hint = (
            "write more of the text around it, or give the numbers of its tokens" if count else "correct it"
        )
        raise ValueError(f"span: expected a text that was written, got {wanted!r}, {found} {text!r}; {hint}")
    low = starts[0] + len(wanted) - len(wanted.lstrip())
    high = starts[0] + len(wanted.rstrip())
    inside = [index for index, (start, stop) in enumerate(offsets) if start < high and stop > low]
    return inside[0], inside[-1] + 1
