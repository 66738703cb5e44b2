"""Find what a claim of an answer rests on, by passes without some of its sources."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from lens_mix._passes.predictions import name_token
from lens_mix.traces.removals import OutOfPasses, Passes, Removal, find_blocking
from lens_mix.traces.sources import TextSource
from lens_mix.traces.spans import WrittenSpan

if TYPE_CHECKING:
    from lens_mix.traces.trace import Trace

VERDICTS = ("supported", "redundant", "conflicting", "from memory", "unclear")
# What a reader asks or orders is not evidence for the answer, so it stays in every pass.
_KEPT_KINDS = ("question", "instruction", "system")
_QUESTION = re.compile(r"\?[\"'”’)\]]*\s*$|^\s*(Question|Answer|Q|A)\s*:", re.IGNORECASE)
_WORD = re.compile(r"\w+")
_FINISHED = re.compile(r"[.!?…。！？][\"'”’»)\]]*\s*$")
# How many of the tokens that the model may write instead are compared, and how many sources contradict.
_LIKELY, _MOST_AGAINST = 8, 2
# For how many tokens of a claim the sources of another one are searched.
_MOST_SEARCHES = 2
# With fewer sources, each of them may be one that a claim rests on.
_MANY_SOURCES = 5


@dataclasses.dataclass(frozen=True)
class Rules:
    """Describe the thresholds of the verdicts, which were chosen on planted cases.

    Attributes:
        decisive: A word of the claim counts if one of its tokens loses this many nats without the sources,
            and this share of what the token with the largest loss loses.
        memory: A claim whose decisive tokens lose less together, in nats, is from memory.
        between: Within this distance of that loss, the claim is "unclear" unless it is contradicted.
        taken: The share of this loss that a claim loses without what it rests on.
        support: A claim is contradicted if other sources make another token more probable by this many nats,
        margin: and with all sources that token is at most this many nats less probable than the claim's,
        lead: or at most what it is more probable by, less this many nats,
        about: and the sources have this share of the claim's rarer words that its own sources have,
        misfit: and with it the rest of the claim loses at most this many nats.
        written: With a word that is less probable than this, or the first one of a sentence than the second
            number, the claim is "unclear": the model would not write it.
        preferred: If the model would rather write another word that the sources support, by this many nats,
            the claim is "unclear", too.
        further: The share of the loss from which tokens on other sources have a ground of their own.
        sufficient: The share that a source must bring alone to be one of which each is enough.
        most: The largest number of sources of which one is enough; with more, the verdict is "unclear".
        instead: How many tokens the model writes without what a claim rests on.
    """

    decisive: tuple[float, float] = (1.0, 0.5)
    memory: float = 1.75
    between: float = 0.75
    taken: float = 0.5
    support: float = 1.5
    margin: float = 2.5
    lead: float = 1.0
    about: float = 0.5
    misfit: float = 2.0
    written: tuple[float, float] = (1e-3, 3e-5)
    preferred: float = 2.0
    further: float = 0.25
    sufficient: float = 0.1
    most: int = 4
    instead: int = 8


class Ground(NamedTuple):
    """What some decisive tokens of a claim rest on.

    Attributes:
        text: The text of these tokens; "…" is for tokens between them.
        tokens: The numbers of the written tokens.
        sources: The sources that are enough alone, of a smallest set without which they lose what all sources
            bring: one source that they need, or several of which each is enough.
        loss: What they lose without all of these sources, in nats.
        instead: What the model writes from the first of them on, without the smallest set.
        shares: For each source, how much of what all sources bring remains with this source alone.
    """

    text: str
    tokens: tuple[int, ...]
    sources: tuple[TextSource, ...]
    loss: float
    instead: str
    shares: tuple[float, ...]


class Contradiction(NamedTuple):
    """Sources that make something else than the claim more probable.

    Attributes:
        sources: The sources.
        token: The number of the written token.
        instead: The token that they make more probable in its place.
        support: By how much, in nats.
        margin: How much less probable than the written token it is with all sources, in nats.
    """

    sources: tuple[TextSource, ...]
    token: int
    instead: str
    support: float
    margin: float


@dataclasses.dataclass(frozen=True)
class Claim:
    """A claim of an answer and what it rests on.

    Attributes:
        span: The claim.
        verdict: "supported", "redundant", "conflicting", "from memory" or "unclear".
        memory: What it loses without all sources; nan if the budget was used up before.
        reason: Why it is unclear, in a few words; else "".
        decisive: The numbers of the written tokens that depend on the sources.
        grounds: What the decisive tokens rest on. Several, if they rest on different sources.
        alone: What the claim loses without each single source that was measured, the largest loss first.
        against: What contradicts it.
        follows: The earlier claim of the answer that it repeats. The verdict, the grounds, and the losses
            without single sources are those of that claim. None if there is none.
    """

    span: WrittenSpan
    verdict: str
    memory: Removal
    reason: str = ""
    decisive: tuple[int, ...] = ()
    grounds: tuple[Ground, ...] = ()
    alone: tuple[Removal, ...] = ()
    against: tuple[Contradiction, ...] = ()
    follows: WrittenSpan | None = None

    @property
    def sources(self) -> list[TextSource]:
        """Return the sources that it rests on or that contradict it."""
        found = [source for each in self.grounds for source in each.sources]
        found += [source for each in self.against for source in each.sources]
        return list(dict.fromkeys(found))

    @property
    def necessary(self) -> list[Removal]:
        """Return the removals of single sources that the claim cannot do without."""
        needed = [each.sources[0] for each in self.grounds if len(each.sources) == 1]
        least = max((each.loss for each in self.alone if each.sources[0] in needed), default=0.0) / 2
        return [each for each in self.alone if each.sources[0] in needed or 0 < least <= each.loss]

    @property
    def sufficient(self) -> dict[TextSource, float]:
        """Return for each source how much of what all sources bring remains with it alone, 0 to 1 or more."""
        return {
            source: share
            for each in self.grounds
            for source, share in zip(each.sources, each.shares, strict=True)
        }

    @property
    def redundant(self) -> list[tuple[TextSource, ...]]:
        """Return the groups of sources of which each is enough."""
        return [each.sources for each in self.grounds if len(each.sources) > 1]

    def describe(self) -> str:
        """Return one sentence that gives the verdict's reason."""
        loss = f"{self.memory.loss:.1f} nats"
        if self.follows is not None:
            return f"it repeats what the answer says before: {self.follows.text.strip()!r}"
        if self.verdict == "from memory":
            whole, without = self.span.probability, self.memory.probability
            return f"its probability is {whole:.2g} with the sources, and {without:.2g} without any"
        if self.verdict == "unclear":
            return self.reason
        line = f"without any source it loses {loss}"
        main = max(self.grounds, key=lambda each: each.loss, default=None)
        if main is None or not main.instead.strip():
            return line
        return f"{line}; without what {main.text!r} rests on, the model would write {main.instead.strip()!r}"


def find_kept(trace: Trace, keep: Sequence[str] | None) -> list[TextSource]:
    """Return the sources that stay in every pass, because they are what a reader asks.

    Args:
        trace: The trace.
        keep: Texts that they contain. None: questions, instructions and messages of the system; in other
            text, sentences that end with a question mark or start with "Question:" or "Answer:", and a last
            sentence without an end, or if there is nothing of all this, the last sentence. If the sources are
            groups that the user gave, all the rest.

    Raises:
        ValueError: If a text is in none of the sources.
    """
    contents = [source for source in trace.sources() if source.is_content]
    if keep is not None:
        for text in keep:
            if not any(text in source.text for source in contents):
                raise ValueError(
                    f"keep: expected texts of the prompt, got {text!r}, which no source contains"
                )
        return [source for source in contents if any(text in source.text for text in keep)]
    if trace.unit in ("token", "word") and trace.reading.prompt_text is not None:
        asked_sentences = find_kept(trace.by("sentence"), None)
        places = {place for source in asked_sentences for place in source.positions}
        return [source for source in contents if places.intersection(source.positions)]
    if trace.unit == "given":
        return [source for source in contents if source.kind != "given"]
    if trace.unit not in ("sentence", "message", "document"):
        return [source for source in contents if source.kind in _KEPT_KINDS]
    kept = [source for source in contents if source.kind in _KEPT_KINDS]
    plain = [source for source in contents if source.kind not in (*_KEPT_KINDS, "document", "picture")]
    asked = [source for source in plain if _QUESTION.search(source.text)]
    last = contents[-1:] if contents and contents[-1] in plain else []
    if last and not (_FINISHED.search(last[0].text) and (asked or kept)):
        asked += [each for each in last if each not in asked]
    return [source for source in contents if source in kept or source in asked]


def _words_in(text: str) -> frozenset[str]:
    return frozenset(_WORD.findall(text.casefold()))


class Auditor:
    """Find what claims rest on, by passes that all claims share.

    Args:
        passes: The passes.
        n_prompt_sources: How many of the sources are the prompt's; the others are earlier written sentences.
        kept: The sources that stay in every pass, because they are what a reader asks.
        rules: The thresholds.
    """

    def __init__(
        self, passes: Passes, n_prompt_sources: int, kept: Sequence[TextSource], rules: Rules
    ) -> None:
        self.passes, self.n, self.rules = passes, n_prompt_sources, rules
        self.starts = {each.start for each in passes.trace.spans}
        self.asked = _words_in(" ".join(source.text for source in kept))
        self.words = [_words_in(source.text) for source in passes.sources[:n_prompt_sources]]
        self.claims: list[Claim] = []
        self.strength: list[float] = []

    def audit(self, span: WrittenSpan) -> Claim:
        """Return the verdict on one claim."""
        passes = self.passes
        scores = span.scores
        self.strength = [abs(float(scores[list(source.positions)].sum())) for source in passes.sources]
        order = sorted(range(self.n), key=lambda number: -self.strength[number])
        memory = Removal(tuple(passes.sources[each] for each in order), math.nan, math.nan)
        claim = Claim(span, "unclear", memory, "the budget of passes was too small")
        try:
            ranked, decisive, memory = self._find_memory(span, order)
            claim = dataclasses.replace(claim, decisive=decisive, memory=memory)
            claim = self._audit(claim, ranked)
        except OutOfPasses:
            pass
        self.claims.append(claim)
        return claim

    def _find_memory(
        self, span: WrittenSpan, order: Sequence[int]
    ) -> tuple[list[int], tuple[int, ...], Removal]:
        """Return the sources to remove, a claim's decisive tokens, and what it loses without all sources.

        A model reads a question after no text in another way, so one of many sources stays: the weakest. If
        the claim loses little, that source may contain it, and the next one stays instead.
        """
        rests = [[*order[:-1]], [*order[:-2], order[-1]]] if len(order) >= _MANY_SOURCES else [list(order)]
        found = []
        for ranked in rests:
            decisive, loss = self._find_decisive(span, ranked)
            found.append((loss, ranked, decisive))
            if loss >= self.rules.memory + self.rules.between:
                break
        # Another context alone can make as much of a difference as the threshold.
        is_other = len(found) > 1 and found[1][0] >= 2 * (self.rules.memory + self.rules.between)
        _, ranked, decisive = found[1] if is_other else found[0]
        return ranked, decisive, self.passes.removal(span, decisive, ranked)

    def _audit(self, claim: Claim, ranked: Sequence[int]) -> Claim:
        reason = self._find_improbable(claim.span, ranked) or self._find_preferred(claim.span, ranked)
        if reason:
            return dataclasses.replace(claim, reason=reason)
        followed = self._find_followed(claim, ranked)
        if followed is not None:
            return dataclasses.replace(
                followed,
                span=claim.span,
                memory=claim.memory,
                decisive=claim.decisive,
                follows=followed.span,
            )
        loss = claim.memory.loss
        if loss >= self.rules.memory + self.rules.between:
            return self._audit_supported(claim, ranked)
        if loss >= self.rules.memory - self.rules.between:
            # Where two sources compete, the claim depends less on each, so a contradiction counts.
            found = self._audit_supported(claim, ranked)
            reason = f"without any source it loses {loss:.1f} nats, between two verdicts"
            return found if found.against else dataclasses.replace(found, verdict="unclear", reason=reason)
        words = [place for word in self._answering(claim.span) for place in range(*word)]
        against = self._find_contradictions(words, claim, [], ranked)
        verdict = "conflicting" if against else "from memory"
        return dataclasses.replace(claim, verdict=verdict, reason="", against=tuple(against))

    def _find_preferred(self, span: WrittenSpan, ranked: Sequence[int]) -> str:
        """Return which word of a claim is less probable than another one that the sources bring, if any is.

        The first word of a sentence does not count, because it may begin with anything.
        """
        whole, none = self.passes.rows(), self.passes.rows(ranked)
        written = self.passes.written
        places = [(start, place) for start, stop in self._answering(span) for place in range(start, stop)]
        for start, place in places:
            other = int(whole[place].argmax())
            lead = float(whole[place, other] - whole[place, written[place]])
            support = float(whole[place, other] - none[place, other])
            is_possible = lead >= self.rules.preferred and support >= self.rules.support
            if is_possible and start not in self.starts:
                own = self._name(written[start : place + 1])
                others = self._name([*written[start:place], other])
                return f"with the sources, the model prefers {others!r} to {own!r} by {lead:.1f} nats"
        return ""

    def _find_improbable(self, span: WrittenSpan, ranked: Sequence[int]) -> str:
        """Return which word of a claim the model would not write, the least probable one, if there is one.

        The first word of a sentence may be less probable, because it may begin with anything.
        """
        least, least_first = self.rules.written
        found = ("", 1.0, 1.0)
        for start, stop in self._words(span):
            places = list(range(start, stop))
            whole = math.exp(float(self.passes.of_written()[places].sum()))
            if whole < (least_first if start in self.starts else least) and whole < found[1]:
                none = math.exp(float(self.passes.of_written(ranked)[places].sum()))
                found = (self.passes.trace.text_of(start, stop).strip(), whole, none)
        word, whole, none = found
        line = f"the model would hardly write {word!r} itself: probability {whole:.1g}, "
        return f"{line}without any source {none:.1g}" if word else ""

    def _words(self, span: WrittenSpan) -> list[tuple[int, int]]:
        """Return the words of a claim, each by its first token and the one after its last."""
        tokens = range(span.start, span.stop)
        starts = [each for each in tokens if each == span.start or self.passes.starts_word(each)]
        words = itertools.pairwise([*starts, span.stop])
        return [each for each in words if any(map(str.isalnum, self.passes.trace.text_of(*each)))]

    def _answering(self, span: WrittenSpan) -> list[tuple[int, int]]:
        """Return the words of a claim that the question does not have; all if it has all of them.

        The other words repeat the question, and whether an answer does so depends on the text around it, too.
        """
        words = self._words(span)
        text_of = self.passes.trace.text_of
        return [word for word in words if not _words_in(text_of(*word)) <= self.asked] or words

    def _find_decisive(
        self, span: WrittenSpan, removed: Sequence[int], base: Sequence[int] = (), skipped: int = 0
    ) -> tuple[tuple[int, ...], float]:
        """Return the tokens of a claim that depend on some sources, and what they lose without them, in nats.

        Args:
            span: The claim.
            removed: The sources.
            base: The sources that are removed in any case.
            skipped: How many of the claim's first words do not count.
        """
        lost = (self.passes.of_written(base) - self.passes.of_written([*base, *removed])).tolist()
        # A sentence ends with or without its sources, so punctuation, which is in no word, claims nothing.
        words = [range(*each) for each in self._answering(span)[skipped:]]
        absolute, share = self.rules.decisive
        least = max(absolute, share * max((lost[each] for word in words for each in word), default=0.0))
        decisive = tuple(each for word in words if max(lost[each] for each in word) >= least for each in word)
        return decisive, sum(lost[each] for each in decisive)

    def _find_followed(self, claim: Claim, ranked: Sequence[int]) -> Claim | None:
        """Return the earlier claim that a claim repeats; None if it depends more on the prompt.

        Without the prompt's sources, the earlier sentence is what it loses most without.
        """
        first = claim.span.positions[0]
        numbers = range(self.n, len(self.passes.sources))
        earlier = [each for each in numbers if self.passes.sources[each].positions[-1] < first]
        strongest = sorted(earlier, key=lambda each: -self.strength[each])[: self.rules.most]
        # Its first word depends on whether there is any text before it.
        losses = {each: self._loss_of_repeated(claim.span, each, ranked) for each in strongest}
        number = max(strongest, key=lambda each: losses[each], default=-1)
        if number < 0 or losses[number] < max(self.rules.memory, claim.memory.loss):
            return None
        place = self.passes.sources[number].positions[0] - self.passes.trace.n_prompt
        return next((each for each in self.claims if each.span.start <= place < each.span.stop), None)

    def _loss_of_repeated(self, span: WrittenSpan, number: int, ranked: Sequence[int]) -> float:
        """Return what the words of a claim that an earlier sentence has, too, lose without it, in nats.

        Other words lose as well, because the next sentence depends on the one before it.
        """
        decisive, loss = self._find_decisive(span, [number], base=ranked, skipped=1)
        text = self.passes.sources[number].text.casefold()
        words = [word for word in self._words(span) if word[0] in decisive]
        repeated = [
            place
            for word in words
            if self.passes.trace.text_of(*word).strip().casefold() in text
            for place in range(*word)
        ]
        lost = self.passes.of_written(ranked) - self.passes.of_written([*ranked, number])
        own = float(lost[repeated].sum()) if repeated else 0.0
        return own if own >= self.rules.taken * loss else 0.0

    def _audit_supported(self, claim: Claim, ranked: Sequence[int]) -> Claim:
        """Return the verdict on a claim that depends on the sources."""
        grounds: list[Ground] = []
        against: list[Contradiction] = []
        rest, measured = list(claim.decisive), []
        while rest and (not grounds or self.passes.loss(rest, ranked) >= self._least(claim)):
            enough = self.rules.taken * self.passes.loss(rest, ranked)
            lost = functools.partial(self.passes.loss, tuple(rest))
            found = find_blocking(lost, ranked, enough, self.rules.most)
            if found is None and grounds:
                break
            if found is None:
                reason = f"it depends on more than {self.rules.most} sources"
                return dataclasses.replace(claim, reason=reason)
            words = [word for word in self._words(claim.span) if word[0] in rest]
            taken = [each for word in words if self._is_taken(word, found, ranked) for each in range(*word)]
            taken = taken or rest
            grounds.append(self._describe_ground(taken, found, ranked))
            against += self._find_contradictions(taken, claim, found, ranked)
            measured += found
            rest = [each for each in rest if each not in taken]
        measured = list(dict.fromkeys([*measured, *ranked[:3]]))
        alone = [self.passes.removal(claim.span, claim.decisive, [number]) for number in measured]
        is_redundant = len(max(grounds, key=lambda each: each.loss).sources) > 1
        return dataclasses.replace(
            claim,
            verdict="conflicting" if against else "redundant" if is_redundant else "supported",
            reason="",
            grounds=tuple(grounds),
            alone=tuple(sorted(alone, key=lambda each: -each.loss)),
            against=tuple(against),
        )

    def _least(self, claim: Claim) -> float:
        """Return the loss from which further tokens of a claim have a ground of their own."""
        return max(self.rules.memory, self.rules.further * claim.memory.loss)

    def _is_taken(self, word: tuple[int, int], removed: Sequence[int], ranked: Sequence[int]) -> bool:
        """Return whether a word loses what the sources bring without some of them."""
        tokens = range(*word)
        return self.passes.loss(tokens, removed) >= self.rules.taken * self.passes.loss(tokens, ranked)

    def _describe_ground(
        self, tokens: Sequence[int], blocking: Sequence[int], ranked: Sequence[int]
    ) -> Ground:
        """Return what tokens rest on: of several sources, those that are enough alone."""
        passes, whole = self.passes, self.passes.loss(tokens, ranked)
        shares = {
            each: 1 - passes.loss(tokens, [other for other in ranked if other != each]) / whole
            for each in blocking
        }
        least = min(self.rules.sufficient, max(shares.values()))
        instead = passes.write_instead(tokens[0], blocking, self.rules.instead) if self.rules.instead else ""
        enough = [each for each in blocking if shares[each] >= least]
        sources = tuple(passes.sources[each] for each in enough)
        # Without these alone less may be lost, and what is recorded is their loss.
        loss = passes.loss(tokens, enough)
        return Ground(
            self._text_of(tokens),
            tuple(tokens),
            sources,
            loss,
            instead,
            tuple(shares[each] for each in enough),
        )

    def _contradicts(self, margin: float, support: float, blocking: Sequence[int]) -> bool:
        """Return whether a token may contradict a claim, by its support and its margin."""
        if not blocking and margin < 0:
            # What the model itself prefers to the claim contradicts nothing that it says.
            return False
        return support >= self.rules.support and margin <= max(self.rules.margin, support - self.rules.lead)

    def _support_lost(self, place: int, token: int, blocking: Sequence[int], removed: Sequence[int]) -> float:
        """Return what another token's log probability loses without some sources, beyond `blocking`."""
        rows = self.passes.rows
        return float(rows(blocking)[place, token] - rows([*blocking, *removed])[place, token])

    def _text_of(self, tokens: Sequence[int]) -> str:
        """Return the text of some tokens, with "…" for those between them."""
        runs = [[tokens[0], tokens[0] + 1]]
        for token in tokens[1:]:
            if token == runs[-1][1]:
                runs[-1][1] += 1
            else:
                runs.append([token, token + 1])
        return " … ".join(self.passes.trace.text_of(*run).strip() for run in runs)

    def _find_contradictions(
        self, tokens: Sequence[int], claim: Claim, blocking: Sequence[int], ranked: Sequence[int]
    ) -> list[Contradiction]:
        """Return the sources that make another token more probable in the place of one of a claim's tokens.

        Without what the claim rests on, the model writes what others say. The other token is one that is
        probable with all sources, too, is less so without the other sources, and fits into the claim.

        Args:
            tokens: The numbers of the written tokens.
            claim: The claim.
            blocking: What these tokens rest on; nothing if the claim is from memory.
            ranked: All sources.
        """
        passes, searches = self.passes, 0
        whole, without, none = passes.rows(), passes.rows(blocking), passes.rows(ranked)
        for place in tokens:
            written = passes.written[place]
            if blocking and int(without[place].argmax()) == written:
                # A number that starts with the same digit, or a name with the same syllable.
                continue
            likely = [each for each in without[place].topk(_LIKELY).indices.tolist() if each != written]
            margins = {each: float(whole[place, written] - whole[place, each]) for each in likely}
            support = {each: float(without[place, each] - none[place, each]) for each in likely}
            possible = [each for each in likely if self._contradicts(margins[each], support[each], blocking)]
            if possible and searches < _MOST_SEARCHES:
                searches += 1
                other = max(possible, key=lambda each: support[each])
                lost = functools.partial(self._support_lost, place, other, blocking)
                written_word = passes.other_word(place, blocking, other)
                end = next(stop for start, stop in self._words(claim.span) if start <= place < stop)
                found = self._find_supporting(
                    claim, (place, end), written_word, lost, blocking, ranked, support[other]
                )
                if found:
                    name = self._name(written_word)
                    return [Contradiction(found, place, name, support[other], margins[other])]
        words = [word for word in self._words(claim.span) if word[0] in tokens and word[1] > word[0] + 1]
        return self._find_other_word(claim, words[:1], blocking, ranked) if blocking else []

    def _find_other_word(
        self,
        claim: Claim,
        words: Sequence[tuple[int, int]],
        blocking: Sequence[int],
        ranked: Sequence[int],
    ) -> list[Contradiction]:
        """Return the sources that make another word of several tokens more probable, such as a number."""
        passes = self.passes
        for word in words:
            place, own = word[0], passes.written[slice(*word)]
            other = passes.other_word(place, blocking)
            if not other or other[: len(own)] == own[: len(other)]:
                continue
            support = passes.of_other(place, other, blocking) - passes.of_other(place, other, ranked)
            margin = float(passes.of_written()[range(*word)].sum()) - passes.of_other(place, other)
            if self._contradicts(margin, support, blocking):
                lost = functools.partial(self._other_lost, place, tuple(other), blocking)
                found = self._find_supporting(claim, word, other, lost, blocking, ranked, support)
                if found:
                    return [Contradiction(found, place, self._name(other), support, margin)]
        return []

    def _find_supporting(
        self,
        claim: Claim,
        word: tuple[int, int],
        other: Sequence[int],
        lost: Callable[[Sequence[int]], float],
        blocking: Sequence[int],
        ranked: Sequence[int],
        support: float,
    ) -> tuple[TextSource, ...]:
        """Return the sources that other tokens in the place of a word rest on; none if they do not fit."""
        rest = [each for each in ranked if each not in blocking]
        found = find_blocking(lost, rest, self.rules.taken * support, _MOST_AGAINST) or []
        found = [each for each in found if self._is_about(claim, each, blocking or ranked)]
        if not found or self.passes.misfit(claim.span, word, other, claim.decisive) > self.rules.misfit:
            return ()
        return tuple(self.passes.sources[each] for each in found)

    def _is_about(self, claim: Claim, number: int, others: Sequence[int]) -> bool:
        """Return whether a source is about the same as a claim: it has its rarer words, as other sources do.

        A sentence of the same form about something else makes other words as probable as a contradiction. The
        words are those of the claim that do not depend on the sources, and those of the question. A word
        counts by the logarithm of (number of sources / number of sources with it), as in retrieval.
        """
        text_of = self.passes.trace.text_of
        words = [each for each in self._words(claim.span) if each[0] not in claim.decisive]
        shared = self.asked.union(*(_words_in(text_of(*each)) for each in words))
        counts = collections.Counter(word for words in self.words for word in words & shared)

        def weigh(each: int) -> float:
            return sum(math.log(self.n / counts[word]) for word in self.words[each] & shared)

        return weigh(number) >= self.rules.about * max(map(weigh, others))

    def _other_lost(
        self, place: int, other: Sequence[int], blocking: Sequence[int], removed: Sequence[int]
    ) -> float:
        """Return what another word's log probability loses without some sources, beyond `blocking`."""
        of_other = self.passes.of_other
        return of_other(place, other, blocking) - of_other(place, other, [*blocking, *removed])

    def _name(self, tokens: Sequence[int]) -> str:
        tokenizer: Any = getattr(self.passes.model, "tokenizer", None)
        return name_token(tokenizer, tokens[0]) if len(tokens) == 1 else str(tokenizer.decode(list(tokens)))
