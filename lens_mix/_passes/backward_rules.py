"""Define the rules of a backward pass as methods declare them; `changed_backward` applies them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal, Protocol

from lens_mix.hooks.base import HookPair

Activations = Literal["gradient", "ratio"]


@dataclasses.dataclass(frozen=True)
class AttentionRule:
    """How an attention is differentiated; with the defaults, as usual.

    Attributes:
        temperature: The temperature of the softmax that is differentiated.
        scores: The factor of the gradients of the scores, and so of queries and keys.
        values: The factor of the gradients of the values.
    """

    temperature: float = 1.0
    scores: float = 1.0
    values: float = 1.0


class BackwardRules(Protocol):
    """The rules of a backward pass; except in `PlainRules`, the scale of a norm is treated as constant."""

    @property
    def activations(self) -> Activations:
        """The activations' rule: "gradient", or "ratio" for `lens_mix.hooks.hold_activation_ratio`."""

    @property
    def gate_up(self) -> float:
        """The factor of the gradients of gate and up, the two factors of a gated feed-forward."""

    @property
    def attention_rule(self) -> AttentionRule:
        """The rule of attention, which the hooks apply to eager attention."""

    def interventions(self, layer: int, *, attention: str) -> Sequence[HookPair]:
        """Return the hooks on one attention module."""


@dataclasses.dataclass(frozen=True)
class PlainRules:
    """No changed rules: the backward pass is the model's own."""

    activations: Activations = "gradient"
    gate_up: float = 1.0
    attention_rule: AttentionRule = AttentionRule()

    def interventions(self, layer: int, *, attention: str) -> list[HookPair]:
        """Return no hooks."""
        return []
