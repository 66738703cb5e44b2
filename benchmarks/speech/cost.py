"""Measure what maps of speech cost: `python -m benchmarks.speech.cost` writes results/cost.md."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import torch

import lens_mix as lm
from benchmarks.common import describe_machine, describe_measurement, markdown_table, peak_over_model
from benchmarks.speech.maps import load
from benchmarks.speech.say import RATE, Espeak
from benchmarks.speech.sentences import make

RESULT = Path(__file__).parent / "results" / "cost.md"
CALLS: dict[str, tuple[Any, dict[str, Any]]] = {
    "attention, cross": ("attention", {"part": "cross"}),
    "value_norm, cross": ("value_norm", {"part": "cross"}),
    "alti, cross": ("alti", {"part": "cross"}),
    "value_zeroing, cross": ("value_zeroing", {"part": "cross"}),
    "value_zeroing, encoder, one row": ("value_zeroing", {"part": "encoder", "queries": [700]}),
    "input_gradients, joint, one row": ("input_gradients", {"part": "joint", "queries": [-1]}),
}


def main() -> None:
    """Measure, and write the record."""
    torch.set_num_threads(1)
    model, espeak = load(), Espeak()
    spoken, texts, seconds = [], [], 0.0
    for sentence in itertools.islice(make("choose"), 20):
        speech = espeak.say(sentence.text, "en-us", 150)
        if seconds + len(speech.samples) / RATE > 30:
            break
        spoken.append(speech.samples)
        texts.append(sentence.text)
        seconds += len(speech.samples) / RATE
    sound, text = torch.cat(spoken), f" {' '.join(texts)}"
    spectrogram = model.processor(sound.numpy(), sampling_rate=RATE, return_tensors="pt")["input_features"]
    tokens = lm.run(model, (sound, text), "attention", part="cross")
    target = torch.tensor([tokens.provenance["target_token_ids"]])

    def forward() -> None:
        with torch.no_grad():
            model.original_model(input_features=spectrogram, decoder_input_ids=target, use_cache=False)

    def seconds_of(call: Any) -> float:
        times = []
        for _ in range(3):
            start = time.process_time()
            call()
            times.append(time.process_time() - start)
        return min(times)

    forward()
    usual, (memory, _) = seconds_of(forward), peak_over_model(forward)
    rows = [{"call": "forward pass", "÷ forward pass": "1", "MB over the model": f"{memory / 1e6:.0f}"}]
    for name, (method, options) in CALLS.items():

        def call(method: Any = method, options: dict[str, Any] = options) -> None:
            lm.run(model, (sound, text), method, progress=None, **options)

        call()
        ratio, (memory, _) = seconds_of(call) / usual, peak_over_model(call)
        rows.append(
            {"call": name, "÷ forward pass": f"{ratio:.2f}", "MB over the model": f"{memory / 1e6:.0f}"}
        )
        print(rows[-1], flush=True)
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(
        f"""# What maps of speech cost

Written by `python -m benchmarks.speech.cost`. Whisper base, float32, one thread: {seconds:.1f} seconds of
speech, {len(target[0])} tokens of text. Processor time over that of a forward pass of the model as
TransformerLens runs it, the best of three; peak of resident memory over the loaded model.

{describe_measurement()} {describe_machine()}

## Calls

{markdown_table(rows)}
""",
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
