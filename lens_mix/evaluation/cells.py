"""Faithfulness of a layer map without any rollout: keep its best cells, remove the rest, see what is left."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lens_mix.arguments import flags, instance, number, one_of, several, whole_number
from lens_mix.evaluation.intervention_passes import FLAT, InterventionPasses, intervention_passes
from lens_mix.evaluation.kept_cells import Job, RankedCells, Visible, kept_pattern
from lens_mix.hooks import freeze_pattern, must_fire
from lens_mix.hooks.mixing import tolerance
from lens_mix.lens.model_classes import TransformerLensModel, UnsupportedModelError
from lens_mix.maps import MixingMap
from lens_mix.targets import TargetLike

if TYPE_CHECKING:
    import pandas

Operator = Literal["zero", "mean"]

# MIB's fractions from 1 % on, then steps of 0.1: with cells, unlike edges, the target recovers there.
_FRACTIONS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


@dataclasses.dataclass(frozen=True)
class CellFaithfulness:
    """The target by the share of a layer map's cells that are kept, on one prompt (or pooled over several).

    Attributes:
        name: of the map.
        operator: what became of the other cells, "zero" or "mean".
        shares: the shares of all ranked cells that were kept, ascending from 0 to 1.
        values: the target with these.
        cells: how many cells were ranked.
    """

    name: str
    operator: str
    shares: tuple[float, ...]
    values: tuple[float, ...]
    cells: int

    @property
    def faithfulness(self) -> tuple[float, ...]:
        """f(k) = (F(k) − F(0)) / (F(1) − F(0)) at each share: 0 with none kept, 1 with all.

        NaN where removing all cells leaves the target as it is. Neither 0 nor 1 are bounds.
        """
        removed, whole = self.values[0], self.values[-1]
        if abs(whole - removed) <= FLAT * max(abs(whole), abs(removed)):
            return (math.nan,) * len(self.values)
        return tuple((value - removed) / (whole - removed) for value in self.values)

    @property
    def area(self) -> float:
        """∫₀¹ F(k) dk, in the target's unit: `cpr` before it is normalised, for intervals over prompts.

        The ends F(0) and F(1) are the prompt's and the same for every map, so that differences between two
        maps' areas are paired without dividing by what may be next to nothing.
        """
        return _area(self.values, self.shares)

    @property
    def distance(self) -> float:
        """∫₀¹ abs(F(1) − F(k)) dk, in the target's unit, likewise of `cmd`; lower is better."""
        return _area([abs(self.values[-1] - value) for value in self.values], self.shares)

    @property
    def cpr(self) -> float:
        """∫₀¹ f(k) dk, as MIB's circuit performance ratio: higher is better.

        Where F(1) is next to F(0) it is as large as may be: pool prompts (`pool_cells`) rather than average.
        """
        return _area(self.faithfulness, self.shares)

    @property
    def cmd(self) -> float:
        """∫₀¹ abs(1 − f(k)) dk, as MIB's circuit-model distance: lower is better, 0 the best."""
        return _area([abs(1 - one) for one in self.faithfulness], self.shares)

    def to_dataframe(self) -> pandas.DataFrame:
        """Columns map, operator, share, value, faithfulness."""
        from lens_mix.tables import Table

        lines = zip(self.shares, self.values, self.faithfulness, strict=True)
        return Table(
            [(self.name, self.operator, *line) for line in lines],
            columns=["map", "operator", "share", "value", "faithfulness"],
        )


def keep_cells(
    model: TransformerLensModel,
    prompt: Any,
    maps: Any,
    *,
    operator: Operator = "zero",
    fractions: Sequence[float] = _FRACTIONS,
    target: TargetLike | None = None,
    keep_diagonal: bool = True,
    seed: int = 0,
    **options: Any,
) -> Any:
    """Faithfulness of layer maps: the target when only the top share of their cells is kept.

    A cell (layer, query, key), of one head where the map has heads, is what the query takes from the key
    there: A_qk v_k. The cells of all layers are ranked together by the map's scores, as they are; where
    layers are scaled differently, that is part of what is measured. For each fraction one pass runs in which
    only the first so many cells are kept, in all layers at once. Patterns are frozen: A is the clean run's,
    no key gets more because another is gone, while the values are those of the edited run. What becomes of
    the other cells says the operator:

    - "zero": nothing is taken from them, A_qk becomes 0;
    - "mean": each is taken from the mean of the values that the query sees, Σ_j v_j / n, with its own A_qk:
      only where the weight lies is lost, not how much of it there is. (Equal to spreading the row's removed
      weight evenly over the keys that it sees.)

    Cells are those that the model's mask allows, whatever the map says of others. No cell is left out for not
    reaching the target: those of the last layer's other queries, say, are ranked like any.

    Args:
        model, prompt: as in `lm.run`.
        maps: a `MixingMap` of kind "layer" of this prompt, with all its rows, or several by name. Layers that
            a map does not hold stay as they are. Heads that are merged are removed together. Negative scores
            rank last: give their absolute values for what matters in either direction.
        operator: "zero" or "mean".
        fractions: shares of the ranked cells to keep, 0 to 1; 0 and 1 are added.
        target: what is measured; None: the log probability of what the model predicts last.
        keep_diagonal: cells (q, q) are always kept and not ranked, since maps that hold the residual put it
            there and the others don't; False: they are ranked like any.
        seed: ties are broken at random, alike for every map.
        options: part, max_memory, prepend_bos, attention_mask and model inputs, as in `lm.run`.

    Returns:
        `CellFaithfulness`; a dict of them by name for maps by name.

    Raises:
        TypeError, ValueError: bad input; a map of another prompt, of rows, of spans, or of kind "input".
        UnsupportedModelError: patterns and values don't make the model's attention, so that a cell can't be
            removed, or keeping all of them does not give the clean target.
    """
    one_of("operator", operator, ("zero", "mean"))
    flags(keep_diagonal=keep_diagonal)
    seed = whole_number("seed", seed, 0)
    listed = several("fractions", fractions, "numbers from 0 to 1")
    asked = sorted({0.0, 1.0, *(number("fractions", one, 0, 1) for one in listed)})
    named = {"map": maps} if isinstance(maps, MixingMap) else maps
    instance("maps", named, Mapping, "a MixingMap, or several by name")
    if not named:
        raise ValueError("maps: expected at least one map by its name, got none")
    with intervention_passes(model, prompt, target, **options) as passes:
        for name, mixing in named.items():
            _check_map(name, mixing, passes)
        visible = _visible(passes)
        ranked = {
            name: RankedCells.of(mixing, visible, keep_diagonal, seed) for name, mixing in named.items()
        }
        counts = {name: [round(one * cells.count) for one in asked] for name, cells in ranked.items()}
        jobs = [(cells, count) for name, cells in ranked.items() for count in counts[name]]
        by_map = _values(passes, jobs, visible, operator).view(len(ranked), len(asked)).tolist()
        curves = {}
        for (name, cells), values in zip(ranked.items(), by_map, strict=True):
            _check_whole(passes, values[-1])
            shares = [count / cells.count for count in counts[name]] if cells.count else asked
            curves[name] = CellFaithfulness(name, operator, tuple(shares), tuple(values), cells.count)
    return curves["map"] if isinstance(maps, MixingMap) else curves


def pool_cells(curves: Sequence[CellFaithfulness]) -> CellFaithfulness:
    """One map's curves on several prompts as one, the targets averaged BEFORE f is made, as MIB does.

    A prompt on which removing everything changes little can't blow up its mean, as it can the mean of `cpr`.
    Shares are averaged too: prompts of different lengths round them differently.

    Raises:
        TypeError, ValueError: no curves; of different maps, operators or numbers of fractions.
    """
    listed = several("curves", curves, "curves of one map", least=1, kind=CellFaithfulness)
    settings = {(one.name, one.operator, len(one.shares)) for one in listed}
    if len(settings) > 1:
        raise ValueError(
            "curves: expected those of one map with one operator and the same fractions, got "
            f"{sorted(settings)}"
        )
    shares = np.mean([one.shares for one in listed], axis=0).tolist()
    values = np.mean([one.values for one in listed], axis=0).tolist()
    cells = sum(one.cells for one in listed)
    return dataclasses.replace(listed[0], shares=tuple(shares), values=tuple(values), cells=cells)


def _area(values: Sequence[float], shares: Sequence[float]) -> float:
    """∫ over the shares, by trapezoids."""
    return float(
        torch.trapezoid(*(torch.tensor(one, dtype=torch.float64, device="cpu") for one in (values, shares)))
    )


# ------------------------------------------------------------------ ranks and passes


def _visible(passes: InterventionPasses) -> dict[int, Bool[Tensor, "query key"]]:
    """Per layer, the keys that each query of the prompt may see."""
    positions = slice(0, passes.length)
    return {
        layer: mask[0, positions, positions].cpu()
        for layer, mask in passes.checked.allowed_keys().by_layer.items()
    }


def _values(
    passes: InterventionPasses, jobs: Sequence[Job], visible: Visible, operator: str
) -> Float[Tensor, " job"]:
    """The target of each job: so many of a map's cells kept."""
    stack, step, values = passes.checked.session.lens.stack, passes.at_once, []
    layers = sorted({layer for cells, _ in jobs for layer in cells.ranks})
    for start in range(0, len(jobs), step):
        chunk, hooks = jobs[start : start + step], []
        for layer in layers:
            clean = passes.checked.clean.recorded[stack.hook_name("pattern", layer)]
            pattern, padding = clean[..., : passes.length, : passes.length], clean.shape[-1] - passes.length
            # In the pass, so that the copies' patterns of one layer live at a time.
            edit = functools.partial(
                kept_pattern,
                layer=layer,
                jobs=chunk,
                visible=visible[layer],
                operator=operator,
                padding=padding,
            )
            hooks.append(freeze_pattern(layer, pattern, edit=edit, attention=stack.attention_template))
        with must_fire(*hooks) as pairs:
            values.append(passes.values(len(chunk), pairs))
    return torch.cat(values).double()


def _check_map(name: str, given: Any, passes: InterventionPasses) -> None:
    lens, argument = passes.checked.session.lens, f"maps[{name!r}]"
    mixing: MixingMap = instance(argument, given, MixingMap, "a MixingMap")
    if mixing.kind != "layer" or mixing.key_tokens is not None:
        raise ValueError(
            f"{argument}: expected a map of single layers over the prompt's own tokens, got kind "
            f"{mixing.kind!r}{'' if mixing.key_tokens is None else ' with other keys'}"
        )
    mixing.require_every_row("cells", argument)
    heads = mixing.scores.shape[1] if mixing.has_heads else lens.n_heads
    size = (mixing.scores.shape[-1], heads, max(mixing.layer_labels) < lens.n_layers)
    if size != (passes.length, lens.n_heads, True):
        raise ValueError(
            f"{argument}: expected {passes.length} positions and layers of {lens.n_layers}, with "
            f"{lens.n_heads} heads if any, got scores of shape {list(mixing.scores.shape)} of layers "
            f"{mixing.layer_labels}; is it of this prompt?"
        )


def _check_whole(passes: InterventionPasses, whole: float) -> None:
    """Patterns that are put in again must give the model's own target."""
    lens = passes.checked.session.lens
    bound = 10 * tolerance(lens.dtype) * max(1.0, abs(passes.clean))
    if not abs(whole - passes.clean) <= bound:
        raise UnsupportedModelError(
            f"keep_cells: expected the clean target, {passes.clean:.6g}, with all cells kept, got "
            f"{whole:.6g}: patterns and values don't make this model's attention"
        )
