"""The number of passes beyond the clean pass: a run that needs many warns beforehand or shows a bar."""

from __future__ import annotations

import dataclasses
import math
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from tqdm.auto import tqdm

if TYPE_CHECKING:
    from lens_mix.lens.block import Block

# A run warns before a method that takes more forward passes than this for one prompt.
_MANY = 20

# This is the cost of a forward and backward pass for one row, in forward passes, if several rows share a
# pass. It is an estimate, for the warning before a long run.
GRADIENT_PASS = 1.5

# A row of a bidirectional model has twice as many keys as the mean row of a causal one, and the forward pass
# of an encoder has no unembedding of a large vocabulary. Together they make a row cost this many times more
# forward passes (DINOv2-small at 197 and 257 positions).
_BIDIRECTIONAL = 3

_LIBRARY = str(Path(__file__).resolve().parent.parent)

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Passes:
    """An estimate of the number of forward passes that a method takes beyond the clean pass.

    Attributes:
        counts: The number for each prompt of the batch.
        reason: What the passes are for.
        cheaper: What the user could choose instead.
    """

    counts: Sequence[float]
    reason: str
    cheaper: str

    def sentences(self, method: str) -> list[str | None]:
        """Return the warning for each prompt; None if it takes few passes."""
        return [
            f"{method} takes about {count:,.0f} forward passes ({self.reason}); {self.cheaper}"
            if count > _MANY
            else None
            for count in self.counts
        ]


def pair_passes(
    blocks: Sequence[Block],
    each: float,
    cheaper: str | None = None,
    *,
    every_row: bool = False,
) -> Passes | None:
    """Return an estimate of the passes of a closed form over pairs of positions; None if they are few.

    Args:
        blocks: The blocks that are mapped.
        each: The time of one row of a causal model in all blocks, in forward passes. It does not depend on
            the length of the prompt, because the time of a forward pass grows with the length too.
        cheaper: The text for `Passes.cheaper`; None: the one row that says most is cheaper.
        every_row: Whether the method computes all rows, even if the user wants only some.
    """
    each *= len(blocks) / len(blocks[-1].stack)
    each *= 1 if blocks[-1].verification.causal else _BIDIRECTIONAL
    rows = blocks[-1].real if every_row else blocks[-1].real_queries
    if each * rows.shape[1] <= _MANY:
        return None
    counts = [each * count for count in rows.sum(dim=1).tolist()]
    reason = "products with the weights for each pair of positions"
    return Passes(counts, reason, _advise_one_row(blocks) if cheaper is None else cheaper)


def row_passes(
    blocks: Sequence[Block],
    each: float,
    reason: str,
    cheaper: str = "lm.input_map takes four to fourteen, without signs",
) -> Passes:
    """Return about how many forward passes the asked rows take.

    Args:
        blocks: Those of the whole model.
        each: The forward passes of one row.
        reason: What they are for.
        cheaper: What to ask for instead of one row; instead of several rows, a single one is cheaper.
    """
    rows = blocks[-1].real_queries.sum(dim=1)
    if int(rows.max()) > 1:
        cheaper = _advise_one_row(blocks)
    return Passes([each * count for count in rows.tolist()], reason, cheaper)


def find_usual_row(block: Block) -> int:
    """Return the row to recommend: -1, the last one, or 0, that of [CLS] in a bidirectional model."""
    return -1 if block.verification.causal or block.stack.reads_target else 0


def _advise_one_row(blocks: Sequence[Block]) -> str:
    row = find_usual_row(blocks[-1])
    return f"queries=[{row}] makes the {'first' if row == 0 else 'last'} row alone"


@dataclasses.dataclass
class Effort:
    """The warnings and bars of one call, about the passes that its methods take.

    Attributes:
        progress: True: show bars. False: warn before many passes. None: neither.
        announced: The methods that have warned, so that each method warns only once in a call.
    """

    progress: bool | None = None
    announced: set[str] = dataclasses.field(default_factory=set)

    def announce(self, method: str, sentence: str) -> None:
        """Warn at the user's line of code, unless a bar will show the passes or the method has warned."""
        if self.progress is False and method not in self.announced:
            self.announced.add(method)
            warnings.warn(
                f"{sentence}. progress=True shows a bar instead of this warning", stacklevel=_level()
            )

    def at_once(self, fitting: int, count: int) -> int:
        """Return how many copies to run at once: fewer than possible if a bar shows the progress.

        Args:
            fitting: The number of copies that fit in memory.
            count: The number of all copies.
        """
        return min(fitting, max(8, math.ceil(count / 20))) if self.progress else fitting

    def bar(self, chunks: Iterable[T], total: int, unit: str) -> Iterator[T]:
        """Yield the chunks of a method's work, and show in a bar how many of `total` are done."""
        # A bar that is not shown is not made: Python drops what a signal's handler raises in its `__del__`.
        yield from tqdm(chunks, total=total, unit=unit, leave=False) if self.progress else chunks


def _level() -> int:
    """Return the `stacklevel` with which our caller's warning names the first line outside the library."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARY):
        frame, level = frame.f_back, level + 1
    return level
