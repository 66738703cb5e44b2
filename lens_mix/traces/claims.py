"""Describe a claim of an answer and what it rests on."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from lens_mix.traces.removals import Removal
from lens_mix.traces.sources import TextSource
from lens_mix.traces.spans import WrittenSpan

VERDICTS = ("supported", "redundant", "conflicting", "from memory", "unclear")


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
        instead: The token that they make more probable in its place, or the word that begins with it.
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
