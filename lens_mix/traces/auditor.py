"""Find what a claim of an answer rests on, by passes without some of its sources."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lens_mix.traces.claims import Claim, Contradiction, Ground, Rules
from lens_mix.traces.contradictions import Contradictions, words_in
from lens_mix.traces.removals import OutOfPasses, Passes, Removal, find_blocking
from lens_mix.traces.sources import TextSource
from lens_mix.traces.spans import WrittenSpan

if TYPE_CHECKING:
    from lens_mix.traces.trace import Trace

# What a reader asks or orders is not evidence for the answer, so it stays in every pass.
_KEPT_KINDS = ("question", "instruction", "system")
_QUESTION = re.compile(r"\?[\"'”’)\]]*\s*$|^\s*(Question|Answer|Q|A)\s*:", re.IGNORECASE)
_FINISHED = re.compile(r"[.!?…。！？][\"'”’»)\]]*\s*$")
# With fewer sources, each of them may be one that a claim rests on.
_MANY_SOURCES = 5


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
        self.asked = words_in(" ".join(source.text for source in kept))
        self.contradictions = Contradictions(passes, n_prompt_sources, self.asked, rules)
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
        against = self.contradictions.find(words, claim, [], ranked)
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
                own = self.passes.name(written[start : place + 1])
                others = self.passes.name([*written[start:place], other])
                return f"with the sources, the model prefers {others!r} to {own!r} by {lead:.1f} nats"
        return ""

    def _find_improbable(self, span: WrittenSpan, ranked: Sequence[int]) -> str:
        """Return which word of a claim the model would not write, the least probable one, if there is one.

        The first word of a sentence may be less probable, because it may begin with anything.
        """
        least, least_first = self.rules.written
        found = ("", 1.0, 1.0)
        for start, stop in self.passes.words_of(span):
            places = list(range(start, stop))
            whole = math.exp(float(self.passes.of_written()[places].sum()))
            if whole < (least_first if start in self.starts else least) and whole < found[1]:
                none = math.exp(float(self.passes.of_written(ranked)[places].sum()))
                found = (self.passes.trace.text_of(start, stop).strip(), whole, none)
        word, whole, none = found
        line = f"the model would hardly write {word!r} itself: probability {whole:.1g}, "
        return f"{line}without any source {none:.1g}" if word else ""

    def _answering(self, span: WrittenSpan) -> list[tuple[int, int]]:
        """Return the words of a claim that the question does not have; all if it has all of them.

        The other words repeat the question, and whether an answer does so depends on the text around it, too.
        """
        words = self.passes.words_of(span)
        text_of = self.passes.trace.text_of
        return [word for word in words if not words_in(text_of(*word)) <= self.asked] or words

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
        words = [word for word in self.passes.words_of(span) if word[0] in decisive]
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
            words = [word for word in self.passes.words_of(claim.span) if word[0] in rest]
            taken = [each for word in words if self._is_taken(word, found, ranked) for each in range(*word)]
            taken = taken or rest
            grounds.append(self._describe_ground(taken, found, ranked))
            against += self.contradictions.find(taken, claim, found, ranked)
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

    def _text_of(self, tokens: Sequence[int]) -> str:
        """Return the text of some tokens, with "…" for those between them."""
        runs = [[tokens[0], tokens[0] + 1]]
        for token in tokens[1:]:
            if token == runs[-1][1]:
                runs[-1][1] += 1
            else:
                runs.append([token, token + 1])
        return " … ".join(self.passes.trace.text_of(*run).strip() for run in runs)
