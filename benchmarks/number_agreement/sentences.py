"""Make sentences up to their verb, whose number is predicted, with other nouns between (attractors).

A grammar replaces the sentences of Linzen et al. (2016): a subject and one to four nouns after it, in
prepositional phrases and relative clauses. At least one of these nouns has the other number. Something may
precede the subject (a fronted phrase, or a clause that reports), so that its position is not always the same.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Iterator, Sequence

PAD, UNK, CLS = "[PAD]", "[UNK]", "[CLS]"
# The two classes of a classifier. They are in no sentence.
CLASSES = ("[NO]", "[YES]")
SPECIAL = (PAD, UNK, CLS, *CLASSES)
# Each noun and each verb has two words, a singular and a plural form.
NOUNS = (
    "author banker captain dancer doctor farmer guard lawyer manager pilot senator student teacher writer "
    "actor artist baker chef driver editor judge king lord miner nurse officer painter poet queen ranger "
    "sailor singer soldier tailor tenant tutor uncle visitor waiter worker boy girl friend neighbor cousin "
    "key door table window car garden letter picture river tower bridge island village school hotel"
).split()
VERBS = "like see help know hear follow visit admire call love hate trust warn blame thank praise".split()
REPORTS = "say think claim hope believe assume".split()
PREPOSITIONS = "near behind beside above below with without against from beyond".split()
ADJECTIVES = (
    "old young tall small red green quiet loud rich poor clever kind strange famous happy angry"
).split()
ADVERBS = "often rarely usually never always sometimes".split()
# Most determiners do not show the number, and these few do.
NEUTRAL, SINGULAR, PLURAL = ("the", "my", "her", "our"), ("this", "every"), ("these", "many")
OTHERS = ("that", ",", "and")


@dataclasses.dataclass(frozen=True)
class Sentence:
    """A sentence up to its verb.

    Attributes:
        words: The words without [CLS].
        plural: Whether the verb is plural.
        nouns: The indices of all nouns among the words.
        noun_plural: Whether each noun is plural.
        subject: The index of the verb's subject.
        construction: What follows the subject: "phrase", "clause" or "both".
        fronted: Whether anything precedes the noun phrase of the subject.
    """

    words: tuple[str, ...]
    plural: bool
    nouns: tuple[int, ...]
    noun_plural: tuple[bool, ...]
    subject: int
    construction: str
    fronted: bool

    @property
    def attractors(self) -> int:
        """Return how many nouns after the subject have the other number."""
        pairs = zip(self.nouns, self.noun_plural, strict=True)
        return sum(plural != self.plural for place, plural in pairs if place > self.subject)

    @property
    def last_noun_plural(self) -> bool:
        """Return whether the noun next to the verb is plural."""
        return self.noun_plural[-1]


class _Writer:
    """The words so far, and which of them are nouns."""

    def __init__(self, draw: random.Random) -> None:
        self.draw, self.words, self.nouns, self.numbers = draw, [], [], []
        self.kinds: set[str] = set()

    def noun_phrase(self, plural: bool) -> int:
        """Write determiner, adjectives and noun, and return the noun's index."""
        draw = self.draw
        agreeing = PLURAL if plural else SINGULAR
        self.words.append(draw.choice(agreeing if draw.random() < 0.1 else NEUTRAL))
        if draw.random() < 0.3:
            self.words.append(draw.choice(ADJECTIVES))
        self.words.append(draw.choice(NOUNS) + "s" * plural)
        self.nouns.append(len(self.words) - 1)
        self.numbers.append(plural)
        return self.nouns[-1]

    def verb(self, verbs: Sequence[str], plural: bool) -> None:
        """Write an optional adverb and a verb."""
        if self.draw.random() < 0.2:
            self.words.append(self.draw.choice(ADVERBS))
        self.words.append(self.draw.choice(verbs) + "s" * (not plural))

    def modifier(self, owner: bool, clause: bool, plural: bool) -> None:
        """Write a phrase or a relative clause with one noun.

        Args:
            owner: Whether the noun that it belongs to is plural.
            clause: Whether it is a relative clause.
            plural: Whether its own noun is plural.
        """
        self.kinds.add("clause" if clause else "phrase")
        if not clause:
            self.words.append(self.draw.choice(PREPOSITIONS))
            self.noun_phrase(plural)
        elif self.draw.random() < 0.5:
            self.words.append("that")
            self.verb(VERBS, owner)
            self.noun_phrase(plural)
        else:
            self.words.append("that")
            self.noun_phrase(plural)
            self.verb(VERBS, plural)


def sentence(draw: random.Random, least_attractors: int = 1) -> Sentence:
    """Make one sentence with at least `least_attractors` attractors (0 or 1)."""
    writer = _Writer(draw)
    front = draw.random()
    if front < 0.2:
        writer.words.append(draw.choice(PREPOSITIONS))
        writer.noun_phrase(draw.random() < 0.5)
        writer.words.append(",")
    elif front < 0.4:
        reporting = draw.random() < 0.5
        writer.noun_phrase(reporting)
        writer.verb(REPORTS, reporting)
        writer.words.append("that")
    plural = draw.random() < 0.5
    between = draw.choices((1, 2, 3, 4), (4, 3, 2, 1))[0]
    # Each number is drawn with equal chances. All are drawn again until there is an attractor.
    while True:
        numbers = [draw.random() < 0.5 for _ in range(between)]
        if sum(number != plural for number in numbers) >= least_attractors:
            break
    subject = writer.noun_phrase(plural)
    owner = plural
    for place, number in enumerate(numbers):
        # A clause belongs to the noun before it. Two clauses in a row would be hard to read.
        clause = draw.random() < 0.5 and not (place and writer.words[-1] not in _list_noun_forms())
        writer.modifier(owner, clause, number)
        owner = number
    construction = "both" if len(writer.kinds) == 2 else next(iter(writer.kinds))
    return Sentence(
        tuple(writer.words),
        plural,
        tuple(writer.nouns),
        tuple(writer.numbers),
        subject,
        construction,
        front < 0.4,
    )


def sentences(seed: int, least_attractors: int = 1) -> Iterator[Sentence]:
    """Yield sentences without end. The same seed gives the same sentences."""
    draw = random.Random(seed)
    while True:
        yield sentence(draw, least_attractors)


@functools.cache
def _list_noun_forms() -> frozenset[str]:
    return frozenset((*NOUNS, *(noun + "s" for noun in NOUNS)))


@functools.cache
def vocabulary() -> dict[str, int]:
    """Return the token number of each word, special tokens first."""
    forms = [stem + end for stem in (*NOUNS, *VERBS, *REPORTS) for end in ("", "s")]
    words = (*SPECIAL, *NEUTRAL, *SINGULAR, *PLURAL, *OTHERS, *PREPOSITIONS, *ADJECTIVES, *ADVERBS, *forms)
    return {word: number for number, word in enumerate(dict.fromkeys(words))}


def token_ids(sentence: Sentence) -> list[int]:
    """Return [CLS] and the words as token numbers."""
    numbers = vocabulary()
    return [numbers[word] for word in (CLS, *sentence.words)]
