"""Read the recording of the demos: a sentence of a synthetic voice, whose words have known times."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

FILE = Path(__file__).parent / "data" / "speech" / "farmer.wav"
# When each word begins, in seconds, as the program that said it marked it.
STARTS = {
    "The": 0.00,
    "old": 0.13,
    "farmer": 0.50,
    "sold": 0.91,
    "seven": 1.37,
    "brown": 1.83,
    "horses": 2.17,
    "to": 2.70,
    "a": 2.84,
    "doctor": 2.91,
    "from": 3.37,
    "London": 3.64,
}


class Recording(NamedTuple):
    """A spoken sentence.

    Attributes:
        samples: The waveform, from -1 to 1.
        rate: The number of samples per second.
        words: The beginning and the end of each word, in seconds.
    """

    samples: torch.Tensor
    rate: int
    words: dict[str, tuple[float, float]]


def read_recording() -> Recording:
    """Return the recording."""
    from scipy.io import wavfile

    rate, samples = wavfile.read(FILE)
    ends = [*list(STARTS.values())[1:], len(samples) / rate]
    words = {word: (start, end) for (word, start), end in zip(STARTS.items(), ends, strict=True)}
    return Recording(torch.tensor(samples / 2**15), rate, words)
