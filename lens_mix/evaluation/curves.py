"""Compute deletion and insertion curves of a row of an input map, and their area normalized per prompt."""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from lens_mix._classes.model_classes import TransformerLensModel
from lens_mix._inputs.rows import Positions
from lens_mix.arguments import check_whole_number
from lens_mix.evaluation.intervention_passes import (
    FLAT,
    InterventionPasses,
    falling,
    intervention_passes,
    read_rows,
)
from lens_mix.removal import Removal, as_removal
from lens_mix.targets import TargetLike

if TYPE_CHECKING:
    import pandas

# A set of positions, as the bits of a number, and a function that returns a value for each of several sets.
_Bits = Sequence[int]
_SetFunction = Callable[[_Bits], list[float]]


@dataclasses.dataclass(frozen=True)
class RemovalCurves:
    """The target as the positions of a row are removed or restored in the order of the row's scores.

    Attributes:
        name: The name of the row.
        positions: The ranked positions, the most important first.
        deletion: The target with the i most important positions removed, i = 0 .. N.
        insertion: The target with all ranked positions removed except the i most important, i = 0 .. N.
        lower: The smallest AOPC of any order on this prompt. NaN if it was not asked for.
        upper: The largest AOPC of any order on this prompt. NaN if it was not asked for.
        exact: Whether these are the true bounds. False: they are those that a beam search found.
    """

    name: str
    positions: tuple[int, ...]
    deletion: tuple[float, ...]
    insertion: tuple[float, ...]
    lower: float
    upper: float
    exact: bool

    def aopc(self, curve: Literal["deletion", "insertion"] = "deletion") -> float:
        """Return the raw area over the perturbation curve (AOPC), in the target's unit.

        (1 / N) Σ_{i=1..N} (F(x) − F(x without i positions)). The most important positions are removed first
        (comprehensiveness), or last for "insertion" (sufficiency). The range of the AOPC depends on the model
        and the prompt. So it ranks neither models nor prompts (Edin et al., ACL 2025), and the prompts that
        react most dominate its mean. `comprehensiveness` and `sufficiency` are normalized instead.

        Args:
            curve: "deletion" or "insertion".
        """
        without = self.deletion[1:] if curve == "deletion" else self.insertion[:-1]
        return self.deletion[0] - sum(without) / len(without)

    @property
    def comprehensiveness(self) -> float:
        """Return the normalized AOPC of the deletion curve, 0 to 1. Higher is better."""
        return self._normalize(self.aopc("deletion"))

    @property
    def sufficiency(self) -> float:
        """Return the normalized AOPC of the insertion curve, 0 to 1. LOWER is better: little is lost."""
        return self._normalize(self.aopc("insertion"))

    def to_dataframe(self) -> pandas.DataFrame:
        """Return a table with the columns row, count, deletion and insertion, one row per count."""
        from lens_mix.tables import Table

        lines = enumerate(zip(self.deletion, self.insertion, strict=True))
        return Table(
            [(self.name, count, *pair) for count, pair in lines],
            columns=["row", "count", "deletion", "insertion"],
        )

    def _normalize(self, aopc: float) -> float:
        scale = max(1e-12, *map(abs, self.deletion))
        # If a bound is NaN, the comparison is false and the result is NaN.
        if not self.upper - self.lower > FLAT * scale:
            return math.nan
        return (aopc - self.lower) / (self.upper - self.lower)


@overload
def removal_curves(
    model: TransformerLensModel, prompt: Any, rows: Mapping[str, Any], **options: Any
) -> dict[str, RemovalCurves]: ...
@overload
def removal_curves(model: TransformerLensModel, prompt: Any, rows: Any, **options: Any) -> RemovalCurves: ...
def removal_curves(
    model: TransformerLensModel,
    prompt: Any,
    rows: Any,
    *,
    removal: str | Removal = "sample",
    target: TargetLike | None = None,
    positions: Positions | None = None,
    exact: int = 8,
    beam: int = 5,
    seed: int = 0,
    **options: Any,
) -> RemovalCurves | dict[str, RemovalCurves]:
    """Compute deletion and insertion curves of rows of input maps, normalized per prompt.

        >>> prompt = "The Eiffel Tower is in"
        >>> row = lm.rollout(lm.run(model, prompt, "attention")).scores[-1, -1]
        >>> lm.evaluation.removal_curves(model, prompt, row, removal="mask")

    The normalized AOPC (Edin et al., "Normalized AOPC", ACL 2025) is (AOPC − lower) / (upper − lower), where
    lower and upper are the smallest and the largest AOPC of all orders of the prompt's positions. For up to
    `exact` positions all 2^N sets are run and the bounds are true. For more, a beam search in each direction
    adds one position at a time and keeps the `beam` best sets. It runs at most beam × N (N + 1) sets, each of
    them once for all rows. The orders of the given rows count too, so that no value is outside 0 to 1.

    Args:
        model: As in `lm.run`. Any TransformerLens model.
        prompt: As in `lm.run`.
        rows: Scores over all positions of the prompt [key], a row of an input map that explains the target.
            Or several rows by name, which share the bounds and all passes.
        removal: "sample" (a token drawn at random), "drop" (the tokens are deleted), "mask" (hidden in the
            attention alone), "zero_values" (in every layer), or a `Removal` with parameters:
            `ReplaceTokens(" the")`, `SampleTokens(samples=4)`.
        target: What is measured. None: the log probability of the prediction at the last position. (The paper
            uses a probability: `lm.targets.predicted()`.)
        positions: The positions that are ranked and removed, or texts. None: all that the target's position
            can see, and for "drop" without that position itself.
        exact: The largest number of positions for exact bounds.
        beam: The width of the search. 0: no bounds, and normalized values are NaN.
        seed: The seed that orders the ties of a row, the same for every row.
        **options: Part, max_memory, prepend_bos, attention_mask and model inputs, as in `lm.run`.

    Returns:
        A `RemovalCurves`, or a dict of them by name if `rows` has names. Normalized values are NaN for one
        position, or if removing positions does not change the target.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument is unknown, out of range, or does not fit the prompt.
        UnsupportedModelError: The verification of the model fails, or it lacks the mask that "drop" needs.
    """
    chosen_removal = as_removal(removal)
    exact, beam = (
        check_whole_number("exact", exact, 0, 20),
        check_whole_number("beam", beam, 0),
    )  # 2^20 sets: a million passes.
    seed = check_whole_number("seed", seed, 0)
    with intervention_passes(model, prompt, target, **options) as passes:
        named, single = read_rows(rows, passes.length)
        ranked_positions = _read_positions(passes, chosen_removal, positions)
        value_of = _CachedTarget(passes, chosen_removal, ranked_positions)
        orders = {name: falling(row[ranked_positions], seed).tolist() for name, row in named.items()}
        paths = {name: _list_prefixes(order) for name, order in orders.items()}
        every = (1 << len(ranked_positions)) - 1
        sets = {one for path in paths.values() for taken in path for one in (taken, every ^ taken)}
        value_of(sorted(sets))  # Running the sets of all rows together fills batches and runs each set once.
        lower, upper, true = _find_bounds(
            value_of, len(ranked_positions), paths.values(), passes.clean, exact, beam
        )
    curves = {}
    for name, path in paths.items():
        deletion, insertion = value_of(path), value_of([every ^ taken for taken in path])
        ranked = tuple(ranked_positions[index] for index in orders[name])
        curves[name] = RemovalCurves(name, ranked, tuple(deletion), tuple(insertion), lower, upper, true)
    return curves["row"] if single else curves


class _CachedTarget:
    """The target as a function of the removed positions. Each set is run only once."""

    def __init__(self, passes: InterventionPasses, removal: Removal, ranked_positions: Sequence[int]) -> None:
        self._passes, self._removal, self._ranked_positions = passes, removal, ranked_positions
        self._known = {0: passes.clean}

    def __call__(self, sets: _Bits) -> list[float]:
        new = [taken for taken in dict.fromkeys(sets) if taken not in self._known]
        if new:
            removed = torch.zeros(len(new), self._passes.length, dtype=torch.bool, device="cpu")
            for row, taken in enumerate(new):
                removed[
                    row, [position for bit, position in enumerate(self._ranked_positions) if taken >> bit & 1]
                ] = True
            values = self._passes.values_without(self._removal, removed)
            self._known.update(zip(new, values.double().tolist(), strict=True))
        return [self._known[taken] for taken in sets]


def _read_positions(passes: InterventionPasses, removal: Removal, asked: Positions | None) -> list[int]:
    ranked_positions = passes.positions(asked)
    if not removal.keeps_target:
        return ranked_positions
    if asked is None and passes.place is not None:
        ranked_positions = [position for position in ranked_positions if position != passes.place]
    if not ranked_positions or passes.place in ranked_positions or len(ranked_positions) == passes.length:
        raise ValueError(
            "positions: with 'drop' at least one position has to stay, because a query that sees nothing is "
            "not defined; expected some of the prompt's, without the one that the target reads, got "
            f"{ranked_positions or 'none'} of {passes.length}"
        )
    return ranked_positions


def _list_prefixes(order: Sequence[int]) -> list[int]:
    """Return the sets of the first 0, 1, 2, … positions of an order."""
    return list(itertools.accumulate((1 << index for index in order), operator.or_, initial=0))


def _find_bounds(
    value_of: _SetFunction, count: int, paths: Iterable[Sequence[int]], clean: float, exact: int, beam: int
) -> tuple[float, float, bool]:
    """Return the smallest and the largest AOPC, and whether they are exact."""
    if beam == 0 and count > exact:
        return math.nan, math.nan, False
    # A larger sum of the target is a smaller area over the curve.
    sums = [_find_extreme_sum(value_of, count, best, None if count <= exact else beam) for best in (max, min)]
    every = (1 << count) - 1
    for path in paths:  # A beam search may have missed the orders of the rows, so they count too.
        backwards = [every ^ taken for taken in path]
        sums += [sum(value_of(path[1:])), sum(value_of(backwards[:-1]))]
    return clean - max(sums) / count, clean - min(sums) / count, count <= exact


def _find_extreme_sum(
    value_of: _SetFunction, count: int, best: Callable[..., float], beam: int | None
) -> float:
    """Return the largest (`best` is max) or smallest (min) sum of the target along an order of removal.

    From every stored set, each remaining position is removed in turn. If a set is reached in several ways,
    the best sum is stored. Without a `beam` all sets are stored, and the sum is exact.
    """
    level = {0: 0.0}
    for _ in range(count):
        following: dict[int, float] = {}
        for taken, total in level.items():
            for bit in range(count):
                if not taken >> bit & 1:
                    reached = taken | 1 << bit
                    following[reached] = best(following.get(reached, total), total)
        values = value_of(list(following))
        sums = {taken: following[taken] + value for taken, value in zip(following, values, strict=True)}
        ranked = sorted(sums, key=lambda taken: sums[taken], reverse=best is max)
        level = {taken: sums[taken] for taken in ranked[:beam]}
    return level[(1 << count) - 1]
