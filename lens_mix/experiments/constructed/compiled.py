"""Provide RASP programs (Weiss et al., ICML 2021), compiled by Tracr (Lindner et al., NeurIPS 2023).

`benchmarks/compile_programs.py` made `tracr.npz` once, from programs of `tracr.compiler.lib`, with tracr-pypi
1.0.0 (Google DeepMind, Apache-2.0). Running the models needs no Tracr. They have one head per layer, no norm
and no causal mask, and token 0 is first in every prompt.

Tracr counts in one way: a head attends to the first token and to all tokens that are counted, and only the
first token has a value. The result is 1 / (1 + count). So a counted token moves no value, and still the
answer depends on it.
"""

from __future__ import annotations

import functools
import importlib.resources
from typing import Any

import numpy as np
import torch

from lens_mix.experiments.constructed.model import Cell, ConstructedModel, draw
from lens_mix.models import Weights

_LETTERS = range(1, 9)
_COUNTED = 1  # The letter whose share rasp_fraction returns.
_NUMBERS = range(1, 13)
_LARGEST = _NUMBERS[9:]  # Each prompt of rasp_sort has one of these.
_LONGEST = 7  # The first token is not counted.

_Truth = tuple[list[Cell], list[int], int]


def compiled() -> list[ConstructedModel]:
    """Return the models of the programs. The answer of each prompt is at one position."""
    return [
        ConstructedModel(
            "rasp_fraction",
            "returns the share of a certain letter among the tokens up to here",
            functools.partial(_load_weights, "fraction"),
            _draw_with_counted,
            _trace_fraction,
            lambda tokens, position: (
                [letter for letter in _LETTERS if letter != tokens[position]] if position else []
            ),
        ),
        ConstructedModel(
            "rasp_reverse",
            "returns the first letter at the last position: it counts the tokens to find the position",
            functools.partial(_load_weights, "reverse"),
            lambda generator: [0, *draw(generator, _LETTERS, 4, _LONGEST - 1)],
            lambda tokens: ([(0, len(tokens) - 1, 0), (3, len(tokens) - 1, 1)], [1], len(tokens) - 1),
            lambda tokens, position: (
                [letter for letter in _LETTERS if letter not in tokens] if position else []
            ),
        ),
        ConstructedModel(
            "rasp_histogram",
            "returns how often the last letter is in the prompt",
            functools.partial(_load_weights, "histogram"),
            _draw_with_repetitions,
            _trace_histogram,
            lambda tokens, position: (
                [letter for letter in _LETTERS if letter not in tokens] if position else []
            ),
        ),
        ConstructedModel(
            "rasp_sort",
            "sorts numbers: each position counts the smaller ones, and the last looks for the largest",
            functools.partial(_load_weights, "sort"),
            _draw_numbers,
            _trace_sort,
            lambda tokens, position: (
                [n for n in _NUMBERS if n < max(tokens) and n not in tokens] if position else []
            ),
        ),
    ]


def _load_weights(program: str) -> Weights:
    file = importlib.resources.files("lens_mix.experiments.constructed") / "tracr.npz"
    with file.open("rb") as stream, np.load(stream) as stored:
        names = [name for name in stored.files if name.startswith(f"{program}/")]
        tensors: dict[str, Any] = {name.split("/")[1]: torch.from_numpy(stored[name]) for name in names}
    return Weights(**tensors, causal=False)


# ------------------------------------------------------------------ routes of a prompt


def _trace_fraction(tokens: list[int]) -> _Truth:
    """Return the route to the answer, two positions before the end: it does not read the later tokens."""
    answer = len(tokens) - 3
    before = list(range(1, answer + 1))
    return [(1, answer, key) for key in before if tokens[key] == _COUNTED], before, answer


def _trace_histogram(tokens: list[int]) -> _Truth:
    last = len(tokens) - 1
    return (
        [(0, last, 0)],
        [position for position, letter in enumerate(tokens) if letter == tokens[last]],
        last,
    )


def _trace_sort(tokens: list[int]) -> _Truth:
    last, largest = len(tokens) - 1, tokens.index(max(tokens))
    return [(0, largest, 0), (1, last, largest)], [largest], last


# ------------------------------------------------------------------ prompts


def _draw_with_counted(generator: torch.Generator) -> list[int]:
    """Draw different letters, with the counted one at two positions before the answer."""
    tokens = [0, *draw(generator, _LETTERS[1:], 6, _LONGEST)]
    for position in draw(generator, range(1, len(tokens) - 3), 2, 2):
        tokens[position] = _COUNTED
    return tokens


def _draw_with_repetitions(generator: torch.Generator) -> list[int]:
    """Draw different letters, with the last one at one or two more positions."""
    tokens = [0, *draw(generator, _LETTERS, 5, _LONGEST)]
    for position in draw(generator, range(1, len(tokens) - 1), 1, 2):
        tokens[position] = tokens[-1]
    return tokens


def _draw_numbers(generator: torch.Generator) -> list[int]:
    """Draw different numbers, with the largest at any position but the last."""
    tokens = [0, *draw(generator, _NUMBERS[:9], 4, _LONGEST)]
    (position,) = draw(generator, range(1, len(tokens) - 1), 1, 1)
    tokens[position] = draw(generator, _LARGEST, 1, 1)[0]
    return tokens
