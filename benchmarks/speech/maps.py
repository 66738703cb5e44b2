"""Compute the maps of spoken sentences, and keep them in files."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

import lens_mix as lm
from benchmarks.speech.say import Espeak, Speech, add_noise
from benchmarks.speech.sentences import Sentence, make
from lens_mix._inputs.speech import find_first_tokens

OUTPUT = Path("outputs/speech")
# These methods need only passes that all words share.
METHODS = ("value_norm", "attn_res_ln", "alti", "value_zeroing")
ROLLOUT = "alti+"
WINDOW = 0.2  # seconds of a stretch that a removal silences


def load() -> Any:
    """Return Whisper as a TransformerBridge."""
    sys.path.insert(0, "demos")
    import models

    return models.whisper()


def spoken(espeak: Espeak, sentence: Sentence) -> Speech:
    """Return the speech of a sentence with its noise."""
    speech = espeak.say(sentence.text, sentence.voice, sentence.speed)
    noisy = add_noise(speech.samples, sentence.decibels, sentence.seed)
    return Speech(noisy, speech.words, speech.starts, speech.end)


def group_rows(tokens: list[str], words: tuple[str, ...]) -> list[list[int]]:
    """Return the numbers of the text tokens that spell each word; a token of punctuation belongs to none."""
    rows: list[list[int]] = [[] for _ in words]
    texts = [word.replace(" ", "") for word in words]
    word, spelled = 0, ""
    for number, token in enumerate(tokens):
        if token.strip() in (".", ",", "?"):
            continue
        rows[word].append(number)
        spelled += token.strip()
        if spelled == texts[word]:
            word, spelled = word + 1, ""
    if word != len(words):
        raise ValueError(f"expected tokens that spell {words}, got {tokens}")
    return rows


def compute(model: Any, half: str, number: int, sentence: Sentence, speech: Speech) -> dict[str, Any]:
    """Return the maps of a sentence, read from a file if they were computed before."""
    place = OUTPUT / half / f"{number}.pt"
    if place.exists():
        return torch.load(place, weights_only=False)
    start = time.time()
    prompt = (speech.samples, f" {sentence.text}")
    methods = [lm.methods.AttentionWeights(per_head=True), *METHODS]
    found_maps = lm.run(model, prompt, methods, part="cross", progress=None)
    maps = dict(zip(("heads", *METHODS), found_maps.values(), strict=True))
    heads = maps["heads"]
    first = next(index for index, token in enumerate(heads.tokens) if not token.startswith("<|"))
    # The row before a token predicts it.
    rows = slice(first - 1, len(heads.tokens) - 1)
    frames = heads.scores.shape[-1]
    found: dict[str, Float[Tensor, "layer *head token frame"]] = {
        name: mapped.scores[..., rows, :frames] for name, mapped in maps.items()
    }
    record = {
        "sentence": sentence._asdict(),
        "words": group_rows(heads.tokens[first:], speech.words),
        "spelled": speech.words,
        "starts": speech.starts,
        "end": speech.end,
        "samples": len(speech.samples),
        "maps": {name: scores.to(torch.float32).clone() for name, scores in found.items()},
    }
    place.parent.mkdir(parents=True, exist_ok=True)
    torch.save(record, place)
    print(half, number, f"{time.time() - start:.0f} s", flush=True)
    return record


def add_end(model: Any, half: str, number: int, record: dict[str, Any], speech: Speech) -> None:
    """Add the row of each head that predicts the end of the text, which OpenAI's time warping has, too."""
    if "end" in record["maps"]:
        return
    prompt = (speech.samples, f" {record['sentence']['text']}")
    method = lm.methods.AttentionWeights(per_head=True)
    heads = lm.run(model, prompt, method, part="cross", queries=[-1], progress=None)
    record["maps"]["end"] = heads.scores.to(torch.float32).clone()
    torch.save(record, OUTPUT / half / f"{number}.pt")


def add_removals(model: Any, half: str, number: int, record: dict[str, Any], speech: Speech) -> None:
    """Add what each token loses when a stretch of the sound is silent."""
    if "removal" in record["maps"]:
        return
    trace = _trace(model, record, speech, "attention")
    losses = []
    for source in trace.by(WINDOW).sources():
        if source.kind != "sound":
            continue
        without = trace.reading.without(source.positions)
        from lens_mix.traces.attribution import read_written

        lost = trace.log_probabilities - read_written(model, trace.reading, without).log_probabilities
        losses += [lost] * len(source.positions)
    record["maps"]["removal"] = torch.stack(losses, -1)[None].to(torch.float32)
    torch.save(record, OUTPUT / half / f"{number}.pt")
    print(half, number, "removals", flush=True)


def add_gradients(model: Any, half: str, number: int, record: dict[str, Any], speech: Speech) -> None:
    """Add the input gradients of each token, as magnitudes."""
    for name in ("input_gradients",):
        if name in record["maps"]:
            continue
        trace = _trace(model, record, speech, name)
        frames = trace.reading.n_source
        record["maps"][name] = trace.steps.scores[:, :, :frames].abs().to(torch.float32)
        torch.save(record, OUTPUT / half / f"{number}.pt")
        print(half, number, name, flush=True)


def add_rollout(model: Any, half: str, number: int, record: dict[str, Any], speech: Speech) -> None:
    """Add ALTI+, the rollout of ALTI of encoder and decoder."""
    if ROLLOUT in record["maps"]:
        return
    start = time.time()
    prompt = (speech.samples, f" {record['sentence']['text']}")
    joined = lm.aggregation.joint(lm.run(model, prompt, "alti", part="all", progress=None))
    parts = joined.provenance["joint"]
    last = lm.rollout(joined).scores[-1, parts["source"] :, : parts["source"]]
    first, rows = len(find_first_tokens(model)), record["maps"]["heads"].shape[-2]
    record["maps"][ROLLOUT] = last[None, first - 1 : first - 1 + rows].to(torch.float32).clone()
    torch.save(record, OUTPUT / half / f"{number}.pt")
    print(half, number, ROLLOUT, f"{time.time() - start:.0f} s", flush=True)


def _trace(model: Any, record: dict[str, Any], speech: Speech, method: str) -> lm.Trace:
    return lm.trace(model, speech.samples, answer=f" {record['sentence']['text']}", method=method)


def records(half: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the stored records of a half in order."""
    folder = OUTPUT / half
    for path in sorted(folder.glob("*.pt"), key=lambda path: int(path.stem)):
        yield int(path.stem), torch.load(path, weights_only=False)


def main(half: str, count: str, removals: str = "0", gradients: str = "0", rollouts: str = "0") -> None:
    """Compute the maps of the first sentences of a half, and of fewer removals, gradients and rollouts."""
    torch.set_num_threads(1)
    model, espeak = load(), Espeak()
    for number, sentence in enumerate(make(half)):
        if number == int(count):
            return
        speech = spoken(espeak, sentence)
        record = compute(model, half, number, sentence, speech)
        add_end(model, half, number, record, speech)
        if number < int(removals):
            add_removals(model, half, number, record, speech)
        if number < int(gradients):
            add_gradients(model, half, number, record, speech)
        if number < int(rollouts):
            add_rollout(model, half, number, record, speech)


if __name__ == "__main__":
    main(*sys.argv[1:])
