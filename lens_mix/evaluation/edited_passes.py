"""A target under edits: one prompt after its clean pass, run again in copies, each edited in its own way."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lens_mix import targets
from lens_mix.arguments import instance, real_tensor
from lens_mix.hooks import HookPair
from lens_mix.lens.batches import Batch
from lens_mix.lens.block import Block
from lens_mix.lens.changes import Change, Changes
from lens_mix.lens.clean_pass import clean_pass
from lens_mix.lens.copies import copies_within
from lens_mix.lens.head import row_at, unembedding_at
from lens_mix.lens.model_classes import TransformerLensModel
from lens_mix.lens.rows import Selection, read_selection
from lens_mix.method import Method
from lens_mix.methods import target_passes
from lens_mix.methods.target_passes import BoundTarget
from lens_mix.session import Passed, Session
from lens_mix.targets import Head, TargetLike

FLAT = 1e-6  # values of the target that differ by less, relative to its size, differ by rounding


@dataclasses.dataclass(frozen=True)
class _Edits(Method):
    """What is asked of a session: patterns, and hooks on values and patterns that are proven to act."""

    name: ClassVar[str] = "a scale that edits passes"  # as errors call it
    residual: ClassVar[float] = 0.0
    engines: ClassVar[tuple[str, ...]] = ("hooks",)
    records: ClassVar[frozenset[str]] = frozenset({"pattern"})

    # A method with a target is refused where logits, or z under hooks of the user's, can't be trusted.
    target: TargetLike = None


@dataclasses.dataclass(frozen=True)
class EditedPasses:
    """One prompt whose target is asked for under edits.

    Attributes:
        passed: the clean pass, proven and checked.
        bound: the target of this prompt.
        first_block: the stack's first block.
    """

    passed: Passed
    bound: BoundTarget
    first_block: Block

    @property
    def clean(self) -> float:
        """The target without edits."""
        return float(self.bound.clean[0])

    @property
    def length(self) -> int:
        """How many positions the prompt has in the mapped stack; they come first, padding behind them."""
        return len(self.passed.token_ids(0))

    @property
    def place(self) -> int | None:
        """The position of the mapped stack that the target reads; None: several, or of another stack."""
        if self.bound.positions is None or self.passed.session.lens.stack.name == "encoder":
            return None
        return int(self.bound.positions[0])

    def positions(self, asked: Selection | None) -> list[int]:
        """Positions of the prompt, ascending; by default those that the target's can see."""
        chosen = read_selection(asked, self.length, "positions")
        if chosen is not None:
            return sorted(chosen)
        causal = self.passed.proof.causal and self.place is not None
        return list(range(self.length if not causal else (self.place or 0) + 1))

    def chunks(self, count: int) -> Iterator[slice]:
        """Slices over `count` copies, as many at a time as `max_memory` allows."""
        session, positions = self.passed.session, self.passed.clean.real.shape[1]
        logits = 0
        if self.bound.reads_logits:
            logits = 1 if self.bound.positions is not None else self.first_block.logits_tokens.shape[1]
        size = copies_within(session.lens, session.max_memory, positions, logits=logits)
        return (slice(start, min(start + size, count)) for start in range(0, count, size))

    def batch(self, copies: int) -> Batch:
        """The prompt, as often."""
        return self.passed.clean.batch.select(self._rows(copies))

    def with_hooks(self, fwd_hooks: Sequence[HookPair], copies: int) -> Float[Tensor, " copy"]:
        """The target of as many copies of the clean input, with hooks in the blocks."""
        rows = self._rows(copies)
        return target_passes.values(self.first_block, self.bound, fwd_hooks, rows, gradients=False)

    def of_batch(
        self, batch: Batch, fwd_hooks: Sequence[HookPair] = (), changes: Sequence[Change] = ()
    ) -> Float[Tensor, " copy"]:
        """The target of edited copies of the input (`batch`), the whole model run anew."""
        with self.passed.session.lens.evaluation_mode(), Changes(list(changes)):
            output = self._output(batch, fwd_hooks)
        copies = [0] * len(output)
        # All are copies of one prompt: one part, without padding.
        ((_, _, rows),) = target_passes.parts(self.first_block, self.bound.target, output, copies)
        return target_passes.evaluate(self.bound.functions[0], rows)

    def _output(self, batch: Batch, fwd_hooks: Sequence[HookPair]) -> Tensor:
        lens, target = self.passed.session.lens, self.bound.target
        if not self.bound.reads_logits:
            last = lens.n_layers - 1
            resid = clean_pass(lens, batch, fwd_hooks, watched=()).calls[last].resid_post
            after = isinstance(target, Head) and target.after_final_norm
            return self.first_block.after_final_norm(resid) if after else resid
        place = self.bound.positions
        positions = None if place is None else place.expand(len(batch))
        with unembedding_at(lens.model, positions) as narrowed, lens.hooked(fwd_hooks):
            out = lens.forward(batch, return_type="logits")
        logits = out if torch.is_tensor(out) else out.logits
        if positions is None:
            return logits
        row = logits if narrowed else row_at(logits, positions)
        # The row that is read stands at every position, as a view: targets index as in the whole.
        return row.expand(-1, self.first_block.logits_real.shape[1], -1)

    def _rows(self, copies: int) -> Int[Tensor, " copy"]:
        return torch.zeros(copies, dtype=torch.long, device=self.passed.clean.real.device)


@contextlib.contextmanager
def edited_passes(
    model: TransformerLensModel,
    prompt: Any,
    target: TargetLike | None,
    *,
    stack: str | None = None,
    max_memory: int | None = None,
    prepend_bos: bool | None = None,
    attention_mask: Tensor | None = None,
    **inputs: Any,
) -> Iterator[EditedPasses]:
    """A prompt after its clean pass, with its target bound; the model is as before afterwards.

    Args:
        target: what is measured (`lens_mix.targets`, or any callable logits -> [copy]); None: the log
            probability of what the model predicts last.
        model, prompt, stack, max_memory, prepend_bos, attention_mask, inputs: as in `lm.run`.

    Raises:
        TypeError, ValueError: bad input, as in `lm.run`; a target that does not fit.
        UnsupportedModelError: hooks on values and patterns can't be trusted on this model.
    """
    target = targets.predicted(of="log_probability") if target is None else target
    session = Session(model, {"edits": _Edits(targets.as_target(target))}, stack=stack, max_memory=max_memory)
    read = session.read(prompt, prepend_bos=prepend_bos, attention_mask=attention_mask, inputs=inputs)
    with session.passed([read]) as passed:
        first = passed.blocks("edits")[0]
        yield EditedPasses(passed, target_passes.bind(first, target), first)


def read_rows(rows: Any, length: int) -> tuple[dict[str, Float[Tensor, " key"]], bool]:
    """Rows of scores over a prompt's positions by their names, in float64, and whether a single one came.

    Raises:
        TypeError, ValueError: neither a row nor rows by name; another number of keys; NaN or infinity.
    """
    single = not isinstance(rows, Mapping)
    named = {"row": rows} if single else dict(rows)
    if not named:
        raise ValueError("rows: expected at least one row by its name, got none")
    read = {}
    for name, row in named.items():
        instance("rows", name, str, "names of rows")
        tensor = real_tensor(f"rows[{name!r}]", row).to("cpu", torch.float64)
        if tuple(tensor.shape) != (length,):
            raise ValueError(
                f"rows[{name!r}]: expected one score per position of the prompt, [{length}], got shape "
                f"{list(tensor.shape)}"
            )
        if not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"rows[{name!r}]: expected finite scores, got NaN or infinity")
        read[name] = tensor
    return read, single
