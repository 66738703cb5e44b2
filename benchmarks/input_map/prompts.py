"""Make the prompts for the search of an input map: two fixed halves, with no template in both.

    python -m benchmarks.input_map.prompts          prints the number of prompts of each kind

Each kind has families of templates for the half on which the search is made, and others for the half that is
held out. The prediction of the model itself is explained, so it need not be right.
"""

# ruff: noqa: E501 (a template is easier to read on one line)

from __future__ import annotations

import collections
import dataclasses
import random

SEED = 19
HALVES = ("choose", "held_out")

NAMES = "Anna Peter Maria David Laura Simon Helen Robert Clara Martin Julia Thomas Emma Oliver Sarah Daniel".split()
CITIES = "Paris London Rome Berlin Madrid Vienna Tokyo Lisbon Dublin Cairo Athens Oslo".split()
COUNTRIES = "France England Italy Germany Spain Austria Japan Portugal Ireland Egypt Greece Norway".split()
LANGUAGES = (
    "French English Italian German Spanish German Japanese Portuguese English Arabic Greek Norwegian".split()
)
COLOURS = "red blue green yellow black white brown purple orange grey".split()
ANIMALS = "dog cat horse rabbit parrot turtle goat fish pony hamster".split()
OBJECTS = "key letter coin ring watch map book lamp umbrella wallet".split()
PLACES = "kitchen garden library station office market museum harbour cellar attic".split()
JOBS = "teacher doctor farmer painter baker lawyer pilot nurse writer driver".split()
FOODS = "bread soup cheese rice pasta fish cake salad apples honey".split()
PLURALS = "keys letters students dogs drivers painters flowers books guards planes".split()
SINGULARS = "cabinet teacher garden house car museum table window river bridge".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()

FILLERS = {
    "choose": (
        "The meeting was moved to another room because of the noise.",
        "A new bridge is being built over the river this year.",
        "Most of the shops close early on Sunday.",
        "The train to the coast takes about three hours.",
        "Somebody left an umbrella under the table.",
        "The museum has opened two more rooms.",
        "It rained for most of the week.",
        "The students are reading a long novel about the sea.",
        "There is a small garden behind the school.",
        "The old clock in the hall has stopped again.",
        "Two of the windows have to be repaired before winter.",
        "The bakery on the corner sells the best rolls in town.",
    ),
    "held_out": (
        "Last night the power went out for nearly an hour.",
        "The library has bought several hundred new books.",
        "Nobody knows why the fountain was taken away.",
        "The bus was late, so they walked along the canal.",
        "A tall fence now runs around the playground.",
        "The concert was cancelled and the tickets were refunded.",
        "Their neighbours have painted the front door.",
        "The soup was too salty, but the dessert was fine.",
        "Every morning a man sells flowers in front of the bank.",
        "The road to the village is closed until spring.",
        "Her cousin is learning to play the violin.",
        "The film was much longer than anyone had expected.",
    ),
}


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One prompt.

    Attributes:
        half: "choose" or "held_out".
        kind: The kind of prompt.
        family: The template family.
        text: The text.
    """

    half: str
    kind: str
    family: str
    text: str


def _draw_fillers(draw: random.Random, half: str, count: int) -> list[str]:
    return draw.sample(FILLERS[half], count)


def _plant(draw: random.Random, half: str, fact: str, question: str, others: int) -> str:
    sentences = _draw_fillers(draw, half, others)
    place = draw.randrange(len(sentences) + 1)
    return " ".join([*sentences[:place], fact, *sentences[place:], question])


def _draw_words(draw: random.Random) -> dict[str, str]:
    name, other, third = draw.sample(NAMES, 3)
    place = draw.randrange(len(CITIES))
    colour, second_colour = draw.sample(COLOURS, 2)
    first, second, last = draw.sample(FOODS, 3)
    return {
        "name": name, "other": other, "third": third, "city": CITIES[place], "country": COUNTRIES[place],
        "language": LANGUAGES[place], "colour": colour, "colour2": second_colour, "animal": draw.choice(ANIMALS),
        "object": draw.choice(OBJECTS), "place": draw.choice(PLACES), "job": draw.choice(JOBS),
        "food": first, "food2": second, "food3": last, "plural": draw.choice(PLURALS),
        "singular": draw.choice(SINGULARS), "day": draw.choice(DAYS), "number": str(draw.randrange(2, 9)),
        "number2": str(draw.randrange(2, 9)),
    }  # fmt: skip


# SHORT[kind][half] has the template families.
SHORT: dict[str, dict[str, tuple[str, ...]]] = {
    "fact": {
        "choose": (
            "The capital of {country} is the city of",
            "People who live in {country} mostly speak",
            "If you travel from {city} you are in the country of",
            "The largest city of {country}, which many tourists visit in summer, is",
        ),
        "held_out": (
            "{city} is a city in",
            "The language that is spoken by most people in {city} is",
            "My uncle flew to {city}, the capital of",
            "The food of {country} is famous, and so is its capital,",
        ),
    },
    "agreement": {
        "choose": (
            "The {plural} near the {singular}",
            "The {singular} that the {plural} belong to",
            "The {plural} that {name} saw behind the {singular} yesterday",
            "Because of the {plural}, the {singular} in the {place}",
        ),
        "held_out": (
            "The {plural} on top of the old {singular} always",
            "The {singular} next to the {plural}",
            "In the {place}, the {plural} which {name} likes",
            "The {job} with the {plural} from {city}",
        ),
    },
    "pronoun": {
        "choose": (
            "{name} gave the {object} to {other} because",
            "When {name} and {other} went to the {place}, {name} handed the {object} to",
            "{name} and {other} were late, so {third} left without",
        ),
        "held_out": (
            "{name} told {other} about the {object}, and then {other} thanked",
            "After {name} had helped {other} in the {place}, {other} paid",
            "The {job} asked {name} where the {object} was, but {name} did not answer the",
        ),
    },
    "list": {
        "choose": (
            "{food}, {food2}, {food3}, {food}, {food2},",
            "Monday, Tuesday, Wednesday,",
            "one {colour} {object}, two {colour} {object}s, three {colour}",
            "{city} - {country}, Paris - France, Rome - Italy, Tokyo -",
        ),
        "held_out": (
            "{colour} {colour2} {colour} {colour2} {colour}",
            "January, February, March,",
            "{name}: {number} points, {other}: {number2} points, {third}:",
            "hot - cold, big - small, old - young, fast -",
        ),
    },
    "code": {
        "choose": (
            "def add({object}, {animal}):\n    return {object} +",
            "for {object} in {object}s:\n    print(",
            "{animal} = {number}\n{object} = {number2}\nresult = {animal} *",
        ),
        "held_out": (
            "if {object} > {number}:\n    {animal} = {object} - {number}\nelse:\n    {animal} =",
            "class {name}:\n    def __init__(self, {object}):\n        self.{object} =",
            "{object}s = [1, 2, 3]\ntotal = sum(",
        ),
    },
    "near cue": {
        "choose": (
            "{name} is a {job}. Every day {name} works as a",
            "The {colour} {object} lay on the table. {name} picked up the {colour}",
            "{name} bought a {animal}. Now {name} has a",
        ),
        "held_out": (
            "There was a {animal} in the {place}. Nobody had seen the {animal} in the",
            "{name} likes {food}, but {other} hates",
            "On {day} {name} went to the {place}. What did {name} do on",
        ),
    },
}

FACTS: dict[str, tuple[tuple[str, str], ...]] = {
    "choose": (
        ("{name} lives in the city of {city}.", "{name} lives in the city of"),
        ("{name}'s favourite colour is {colour}.", "{name}'s favourite colour is"),
        ("The animal that {name} keeps is a {animal}.", "The animal that {name} keeps is a"),
    ),
    "held_out": (
        ("{name} hid the {object} in the {place}.", "Later {name} remembered that the {object} was in the"),
        ("{name} works as a {job} in {city}.", "Nobody was surprised that {name} had become a"),
        ("The box of {name} is {colour} and that of {other} is {colour2}.", "So the box of {other} is"),
    ),
}

STORIES: dict[str, tuple[str, ...]] = {
    "choose": (
        "My grandmother was born in {country}. She left the country with her two sisters after the war, but all "
        "her life she cooked the food of her home and sang to us in",
        "Once there was a little {animal} named {name}. {name} lived in the {place} and loved {food} more than "
        "anything else. One day {other} came to visit and brought a basket full of",
        "{name} is a {job}. {name} gets up at six, has {food} for breakfast and takes the bus. Work begins at "
        "eight and ends at five. After so many years {name} still likes to be a",
        "It was a cold {day} in {city}. {name} had lost the {object} and looked for it everywhere. At last {other} "
        "found it in the {place}. {name} was so glad to have back the",
        "The {plural} were old, and the {singular} was older still. {name} had inherited them from an aunt who "
        "had been a {job} in {city}. When the aunt died, all that was left were the",
    ),
    "held_out": (
        "{name} grew up in {city} and moved abroad at the age of twenty. Friends say that even now, after half a "
        "life in another country, {name} counts and dreams in",
        "The {job} opened the door of the {place} and saw a {animal} on the chair. It looked at the {food} on "
        "the table, then at the {job}, and jumped. From that day on nobody in the house was safe from the",
        "Dear {name}, thank you for the {colour} {object}. I have put it in the {place}, next to the one that "
        "{other} gave me. Everyone who visits asks me about it, and I tell them that it came from",
        "On {day} the {plural} arrived at the {place}. {name} counted them and wrote the number down. {other} "
        "counted them again and came to another number. They had to ask the {job} to count the",
        "There are two roads from {city} to the sea. The long one goes through the hills, and {name} takes it in "
        "summer. The short one follows the river. In winter, when the hills are full of snow, {name} takes the",
    ),
}


def make() -> list[Prompt]:
    """Return all prompts, always in the same order."""
    draw = random.Random(SEED)
    made: dict[str, Prompt] = {}

    def add(half: str, kind: str, family: str, text: str) -> None:
        made.setdefault(text, Prompt(half, kind, family, text))

    for half in HALVES:
        for kind, families in SHORT.items():
            for number, family in enumerate(families[half]):
                for _ in range(4):
                    add(half, kind, f"{kind} {number}", family.format(**_draw_words(draw)))
        for number, (fact, question) in enumerate(FACTS[half]):
            for others in (2, 3, 5, 8):
                words = _draw_words(draw)
                text = _plant(draw, half, fact.format(**words), question.format(**words), others)
                add(half, "planted fact", f"planted fact {number}", text)
        for number, story in enumerate(STORIES[half]):
            for before in (0, 0, 2):
                text = " ".join([*_draw_fillers(draw, half, before), story.format(**_draw_words(draw))])
                add(half, "story", f"story {number}", text)
    return list(made.values())


if __name__ == "__main__":
    counts = collections.Counter((prompt.half, prompt.kind) for prompt in make())
    for (half, kind), count in sorted(counts.items()):
        print(f"{half:>9} {kind:<13} {count}")
    print(len(make()))
