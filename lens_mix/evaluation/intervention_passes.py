"""A target under edits: one prompt after its clean pass, run again in copies, each edited in its own way."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lens_mix import targets
from lens_mix.arguments import check_instance, check_real_tensor
from lens_mix.hooks import HookPair
from lens_mix.lens.block import Block
from lens_mix.lens.copies import count_copies
from lens_mix.lens.model_classes import TransformerLensModel
from lens_mix.lens.rows import Selection, read_selection
from lens_mix.method import Method
from lens_mix.methods.bound_target import BoundTarget, bind
from lens_mix.removal import Removal
from lens_mix.session import CheckedPass, Session
from lens_mix.targets import TargetLike

FLAT = 1e-6  # values of the target that differ by less, relative to its size, differ by rounding


@dataclasses.dataclass(frozen=True)
class _Edits(Method):
    """What is asked of a session: patterns, and hooks on values and patterns that are verified to act."""

    name: ClassVar[str] = "a scale that edits passes"  # as errors call it
    residual: ClassVar[float] = 0.0
    engines: ClassVar[tuple[str, ...]] = ("hooks",)
    records: ClassVar[frozenset[str]] = frozenset({"pattern"})

    # A method with a target is refused where logits, or z under hooks of the user's, can't be trusted.
    target: TargetLike | None = None


@dataclasses.dataclass(frozen=True)
class InterventionPasses:
    """One prompt whose target is asked for under edits.

    Attributes:
        checked: the clean pass, verified and checked.
        bound: the target of this prompt.
        first_block: the stack's first block.
    """

    checked: CheckedPass
    bound: BoundTarget
    first_block: Block

    @property
    def clean(self) -> float:
        """The target without edits."""
        return float(self.bound.clean[0])

    @property
    def length(self) -> int:
        """How many positions the prompt has in the mapped stack; they come first, padding behind them."""
        return len(self.checked.token_ids(0))

    @property
    def place(self) -> int | None:
        """The position of the mapped stack that the target reads; None: several, or of another stack."""
        return self.first_block.record.default_rows[0]

    def positions(self, asked: Selection | None) -> list[int]:
        """Positions of the prompt, ascending; by default those that the target's can see."""
        chosen = read_selection(asked, self.length, "positions")
        if chosen is not None:
            return sorted(chosen)
        if self.place is None or not self.checked.verification.causal:
            return list(range(self.length))
        return list(range(self.place + 1))

    @property
    def at_once(self) -> int:
        """How many copies `max_memory` allows at a time."""
        session, positions = self.checked.session, self.checked.clean.real.shape[1]
        logits = 0
        if self.bound.reads_logits:
            logits = 1 if self.bound.positions is not None else self.first_block.batch.logits_tokens.shape[1]
        return count_copies(session.lens, session.max_memory, positions, logits=logits)

    def values(
        self, copies: int, fwd_hooks: Sequence[HookPair] = (), **options: Any
    ) -> Float[Tensor, " copy"]:
        """Compute the target of as many copies of the prompt, with hooks in the blocks.

        `options`: as in `BoundTarget.values` (`batch`, the altered copies; `resid_pre` of the first block).
        """
        return self.bound.values(self._index(copies), fwd_hooks, **options)

    def values_without(self, removal: Removal, removed: Bool[Tensor, "group pos"]) -> Float[Tensor, " group"]:
        """Compute the target without each group of positions, the mean over the samples of a removal.

        Args:
            removal: how the positions of a group are removed, all at once.
            removed: for each group, its positions in the prompt.
        """
        block = self.first_block
        inputs = torch.zeros(len(removed), block.real.shape[1], dtype=torch.bool, device=block.real.device)
        inputs[:, block.real[0]] = removed.to(inputs.device)
        copies = removal.make_copies(block, self._index(len(inputs)), inputs)
        step, values = 1 if removal.runs_alone(block, inputs) else self.at_once, []
        for start in range(0, len(copies), step):
            chunk = copies.at(slice(start, start + step))
            with removal.changes(block, chunk) as (batch, hooks):
                values.append(self.values(len(chunk), hooks, batch=batch))
        by_group: Tensor = torch.cat(values).unflatten(0, (-1, copies.samples))
        return by_group.mean(1)

    def _index(self, copies: int) -> Int[Tensor, " copy"]:
        return torch.zeros(copies, dtype=torch.long, device=self.checked.clean.real.device)


@contextlib.contextmanager
def intervention_passes(
    model: TransformerLensModel,
    prompt: Any,
    target: TargetLike | None,
    *,
    part: str | None = None,
    max_memory: int | None = None,
    prepend_bos: bool | None = None,
    attention_mask: Tensor | None = None,
    **inputs: Any,
) -> Iterator[InterventionPasses]:
    """A prompt after its clean pass, with its target bound; the model is as before afterwards.

    Args:
        target: what is measured (`lens_mix.targets`, or any callable logits -> [copy]); None: the log
            probability of what the model predicts last.
        model, prompt, part, max_memory, prepend_bos, attention_mask, inputs: as in `lm.run`.

    Raises:
        TypeError, ValueError: bad input, as in `lm.run`; a target that does not fit.
        UnsupportedModelError: hooks on values and patterns can't be trusted on this model.
    """
    target = targets.predicted(of="log_probability") if target is None else target
    edits = {"edits": _Edits(targets.as_target(target))}
    session = Session(model, edits, part=part, max_memory=max_memory)
    read = session.read(prompt, prepend_bos=prepend_bos, attention_mask=attention_mask, inputs=inputs)
    with session.checked_pass([read]) as checked:
        first = checked.blocks("edits")[0]
        yield InterventionPasses(checked, bind([first], target), first)


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
        check_instance("rows", name, str, "names of rows")
        tensor = check_real_tensor(f"rows[{name!r}]", row).to("cpu", torch.float64)
        if tuple(tensor.shape) != (length,):
            raise ValueError(
                f"rows[{name!r}]: expected one score per position of the prompt, [{length}], got shape "
                f"{list(tensor.shape)}"
            )
        if not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"rows[{name!r}]: expected finite scores, got NaN or infinity")
        read[name] = tensor
    return read, single


def falling(scores: Float[Tensor, " place"], seed: int) -> Int[Tensor, " place"]:
    """Places by falling score; ties at random, alike for every row of as many scores."""
    # Shuffled first, then sorted stably: ties stay as they were drawn.
    shuffled = torch.randperm(len(scores), generator=torch.Generator().manual_seed(seed), device="cpu")
    return shuffled[scores[shuffled].argsort(descending=True, stable=True)]
