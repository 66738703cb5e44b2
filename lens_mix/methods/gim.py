"""Gradient interaction modifications."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from lens_mix.arguments import number
from lens_mix.lens.changed_backward import Rules
from lens_mix.methods.changed_gradients import ChangedGradients


@dataclasses.dataclass(frozen=True)
class Gim(ChangedGradients):
    """GIM, gradient interaction modifications (Edin et al., 2025, arXiv 2505.17630): g · x per token.

    x is the residual stream that enters the first block, g the gradient of the target F, read at the row's
    position, of a backward pass with three changed rules; the forward pass is the model's own.

    - The softmax of attention goes back at `temperature` T: with P_T = softmax(scores / T), the gradient by
      the scores is P_T ⊙ (g_P − Σ_k P_T g_P) (as in the authors' code, without a derivative's factor 1/T).
    - Gradients of queries and keys are times `queries_keys`, of values times `values`.
    - Norms go back at their scale, held: those of the blocks, on queries and keys, the last one.

    One map [1, query, key], signed, in the target's unit, a backward pass per row: ask for the rows that you
    need. Rows sum to nothing in particular. The authors' package subtracts the embedding of a space from x;
    here the baseline is 0. Where patterns hold an attention sink (gpt-oss), it counts as a key.

    Args:
        target: as `InputGradients`.
        readout: "signed_sum" Σ_d g_d x_d (the paper), or "absolute" Σ_d |g_d x_d|, 0 or more.
        after_blocks: read relevance off the embeddings and the residual stream after each of the first n
            blocks: each row is scaled to Σ|scores| = 1, then their mean is taken. A list names the streams
            (0: the embeddings). 0, or a list of one: that stream alone, not scaled.
        activations: "gradient" (the paper), or "ratio": act(z)/z, held, in place of act'(z), and half of the
            gradient to each factor of a gated feed-forward (needs feed-forwards that are written down).
        temperature: T, above 0.
        queries_keys, values: the factors; 0 or more.
        internal_batch_size: most rows in one pass; None: what `max_memory` allows.

    Raises:
        TypeError, ValueError: an unknown option; a target that does not fit. RuntimeError: inside
            torch.inference_mode. UnsupportedModelError: a rule that can't be put on this model.
    """

    name: ClassVar[str] = "gim"
    citation: ClassVar[str] = "edin-etal-2025-gim"

    temperature: float = 2.0
    queries_keys: float = 0.25
    values: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        number("temperature", self.temperature, 0, above=True)
        number("queries_keys", self.queries_keys, 0)
        number("values", self.values, 0)

    @property
    def rules(self) -> Rules:
        return Rules(self.temperature, self.queries_keys, self.values, self.activations)
