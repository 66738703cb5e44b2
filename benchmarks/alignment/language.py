"""Make two artificial languages with a known alignment: words of several tokens, in another order.

A clause of the source is `determiner adjectives noun verb [adverb] determiner adjectives noun`. A sentence is
one clause, or two with a comma between. Its translation has the adverb (two words) first and the verb last.
Adjectives follow their noun in reverse order, and the plain determiner is dropped. Every target word has
exactly one source word, and some source words have two or none. Positions do not determine the links.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

PAD, END, COMMA = 0, 1, 2
SIZES = {"determiner": 3, "adjective": 10, "noun": 16, "verb": 8, "adverb": 4}
# This first determiner has no translation.
PLAIN = ("determiner", 0)
# The numbers of tokens that start a word, and that continue one, in each language.
STARTS, CONTINUATIONS = 24, 12
FIRST_PIECE = 3
VOCABULARY = FIRST_PIECE + STARTS + CONTINUATIONS

Word = tuple[str, int]


@dataclasses.dataclass(frozen=True)
class Pair:
    """A sentence and its translation, as token numbers with the end of the sentence.

    Attributes:
        source: The token numbers of the sentence.
        target: The token numbers of the translation.
        source_words: The positions of each word's tokens in `source`, from 0.
        target_words: The positions of each word's tokens in `target`, from 0.
        links: (source word, target word).
        others: For each source word, the tokens of another word of its kind, whose sentence has a translation
            in the same order. It is empty for the comma and the determiner that is dropped.
    """

    source: tuple[int, ...]
    target: tuple[int, ...]
    source_words: tuple[tuple[int, ...], ...]
    target_words: tuple[tuple[int, ...], ...]
    links: frozenset[tuple[int, int]]
    others: tuple[tuple[int, ...], ...]


def pairs(seed: int) -> Iterator[Pair]:
    """Yield pairs without end. The same seed gives the same pairs."""
    generator = random.Random(seed)
    source, target = _draw_lexicon(1), _draw_lexicon(2)
    while True:
        words, order = _draw_sentence(generator)
        yield _write(words, order, source, target)


def _draw_sentence(generator: random.Random) -> tuple[list[Word], list[tuple[int, int]]]:
    """Draw source words, and for each target word its source word and which of its translations it is."""
    words: list[Word] = []
    order: list[tuple[int, int]] = []
    for number in range(generator.choice((1, 1, 1, 2))):
        if number:
            order.append((len(words), 0))
            words.append(("comma", 0))
        subject, subject_order = _draw_phrase(generator, len(words))
        words += subject
        verb = len(words)
        words.append(_draw_word(generator, "verb"))
        adverb = [len(words)] if generator.random() < 0.5 else []
        words += [_draw_word(generator, "adverb") for _ in adverb]
        objects, object_order = _draw_phrase(generator, len(words))
        words += objects
        order += [(place, half) for place in adverb for half in (0, 1)]
        order += [*subject_order, *object_order, (verb, 0)]
    return words, order


def _draw_phrase(generator: random.Random, start: int) -> tuple[list[Word], list[tuple[int, int]]]:
    adjectives = generator.choice((0, 1, 2))
    words = [_draw_word(generator, "determiner")]
    words += [_draw_word(generator, "adjective") for _ in range(adjectives)]
    words.append(_draw_word(generator, "noun"))
    noun = start + len(words) - 1
    order = [] if words[0] == PLAIN else [(start, 0)]
    return words, [*order, (noun, 0), *((place, 0) for place in range(noun - 1, start, -1))]


def _draw_word(generator: random.Random, kind: str) -> Word:
    return kind, generator.randrange(SIZES[kind])


def _draw_lexicon(seed: int) -> dict[tuple[Word, int], tuple[int, ...]]:
    """Draw the tokens of each word, one to three. An adverb has a second word."""
    generator = random.Random(seed)
    lexicon: dict[tuple[Word, int], tuple[int, ...]] = {(("comma", 0), 0): (COMMA,)}
    for kind, count in SIZES.items():
        for number in range(count):
            for half in (0, 1) if kind == "adverb" else (0,):
                spelt = _spell(generator)
                while spelt in lexicon.values():
                    spelt = _spell(generator)
                lexicon[(kind, number), half] = spelt
    return lexicon


def _spell(generator: random.Random) -> tuple[int, ...]:
    start = FIRST_PIECE + generator.randrange(STARTS)
    rest = (
        FIRST_PIECE + STARTS + generator.randrange(CONTINUATIONS)
        for _ in range(generator.choice((0, 0, 1, 1, 2)))
    )
    return start, *rest


def _write(words: list[Word], order: list[tuple[int, int]], source: dict, target: dict) -> Pair:
    source_ids, source_words = _join([source[word, 0] for word in words])
    target_ids, target_words = _join([target[words[place], half] for place, half in order])
    links = frozenset((place, number) for number, (place, _) in enumerate(order))
    others = tuple(source[other, 0] if (other := _replace_word(word)) else () for word in words)
    return Pair(source_ids, target_ids, source_words, target_words, links, others)


def _replace_word(word: Word) -> Word | None:
    kind, number = word
    if kind == "comma" or word == PLAIN:
        return None
    following = kind, (number + 1) % SIZES[kind]
    return (kind, 1) if following == PLAIN else following


def _join(pieces: list[tuple[int, ...]]) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    ids: list[int] = []
    groups = []
    for word in pieces:
        groups.append(tuple(range(len(ids), len(ids) + len(word))))
        ids += word
    return (*ids, END), tuple(groups)
