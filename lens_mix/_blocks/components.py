"""The components of a model as a table: how each one is rebuilt, and what it is compared with.

The verification of a model (`lens_mix._verification.verify`) rebuilds every component on a short prompt.
The check of a run's own prompts (`lens_mix._verification.prompt_check`) rebuilds the components that the
requested methods need. Both use `measure`, and nothing else rebuilds a component.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any, Generic, Protocol, TypeVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from lens_mix._blocks.recorded import RecordedBlock, RecordedEnd
from lens_mix._care.precision import relative_error
from lens_mix.hooks.mixing import mix

_CHUNK_ROWS = 512  # The number of rows, of all prompts together, that are rebuilt at once.


class _NotRebuilt(Exception):
    """Say why a component can't be rebuilt."""


@dataclasses.dataclass(frozen=True)
class ComponentError:
    """The result of rebuilding one component of one block.

    Attributes:
        layer: The block.
        component: Its name.
        error: The largest relative error of any row; None if the component can't be rebuilt.
        tolerance: The largest accepted error in the model's dtype.
        note: The reason if `error` is None, or what was found.
    """

    layer: int
    component: str
    error: float | None
    tolerance: float
    note: str = ""

    @property
    def ok(self) -> bool:
        """Whether the component is verified."""
        return self.error is not None and self.error <= self.tolerance


class _Recorded(Protocol):
    """The masks of the recorded rows and keys that are compared; None for all of them."""

    @property
    def real_rows(self) -> Bool[Tensor, "batch row"] | None: ...
    @property
    def real_keys(self) -> Bool[Tensor, "batch key"] | None: ...


R = TypeVar("R", bound=_Recorded)


@dataclasses.dataclass(frozen=True)
class Component(Generic[R]):
    """One entry of the table.

    Attributes:
        name: The component's name, a column of `lens_mix.check`.
        formula: The written formula by which it is rebuilt.
        recorded: The name of the tensor that the rebuilt component is compared with.
        rebuild: Computes it from the recorded tensors, [batch row ...]; None if one of them is missing, or if
            the anatomy has no formula for it. It raises `_NotRebuilt` if the shapes are unexpected.
        compare_with: Returns the recorded tensor, [batch row ...]; None if it was not recorded.
        needed_for: What can't run without it: "hooks" (which every method needs), "algebra", a name that
            only some methods list in their `needs`, or "next_norm" (the norm that reads a block's output).
        checked_for: The engine, or the name in `needs`, for which it is compared again on a run's own
            prompts; "" if it is not compared again.
        claim: The expectation on these prompts, for the error message.
        of_keys: Whether it has one vector per key instead of one per row.
        needs_replay: Whether rebuilding it runs the block again, with any anatomy.
    """

    name: str
    formula: str
    recorded: str
    rebuild: Callable[[R], Tensor | None]
    compare_with: Callable[[R], Tensor | None]
    needed_for: str
    checked_for: str = ""
    claim: str = "its components to give its output on this prompt"
    of_keys: bool = False
    needs_replay: bool = False

    def error(self, recorded: R) -> float | None:
        """Return the largest relative error of a row; None if there is nothing to compare."""
        rebuilt, expected = self.rebuild(recorded), self.compare_with(recorded)
        if rebuilt is None or expected is None:
            return None
        if rebuilt.shape != expected.shape:
            shapes = f"shape {list(rebuilt.shape)}, got {list(expected.shape)}"
            raise _NotRebuilt(f"expected {self.recorded} of {shapes}")
        return relative_error(rebuilt.flatten(2), expected.flatten(2), self._real(recorded))

    def _real(self, recorded: R) -> Bool[Tensor, "batch row"] | None:
        return recorded.real_keys if self.of_keys else recorded.real_rows


def measure(
    component: Component[RecordedBlock],
    block: RecordedBlock,
    places: Int[Tensor, "batch row"] | None = None,
) -> ComponentError:
    """Rebuild a component of a block, compare it, and return the result.

    Args:
        component: An entry of the table.
        block: The recorded tensors of the block, and its anatomy.
        places: Which of the recorded rows to rebuild, in chunks of bounded memory; None for all rows at once.
            A component of keys is rebuilt at every key.
    """
    error, note = None, ""
    try:
        if places is None or component.of_keys:
            error = component.error(block)
        else:
            chunks = places.split(max(1, _CHUNK_ROWS // len(places)), dim=1)
            error = _largest(component.error(block.at(chunk)) for chunk in chunks)
    except _NotRebuilt as problem:
        note = str(problem)
    return ComponentError(block.layer, component.name, error, block.tolerance, note)


def _largest(errors: Iterable[float | None]) -> float | None:
    found = [error for error in errors if error is not None]
    # The result of Python's own max with a NaN depends on the order.
    return float(torch.tensor(found, dtype=torch.float64, device="cpu").max()) if found else None


def measure_end(component: Component[RecordedEnd], end: RecordedEnd) -> float:
    """Return the largest relative error of any position; NaN if there is nothing to compare."""
    error = component.error(end)
    return math.nan if error is None else error


# ------------------------------------------------------------------ how each component is rebuilt


def _mixed(block: RecordedBlock) -> Tensor:
    _require_mixable(block)
    return mix(block.pattern, block.value)


def _require_mixable(block: RecordedBlock) -> None:
    batch, heads, rows, keys = block.pattern.shape
    value, z = block.value, block.z
    is_mixable = (
        value.ndim == 4
        and value.shape[:2] == (batch, keys)
        and heads % value.shape[2] == 0
        and z.numel() == batch * rows * heads * value.shape[3]
    )
    if not is_mixable:
        shapes = f"value {list(value.shape)}, pattern {list(block.pattern.shape)}, z {list(z.shape)}"
        raise _NotRebuilt(
            f"expected value [batch, key, head, d_head] and z [batch, query, head, d_head], got {shapes}"
        )


def _z(block: RecordedBlock) -> Tensor:
    return _by_head(block, block.z)


def _by_head(block: RecordedBlock, z: Tensor) -> Tensor:
    # A Bridge may flatten the heads of z, because its output matrix reads them so.
    return z.reshape(*z.shape[:2], block.pattern.shape[1], -1)


def _values(block: RecordedBlock) -> Tensor | None:
    x, norm, path = block.key_input, block.anatomy.attention_input, block.anatomy.value_path
    # The values of cross-attention are computed from the encoder's outputs, and no method needs that step.
    return None if x is None or path is None else path.values(x if norm is None else norm(x))


def _projected(block: RecordedBlock) -> Tensor | None:
    path = block.anatomy.value_path
    if path is None or block.output("attention_out") is None:
        return None
    return path.project(block.z.reshape(*block.z.shape[:2], len(path.W_O), -1))


def _feed_forward(block: RecordedBlock) -> Tensor | None:
    feed_forward = block.anatomy.feed_forward
    if block.anatomy.feed_forward_kind == "none":
        return torch.zeros_like(block.resid_pre)
    if feed_forward is None or block.output("feed_forward_out") is None or not block.pre_activations:
        return None
    return feed_forward.output(block.pre_activations)


def _feed_forward_out(block: RecordedBlock) -> Tensor | None:
    # A block without a feed-forward adds nothing in its place.
    is_absent = block.anatomy.feed_forward_kind == "none"
    return torch.zeros_like(block.resid_pre) if is_absent else block.output("feed_forward_out")


def _residual(block: RecordedBlock) -> Tensor | None:
    return _after(block, block.mid, block.output("feed_forward_out"))


def _after(block: RecordedBlock, mid: Tensor | None, feed_forward_out: Tensor | None) -> Tensor | None:
    """Return the block's output from the residual stream before the feed-forward, and the latter's output."""
    is_absent = block.anatomy.feed_forward_kind == "none"
    if mid is None or (feed_forward_out is None and not is_absent):
        return None
    return block.anatomy.after_feed_forward(mid, None if is_absent else feed_forward_out)


def _rebuilt_mid(block: RecordedBlock) -> Tensor | None:
    """Return the residual stream before the feed-forward's branch, from x, the pattern and the values."""
    anatomy, path, cross_out = block.anatomy, block.anatomy.value_path, block.output("cross_out")
    if path is None or (anatomy.cross and cross_out is None):
        return None
    heads, _, d_head = path.W_V.shape
    if block.value.shape[2:] != (heads, d_head):
        shape = list(block.value.shape)
        raise _NotRebuilt(
            f"expected values of {heads} heads with {d_head} dimensions as W_V gives, got {shape}"
        )
    return anatomy.after_attention(block.resid_pre, path.project(mix(block.pattern, block.value)), cross_out)


def _whole_block(block: RecordedBlock) -> Tensor | None:
    """Return the block's output, with the feed-forward's output as recorded, or else computed."""
    anatomy, out = block.anatomy, block.output("feed_forward_out")
    # Without a formula and without a recorded output, nothing gives the feed-forward's part of the sum.
    mid = None if out is None and not anatomy.is_written_down else _rebuilt_mid(block)
    if mid is not None and out is None and anatomy.feed_forward is not None:
        out = anatomy.feed_forward(anatomy.feed_forward_in(block.resid_pre, mid))
    return _after(block, mid, out)


def _z_of_replay_without_first_value(block: RecordedBlock) -> Tensor:
    from lens_mix.hooks.vectors import zero_values

    _require_mixable(block)
    out, z = block.replay_with([zero_values(block.layer, 0, attention=block.attention_template)])
    if z is None:
        raise _NotRebuilt("the hook on z never fired")
    # A hook that does not reach the output would make maps of zeros.
    if out is not None and bool((out == block.resid_post).all()) and _has_an_effect(block):
        raise _NotRebuilt("the intervention did not change the block's output")
    return _by_head(block, z)


def _mixed_without_first_value(block: RecordedBlock) -> Tensor:
    value = block.value.clone()
    value[:, 0] = 0
    return mix(block.pattern, value)


def _has_an_effect(block: RecordedBlock) -> bool:
    """Return whether zeroing the first value vector has to change the block's output.

    It need not if the output matrix is zero (an ablated block), or if the value vector is zero already.
    """
    attention_out = block.output("attention_out")
    writes = attention_out is None or bool((attention_out != attention_out[:, :1]).any())
    return writes and bool((_mixed_without_first_value(block) != _z(block)).any())


def _normed(end: RecordedEnd) -> Tensor:
    return end.resid_post if end.norm is None else end.norm(end.resid_post)


def _logits(end: RecordedEnd) -> Tensor | None:
    return None if end.unembedding is None else end.unembedding(end.resid_post)


# ------------------------------------------------------------------ the table

# A method lists these names in its `needs`. Most methods use the recorded values, which user hooks may have
# changed. Only a method that computes values from the block's input (DecompX) needs VALUE. A method that
# splits logits needs UNEMBEDDING.
VALUE = "value"
UNEMBEDDING = "unembedding"

MIXING = Component(
    "mixing",
    "pattern @ values",
    "the hook on z",
    _mixed,
    _z,
    needed_for="hooks",
    # The engine "hooks" needs no check, because its replays run with the user hooks of the model.
    checked_for="recorded",
    claim="z to be pattern @ values, up to a factor per head, at every position",
)

VALUES = Component(
    VALUE,
    "N1(x) W_V + b_V",
    "the hook on values",
    _values,
    lambda block: block.value,
    needed_for=VALUE,
    checked_for=VALUE,
    of_keys=True,
)

PROJECTION = Component(
    "projection",
    "z W_O + b_O",
    "the attention's output",
    _projected,
    lambda block: block.output("attention_out"),
    # A run's prompts are compared by BLOCK, which includes this step and the sums.
    needed_for="algebra",
)

FEED_FORWARD = Component(
    "feed_forward",
    "F(N2(mid))",
    "the feed-forward's output",
    _feed_forward,
    _feed_forward_out,
    needed_for="algebra",
)

RESIDUAL = Component(
    "residual",
    "the sums and norms around the recorded outputs",
    "the block's output",
    _residual,
    lambda block: block.resid_post,
    needed_for="algebra",
)

BLOCK = Component(
    "block",
    "all of it, from x, the pattern, the values and the feed-forward's output",
    "the block's output",
    _whole_block,
    lambda block: block.resid_post,
    needed_for="algebra",
    checked_for="algebra",
)

# This verifies that an intervention on values has the expected effect.
ZERO_VALUE = Component(
    "zero_value",
    "the hook on z in a replay with one value vector zeroed",
    "pattern @ values without that vector",
    _z_of_replay_without_first_value,
    _mixed_without_first_value,
    needed_for="hooks",
    needs_replay=True,
)

COMPONENTS: tuple[Component[RecordedBlock], ...] = (
    MIXING,
    VALUES,
    PROJECTION,
    FEED_FORWARD,
    RESIDUAL,
    BLOCK,
    ZERO_VALUE,
)

# These belong to no block. Methods that need the norm or the unembedding compare it on every prompt.
NEXT_NORM: Component[RecordedEnd] = Component(
    "next_norm",
    "the final norm's input, in a pass from the last block on",
    "the last block's output",
    lambda end: end.read,
    lambda end: end.resid_post,
    needed_for="next_norm",
)
FINAL_NORM = Component(
    "final_norm",
    "N(x), from the last residual stream",
    "the output of the model's own final norm",
    _normed,
    lambda end: end.normed,
    needed_for="next_norm",
    claim="its components to give its output",
)
LOGITS = Component(
    UNEMBEDDING,
    "N(x) W_U + b_U, from the last residual stream",
    "the logits",
    _logits,
    lambda end: end.logits,
    needed_for=UNEMBEDDING,
)

END_COMPONENTS: tuple[Component[RecordedEnd], ...] = (NEXT_NORM, FINAL_NORM, LOGITS)


def names_needed_for(need: str) -> tuple[str, ...]:
    """Return the names of a block's components that are needed for something (`Component.needed_for`)."""
    return tuple(each.name for each in COMPONENTS if each.needed_for == need)


def describe() -> str:
    """Return the table with one line of text per component."""
    table: tuple[Component[Any], ...] = (*COMPONENTS, *END_COMPONENTS)
    return "\n".join(f"    {each.name:<13} {each.formula}, against {each.recorded}" for each in table)


__doc__ = f"{__doc__}\n{describe()}\n"
