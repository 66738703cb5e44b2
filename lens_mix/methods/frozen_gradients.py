"""Gradient times input with patterns and norms frozen."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from lens_mix.lens.changed_backward import Rules
from lens_mix.methods.changed_gradients import ChangedGradients


@dataclasses.dataclass(frozen=True)
class FrozenGradients(ChangedGradients):
    """Gradient × input with attention patterns and norm scales frozen (Ali et al., ICML 2022).

    g · x per token, where x is the residual stream that enters the first block and g the gradient of the
    target F, read at the row's position, with the paper's two rules: attention patterns (AH-rule) and the
    scales that LayerNorm or RMSNorm divide by (LN-rule) are constants in the backward pass.

    With `activations="ratio"` an activation is z times act(z)/z with the factor held, as in DecompX, and each
    factor of a gated feed-forward gets half of the gradient. What is left of the model is linear, and a row
    conserves: with `readout="signed_sum"` at the embeddings it sums to F less what comes from no token
    (biases; what an encoder sends). `provenance["details"]` holds that per row as `constant_share`, and what
    is missing then, 0 but for rounding, as `conservation_gap`. A note says where it is not: the target has to
    be linear in the logits, and these in what the last norm gives.

    One map [1, query, key], signed, in the target's unit, a backward pass per row.

    Args:
        target, readout, after_blocks, activations, internal_batch_size: as `Gim`.

    Raises: as `Gim`.
    """

    name: ClassVar[str] = "frozen_gradients"
    citation: ClassVar[str] = "ali-etal-2022-xai"

    @property
    def rules(self) -> Rules:
        return Rules(scores=0.0, activations=self.activations)

    @property
    def conserves(self) -> bool:
        return self.activations == "ratio"
