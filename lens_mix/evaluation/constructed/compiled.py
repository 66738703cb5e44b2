"""RASP programs (Weiss et al., ICML 2021), compiled by Tracr (Lindner et al., NeurIPS 2023).

`tracr.npz` was made once, from programs of `tracr.compiler.lib`, with tracr-pypi 1.0.0 (Google DeepMind,
Apache-2.0) by `benchmarks/compile_programs.py`; running them needs no Tracr. They have one head per layer, no
norm and no causal mask; token 0 stands first in every prompt.

Tracr counts in one way: a head looks at the first token and at all that is counted, and the first token alone
has a value; what arrives is 1 / (1 + count). What is counted moves nothing, and yet the answer depends on it.
"""

from __future__ import annotations

import functools
import importlib.resources
from typing import Any

import numpy as np
import torch

from lens_mix.evaluation.constructed.model import Cell, ConstructedModel, draw
from lens_mix.lens.from_weights import Weights

_LETTERS = range(1, 9)
_COUNTED = 1  # the letter whose share rasp_fraction tells
_NUMBERS = range(1, 13)
_LARGEST = _NUMBERS[9:]  # one of which stands in each prompt of rasp_sort
_LONGEST = 7  # without the first token

_Truth = tuple[list[Cell], list[int], int]


def compiled() -> list[ConstructedModel]:
    """The programs; each prompt's answer stands at one position."""
    return [
        ConstructedModel(
            "rasp_fraction",
            "tells which share of the tokens up to here is a certain letter",
            functools.partial(_weights, "fraction"),
            _with_counted,
            _fraction,
            lambda tokens, at: [letter for letter in _LETTERS if letter != tokens[at]] if at else [],
        ),
        ConstructedModel(
            "rasp_reverse",
            "gives the first letter at the last position: it counts the tokens to know where to look",
            functools.partial(_weights, "reverse"),
            lambda generator: [0, *draw(generator, _LETTERS, 4, _LONGEST - 1)],
            lambda tokens: ([(0, len(tokens) - 1, 0), (3, len(tokens) - 1, 1)], [1], len(tokens) - 1),
            lambda tokens, at: [letter for letter in _LETTERS if letter not in tokens] if at else [],
        ),
        ConstructedModel(
            "rasp_histogram",
            "tells how often the last letter stands in the prompt",
            functools.partial(_weights, "histogram"),
            _with_repetitions,
            _histogram,
            lambda tokens, at: [letter for letter in _LETTERS if letter not in tokens] if at else [],
        ),
        ConstructedModel(
            "rasp_sort",
            "sorts numbers: each position counts the smaller ones, and the last looks for the largest",
            functools.partial(_weights, "sort"),
            _numbers,
            _sort,
            lambda tokens, at: [n for n in _NUMBERS if n < max(tokens) and n not in tokens] if at else [],
        ),
    ]


def _weights(program: str) -> Weights:
    file = importlib.resources.files("lens_mix.evaluation.constructed") / "tracr.npz"
    with file.open("rb") as stream, np.load(stream) as stored:
        names = [name for name in stored.files if name.startswith(f"{program}/")]
        parts: dict[str, Any] = {name.split("/")[1]: torch.from_numpy(stored[name]) for name in names}
    return Weights(**parts, causal=False)


# ------------------------------------------------------------------ what is true of a prompt


def _fraction(tokens: list[int]) -> _Truth:
    """The answer stands two positions before the end: there are later tokens, which it does not read."""
    answer = len(tokens) - 3
    before = list(range(1, answer + 1))
    return [(1, answer, key) for key in before if tokens[key] == _COUNTED], before, answer


def _histogram(tokens: list[int]) -> _Truth:
    last = len(tokens) - 1
    return [(0, last, 0)], [at for at, letter in enumerate(tokens) if letter == tokens[last]], last


def _sort(tokens: list[int]) -> _Truth:
    last, largest = len(tokens) - 1, tokens.index(max(tokens))
    return [(0, largest, 0), (1, last, largest)], [largest], last


# ------------------------------------------------------------------ prompts


def _with_counted(generator: torch.Generator) -> list[int]:
    """Different letters; the counted one stands at two places before the answer."""
    tokens = [0, *draw(generator, _LETTERS[1:], 6, _LONGEST)]
    for at in draw(generator, range(1, len(tokens) - 3), 2, 2):
        tokens[at] = _COUNTED
    return tokens


def _with_repetitions(generator: torch.Generator) -> list[int]:
    """Different letters; the last one stands at one or two places more."""
    tokens = [0, *draw(generator, _LETTERS, 5, _LONGEST)]
    for at in draw(generator, range(1, len(tokens) - 1), 1, 2):
        tokens[at] = tokens[-1]
    return tokens


def _numbers(generator: torch.Generator) -> list[int]:
    """Different numbers, the largest at any place but the last."""
    tokens = [0, *draw(generator, _NUMBERS[:9], 4, _LONGEST)]
    (at,) = draw(generator, range(1, len(tokens) - 1), 1, 1)
    tokens[at] = draw(generator, _LARGEST, 1, 1)[0]
    return tokens
