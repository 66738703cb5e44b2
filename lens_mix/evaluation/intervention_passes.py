"""The target of one prompt under interventions: copies of the prompt run again, each with its own change."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lens_mix import targets
from lens_mix._blocks.block import Block
from lens_mix._classes.model_classes import TransformerLensModel
from lens_mix._inputs.rows import Positions, read_selection
from lens_mix._passes.copies import count_copies
from lens_mix.arguments import check_instance, check_real_tensor
from lens_mix.hooks import HookPair
from lens_mix.method import Method
from lens_mix.methods.bound_target import BoundTarget, bind
from lens_mix.removal import Removal
from lens_mix.session import CheckedPass, Session
from lens_mix.targets import TargetLike

FLAT = 1e-6  # A smaller difference of the target, relative to its size, is due to rounding.


@dataclasses.dataclass(frozen=True)
class _Interventions(Method):
    """The requests to a session: verified hooks on values and patterns."""

    # Errors use this name.
    name: ClassVar[str] = "a scale that intervenes in passes"
    residual: ClassVar[float] = 0.0
    engines: ClassVar[tuple[str, ...]] = ("hooks",)

    # The session raises an error for a method with a target if logits, or z under user hooks, are unreliable.
    target: TargetLike | None = None


@dataclasses.dataclass(frozen=True)
class _InterventionsOnPatterns(_Interventions):
    """The same requests, and recorded patterns, whose memory grows with the square of the prompt."""

    records: ClassVar[frozenset[str]] = frozenset({"pattern"})


@dataclasses.dataclass(frozen=True)
class InterventionPasses:
    """One prompt whose target is computed under interventions.

    Attributes:
        checked: The clean pass, whose components are verified.
        bound: The target, bound to this prompt.
        first_block: The stack's first block.
    """

    checked: CheckedPass
    bound: BoundTarget
    first_block: Block

    @property
    def clean(self) -> float:
        """The target in the clean pass."""
        return float(self.bound.clean[0])

    @property
    def length(self) -> int:
        """The number of the prompt's positions in the mapped part; any padding follows them."""
        return len(self.checked.token_ids(0))

    @property
    def place(self) -> int | None:
        """The position of the mapped part that the target reads; None if several, or of another part."""
        return self.first_block.record.default_rows[0]

    @property
    def first_read(self) -> int | None:
        """The first position of the mapped part that the target reads; None if it is unknown."""
        rows = self.bound.rows_read
        return self.place if rows is None else int(rows[0, 0]) - self.bound.spans[0].start

    def positions(self, selection: Positions | None) -> list[int]:
        """Return the selected positions, ascending; None selects all that the target may attend to."""
        chosen = read_selection(selection, self.length, "positions", lambda: self.checked.tokens(0))
        if chosen is not None:
            return sorted(chosen)
        if self.place is None or not self.checked.verification.causal:
            return list(range(self.length))
        return list(range(self.place + 1))

    @property
    def at_once(self) -> int:
        """The number of copies that fit into `max_memory` at once."""
        session, positions = self.checked.session, self.checked.clean.real.shape[1]
        logits = 0
        if self.bound.reads_logits:
            logits = 1 if self.bound.positions is not None else self.first_block.batch.logits_tokens.shape[1]
            logits = logits if self.bound.rows_read is None else self.bound.rows_read.shape[1]
        return count_copies(session.lens, session.max_memory, positions, logits=logits)

    def values(
        self, copies: int, fwd_hooks: Sequence[HookPair] = (), **options: Any
    ) -> Float[Tensor, " copy"]:
        """Compute the target of copies of the prompt in a pass with hooks.

        Args:
            copies: The number of copies.
            fwd_hooks: TransformerLens hooks.
            **options: As in `BoundTarget.values` (`batch`, the changed copies; `resid_pre` of the first
                block).
        """
        return self.bound.values(self._index(copies), fwd_hooks, **options)

    def values_without(self, removal: Removal, removed: Bool[Tensor, "group pos"]) -> Float[Tensor, " group"]:
        """Compute the target without each group of positions, averaged over the samples of a removal.

        Args:
            removal: The removal of a group's positions.
            removed: For each group, its positions in the prompt.
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
    records_patterns: bool = False,
    part: str | None = None,
    max_memory: int | None = None,
    prepend_bos: bool | None = None,
    attention_mask: Tensor | None = None,
    **inputs: Any,
) -> Iterator[InterventionPasses]:
    """Yield a prompt after its clean pass, with its target bound; the model is unchanged afterwards.

    Args:
        model: As in `lm.run`.
        prompt: As in `lm.run`, a single one.
        target: The target (the text of a token, one of `lens_mix.targets`, or any callable logits -> [copy]);
            None for the log probability of the model's last prediction.
        records_patterns: Whether the clean pass records the patterns of all layers.
        part: As in `lm.run`.
        max_memory: As in `lm.run`.
        prepend_bos: As in `lm.run`.
        attention_mask: As in `lm.run`.
        **inputs: As in `lm.run`.

    Raises:
        TypeError, ValueError: An input is wrong, as in `lm.run`, or the target does not fit the prompt.
        UnsupportedModelError: Hooks on values and patterns can't be used on this model.
    """
    target = targets.predicted(of="log_probability") if target is None else target
    requests = _InterventionsOnPatterns if records_patterns else _Interventions
    methods = {"interventions": requests(targets.as_target(target))}
    session = Session(model, methods, part=part, max_memory=max_memory)
    read = session.read(prompt, prepend_bos=prepend_bos, attention_mask=attention_mask, inputs=inputs)
    with session.checked_pass([read]) as checked:
        first = checked.blocks("interventions")[0]
        yield InterventionPasses(checked, bind([first], target), first)


def read_rows(rows: Any, length: int) -> tuple[dict[str, Float[Tensor, " key"]], bool]:
    """Return name -> scores over a prompt's positions, in float64, and whether a single row was given.

    Raises:
        TypeError, ValueError: The argument is neither a row nor rows by name, has another number of keys, or
        has
            NaN or infinity.
    """
    is_single = not isinstance(rows, Mapping)
    named = {"row": rows} if is_single else dict(rows)
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
    return read, is_single


def falling(scores: Float[Tensor, " place"], seed: int) -> Int[Tensor, " place"]:
    """Return indices by descending score; ties are in a random order that depends on `seed` only."""
    # A stable sort of shuffled scores keeps ties in their shuffled order.
    shuffled = torch.randperm(len(scores), generator=torch.Generator().manual_seed(seed), device="cpu")
    return shuffled[scores[shuffled].argsort(descending=True, stable=True)]
