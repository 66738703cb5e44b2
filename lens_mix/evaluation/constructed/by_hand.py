"""Models built by hand: each shows one thing that a map may get right or wrong.

In all of them the answer stands at the last position: a token in a part of the residual stream that the
unembedding reads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from lens_mix.evaluation.constructed.model import Cell, ConstructedModel, Sample, Spare, draw
from lens_mix.evaluation.constructed.parts import (
    CONTEXT,
    TOKENS,
    WORDS,
    FeedForward,
    Head,
    assemble,
    look_back,
    look_for,
    look_for_copies,
)
from lens_mix.lens.from_weights import Norm

_KEYS = range(1, 5)  # what planted_key looks for, and what stands first in broadcast_sink
_FILLERS = range(5, TOKENS)
_SHORTEST, _LONGEST = 6, CONTEXT - 2  # without the first token and one that may be repeated at the end
_Route = Callable[[list[int]], tuple[list[Cell], list[int]]]


def by_hand() -> list[ConstructedModel]:
    """All of them; a norm or a feed-forward does not change the routes of those that have one."""
    copy, decoy, silent = Head(look_back(3)), look_back(1), Head(look_back(1), moved=())
    relay = [[Head(look_back(2))], [Head(look_back(1), source=0, target=1)]]
    split = look_back(3, first=0.9)
    return [
        _built("copy", "copies the token three positions back", [[copy]]),
        _built("copy_layernorm", "the same with LayerNorm", [[copy]], norm="LN"),
        _built("copy_feed_forward", "a feed-forward brings it on", [[copy]], read=[2], job=[(0, 2, 1.0)]),
        _built(
            "planted_key",
            "looks for the one key token in the prompt and copies it, wherever it stands",
            [[Head(look_for(_KEYS))]],
            _planted,
            sample=_with_key,
            spare=lambda tokens, at: (
                _unused(tokens, _KEYS if tokens[at] in _KEYS else _FILLERS) if at else []
            ),
        ),
        _induction("induction", "finds where the last token stood before, copies what followed it there"),
        _induction("induction_rmsnorm", "the same with RMSNorm", norm="RMS"),
        _induction(
            "induction_layernorm_feed_forward",
            "the same with LayerNorm and a feed-forward",
            read=[2],
            job=[None, (1, 2, 1.0)],
            norm="LN",
        ),
        _built(
            "relay", "copies the token three positions back by way of the last but one", relay, _relayed, [1]
        ),
        _built(
            "zero_value_heads",
            "copy, and two more heads that look one position back; their values are zero",
            [[copy, silent, silent]],
        ),
        _built(
            "cancelling_heads",
            "copy, and two more heads that move the last token but one, with opposite signs",
            [[copy, Head(decoy), Head(decoy, scale=-1.0)]],
        ),
        _built(
            "silent_sink",
            "copy with a tenth of its attention; the rest goes to the first token, whose value is zero",
            [[Head(split)]],
        ),
        _built(
            "broadcast_sink",
            "looks as silent_sink does, but copies the first token; all others have the value zero",
            [[Head(split, moved=_KEYS)]],
            lambda tokens: ([(0, len(tokens) - 1, 0)], [0]),
            sample=lambda generator: [_pick(generator, _KEYS), *_distinct(generator, _FILLERS)[1:]],
            spare=lambda tokens, at: _unused(tokens, _FILLERS if at else _KEYS),
        ),
        _built(
            "identity_blocks",
            "copy in the second of four layers; the others look one position back, with zero values",
            [[silent], [copy], [silent], [silent]],
            functools.partial(_copied, layer=1),
        ),
        _built(
            "erased_copy",
            "copy, and a head that moves the last token but one, which the block's feed-forward takes out",
            [[copy, Head(decoy, target=1)]],
            read=[0, 1],
            job=[(1, 1, -1.0)],
        ),
        _built(
            "unread_copy",
            "copy, and a head that moves the last token but one, twice as far, to where nothing reads it",
            [[copy, Head(decoy, target=1, scale=2.0)]],
        ),
    ]


# ------------------------------------------------------------------ what is true of a prompt


def _copied(tokens: list[int], layer: int = 0) -> tuple[list[Cell], list[int]]:
    last = len(tokens) - 1
    return [(layer, last, last - 3)], [last - 3]


def _relayed(tokens: list[int]) -> tuple[list[Cell], list[int]]:
    last = len(tokens) - 1
    return [(0, last - 1, last - 3), (1, last, last - 1)], [last - 3]


def _planted(tokens: list[int]) -> tuple[list[Cell], list[int]]:
    place = next(position for position, number in enumerate(tokens) if number in _KEYS)
    return [(0, len(tokens) - 1, place)], [place]


def _matched(tokens: list[int]) -> tuple[list[Cell], list[int]]:
    last, before = len(tokens) - 1, tokens.index(tokens[-1])
    return [(0, before + 1, before), (1, last, before + 1)], [before, before + 1, last]


# ------------------------------------------------------------------ prompts


def _pick(generator: torch.Generator, choices: Sequence[int]) -> int:
    return choices[int(torch.randint(len(choices), (), generator=generator, device="cpu"))]


def _distinct(generator: torch.Generator, choices: Sequence[int] = WORDS) -> list[int]:
    """Token 0, then others that are all different."""
    return [0, *draw(generator, choices, _SHORTEST, _LONGEST)]


def _with_key(generator: torch.Generator) -> list[int]:
    """Fillers with one key among them, neither first nor last."""
    tokens = _distinct(generator, _FILLERS)
    tokens[_pick(generator, range(1, len(tokens) - 1))] = _pick(generator, _KEYS)
    return tokens


def _repeating(generator: torch.Generator) -> list[int]:
    """Different tokens, and at the end one of them again, not the last but one."""
    tokens = _distinct(generator)
    return [*tokens, tokens[_pick(generator, range(1, len(tokens) - 1))]]


def _unused(tokens: list[int], choices: Iterable[int]) -> list[int]:
    return [number for number in choices if number not in tokens]


def _fresh(tokens: list[int], at: int) -> list[int]:
    """Tokens that the prompt does not hold; the first token stays."""
    return _unused(tokens, WORDS) if at else []


def _built(
    name: str,
    description: str,
    layers: Sequence[Sequence[Head]],
    route: _Route = _copied,
    read: Iterable[int] = (0,),
    job: Sequence[FeedForward | None] | None = None,
    norm: Norm | None = None,
    sample: Sample = _distinct,
    spare: Spare = _fresh,
) -> ConstructedModel:
    weights = functools.partial(assemble, layers, read, job, norm)
    return ConstructedModel(
        name, description, weights, sample, lambda tokens: (*route(tokens), len(tokens) - 1), spare
    )


def _induction(name: str, description: str, read: Iterable[int] = (1,), **options: Any) -> ConstructedModel:
    layers = [[Head(look_back(1))], [Head(look_for_copies(0), target=1)]]
    return _built(name, description, layers, _matched, read, sample=_repeating, **options)
