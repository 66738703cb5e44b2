"""The cost of a method in forward passes: one estimate for lists of methods, the app and warnings.

The costs of the built-in methods are in `measured.json`, which benchmarks/facts.py generates from the
recorded times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from lens_mix.measured import recorded_costs

if TYPE_CHECKING:
    from lens_mix._blocks.block import Block

# What the time of a map grows with, beyond the time of a forward pass of the same prompt.
Growth = Literal["nothing", "rows", "tokens", "layers"]

# The prompt length for which the cost of all rows is shown; most costs were recorded at this length.
_SHOWN_TOKENS = 64


class Cost(NamedTuple):
    """Estimate the cost of a method in forward passes of the same prompt.

    It is an estimate, because the cost differs between models, by a factor of 2 and more.

    Attributes:
        base: The passes that every map needs, the clean pass included.
        per_row: The passes for each row that is computed, which is one position of the prompt.
        per_token: The passes for each token of the prompt, whichever rows are computed.
        per_layer: The passes for each layer that is computed.
        bidirectional: How many times more a row or a token takes in a bidirectional model, where it has twice
            as many keys as the mean row of a causal one.
    """

    base: float
    per_row: float = 0.0
    per_token: float = 0.0
    per_layer: float = 0.0
    bidirectional: float = 1.0

    def passes(
        self, tokens: int, rows: int, layers: int, n_layers: int | None = None, *, is_causal: bool = True
    ) -> float:
        """Return the estimated number of forward passes.

        Args:
            tokens: The number of tokens of the prompt.
            rows: The number of rows to compute.
            layers: The number of layers to compute.
            n_layers: The number of all layers, in which a row or a token takes what is recorded. None: all
                layers are computed.
            is_causal: Whether the model is causal.
        """
        share = 1.0 if n_layers is None else layers / n_layers
        share *= 1.0 if is_causal else self.bidirectional
        growing = self.per_row * rows + self.per_token * tokens
        return self.base + share * growing + self.per_layer * layers

    def times(self, factor: float) -> Cost:
        """Return the cost if everything beyond the base takes `factor` times as many passes."""
        return self._replace(
            per_row=factor * self.per_row,
            per_token=factor * self.per_token,
            per_layer=factor * self.per_layer,
        )

    def __str__(self) -> str:
        if self.per_layer:
            return f"about {self.per_layer:.2g} forward passes per layer"
        if self.per_token:
            return f"about {self.per_token:.2g} forward passes per token"
        if self.per_row:
            one, every = (self.passes(_SHOWN_TOKENS, rows, 1) for rows in (1, _SHOWN_TOKENS))
            return f"about {one:.2g} forward passes for one position, {every:.0f} for all {_SHOWN_TOKENS}"
        return "about 1 forward pass" if self.base == 1 else f"about {self.base:.2g} forward passes"


# The recorded costs of the built-in methods with their default parameters, and of `input_map`.
COSTS = {name: Cost(**cost) for name, cost in recorded_costs().items()}


def find_usual_row(block: Block) -> int:
    """Return the row to recommend: -1, the last one, or 0, that of [CLS] in a bidirectional model."""
    return -1 if block.verification.causal or block.stack.reads_target else 0


def describe_seconds(seconds: float) -> str:
    """Return a time as a text: "40 s", "5 min" or "2.5 h"."""
    if seconds < 10:
        return f"{seconds:.2g} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def count_passes(cost: Cost, blocks: Sequence[Block]) -> float:
    """Return the estimated passes for a method's map of each prompt of a batch, beyond the clean pass.

    Args:
        cost: The cost of the method, with its parameters.
        blocks: The blocks that it reads.
    """
    first, last = blocks[0], blocks[-1]
    tokens = (first.real_inputs if first.stack.is_joint else first.real_keys).sum(dim=1).tolist()
    rows = last.real_queries.sum(dim=1).tolist()
    is_causal = last.verification.causal
    counts = [
        cost.passes(n_tokens, n_rows, len(blocks), len(last.stack), is_causal=is_causal) - 1
        for n_tokens, n_rows in zip(tokens, rows, strict=True)
    ]
    return sum(counts) / len(counts)


def suggest_less(
    blocks: Sequence[Block], *, by_rows: bool, by_layers: bool, pass_seconds: float = 0.0
) -> str:
    """Return what takes less time than a method on these blocks.

    Args:
        blocks: The blocks that the method reads.
        by_rows: Whether fewer rows take less time.
        by_layers: Whether fewer layers do.
        pass_seconds: The time of a forward pass.
    """
    row = find_usual_row(blocks[-1])
    if by_rows and int(blocks[-1].real_queries.sum(dim=1).max()) > 1:
        return f"queries=[{row}] makes the {'first' if row == 0 else 'last'} row alone"
    if by_layers:
        return "layers=[-1] maps the last layer alone"
    if blocks[-1].clean.predictions is None:
        # A model without logits has nothing that gradients could explain by default.
        return "a shorter prompt takes less"
    gradient = COSTS["gim"].passes(1, 1, 1) * pass_seconds
    return f"gim with queries=[{row}] takes about {describe_seconds(gradient)}"
