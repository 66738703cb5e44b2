"""The components of a model as a table: how each one is rebuilt, and what it is compared with.

The verification of a model evaluates every row on a short prompt (`lens_mix.lens.verification.verify`). The check of
a run's own prompts evaluates the rows that the asked methods need (`lens_mix.lens.verification.prompt_check`). Both use
`measured`, and nothing else rebuilds a component.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from lens_mix.hooks.mixing import mix
from lens_mix.lens.recorded import RecordedBlock
from lens_mix.lens.replay import relative_error

_CHUNK_ROWS = 512  # rows of all prompts that are rebuilt at once


class NotRebuilt(Exception):
    """Raised by a row of the table, with the reason why its component can't be rebuilt."""


@dataclasses.dataclass(frozen=True)
class ComponentError:
    """How well one component of one block was rebuilt.

    Attributes:
        layer: the block.
        part: the component's name.
        error: the largest relative error of a position; None if the component can't be rebuilt.
        tolerance: the largest accepted error in the model's dtype.
        note: why there is no error, or what was found.
    """

    layer: int
    part: str
    error: float | None
    tolerance: float
    note: str = ""

    @property
    def ok(self) -> bool:
        """Whether the component is verified."""
        return self.error is not None and self.error <= self.tolerance


class Recorded(Protocol):
    """What `measured` needs to know of the recorded tensors of a component."""

    @property
    def layer(self) -> int: ...
    @property
    def tolerance(self) -> float: ...
    @property
    def real_rows(self) -> Bool[Tensor, "batch row"]: ...


R = TypeVar("R", bound=Recorded)


@dataclasses.dataclass(frozen=True)
class Component(Generic[R]):
    """One row of the table.

    Attributes:
        name: the component's name, a column of `lens_mix.check`.
        formula: how it is rebuilt, in words.
        recorded: what that is compared with, in words.
        rebuild: computes it from the recorded tensors, [batch row ...]; None if one of them is missing, or if
            the anatomy has no formula for it. It raises `NotRebuilt` if shapes do not fit.
        compare_with: returns the recorded tensor, [batch row ...]; None if it was not recorded.
        needed_for: what can't run without it: "hooks" (which every method needs), "algebra", or a name that
            only some methods list in their `parts`.
        checked_for: the engine, or the name in `parts`, for which it is compared again on a run's own
            prompts; "": for none.
        claim: what is expected on these prompts, for the error.
    """

    name: str
    formula: str
    recorded: str
    rebuild: Callable[[R], Tensor | None]
    compare_with: Callable[[R], Tensor | None]
    needed_for: str
    checked_for: str = ""
    claim: str = "its parts to give its output on this prompt"

    def error(self, recorded: R) -> float | None:
        """Return the largest relative error of a row; None if there is nothing to compare."""
        rebuilt, expected = self.rebuild(recorded), self.compare_with(recorded)
        if rebuilt is None or expected is None:
            return None
        if rebuilt.shape != expected.shape:
            raise NotRebuilt(
                f"expected {self.recorded} of shape {list(rebuilt.shape)}, got {list(expected.shape)}"
            )
        return relative_error(rebuilt.flatten(2), expected.flatten(2), recorded.real_rows)


def measured(
    component: Component[RecordedBlock], block: RecordedBlock, places: Int[Tensor, "batch row"] | None = None
) -> ComponentError:
    """Return how well a component of a block is rebuilt.

    Args:
        component: a row of the table.
        block: what was recorded of the block, and what it is read as.
        places: which of the recorded rows to rebuild, so many at once that their memory is bounded; None: all
            rows, at once.
    """
    error, note = None, ""
    try:
        if places is None:
            error = component.error(block)
        else:
            chunks = places.split(max(1, _CHUNK_ROWS // len(places)), dim=1)
            error = _largest(component.error(block.at(chunk)) for chunk in chunks)
    except NotRebuilt as problem:
        note = str(problem)
    return ComponentError(block.layer, component.name, error, block.tolerance, note)


def _largest(errors: Iterable[float | None]) -> float | None:
    found = [error for error in errors if error is not None]
    # Python's own max may lose a NaN.
    return float(torch.tensor(found, dtype=torch.float64, device="cpu").max()) if found else None


# ------------------------------------------------------------------ how each component is rebuilt


def _mixed(block: RecordedBlock) -> Tensor:
    batch, heads, rows, keys = block.pattern.shape
    value, z = block.value, block.z
    fits = (
        value.ndim == 4
        and value.shape[:2] == (batch, keys)
        and heads % value.shape[2] == 0
        and z.numel() == batch * rows * heads * value.shape[3]
    )
    if not fits:
        shapes = f"value {list(value.shape)}, pattern {list(block.pattern.shape)}, z {list(z.shape)}"
        raise NotRebuilt(
            f"expected value [batch, key, head, d_head] and z [batch, query, head, d_head], got {shapes}"
        )
    return mix(block.pattern, value)


def _z(block: RecordedBlock) -> Tensor:
    # The z of a Bridge may be flat, as the output matrix reads it.
    return block.z.reshape(*block.z.shape[:2], block.pattern.shape[1], -1)


# ------------------------------------------------------------------ the table

MIXING = Component(
    "mixing",
    "pattern @ values",
    "the hook on z",
    _mixed,
    _z,
    needed_for="hooks",
    # The engine "hooks" needs no check: its replays run with whatever is on the model.
    checked_for="recorded",
    claim="z to be pattern @ values, up to a factor per head, at every position",
)

COMPONENTS: tuple[Component[RecordedBlock], ...] = (MIXING,)
