"""A prompt as tensors, and prompts of different lengths as one batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor

PaddingSide = Literal["left", "right"]

_TYPES = "token_type_ids"


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One prompt, without any padding.

    Attributes:
        tokens: what the (first) stack reads.
        target: what the decoder of an encoder-decoder reads; None elsewhere.
        inputs: further model inputs of the shape of `tokens`, by name.
        text: as it was given, for the record: a string, a pair of them, chat messages; None for tokens.
        notes: the notes that its maps carry.
    """

    tokens: Int[Tensor, " pos"]
    target: Int[Tensor, " target_pos"] | None = None
    inputs: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    text: Any = None
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Batch:
    """Prompts padded to one length.

    Attributes:
        prompts: the prompts in order.
        tokens, real: padded tokens and which of them are the prompts' own.
        target, target_real: the same for the decoder's side; None without a decoder.
        inputs: further model inputs, padded with zeros.
        hidden: keys of the mapped stack that no query sees, as if masked; positions are counted as if they
            were seen. None: none.
    """

    prompts: tuple[Prompt, ...]
    tokens: Int[Tensor, "batch pos"]
    real: Bool[Tensor, "batch pos"]
    target: Int[Tensor, "batch target_pos"] | None
    target_real: Bool[Tensor, "batch target_pos"] | None
    inputs: Mapping[str, Tensor]
    hidden: Bool[Tensor, "batch key"] | None = None

    def __len__(self) -> int:
        return len(self.prompts)

    def select(self, rows: Int[Tensor, " row"]) -> Batch:
        """Some of the prompts, repeats allowed, with the padding they have here."""
        prompts = tuple(self.prompts[row] for row in rows.tolist())
        target = None if self.target is None else self.target[rows]
        target_real = None if self.target_real is None else self.target_real[rows]
        inputs = {name: value[rows] for name, value in self.inputs.items()}
        hidden = None if self.hidden is None else self.hidden[rows]
        return Batch(prompts, self.tokens[rows], self.real[rows], target, target_real, inputs, hidden)

    def real_positions(self, part: str) -> Bool[Tensor, "batch pos"]:
        """Which positions of the given stack's queries are the prompts' own."""
        if part not in ("decoder", "cross", "joint"):
            return self.real
        if self.target_real is None:
            raise ValueError(f"part={part!r}: the prompts have no decoder side")
        return self.target_real

    def real_keys(self, part: str) -> Bool[Tensor, "batch key"]:
        """Which positions of the given stack's keys are the prompts' own."""
        return self.real if part == "cross" else self.real_positions(part)


def pad(prompts: Sequence[Prompt], pad_token: int, side: PaddingSide) -> Batch:
    """Prompts of different lengths as one batch, padded on one side."""
    sources, target, target_real, least = [prompt.tokens for prompt in prompts], None, None, 1
    if prompts[0].target is not None and all(len(source) == 1 for source in sources):
        # TransformerBridge repeats T5's position bias over copies of a source of one token, and then fails.
        least, side = 2, "right"
    tokens, real = _pad(sources, pad_token, side, least)
    if prompts[0].target is not None:
        # A decoder is causal: padding on its right cannot reach the prompt's own positions.
        target, target_real = _pad([p.target for p in prompts if p.target is not None], pad_token, "right")
    names = sorted(set().union(*(prompt.inputs for prompt in prompts)))
    if any(set(names) - set(prompt.inputs) - {_TYPES} for prompt in prompts):
        raise ValueError(f"model inputs: expected {names} for every prompt of a batch, some differ")
    # Beside pairs, a prompt without token types is a single text, whose types are 0.
    given = {name: [p.inputs.get(name, torch.zeros_like(p.tokens)) for p in prompts] for name in names}
    inputs = {name: _pad(rows, 0, side, least)[0] for name, rows in given.items()}
    return Batch(tuple(prompts), tokens, real, target, target_real, inputs)


def _pad(
    rows: Sequence[Tensor], value: int, side: PaddingSide, least: int = 1
) -> tuple[Tensor, Bool[Tensor, "batch pos"]]:
    longest = max(least, *(len(row) for row in rows))
    padded = rows[0].new_full((len(rows), longest), value)
    real = torch.zeros_like(padded, dtype=torch.bool)
    for index, row in enumerate(rows):
        span = slice(longest - len(row), longest) if side == "left" else slice(0, len(row))
        padded[index, span] = row
        real[index, span] = True
    return padded, real
