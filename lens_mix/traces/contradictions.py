"""Find the sources of an answer that contradict one of its claims."""

from __future__ import annotations

import collections
import functools
import math
import re
from collections.abc import Callable, Sequence

from lens_mix.traces.claims import Claim, Contradiction, Rules
from lens_mix.traces.removals import Passes, find_blocking
from lens_mix.traces.sources import TextSource

_WORD = re.compile(r"\w+")
# How many of the tokens that the model may write instead are compared, and how many sources contradict.
_LIKELY, _MOST_AGAINST = 8, 2
# For how many tokens of a claim the sources of another one are searched.
_MOST_SEARCHES = 2


def words_in(text: str) -> frozenset[str]:
    """Return the words of a text, in lower case."""
    return frozenset(_WORD.findall(text.casefold()))


class Contradictions:
    """Find the sources that make something else than a claim more probable.

    Args:
        passes: The passes.
        n_prompt_sources: How many of the sources are the prompt's.
        asked: The words of what a reader asks.
        rules: The thresholds.
    """

    def __init__(self, passes: Passes, n_prompt_sources: int, asked: frozenset[str], rules: Rules) -> None:
        self.passes, self.n, self.asked, self.rules = passes, n_prompt_sources, asked, rules
        self.words = [words_in(source.text) for source in passes.sources[:n_prompt_sources]]

    def find(
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
                end = next(stop for start, stop in passes.words_of(claim.span) if start <= place < stop)
                found = self._find_supporting(
                    claim, (place, end), written_word, lost, blocking, ranked, support[other]
                )
                if found:
                    name = passes.name(written_word)
                    return [Contradiction(found, place, name, support[other], margins[other])]
        words = [word for word in passes.words_of(claim.span) if word[0] in tokens and word[1] > word[0] + 1]
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
                    return [Contradiction(found, place, passes.name(other), support, margin)]
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
        words = [each for each in self.passes.words_of(claim.span) if each[0] not in claim.decisive]
        shared = self.asked.union(*(words_in(text_of(*each)) for each in words))
        counts = collections.Counter(word for words in self.words for word in words & shared)

        def weigh(each: int) -> float:
            return sum(math.log(self.n / counts[word]) for word in self.words[each] & shared)

        return weigh(number) >= self.rules.about * max(map(weigh, others))

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

    def _other_lost(
        self, place: int, other: Sequence[int], blocking: Sequence[int], removed: Sequence[int]
    ) -> float:
        """Return what another word's log probability loses without some sources, beyond `blocking`."""
        of_other = self.passes.of_other
        return of_other(place, other, blocking) - of_other(place, other, [*blocking, *removed])
