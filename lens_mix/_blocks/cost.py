"""The cost of a method in forward passes: one estimate for warnings, lists of methods and the app.

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

# A run warns before a method that takes more forward passes than this for one prompt, beyond the clean pass.
_MANY = 20
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
        cheaper: What the user could choose instead; "" for fewer rows or layers, or a cheaper method.
    """

    base: float
    per_row: float = 0.0
    per_token: float = 0.0
    per_layer: float = 0.0
    bidirectional: float = 1.0
    cheaper: str = ""

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


def find_warnings(method: str, cost: Cost, blocks: Sequence[Block]) -> list[str | None]:
    """Return a warning for each prompt of a batch about many passes; None if a method takes few.

    Args:
        method: The label of the method.
        cost: Its cost, with its parameters.
        blocks: The blocks that it reads.
    """
    first, last = blocks[0], blocks[-1]
    tokens = (first.real_inputs if first.stack.is_joint else first.real_keys).sum(dim=1).tolist()
    rows = last.real_queries.sum(dim=1).tolist()
    is_causal = last.verification.causal
    sentences: list[str | None] = []
    for n_tokens, n_rows in zip(tokens, rows, strict=True):
        # The clean pass is what the user has asked for in any case.
        count = cost.passes(n_tokens, n_rows, len(blocks), len(last.stack), is_causal=is_causal) - 1
        growth, cheaper = _explain(cost, last, n_rows)
        advice = cost.cheaper or cheaper
        text = f"{method} takes about {count:,.0f} forward passes ({growth}); {advice}"
        sentences.append(text if count > _MANY else None)
    return sentences


def _explain(cost: Cost, block: Block, rows: int) -> tuple[str, str]:
    """Return what the passes are for, and what takes fewer."""
    row = find_usual_row(block)
    if cost.per_row:
        reason = f"about {cost.per_row:.2g} for each row"
        if rows > 1:
            return reason, f"queries=[{row}] makes the {'first' if row == 0 else 'last'} row alone"
    elif cost.per_layer:
        return f"about {cost.per_layer:.2g} for each layer", "layers=[-1] maps the last layer alone"
    else:
        reason = f"about {cost.per_token:.2g} for each token" if cost.per_token else "whatever the rows"
    single = COSTS["gim"].passes(1, 1, 1)
    return reason, f"gim with queries=[{row}] takes about {single:.0f}"
