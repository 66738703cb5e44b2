"""Ask whether maps of Whisper find the word on which the spelling of a homophone depends.

    python -m benchmarks.speech.homophones find 8      measures sentences in all voices, of 8 a pair at most
    python -m benchmarks.speech.homophones table       writes results/homophones.md

After Mohebbi et al. (EMNLP 2023), who asked it of French sentences with Value Zeroing. A sentence counts if
the model prefers the right spelling. Maps are scored where the other cue in the decoder's text reverses that.
The cue is found if it has the largest score of all words besides the homophone and the word of the row.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import lens_mix as lm
from benchmarks.common import markdown_table
from benchmarks.speech.maps import OUTPUT, load
from benchmarks.speech.say import Espeak, Speech
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

    @property
    def text(self) -> str:
        """The sentence that is said."""
        return self.template.format(self.cue, self.spelling)


def items() -> list[Item]:
    """Return all sentences in all voices."""
    return [
        Item(template, *own, *other, voice)
        for template, first, second in PAIRS
        for voice in VOICES
        for own, other in ((first, second), (second, first))
    ]


def encode(model: Any, samples: torch.Tensor) -> Any:
    """Return the encoder's output and hidden states for a sound."""
    spectrogram = make_model_input(model, samples[None])
    with torch.no_grad():
        return model.original_model.model.encoder(spectrogram, output_hidden_states=True)


def margin(model: Any, encoded: Any, item: Item, cue: str) -> float:
    """Return how much more probable the right spelling is than the other one, in nats.

    Args:
        model: The model.
        encoded: The encoder's output.
        item: The sentence.
        cue: The cue that the decoder has read, which may be another one than was said.
    """
    start, _, rest = item.template.partition("{}")
    before = f" {start}{cue}{rest.partition('{}')[0]}".rstrip()
    numbers = []
    for spelling in (item.spelling, item.other_spelling):
        own = model.tokenizer(f" {spelling}", add_special_tokens=False)["input_ids"]
        ids = [
            *find_first_tokens(model),
            *model.tokenizer(before, add_special_tokens=False)["input_ids"],
            *own,
        ]
        target = torch.tensor([ids])
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
    frames = {word: frames_of(speech, index) for index, word in enumerate(speech.words) if index != homophone}
    found: dict[str, dict[str, list[dict[str, float]]]] = {name: {} for name in METHODS}
    for part in ("decoder", "cross"):
        for name, m in lm.run(model, prompt, list(METHODS), part=part, progress=None).items():
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
        frames = {text: word for text, word in zip(texts, words, strict=True) if word[-1] < target - 1}
    return [
        {word: float(layer[places].sum()) for word, places in frames.items()}
        for layer in m.scores[:, m.row_index(target - 1)]
    ]


def find(most: str) -> None:
    """Measure the sentences, and keep what was found."""
    torch.set_num_threads(1)
    model, espeak = load(), Espeak()
    folder = OUTPUT / "homophones"
    folder.mkdir(parents=True, exist_ok=True)
    counts: dict[str, int] = defaultdict(int)
    for number, item in enumerate(items()):
        path = folder / f"{number}.pt"
        key = f"{item.cue} {item.spelling}"
        if not path.exists() and counts[key] < int(most):
            start = time.time()
            record = measure(model, item, espeak.say(item.text, item.voice, SPEED))
            torch.save(record, path)
            print(number, item.text, record and record["margins"], f"{time.time() - start:.0f} s", flush=True)
        if path.exists() and torch.load(path, weights_only=False) is not None:
            counts[key] += 1


def stored() -> list[dict[str, Any]]:
    """Return the sentences that count."""
    paths = sorted((OUTPUT / "homophones").glob("*.pt"), key=lambda path: int(path.stem))
    found = [torch.load(path, weights_only=False) for path in paths]
    return [record for record in found if record is not None]


def is_found(record: dict[str, Any], name: str, part: str, layer: int) -> float:
    """Return 1 if the cue has the largest score of a layer, else 0."""
    scores = record["found"][name][part][layer]
    best = max(scores, key=lambda word: scores[word])
    return float(record["item"]["cue"] in best.split())


def table() -> None:
    """Write the record."""
    records_ = stored()
    tried = len(list((OUTPUT / "homophones").glob("*.pt")))
    # The text decides if reading the other cue reverses the preference.
    by_text = [record for record in records_ if record["margins"]["other cue read"] < 0]
    pages = []
    rows = []
    for name in ("said", "cue silent", "other cue read", "both"):
        values = [record["margins"][name] for record in records_]
        rows.append(
            {
                "what the model gets": {
                    "said": "the sentence as it was said",
                    "cue silent": "the cue's sound is silent, its text stays",
                    "other cue read": "the decoder reads the other cue, the sound stays",
                    "both": "both",
                }[name],
                "margin, nats": cell(values, 2),
                "right spelling preferred": cell([float(value > 0) for value in values], 2),
            }
        )
    for part, title in (("encoder", "Encoder"), ("decoder", "Decoder"), ("cross", "Cross-attention")):
        lines = []
        for name in METHODS:
            count = len(records_[0]["found"][name][part])
            line = {"map": name}
            for layer in range(count):
                line[f"layer {layer}"] = cell([is_found(record, name, part, layer) for record in by_text], 2)
            lines.append(line)
        chance = np.mean([1 / len(record["found"]["attention"][part][0]) for record in by_text])
        pages.append(
            f"## {title}\n\nShare of sentences whose cue has the largest score. A random word: {chance:.2f}. "
            f"The nearest word is never the cue.\n\n{markdown_table(lines)}"
        )
    text = f"""# Homophones: which word decided the spelling?

Written by `python -m benchmarks.speech.homophones table`. Whisper base; synthetic speech (espeak-ng) in
{len(VOICES)} voices. Of {tried} sentences with {len(PAIRS)} pairs of homophones, the model prefers the right
spelling in {len(records_)}. Intervals are 95 %, over sentences.

Measured {date.today().isoformat()} with TransformerLens {version("transformer-lens")}, torch
{version("torch")}.

## What the model uses

The margin is the log probability of the right spelling less that of the other one.

{markdown_table(rows)}

In {len(by_text)} sentences the other cue in the decoder's text reverses the preference. The tables below are
of these.

{chr(10).join(page + chr(10) for page in pages)}"""
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(text.rstrip() + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    {"find": find, "table": table}[sys.argv[1]](*sys.argv[2:])
