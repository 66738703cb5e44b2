"""Make models by hand, each of which tests one thing that a map may get right or wrong.

In all of them the answer is at the last position. It is a token in a slot of the residual stream that the
unembedding reads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch

from lens_mix.experiments.constructed.assembly import (
    CONTEXT,
    TOKENS,
    WORDS,
    ConstructedFeedForward,
    ConstructedHead,
    assemble,
    look_back,
    look_for,
    look_for_copies,
)
from lens_mix.experiments.constructed.model import Cell, ConstructedModel, Sample, Spare, draw

_KEYS = range(1, 5)  # The tokens that planted_key looks for, and the first tokens of broadcast_sink.
_FILLERS = range(5, TOKENS)
_SHORTEST, _LONGEST = 6, CONTEXT - 2  # One position is for token 0, and one for a token that may be repeated.
_Route = Callable[[list[int]], tuple[list[Cell], list[int]]]


def by_hand() -> list[ConstructedModel]:
    """Return all of them. A norm or a feed-forward does not change the routes."""
    copy, decoy, silent = ConstructedHead(look_back(3)), look_back(1), ConstructedHead(look_back(1), moved=())
    relay = [[ConstructedHead(look_back(2))], [ConstructedHead(look_back(1), source=0, target=1)]]
    split = look_back(3, first=0.9)
    return [
        _build("copy", "copies the token three positions back", [[copy]]),
        _build("copy_layernorm", "the same with LayerNorm", [[copy]], norm="LN"),
        _build(
            "copy_feed_forward",
            "the same, and a feed-forward moves the copy",
            [[copy]],
            read=[2],
            job=[(0, 2, 1.0)],
        ),
        _build(
            "planted_key",
            "looks for the one key token in the prompt and copies it, at any position",
            [[ConstructedHead(look_for(_KEYS))]],
            _trace_planted,
            sample=_draw_with_key,
            spare=lambda tokens, position: (
                _list_unused(tokens, _KEYS if tokens[position] in _KEYS else _FILLERS) if position else []
            ),
        ),
        _build_induction(
            "induction", "finds an earlier copy of the last token, and copies the token after it"
        ),
        _build_induction("induction_rmsnorm", "the same with RMSNorm", norm="RMS"),
        _build_induction(
            "induction_layernorm_feed_forward",
            "the same with LayerNorm and a feed-forward",
            read=[2],
            job=[None, (1, 2, 1.0)],
            norm="LN",
        ),
        _build(
            "relay",
            "copies the token three positions back by way of the last but one",
            relay,
            _trace_relay,
            [1],
        ),
        _build(
            "zero_value_heads",
            "copy, and two more heads that look one position back; their values are zero",
            [[copy, silent, silent]],
        ),
        _build(
            "cancelling_heads",
            "copy, and two more heads that move the last token but one, with opposite signs",
            [[copy, ConstructedHead(decoy), ConstructedHead(decoy, scale=-1.0)]],
        ),
        _build(
            "silent_sink",
            "copy with a tenth of its attention; the rest goes to the first token, whose value is zero",
            [[ConstructedHead(split)]],
        ),
        _build(
            "broadcast_sink",
            "attends as silent_sink does, but copies the first token; all others have the value zero",
            [[ConstructedHead(split, moved=_KEYS)]],
            lambda tokens: ([(0, len(tokens) - 1, 0)], [0]),
            sample=lambda generator: [_pick(generator, _KEYS), *_draw_distinct(generator, _FILLERS)[1:]],
            spare=lambda tokens, position: _list_unused(tokens, _FILLERS if position else _KEYS),
        ),
        _build(
            "identity_blocks",
            "copy in the second of four layers; the others look one position back, with zero values",
            [[silent], [copy], [silent], [silent]],
            functools.partial(_trace_copy, layer=1),
        ),
        _build(
            "erased_copy",
            "copy, and a head that moves the last token but one, which the feed-forward then removes",
            [[copy, ConstructedHead(decoy, target=1)]],
            read=[0, 1],
            job=[(1, 1, -1.0)],
        ),
        _build(
            "unread_copy",
            "copy, and a head that moves the last token but one, twice as far, to a slot that nothing reads",
            [[copy, ConstructedHead(decoy, target=1, scale=2.0)]],
        ),
    ]


# ------------------------------------------------------------------ routes of a prompt


def _trace_copy(tokens: list[int], layer: int = 0) -> tuple[list[Cell], list[int]]:
    last = len(tokens) - 1
    return [(layer, last, last - 3)], [last - 3]


def _trace_relay(tokens: list[int]) -> tuple[list[Cell], list[int]]:
    last = len(tokens) - 1
    return [(0, last - 1, last - 3), (1, last, last - 1)], [last - 3]


def _trace_planted(tokens: list[int]) -> tuple[list[Cell], list[int]]:
    key_position = next(position for position, number in enumerate(tokens) if number in _KEYS)
    return [(0, len(tokens) - 1, key_position)], [key_position]


def _trace_match(tokens: list[int]) -> tuple[list[Cell], list[int]]:
    last, match = len(tokens) - 1, tokens.index(tokens[-1])
    return [(0, match + 1, match), (1, last, match + 1)], [match, match + 1, last]


# ------------------------------------------------------------------ prompts


def _pick(generator: torch.Generator, choices: Sequence[int]) -> int:
    return choices[int(torch.randint(len(choices), (), generator=generator, device="cpu"))]


def _draw_distinct(generator: torch.Generator, choices: Sequence[int] = WORDS) -> list[int]:
    """Draw token 0, then other tokens that are all different."""
    return [0, *draw(generator, choices, _SHORTEST, _LONGEST)]


def _draw_with_key(generator: torch.Generator) -> list[int]:
    """Draw fillers with one key among them, which is neither first nor last."""
    tokens = _draw_distinct(generator, _FILLERS)
    tokens[_pick(generator, range(1, len(tokens) - 1))] = _pick(generator, _KEYS)
    return tokens


def _draw_repeating(generator: torch.Generator) -> list[int]:
    """Draw different tokens, and at the end one of them again, except the last but one."""
    tokens = _draw_distinct(generator)
    return [*tokens, tokens[_pick(generator, range(1, len(tokens) - 1))]]


def _list_unused(tokens: list[int], choices: Iterable[int]) -> list[int]:
    return [number for number in choices if number not in tokens]


def _list_fresh(tokens: list[int], position: int) -> list[int]:
    """Return the tokens that are not in the prompt, or none for the first position."""
    return _list_unused(tokens, WORDS) if position else []


def _build(
    name: str,
    description: str,
    layers: Sequence[Sequence[ConstructedHead]],
    route: _Route = _trace_copy,
    read: Iterable[int] = (0,),
    job: Sequence[ConstructedFeedForward | None] | None = None,
    norm: Literal["LN", "RMS"] | None = None,
    sample: Sample = _draw_distinct,
    spare: Spare = _list_fresh,
) -> ConstructedModel:
    weights = functools.partial(assemble, layers, read, job, norm)
    return ConstructedModel(
        name, description, weights, sample, lambda tokens: (*route(tokens), len(tokens) - 1), spare
    )


def _build_induction(
    name: str, description: str, read: Iterable[int] = (1,), **options: Any
) -> ConstructedModel:
    layers = [[ConstructedHead(look_back(1))], [ConstructedHead(look_for_copies(0), target=1)]]
    return _build(name, description, layers, _trace_match, read, sample=_draw_repeating, **options)
