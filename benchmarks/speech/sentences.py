"""Make the spoken sentences of the benchmark: half to choose on, half to report."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

VOICES = ("en-us", "en", "en-us+f2", "en+m3", "en-gb-scotland", "en-us+f4", "en-gb-x-rp", "en-us+m7")
SPEEDS = (120, 150, 180)
# The ratio of the speech to the noise in decibels.
NOISES = (None, 20.0, 10.0)

# The halves share no noun, verb, adjective or place.
_WORDS = {
    "choose": {
        "adjective": "old young quiet angry famous hungry tired clever friendly careful".split(),
        "person": "farmer teacher doctor singer painter driver captain lawyer neighbor student".split(),
        "verb": "sold bought painted carried described followed counted remembered borrowed washed".split(),
        "number": "two three four five six seven eight nine ten twelve".split(),
        "color": "brown yellow silver heavy broken golden little wooden purple ancient".split(),
        "thing": "horses tables bottles windows letters carpets engines baskets mirrors ladders".split(),
        "place": "London Boston Canada Madrid Texas Denmark Chicago Norway Berlin Florida".split(),
    },
    "report": {
        "adjective": "tall lonely nervous polite wealthy patient stubborn cheerful lazy humble".split(),
        "person": "baker soldier nurse pilot lady manager dancer writer shepherd tailor".split(),
        "verb": "found repaired collected ordered dropped covered delivered examined stole polished".split(),
        "number": "thirteen fourteen fifteen sixteen twenty thirty forty fifty sixty ninety".split(),
        "color": "green orange narrow dusty plastic frozen round empty expensive modern".split(),
        "thing": (
            "pencils lanterns buckets candles sandals blankets pumpkins saddles hammers trumpets".split()
        ),
        "place": "Paris Dublin Mexico Vienna Kansas Sweden Portugal Dallas Athens Georgia".split(),
    },
}
_FORMS = (
    "The {adjective} {person} {verb} {number} {color} {thing} from {place}.",
    "In {place} a {person} {verb} the {color} {thing} of an {adjective} {other}.",
    "My {adjective} {person} from {place} never {verb} {number} {thing} before.",
    "Yesterday {number} {color} {thing} were {verb} near the harbor of {place}.",
    "Every {person} in {place} {verb} some {color} {thing} for the {adjective} {other}.",
)


class Sentence(NamedTuple):
    """A sentence, and how it is said."""

    text: str
    voice: str
    speed: int
    decibels: float | None
    seed: int


def make(half: str) -> Iterator[Sentence]:
    """Yield the sentences of a half, "choose" or "report", without an end."""
    words, drawn = _WORDS[half], random.Random(half)
    number = 0
    while True:
        chosen = {name: drawn.choice(listed) for name, listed in words.items()}
        others = [person for person in words["person"] if person != chosen["person"]]
        text = _FORMS[number % len(_FORMS)].format(**chosen, other=drawn.choice(others))
        # English has "an" before vowels only.
        starts_with_vowel = chosen["adjective"][0] in "aeiou"
        text = text if starts_with_vowel else text.replace(" an ", " a ")
        yield Sentence(
            text,
            VOICES[number % len(VOICES)],
            SPEEDS[number // len(VOICES) % len(SPEEDS)],
            NOISES[(number + number // len(VOICES)) % len(NOISES)],
            number,
        )
        number += 1
