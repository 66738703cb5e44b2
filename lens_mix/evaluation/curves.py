"""Deletion and insertion curves of a row of an input map, and their area normalised per prompt."""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

from lens_mix.arguments import whole_number
from lens_mix.evaluation.intervention_passes import (
    FLAT,
    InterventionPasses,
    falling,
    intervention_passes,
    read_rows,
)
from lens_mix.evaluation.removal import Removal, as_removal
from lens_mix.lens.model_classes import TransformerLensModel
from lens_mix.lens.rows import Selection
from lens_mix.targets import TargetLike

if TYPE_CHECKING:
    import pandas

# A set of positions, as the bits of a number; what a function of it gives, for as many sets.
_Bits = Sequence[int]
_ValueOf = Callable[[_Bits], list[float]]


@dataclasses.dataclass(frozen=True)
class RemovalCurves:
    """What happens to the target as a row's positions are removed or restored in its order.

    Attributes:
        name: of the row.
        positions: the positions that are ranked, the most important first.
        deletion: the target with the i most important removed, i = 0 .. N.
        insertion: the target with all of them removed but the i most important, i = 0 .. N.
        lower, upper: least and greatest AOPC that any order has on this prompt; NaN where not asked for.
        exact: whether these are the true bounds (else a beam search's).
    """

    name: str
    positions: tuple[int, ...]
    deletion: tuple[float, ...]
    insertion: tuple[float, ...]
    lower: float
    upper: float
    exact: bool

    def aopc(self, curve: Literal["deletion", "insertion"] = "deletion") -> float:
        """Raw area over the perturbation curve, in the target's unit: no headline.

        (1 / N) Σ_{i=1..N} (F(x) − F(x without i positions)), the most important removed first
        (comprehensiveness) or last ("insertion", sufficiency). Its range is the model's and the prompt's own,
        so that it ranks neither models nor prompts (Edin et al., ACL 2025), and a mean over prompts is made
        of those that react most. Use `comprehensiveness` and `sufficiency`.
        """
        without = self.deletion[1:] if curve == "deletion" else self.insertion[:-1]
        return self.deletion[0] - sum(without) / len(without)

    @property
    def comprehensiveness(self) -> float:
        """Normalised AOPC of the deletion curve, 0 to 1; higher is better."""
        return self._normalised(self.aopc("deletion"))

    @property
    def sufficiency(self) -> float:
        """Normalised AOPC of the insertion curve, 0 to 1; LOWER is better: the best, kept, lose little."""
        return self._normalised(self.aopc("insertion"))

    def to_dataframe(self) -> pandas.DataFrame:
        """Columns row, count, deletion, insertion: one line per number of positions removed or restored."""
        from lens_mix.tables import Table

        lines = enumerate(zip(self.deletion, self.insertion, strict=True))
        return Table(
            [(self.name, count, *pair) for count, pair in lines],
            columns=["row", "count", "deletion", "insertion"],
        )

    def _normalised(self, aopc: float) -> float:
        scale = max(1e-12, *map(abs, self.deletion))
        # A comparison with NaN is false.
        if not self.upper - self.lower > FLAT * scale:
            return math.nan
        return (aopc - self.lower) / (self.upper - self.lower)


def removal_curves(
    model: TransformerLensModel,
    prompt: Any,
    rows: Any,
    *,
    removal: str | Removal = "sample",
    target: TargetLike | None = None,
    positions: Selection | None = None,
    exact: int = 8,
    beam: int = 5,
    seed: int = 0,
    **options: Any,
) -> Any:
    """Deletion and insertion curves of rows of input maps, normalised per prompt.

    Normalised AOPC (Edin et al., "Normalized AOPC", ACL 2025): (AOPC − lower) / (upper − lower), where lower
    and upper are the least and the greatest AOPC of all orders of the prompt's positions. With up to `exact`
    positions all 2^N sets are run and the bounds are true. With more, a beam search in each direction adds
    one position at a time and keeps the `beam` best sets: at most beam × N (N + 1) sets, each run once for
    all rows. Orders of the rows given count too, so that no value is outside 0 to 1.

    Args:
        model, prompt: as in `lm.run`; any TransformerLens model.
        rows: scores over all positions of the prompt [key], a row of an input map that explains the target;
            or several by name, which share the bounds and all passes.
        removal: "sample" (a token drawn at random), "drop" (the attention mask), "zero_values" (in every
            layer), or a `Removal` with its parameters: `ReplaceTokens(" the")`, `SampleTokens(samples=4)`.
        target: what is measured; None: the log probability of what the model predicts last. (The paper takes
            a probability: `lm.targets.predicted()`.)
        positions: which positions are ranked and removed; None: all that the target's position can see, with
            "drop" without that position itself.
        exact: most positions for exact bounds.
        beam: width of the search; 0: no bounds, normalised values are NaN.
        seed: ties of a row are broken at random, alike for every row.
        options: part, max_memory, prepend_bos, attention_mask and model inputs, as in `lm.run`.

    Returns:
        `RemovalCurves`; a dict of them by name for rows by name. With one position, or where removing changes
        nothing, normalised values are NaN.

    Raises:
        TypeError, ValueError: bad input, naming what was expected.
        UnsupportedModelError: the model can't be trusted; with "drop", it does not mask.
    """
    how = as_removal(removal)
    exact, beam = whole_number("exact", exact, 0, 20), whole_number("beam", beam, 0)  # 2^20: a million passes
    seed = whole_number("seed", seed, 0)
    with intervention_passes(model, prompt, target, **options) as passes:
        named, single = read_rows(rows, passes.length)
        places = _places(passes, how, positions)
        value_of = _Values(passes, how, places)
        orders = {name: falling(row[places], seed).tolist() for name, row in named.items()}
        paths = {name: _prefixes(order) for name, order in orders.items()}
        every = (1 << len(places)) - 1
        sets = {one for path in paths.values() for taken in path for one in (taken, every ^ taken)}
        value_of(sorted(sets))  # those of all rows at once: full batches, and each set once
        lower, upper, true = _bounds(value_of, len(places), paths.values(), passes.clean, exact, beam)
    curves = {}
    for name, path in paths.items():
        deletion, insertion = value_of(path), value_of([every ^ taken for taken in path])
        ranked = tuple(places[index] for index in orders[name])
        curves[name] = RemovalCurves(name, ranked, tuple(deletion), tuple(insertion), lower, upper, true)
    return curves["row"] if single else curves


class _Values:
    """The target by which of the ranked positions are removed; each set is run once."""

    def __init__(self, passes: InterventionPasses, removal: Removal, places: Sequence[int]) -> None:
        self._passes, self._removal, self._places = passes, removal, places
        self._known = {0: passes.clean}

    def __call__(self, sets: _Bits) -> list[float]:
        new = [taken for taken in dict.fromkeys(sets) if taken not in self._known]
        if new:
            removed = torch.zeros(len(new), self._passes.length, dtype=torch.bool, device="cpu")
            for row, taken in enumerate(new):
                removed[row, [place for bit, place in enumerate(self._places) if taken >> bit & 1]] = True
            values = self._removal.values(self._passes, removed)
            self._known.update(zip(new, values.double().tolist(), strict=True))
        return [self._known[taken] for taken in sets]


def _places(passes: InterventionPasses, removal: Removal, asked: Selection | None) -> list[int]:
    places = passes.positions(asked)
    if not removal.keeps_target:
        return places
    if asked is None and passes.place is not None:
        places = [place for place in places if place != passes.place]
    if not places or passes.place in places or len(places) == passes.length:
        raise ValueError(
            "positions: with 'drop' one position at least has to stay, as a query that sees nothing is not "
            "defined; expected some of the prompt's, without the one that the target reads, got "
            f"{places or 'none'} of {passes.length}"
        )
    return places


def _prefixes(order: Sequence[int]) -> list[int]:
    """The sets of the first 0, 1, 2, … of an order."""
    return list(itertools.accumulate((1 << index for index in order), operator.or_, initial=0))


def _bounds(
    value_of: _ValueOf, count: int, paths: Iterable[Sequence[int]], clean: float, exact: int, beam: int
) -> tuple[float, float, bool]:
    """Least and greatest AOPC, and whether they are exact."""
    if beam == 0 and count > exact:
        return math.nan, math.nan, False
    # The greatest area is over the lowest curve.
    sums = [_extreme_sum(value_of, count, best, None if count <= exact else beam) for best in (max, min)]
    every = (1 << count) - 1
    for path in paths:  # what the rows' own orders reach counts too: a beam may have missed it
        backwards = [every ^ taken for taken in path]
        sums += [sum(value_of(path[1:])), sum(value_of(backwards[:-1]))]
    return clean - max(sums) / count, clean - min(sums) / count, count <= exact


def _extreme_sum(value_of: _ValueOf, count: int, best: Callable[..., float], beam: int | None) -> float:
    """The greatest (`best` max) or least sum of the target along an order of removal.

    From every set that is kept, each position that is left is removed in turn; a set that is reached in
    several ways keeps the best of them. Without a `beam` all sets are kept, and the sum is exact.
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
