"""Ask whether maps of Whisper find the word on which the spelling of a homophone depends.

    python -m benchmarks.speech.homophones find        measures each sentence in the first voice that counts
    python -m benchmarks.speech.homophones french      asks how much of espeak-ng's French the model hears
    python -m benchmarks.speech.homophones table       writes results/homophones.md

After Mohebbi et al. (EMNLP 2023), who asked it of French sentences with Value Zeroing. A sentence counts if
the model prefers the right spelling. Maps are scored where the other cue in the decoder's text reverses that.
The cue is found if it has the largest score of all words but the homophone (and, in the decoder, the word of
the row). It stands in three places: as the subject of the sentence, as that of a later clause, and beside the
subject, so that a map of the first word, or of the nearest subject, does not always find it.
"""

from __future__ import annotations

import itertools
import re
import sys
import time
from collections import defaultdict
from datetime import date
from difflib import SequenceMatcher
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import lens_mix as lm
from benchmarks.common import markdown_table
from benchmarks.speech.maps import OUTPUT, load
from benchmarks.speech.say import Espeak, Speech
from benchmarks.speech.sentences import make
from benchmarks.speech.table import cell
from lens_mix._inputs.speech import find_first_tokens, make_model_input

RESULT = Path(__file__).parent / "results" / "homophones.md"
# The sentence, and two cues with the spelling that each of them asks for.
PAIRS = (
    ("The {} looked at the {}.", ("gardener", "flower"), ("baker", "flour")),
    ("The {} wanted more {} today.", ("gardener", "flowers"), ("baker", "flour")),
    ("The {} was waiting for the {}.", ("sailor", "sail"), ("shopper", "sale")),
    ("The {} has such a long {}.", ("donkey", "tail"), ("legend", "tale")),
    ("The {} cares about the {}.", ("cobbler", "sole"), ("preacher", "soul")),
    ("The {} talked about the {}.", ("monarch", "reign"), ("farmer", "rain")),
    ("The {} finally found the {}.", ("plumber", "leak"), ("cook", "leek")),
    ("The {} really loved the {}.", ("actress", "role"), ("bakery", "roll")),
    ("The {} carefully measured the {}.", ("tailor", "waist"), ("factory", "waste")),
    ("The {} wants to see the {}.", ("barber", "hair"), ("hunter", "hare")),
    ("The {} brought us the {}.", ("treaty", "peace"), ("dessert", "piece")),
    ("The {} looked after the {}.", ("mechanic", "brake"), ("teacher", "break")),
    ("The {} asked for a {}.", ("castle", "knight"), ("hotel", "night")),
    ("The {} often dreams of the {}.", ("mother", "son"), ("astronomer", "sun")),
    ("The {} thinks about the {}.", ("butcher", "meat"), ("athlete", "meet")),
    ("The {} was full of {}.", ("clinic", "patients"), ("teacher", "patience")),
    ("The {} looked at the {}.", ("grocer", "pear"), ("couple", "pair")),
    ("The {} came with the {}.", ("postman", "mail"), ("female", "male")),
    ("The {} stood on the {}.", ("captain", "quay"), ("locksmith", "key")),
    ("The {} was looking at the {}.", ("carpenter", "board"), ("pupil", "bored")),
    ("The {} always needs more {}.", ("kitchen", "thyme"), ("worker", "time")),
    ("The {} could not find the {}.", ("diver", "mussels"), ("athlete", "muscles")),
    ("The {} is proud of the {}.", ("printer", "prints"), ("palace", "prince")),
    ("The {} told us about the {}.", ("welder", "steel"), ("burglar", "steal")),
)
# How a sentence begins, and what its cue is there.
PLACES = {
    "subject of the sentence": "The {}",
    "subject of a clause": "My neighbor says that the {}",
    "beside the subject": "Beside the {} my neighbor",
}
SUBJECT = "neighbor"
FRENCH = (
    "Le facteur du village mange une pomme.",
    "Les voisins de ma mère chantent le soir.",
    "Les enfants regardent la petite maison.",
    "Mon frère achète du pain tous les matins.",
    "La fille du médecin travaille à Paris.",
    "Nous cherchons un livre pour notre grand-père.",
)
FRENCH_VOICES = ("fr", "fr+f2", "fr-be")
HEARD = OUTPUT / "homophones_heard.pt"
GIVEN = {
    "said": "the sentence as it was said",
    "cue silent": "the cue's sound is silent, its text stays",
    "other cue read": "the decoder reads the other cue, the sound stays",
    "both": "both",
}
VOICES = ("en-us", "en", "en-us+f2", "en-gb-x-rp")
SPEED = 140
# Value Zeroing of the encoder is of the homophone's frames.
METHODS = ("attention", "value_norm", "value_zeroing")


class Item(NamedTuple):
    """A sentence with a cue and a homophone, and how both are spelled with the other cue."""

    template: str
    cue: str
    spelling: str
    other_cue: str
    other_spelling: str
    voice: str
    place: str

    @property
    def text(self) -> str:
        """The sentence that is said."""
        return self.template.format(self.cue, self.spelling)


def items() -> list[Item]:
    """Return all sentences in all voices."""
    return [
        Item(template.replace("The {}", beginning, 1), *own, *other, voice, place)
        for place, beginning in PLACES.items()
        for template, first, second in PAIRS
        for voice in VOICES
        for own, other in ((first, second), (second, first))
    ]


def encode(model: Any, samples: torch.Tensor) -> Any:
    """Return the encoder's output and hidden states for a sound."""
    spectrogram = make_model_input(model, samples[None])
    with torch.no_grad():
        return model.original_model.model.encoder(spectrogram, output_hidden_states=True)


def tokenize(model: Any, text: str) -> list[int]:
    """Return the tokens of a text."""
    return list(model.tokenizer(text, add_special_tokens=False)["input_ids"])


def read_before(model: Any, item: Item, cue: str) -> list[int]:
    """Return the tokens that the decoder reads before the homophone."""
    before = item.template.format(cue, "|").partition("|")[0].rstrip()
    return [*find_first_tokens(model), *tokenize(model, f" {before}")]


def margin(model: Any, encoded: Any, item: Item, cue: str) -> float:
    """Return how much more probable the right spelling is than the other one, in nats.

    Args:
        model: The model.
        encoded: The encoder's output.
        item: The sentence.
        cue: The cue that the decoder has read, which may be another one than was said.
    """
    numbers = []
    for spelling in (item.spelling, item.other_spelling):
        own = tokenize(model, f" {spelling}")
        target = torch.tensor([[*read_before(model, item, cue), *own]])
        with torch.no_grad():
            out = model.original_model(
                encoder_outputs=(encoded.last_hidden_state,), decoder_input_ids=target, use_cache=False
            )
        log_p = out.logits[0].log_softmax(-1)[:-1].gather(1, target[0, 1:, None])[:, 0]
        numbers.append(float(log_p[-len(own) :].sum()))
    return numbers[0] - numbers[1]


def zero_words(model: Any, encoded: Any, rows: list[int], words: dict[str, list[int]]) -> torch.Tensor:
    """Return Value Zeroing of whole words in each layer of the encoder, [layer, word].

    The values of all frames of a word become zero at once, as in the paper. A score is the mean over the
    rows of 1 - cos of the block's output.
    """
    scores = []
    for layer, block in enumerate(model.original_model.model.encoder.layers):
        stream = encoded.hidden_states[layer]
        values = block.self_attn.v_proj

        def run(
            frames: list[int], block: Any = block, stream: Any = stream, values: Any = values
        ) -> torch.Tensor:
            def zero(module: Any, given: Any, out: torch.Tensor) -> torch.Tensor:
                changed = out.clone()
                changed[:, frames] = 0
                return changed

            handle = values.register_forward_hook(zero)
            try:
                with torch.no_grad():
                    output = block(stream, None)
            finally:
                handle.remove()
            return (output if torch.is_tensor(output) else output[0])[0, rows]

        clean = run([])
        scores.append(
            [1 - torch.cosine_similarity(clean, run(frames), dim=-1).mean() for frames in words.values()]
        )
    return torch.tensor(scores)


def frames_of(speech: Speech, word: int) -> list[int]:
    """Return the frames of a word."""
    stop = [*speech.starts[1:], speech.end][word]
    return list(
        range(round(speech.starts[word] * 50), max(round(stop * 50), round(speech.starts[word] * 50) + 1))
    )


def words_of(tokens: list[str], first: int) -> list[list[int]]:
    """Return the positions of each word of the decoder's text."""
    words: list[list[int]] = []
    for position in range(first, len(tokens)):
        if tokens[position].startswith(" "):
            words.append([])
        words[-1].append(position)
    return words


def measure(model: Any, item: Item, speech: Speech) -> dict[str, Any] | None:
    """Return the maps' words and the model's margins of a sentence; None if it does not count."""
    encoded = encode(model, speech.samples)
    said = margin(model, encoded, item, item.cue)
    if said <= 0:
        return None
    cue = next(index for index, word in enumerate(speech.words) if item.cue in word.split())
    homophone = next(index for index, word in enumerate(speech.words) if item.spelling in word.split())
    silent = speech.samples.clone()
    silent[round(16_000 * speech.starts[cue]) : round(16_000 * speech.starts[cue + 1])] = 0
    silent_encoded = encode(model, silent)
    margins = {
        "said": said,
        "cue silent": margin(model, silent_encoded, item, item.cue),
        "other cue read": margin(model, encoded, item, item.other_cue),
        "both": margin(model, silent_encoded, item, item.other_cue),
    }
    prompt, own = (speech.samples, f" {item.text}"), frames_of(speech, homophone)
    # A word can be there twice.
    frames = {
        f"{index} {word}": frames_of(speech, index)
        for index, word in enumerate(speech.words)
        if index != homophone
    }
    found: dict[str, dict[str, list[dict[str, float]]]] = {name: {} for name in METHODS}
    row = len(read_before(model, item, item.cue)) - 1
    for part in ("decoder", "cross"):
        maps = lm.run(model, prompt, list(METHODS), part=part, queries=[row], progress=None)
        for name, m in maps.items():
            found[name][part] = _by_word(m, item, frames if part == "cross" else None)
    for name in METHODS[:-1]:
        m = lm.run(model, speech.samples, name, part="encoder", queries=own, progress=None)
        found[name]["encoder"] = [
            {word: float(layer[places].sum()) for word, places in frames.items()}
            for layer in m.scores.mean(1)
        ]
    zeroed = zero_words(model, encoded, own, frames).tolist()
    found[METHODS[-1]]["encoder"] = [dict(zip(frames, layer, strict=True)) for layer in zeroed]
    return {"item": item._asdict(), "margins": margins, "found": found}


def _by_word(m: lm.MixingMap, item: Item, frames: dict[str, list[int]] | None) -> list[dict[str, float]]:
    """Return the score of each word by layer, in the row that predicts the homophone.

    Args:
        m: The map.
        item: The sentence.
        frames: The frames of each word; None for the words of the decoder's text before the row.
    """
    first = next(index for index, token in enumerate(m.tokens) if not token.startswith("<|"))
    words = words_of(m.tokens, first)
    texts = ["".join(m.tokens[place] for place in word).strip(" .") for word in words]
    target = words[texts.index(item.spelling)][0]
    if frames is None:
        frames = {
            f"{index} {text}": word
            for index, (text, word) in enumerate(zip(texts, words, strict=True))
            if word[-1] < target - 1
        }
    return [
        {word: float(layer[places].sum()) for word, places in frames.items()}
        for layer in m.scores[:, m.row_index(target - 1)]
    ]


def find() -> None:
    """Measure the sentences, each in the first voice with which it counts, and keep what was found."""
    torch.set_num_threads(1)
    model, espeak = load(), Espeak()
    folder = OUTPUT / "homophones"
    folder.mkdir(parents=True, exist_ok=True)
    counted: set[str] = set()
    for number, item in enumerate(items()):
        path = folder / f"{number}.pt"
        if item.text in counted:
            continue
        if not path.exists():
            start = time.time()
            record = measure(model, item, espeak.say(item.text, item.voice, SPEED))
            torch.save(record, path)
            print(number, item.text, record and record["margins"], f"{time.time() - start:.0f} s", flush=True)
        if torch.load(path, weights_only=False) is not None:
            counted.add(item.text)


def hear(model: Any, espeak: Espeak, text: str, voice: str, language: str) -> float:
    """Return the share of a sentence's words that the model writes down, in their order."""
    model.tokenizer.set_prefix_tokens(language=language, task="transcribe")
    sound = espeak.say(text, voice, SPEED).samples
    m = lm.trace(model, sound, generate=3 * len(text.split()), method="attention")
    said = _words(text)
    equal = SequenceMatcher(None, said, _words(m.text), autojunk=False).get_matching_blocks()
    return sum(block.size for block in equal) / len(said)


def _words(text: str) -> list[str]:
    return re.findall(r"[\w'-]+", text.lower())


def french() -> None:
    """Measure how much of French and of English sentences the model writes down."""
    torch.set_num_threads(1)
    model, espeak = load(), Espeak()
    english = [sentence.text for sentence in itertools.islice(make("choose"), len(FRENCH))]
    found = {
        language: [
            [hear(model, espeak, text, voice, language) for voice in voices[: len(FRENCH_VOICES)]]
            for text in texts
        ]
        for language, texts, voices in (("french", FRENCH, FRENCH_VOICES), ("english", english, VOICES))
    }
    torch.save(found, HEARD)
    print(found)


def stored() -> dict[str, list[dict[str, Any]]]:
    """Return the sentences that count by the place of the cue, each in one voice."""
    found: dict[str, dict[str, dict[str, Any]]] = {place: {} for place in PLACES}
    for number, item in enumerate(items()):
        path = OUTPUT / "homophones" / f"{number}.pt"
        record = torch.load(path, weights_only=False) if path.exists() else None
        if record is not None:
            found[item.place].setdefault(item.text, record | {"item": item._asdict()})
    return {place: list(records.values()) for place, records in found.items()}


def has_largest(record: dict[str, Any], word: str, name: str, part: str, layer: int) -> float:
    """Return 1 if a word has the largest score of a layer, else 0."""
    scores = record["found"][name][part][layer]
    best = max(scores, key=lambda one: scores[one])
    return float(word in best.split())


def is_decided_by_text(record: dict[str, Any]) -> bool:
    """Return whether the model prefers the other spelling once its text has the other cue."""
    return bool(record["margins"]["other cue read"] < 0)


def by_pair(records: list[dict[str, Any]], values: list[float]) -> str:
    """Return the mean over pairs of homophones with its 95 % interval; a pair has one to six sentences."""
    found: dict[frozenset[str], list[float]] = defaultdict(list)
    for record, value in zip(records, values, strict=True):
        found[frozenset((record["item"]["spelling"], record["item"]["other_spelling"]))].append(value)
    return cell([float(np.mean(own)) for own in found.values()], 2)


def rows_of_margins(by_place: dict[str, list[dict[str, Any]]]) -> list[dict[str, str]]:
    """Return the model's margins with changed cues."""
    rows = []
    everywhere = {"anywhere": [record for found in by_place.values() for record in found]}
    for place, records in (everywhere | by_place).items():
        for name, said in GIVEN.items():
            values = [record["margins"][name] for record in records]
            row = {"the cue is": place, "what the model gets": said, "margin, nats": by_pair(records, values)}
            rows.append(row | {"right spelling preferred": by_pair(records, [float(v > 0) for v in values])})
    return rows


def rows_of_words(
    by_place: dict[str, list[dict[str, Any]]], part: str, word: str | None = None
) -> list[dict[str, str]]:
    """Return the share of sentences in which the cue, or another word, has the largest score."""
    rows = []
    for place, records in by_place.items():
        if not records:
            continue
        chance = np.mean([1 / len(record["found"]["attention"][part][0]) for record in records])
        for name in METHODS:
            row = {"the cue is": place, "map": name, "n": str(len(records)), "random word": f"{chance:.2f}"}
            for layer in range(len(records[0]["found"][name][part])):
                hits = [
                    has_largest(record, word or record["item"]["cue"], name, part, layer)
                    for record in records
                ]
                row[f"layer {layer}"] = by_pair(records, hits)
            rows.append(row)
    return rows


def rows_of_counts(by_place: dict[str, list[dict[str, Any]]]) -> list[dict[str, str]]:
    """Return the numbers of sentences for each place of the cue."""
    return [
        {
            "the cue is": place,
            "example": PAIRS[0][0].replace("The {}", PLACES[place], 1).format(*PAIRS[0][1]),
            "sentences": str(2 * len(PAIRS)),
            "spelled rightly": str(len(records)),
            "decided by the text": str(sum(map(is_decided_by_text, records))),
        }
        for place, records in by_place.items()
    ]


def table() -> None:
    """Write the record."""
    everything = stored()
    decided = {
        place: [record for record in found if is_decided_by_text(record)]
        for place, found in everything.items()
    }
    controls = dict(list(decided.items())[1:])
    heard = [
        {"language": language.capitalize(), "words heard": f"{np.mean(shares):.2f}"}
        for language, shares in torch.load(HEARD, weights_only=False).items()
    ]
    parts = [
        f"## {title}\n\nShare of sentences whose cue has the largest score.\n\n"
        f"{markdown_table(rows_of_words(decided, part))}\n"
        for part, title in (("encoder", "Encoder"), ("decoder", "Decoder"), ("cross", "Cross-attention"))
    ]
    text = f"""# Homophones: which word decided the spelling?

Written by `python -m benchmarks.speech.homophones table`. Whisper base; synthetic speech (espeak-ng). A
sentence has one of the {len(PAIRS)} pairs of homophones and one of its two cues, and counts in the first of
{len(VOICES)} voices with which the model prefers the right spelling. Numbers are means over the pairs, whose
sentences are averaged first; intervals are 95 %, over the pairs.

Measured {date.today().isoformat()} with TransformerLens {version("transformer-lens")}, torch
{version("torch")}.

## Sentences

"decided by the text": another cue in the decoder's text reverses the preference. Maps are scored on these.

{markdown_table(rows_of_counts(everything))}

## What the model uses

The margin is the log probability of the right spelling less that of the other one, over the sentences that
are spelled rightly (so the first share is 1, and its margin that of the best voices).

{markdown_table(rows_of_margins(everything))}

{chr(10).join(parts)}
## Decoder, the subject

Share of sentences in which "{SUBJECT}" has the largest score: the main clause's subject, not the cue.

{markdown_table(rows_of_words(controls, "decoder", SUBJECT))}

## French

The share of the words of {len(FRENCH)} sentences that the model writes down, in order, with
{len(FRENCH_VOICES)} voices of espeak-ng for each language. Mohebbi et al. had recordings.

{markdown_table(heard)}
"""
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    {"find": find, "french": french, "table": table}[sys.argv[1]]()
