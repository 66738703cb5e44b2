"""Measure what was written without sets of sources, one forward pass for each set."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix._classes.model_classes import UnsupportedModelError
from lens_mix._inputs.batches import Prompt
from lens_mix._passes.predictions import name_token
from lens_mix.traces.attribution import read_logits
from lens_mix.traces.generation import continue_prompt
from lens_mix.traces.sources import TextSource
from lens_mix.traces.spans import WrittenSpan

if TYPE_CHECKING:
    from lens_mix.traces.trace import Trace

# The log probabilities of all tokens of the vocabulary take much memory, so only the last ones stay.
_PASSES_KEPT = 6
# The longest word that may be written instead of another one, such as a number of one token per digit.
_TOKENS_OF_A_WORD = 8


class Removal(NamedTuple):
    """What a claim loses without some sources.

    Attributes:
        sources: The sources that are removed together.
        loss: What the log probability of the claim's decisive tokens loses, in nats; negative if it gains.
        probability: The probability of the whole claim without them, 0 to 1.
    """

    sources: tuple[TextSource, ...]
    loss: float
    probability: float


class OutOfPasses(Exception):
    """The budget of forward passes is used up."""


class Passes:
    """Measure what was written without sets of sources; each set takes one forward pass for all claims.

    A set is given by the numbers of its sources. Sources that were written themselves can be removed, too;
    what is read is then the rest.

    Args:
        trace: The trace, with its model.
        sources: The sources that can be removed.
        budget: The largest number of forward passes.
    """

    def __init__(self, trace: Trace, sources: Sequence[TextSource], budget: int) -> None:
        self.trace, self.sources, self.budget = trace, tuple(sources), budget
        self.model = trace.require_model()
        self.written: list[int] = trace.reading.ids[trace.reading.n_prompt :].tolist()
        self.count = 0
        self._of_others: dict[tuple[int, tuple[int, ...], frozenset[int]], float] = {}
        self._of_written: dict[frozenset[int], Float[Tensor, " written"]] = {}
        self._rows: collections.OrderedDict[frozenset[int], Float[Tensor, "written d_vocab"]]
        self._rows = collections.OrderedDict()

    def rows(self, removed: Iterable[int] = ()) -> Float[Tensor, "written d_vocab"]:
        """Return the log probability of every token of the vocabulary in the place of every written one.

        A place is nan if its token is removed.

        Raises:
            OutOfPasses: If the budget is used up.
            UnsupportedModelError: If nothing would predict the first written token.
        """
        key = frozenset(removed)
        if key not in self._rows:
            rows = self._run(key)
            self._rows[key] = rows
            self._of_written[key] = rows[range(len(self.written)), self.written].double()
            if len(self._rows) > _PASSES_KEPT:
                self._rows.popitem(last=False)
        self._rows.move_to_end(key)
        return self._rows[key]

    def of_written(self, removed: Iterable[int] = ()) -> Float[Tensor, " written"]:
        """Return the log probability of every written token without some sources; see `rows`."""
        key = frozenset(removed)
        if key not in self._of_written:
            self.rows(key)
        return self._of_written[key]

    def loss(self, tokens: Sequence[int], removed: Iterable[int]) -> float:
        """Return what the log probability of some written tokens loses without some sources, in nats."""
        places = list(tokens)
        return float((self.of_written()[places] - self.of_written(removed)[places]).sum())

    def removal(self, span: WrittenSpan, decisive: Sequence[int], removed: Sequence[int]) -> Removal:
        """Return what a claim loses without some sources."""
        whole = float(self.of_written(removed)[span.start : span.stop].sum())
        sources = tuple(self.sources[number] for number in removed)
        return Removal(sources, self.loss(decisive, removed), math.exp(whole))

    def write_instead(self, place: int, removed: Iterable[int], count: int) -> str:
        """Return what the model writes from a written token on, without some sources.

        It is the most probable text. An encoder-decoder writes from the start of the answer.

        Args:
            place: The number of the written token.
            removed: The sources.
            count: The number of tokens.

        Raises:
            OutOfPasses: If the budget is used up.
        """
        first = int(self.rows(removed)[place].argmax())
        tokenizer = getattr(self.model, "tokenizer", None)
        found = self._continue(place, removed, count)
        is_own = found is not None and (bool(self.trace.reading.n_source) or found[0] == first)
        # `generate` is wrong in some models, and then the pass alone is believed.
        if tokenizer is None:
            return name_token(tokenizer, first)
        # A special token, such as the end of the text, has no text to show.
        is_end = first in getattr(tokenizer, "all_special_ids", ())
        if is_end or is_own:
            return "" if is_end else str(tokenizer.decode(found))
        return name_token(tokenizer, first)

    def of_other(self, place: int, tokens: Sequence[int], removed: Iterable[int] = ()) -> float:
        """Return the log probability of other tokens from a written one on, without some sources.

        Raises:
            OutOfPasses: If the budget is used up.
        """
        key = (place, tuple(tokens), frozenset(removed))
        if key not in self._of_others:
            rest = self.trace.reading.without(self._positions(key[2]))
            assert rest is not None, "the same sources were removed before"
            rows = self._run_changed(rest, place, tokens, self.written[place + len(tokens) :])
            self._of_others[key] = float(rows[range(len(tokens)), list(tokens)].double().sum())
        return self._of_others[key]

    def misfit(
        self, span: WrittenSpan, word: tuple[int, int], tokens: Sequence[int], decisive: Sequence[int]
    ) -> float:
        """Return what the rest of a claim loses, in nats, with other tokens in the place of one word of it.

        The rest are the tokens after the word that are not decisive; 0 if there are none.

        Args:
            span: The claim.
            word: The number of the word's first written token and of the one after its last.
            tokens: The other tokens.
            decisive: The numbers of the written tokens that depend on the sources.

        Raises:
            OutOfPasses: If the budget is used up.
        """
        start, stop = word
        rest = [each for each in range(stop, span.stop) if each not in decisive]
        if not rest:
            return 0.0
        rows = self._run_changed(self.trace.reading.prompt, start, tokens, self.written[stop:])
        places = [each - stop + len(tokens) for each in rest]
        numbers = rows[places, [self.written[each] for each in rest]].double()
        return float((self.of_written()[rest] - numbers).clamp_min(0).sum())

    def other_word(self, place: int, removed: Iterable[int], first: int | None = None) -> list[int]:
        """Return the tokens of the word that the model writes from a written token on, without some sources.

        There are none if the model has no tokenizer, or cannot write.

        Args:
            place: The number of the written token.
            removed: The sources.
            first: The first token of the word. None: the most probable one.

        Raises:
            OutOfPasses: If the budget is used up.
        """
        tokenizer = getattr(self.model, "tokenizer", None)
        start = [] if first is None else [first]
        if self.trace.reading.n_source or tokenizer is None:
            return start
        written = [*start, *(self._continue(place, removed, _TOKENS_OF_A_WORD, start) or [])]
        word = written[:1]
        for token in written[1:]:
            text = tokenizer.decode([*word, token])[len(tokenizer.decode(word)) :]
            if not text[:1].isalnum():
                break
            word.append(token)
        return word

    def words_of(self, span: WrittenSpan) -> list[tuple[int, int]]:
        """Return the words of a claim, each by its first token and the one after its last."""
        tokens = range(span.start, span.stop)
        starts = [each for each in tokens if each == span.start or self._starts_word(each)]
        words = itertools.pairwise([*starts, span.stop])
        return [each for each in words if any(map(str.isalnum, self.trace.text_of(*each)))]

    def name(self, tokens: Sequence[int]) -> str:
        """Return the text of some tokens of the vocabulary."""
        tokenizer: Any = getattr(self.model, "tokenizer", None)
        return name_token(tokenizer, tokens[0]) if len(tokens) == 1 else str(tokenizer.decode(list(tokens)))

    def _starts_word(self, place: int) -> bool:
        """Return whether a written token begins with a space, as far as its text is known."""
        placed = self.trace.reading.written_text
        if placed is None:
            return True
        start, stop = placed.offsets[place]
        before = placed.offsets[place - 1][1] if place else 0
        return placed.text[before:stop][:1].isspace() or not placed.text[start:stop].isalnum()

    def _continue(
        self, place: int, removed: Iterable[int], count: int, start: Sequence[int] = ()
    ) -> list[int] | None:
        """Return the most probable tokens from a written one on, without some sources, if there are any.

        Args:
            place: The number of the written token.
            removed: The sources.
            count: The number of tokens.
            start: Tokens that are written first, in the place of the written one; not for encoder-decoders.
        """
        self._count()
        rest = self.trace.reading.without(self._positions(removed))
        if rest is not None and not self.trace.reading.n_source:
            rest = self._replace(rest, place, start)
        found = None if rest is None or not len(rest.tokens) else continue_prompt(self.model, rest, count)
        return None if found is None else found.tolist()

    def _run_changed(
        self, prompt: Prompt, place: int, tokens: Sequence[int], rest: Sequence[int]
    ) -> Float[Tensor, "changed d_vocab"]:
        """Return the rows of other tokens from a written one on, and of those after them, from one pass.

        Args:
            prompt: The prompt, which ends with all that was written.
            place: The number of the written token from which on all is replaced.
            tokens: The other tokens.
            rest: The tokens after them.
        """
        self._count()
        changed = self._replace(prompt, place, [*tokens, *rest])
        logits = read_logits(self.model, changed, len(tokens) + len(rest), self.trace.reading.part)
        return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1).cpu()

    def _replace(self, prompt: Prompt, place: int, tokens: Sequence[int]) -> Prompt:
        """Return a prompt with other tokens instead of all that was written from one token on."""
        before = prompt.tokens if prompt.target is None else prompt.target
        after = torch.tensor(tokens, dtype=before.dtype, device=before.device)
        changed = torch.cat([before[: len(before) - len(self.written) + place], after])
        if prompt.target is not None:
            return dataclasses.replace(prompt, target=changed)
        # What belongs to a written token, such as its type, is the same for all of them.
        inputs = {
            name: torch.cat([value, value[-1:].expand(len(changed), *value.shape[1:])])[: len(changed)]
            for name, value in prompt.inputs.items()
        }
        return dataclasses.replace(prompt, tokens=changed, inputs=inputs)

    def _positions(self, removed: Iterable[int]) -> list[int]:
        return sorted(place for number in removed for place in self.sources[number].positions)

    def _count(self) -> None:
        if self.count >= self.budget:
            raise OutOfPasses
        self.count += 1

    def _run(self, removed: Iterable[int]) -> Float[Tensor, "written d_vocab"]:
        """Return the rows of one forward pass."""
        reading, positions = self.trace.reading, self._positions(removed)
        rest = reading.without(positions)
        if rest is None:
            raise UnsupportedModelError(
                "audit: expected a prompt with tokens besides its sources, which predict the first written "
                "token, got none; put the question after the sources"
            )
        self._count()
        kept = [place for place in range(reading.n_written) if reading.n_prompt + place not in positions]
        logits = read_logits(self.model, rest, len(kept), reading.part)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1).cpu()
        if len(kept) == reading.n_written:
            return wide
        rows = wide.new_full((reading.n_written, wide.shape[-1]), math.nan)
        rows[kept] = wide
        return rows


def find_blocking(
    loss: Callable[[Sequence[int]], float], ranked: Sequence[int], enough: float, most: int
) -> list[int] | None:
    """Return a smallest set of sources without which `enough` is lost; None if it has over `most`.

    Each member is needed: with any one of them left in, the loss is smaller. So a set of one source is what a
    claim rests on, and of several sources each is enough. The sources are removed in the order of their
    scores; how many of them is doubled and then halved, so that a member takes a logarithm of passes.

    Args:
        loss: Return what is lost without some sources, in nats.
        ranked: The sources, the strongest first.
        enough: The loss in nats.
        most: The largest size of the set.

    Raises:
        OutOfPasses: If the budget is used up.
    """
    found: list[int] = []
    rest = list(ranked)
    while not found or loss(found) < enough:
        if len(found) == most or not rest:
            return None
        low, high = 0, 1
        while high < len(rest) and loss([*found, *rest[:high]]) < enough:
            low, high = high, 2 * high
        high = min(high, len(rest))
        while high - low > 1:
            middle = (low + high) // 2
            if loss([*found, *rest[:middle]]) < enough:
                low = middle
            else:
                high = middle
        found.append(rest[high - 1])
        # Those after it are not needed, because all sources before it with it are enough.
        rest = rest[: high - 1]
    return found
