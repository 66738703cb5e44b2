"""Let espeak-ng say sentences, and return when each word begins.

espeak-ng comes from the package `espeakng-loader` (0.2.4), which has its library and voices. It is licensed
under GPL 3, so it is installed for this benchmark only, and nothing of it is part of lens_mix.
"""

from __future__ import annotations

import ctypes
import dataclasses
from math import gcd

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

RATE = 16_000  # samples per second that Whisper reads
_SYNCHRONOUS, _WORD, _END, _SPEED, _UTF8 = 2, 1, 0, 1, 1


class _Event(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int),
        ("unique_identifier", ctypes.c_uint),
        ("text_position", ctypes.c_int),
        ("length", ctypes.c_int),
        ("audio_position", ctypes.c_int),
        ("sample", ctypes.c_int),
        ("user_data", ctypes.c_void_p),
        ("id", ctypes.c_char * 8),
    ]


_Callback = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.POINTER(_Event)
)


@dataclasses.dataclass(frozen=True)
class Speech:
    """A spoken sentence.

    Attributes:
        samples: The waveform, 16,000 samples per second.
        words: The words without punctuation; neighbors that are said as one word are one.
        starts: When each word begins, in seconds.
        end: When the last word ends, in seconds.
    """

    samples: Float[Tensor, " sample"]
    words: tuple[str, ...]
    starts: tuple[float, ...]
    end: float


class Espeak:
    """The library espeak-ng."""

    def __init__(self) -> None:
        try:
            import espeakng_loader
        except ImportError as problem:
            raise ImportError(
                "benchmarks.speech needs espeak-ng: pip install espeakng-loader==0.2.4"
            ) from problem
        self._library = ctypes.CDLL(espeakng_loader.get_library_path())
        self._rate = self._library.espeak_Initialize(
            _SYNCHRONOUS, 0, espeakng_loader.get_data_path().encode(), 0
        )

    def say(self, text: str, voice: str = "en-us", speed: int = 150) -> Speech:
        """Return a sentence as speech.

        Args:
            text: The sentence, in which each word is divided by one space from the next.
            voice: A voice of espeak-ng, such as "en-gb" or "en-us+f2".
            speed: Words per minute.

        Raises:
            RuntimeError: If the voice does not exist, or espeak-ng marks other words.
        """
        pieces: list[bytes] = []
        places: dict[int, float] = {}

        def receive(wave: object, count: int, events: object) -> int:
            if count > 0:
                pieces.append(ctypes.string_at(wave, 2 * count))
            index = 0
            while events[index].type != _END:
                event = events[index]
                if event.type == _WORD:
                    places.setdefault(event.text_position, event.audio_position / 1000)
                index += 1
            return 0

        callback, encoded = _Callback(receive), text.encode() + b"\0"
        self._library.espeak_SetSynthCallback(callback)
        if self._library.espeak_SetVoiceByName(voice.encode()) != 0:
            raise RuntimeError(f"expected a voice of espeak-ng, got {voice!r}")
        self._library.espeak_SetParameter(_SPEED, speed, 0)
        self._library.espeak_Synth(encoded, len(encoded), 0, 1, 0, _UTF8, None, None)
        self._library.espeak_Synchronize()
        words = text.split(" ")
        # Positions count characters from 1.
        first = [1 + sum(len(word) + 1 for word in words[:index]) for index in range(len(words))]
        if not places.keys() <= set(first) or first[0] not in places:
            raise RuntimeError(f"expected marks of the words of {text!r}, got {sorted(places)}")
        # Some neighbors, such as "of an", are said as one word.
        units: list[str] = []
        for place, word in zip(first, words, strict=True):
            if place in places:
                units.append(word.strip(".,?!"))
            else:
                units[-1] += f" {word.strip('.,?!')}"
        samples = np.frombuffer(b"".join(pieces), "<i2").astype(np.float64) / 2**15
        loud = np.abs(samples) > 0.01
        end = float(len(loud) - loud[::-1].argmax()) / self._rate
        return Speech(
            torch.from_numpy(_resample(samples, self._rate).astype(np.float32)),
            tuple(units),
            tuple(places[place] for place in sorted(places)),
            end,
        )


def _resample(samples: np.ndarray, rate: int) -> np.ndarray:
    from scipy.signal import resample_poly

    common = gcd(RATE, rate)
    return np.asarray(resample_poly(samples, RATE // common, rate // common))


def add_noise(
    samples: Float[Tensor, " sample"], decibels: float | None, seed: int
) -> Float[Tensor, " sample"]:
    """Return speech with white noise; `decibels` is the ratio of their powers, None for no noise."""
    if decibels is None:
        return samples
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(len(samples), generator=generator)
    return samples + noise * samples.square().mean().sqrt() * 10 ** (-decibels / 20)
