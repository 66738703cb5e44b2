"""Measure the faithfulness of a layer map without a rollout, by removing all but its highest cells."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lens_mix._classes.model_classes import TransformerLensModel, UnsupportedModelError
from lens_mix.arguments import (
    check_choice,
    check_flags,
    check_instance,
    check_items,
    check_number,
    check_whole_number,
)
from lens_mix.evaluation.intervention_passes import FLAT, InterventionPasses, intervention_passes
from lens_mix.evaluation.kept_cells import CellJob, RankedCells, Visible, kept_pattern
from lens_mix.hooks import freeze_pattern, must_fire
from lens_mix.hooks.mixing import tolerance
from lens_mix.maps import MixingMap
from lens_mix.targets import TargetLike

if TYPE_CHECKING:
    import pandas

Operator = Literal["zero", "mean"]

# MIB's fractions from 1 % on, then steps of 0.1: with cells, unlike edges, the target recovers there.
_FRACTIONS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


@dataclasses.dataclass(frozen=True)
class CellFaithfulness:
    """The target as a function of the share of a layer map's cells that are kept.

    It is that of one prompt, or pooled over several (`pool_cells`).

    Attributes:
        name: The name of the map.
        operator: What replaces the other cells, "zero" or "mean".
        shares: The shares of all ranked cells that were kept, ascending from 0 to 1.
        values: The target for each share.
        cells: The number of ranked cells.
    """

    name: str
    operator: str
    shares: tuple[float, ...]
    values: tuple[float, ...]
    cells: int

    @property
    def faithfulness(self) -> tuple[float, ...]:
        """Return f(k) = (F(k) − F(0)) / (F(1) − F(0)) at each share: 0 if no cell is kept, 1 if all are.

        It is NaN if removing all cells does not change the target. f may be below 0 and above 1.
        """
        removed, whole = self.values[0], self.values[-1]
        if abs(whole - removed) <= FLAT * max(abs(whole), abs(removed)):
            return (math.nan,) * len(self.values)
        return tuple((value - removed) / (whole - removed) for value in self.values)

    @property
    def area(self) -> float:
        """Return ∫₀¹ F(k) dk, in the target's unit: `cpr` without normalization, for intervals over prompts.

        The ends F(0) and F(1) belong to the prompt and are the same for every map. So paired differences of
        two maps' areas compare the maps without dividing by a number that may be almost 0.
        """
        return _area(self.values, self.shares)

    @property
    def distance(self) -> float:
        """Return ∫₀¹ abs(F(1) − F(k)) dk, in the target's unit: `cmd` without normalization."""
        return _area([abs(self.values[-1] - value) for value in self.values], self.shares)

    @property
    def cpr(self) -> float:
        """Return ∫₀¹ f(k) dk, MIB's circuit performance ratio (CPR). Higher is better.

        If F(1) is close to F(0), it can be arbitrarily large. So pool prompts (`pool_cells`) instead of
        averaging it.
        """
        return _area(self.faithfulness, self.shares)

    @property
    def cmd(self) -> float:
        """Return ∫₀¹ abs(1 − f(k)) dk, MIB's circuit-model distance (CMD). Lower is better, and 0 is best."""
        return _area([abs(1 - one) for one in self.faithfulness], self.shares)

    def to_dataframe(self) -> pandas.DataFrame:
        """Return a table with the columns map, operator, share, value and faithfulness."""
        from lens_mix.tables import Table

        lines = zip(self.shares, self.values, self.faithfulness, strict=True)
        return Table(
            [(self.name, self.operator, *line) for line in lines],
            columns=["map", "operator", "share", "value", "faithfulness"],
        )


@overload
def keep_cells(
    model: TransformerLensModel, prompt: Any, maps: MixingMap, **options: Any
) -> CellFaithfulness: ...
@overload
def keep_cells(
    model: TransformerLensModel, prompt: Any, maps: Mapping[str, MixingMap], **options: Any
) -> dict[str, CellFaithfulness]: ...
def keep_cells(
    model: TransformerLensModel,
    prompt: Any,
    maps: MixingMap | Mapping[str, MixingMap],
    *,
    operator: Operator = "zero",
    fractions: Sequence[float] = _FRACTIONS,
    target: TargetLike | None = None,
    keep_diagonal: bool = True,
    seed: int = 0,
    **options: Any,
) -> CellFaithfulness | dict[str, CellFaithfulness]:
    """Measure the faithfulness of layer maps: the target when only the highest cells are kept.

        >>> m = lm.run(model, "The Eiffel Tower is in the city of", "value_zeroing")
        >>> lm.evaluation.keep_cells(model, "The Eiffel Tower is in the city of", m).cpr

    A cell (layer, query, key) is what the query receives from the key there: A_qk v_k. If the map has heads,
    each head has cells of its own. The cells of all layers are ranked together by the map's raw scores, so
    the scale of each layer is part of what is measured. For each fraction there is one pass in which only the
    highest cells are kept, in all layers together. Patterns are those of the clean pass: removing a key does
    not give more weight to another. Values are those of the pass with interventions.

    `operator` says what replaces the other cells:

    - "zero": A_qk becomes 0.
    - "mean": v_k becomes the mean of the values that the query can see, Σ_j v_j / n, and A_qk stays. So the
      position of the weight is removed, and its amount stays. (This equals distributing the row's removed
      weight evenly over the keys that the query can see.)

    All cells that the model's mask allows are ranked, also those that cannot influence the target (the other
    queries of the last layer, for example).

    Args:
        model: As in `lm.run`.
        prompt: As in `lm.run`.
        maps: A layer map of this prompt with all its rows, or several by name. Layers that a map lacks stay
            unchanged. Heads that are merged in the map are removed together. Negative scores rank last: pass
            absolute values to rank what matters in either direction.
        operator: "zero" or "mean".
        fractions: The shares of the ranked cells to keep, 0 to 1. 0 and 1 are added.
        target: What is measured. None: the log probability of the prediction at the last position.
        keep_diagonal: Whether cells (q, q) are always kept and not ranked. Maps that contain the residual
            stream have it there, and other maps do not.
        seed: The seed that orders ties, the same for every map.
        **options: Part, max_memory, prepend_bos, attention_mask and model inputs, as in `lm.run`.

    Returns:
        A `CellFaithfulness`, or a dict of them by name if `maps` has names.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An option is unknown or out of range, or a map is of another prompt, lacks rows, has spans
            as keys, or is not a layer map.
        UnsupportedModelError: Patterns and values do not give the model's attention, so that a cell cannot be
            removed, or keeping all cells does not give the clean target.
    """
    check_choice("operator", operator, ("zero", "mean"))
    check_flags(keep_diagonal=keep_diagonal)
    seed = check_whole_number("seed", seed, 0)
    listed = check_items("fractions", fractions, "numbers from 0 to 1")
    asked = sorted({0.0, 1.0, *(check_number("fractions", one, 0, 1) for one in listed)})
    named = {"map": maps} if isinstance(maps, MixingMap) else maps
    check_instance("maps", named, Mapping, "a MixingMap, or several by name")
    if not named:
        raise ValueError("maps: expected at least one map by its name, got none")
    with intervention_passes(model, prompt, target, records_patterns=True, **options) as passes:
        for name, mixing in named.items():
            _check_map(name, mixing, passes)
        visible = _list_visible(passes)
        ranked = {
            name: RankedCells.of(mixing, visible, keep_diagonal, seed) for name, mixing in named.items()
        }
        counts = {name: [round(one * cells.count) for one in asked] for name, cells in ranked.items()}
        jobs = [(cells, count) for name, cells in ranked.items() for count in counts[name]]
        by_map = _compute_values(passes, jobs, visible, operator).view(len(ranked), len(asked)).tolist()
        curves = {}
        for (name, cells), values in zip(ranked.items(), by_map, strict=True):
            _check_all_kept(passes, values[-1])
            shares = [count / cells.count for count in counts[name]] if cells.count else asked
            curves[name] = CellFaithfulness(name, operator, tuple(shares), tuple(values), cells.count)
    return curves["map"] if isinstance(maps, MixingMap) else curves


def pool_cells(curves: Sequence[CellFaithfulness]) -> CellFaithfulness:
    """Pool one map's curves on several prompts: average the targets first and compute f from the means.

        >>> prompts = ["The Eiffel Tower is in the city of", "Anna lives in Rome. Anna lives in"]
        >>> maps = [lm.run(model, prompt, "value_zeroing") for prompt in prompts]
        >>> curves = [lm.evaluation.keep_cells(model, *each) for each in zip(prompts, maps)]
        >>> lm.evaluation.pool_cells(curves).cpr

    MIB does the same. If removing all cells changes little on a prompt, the mean of `cpr` can become
    arbitrarily large, and the pooled one cannot. Shares are averaged too, because prompts of different
    lengths round them differently.

    Args:
        curves: The curves of one map with one operator and the same fractions.

    Raises:
        TypeError: A curve is not a `CellFaithfulness`.
        ValueError: There are no curves, or they differ in map, operator or number of fractions.
    """
    listed: list[CellFaithfulness] = check_items(
        "curves", curves, "curves of one map", least=1, kind=CellFaithfulness
    )
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
    """Return the integral over the shares, by the trapezoidal rule."""
    return float(
        torch.trapezoid(*(torch.tensor(one, dtype=torch.float64, device="cpu") for one in (values, shares)))
    )


# ------------------------------------------------------------------ ranks and passes


def _list_visible(passes: InterventionPasses) -> dict[int, Bool[Tensor, "query key"]]:
    """Return, for each layer, the keys that each query of the prompt may see."""
    positions = slice(0, passes.length)
    return {
        layer: mask[0, positions, positions].cpu()
        for layer, mask in passes.checked.allowed_keys().by_layer.items()
    }


def _compute_values(
    passes: InterventionPasses, jobs: Sequence[CellJob], visible: Visible, operator: str
) -> Float[Tensor, " job"]:
    """Return the target of each job, which keeps some number of a map's cells."""
    stack, step, values = passes.checked.session.lens.stack, passes.at_once, []
    layers = sorted({layer for cells, _ in jobs for layer in cells.ranks})
    for start in range(0, len(jobs), step):
        chunk, hooks = jobs[start : start + step], []
        for layer in layers:
            clean = passes.checked.clean.recorded[stack.hook_name("pattern", layer)]
            pattern, padding = clean[..., : passes.length, : passes.length], clean.shape[-1] - passes.length
            # The hook makes the patterns of the copies, so that only one layer's are in memory.
            make_pattern = functools.partial(
                kept_pattern,
                layer=layer,
                jobs=chunk,
                visible=visible[layer],
                operator=operator,
                padding=padding,
            )
            hooks.append(
                freeze_pattern(layer, pattern, edit=make_pattern, attention=stack.attention_template)
            )
        with must_fire(*hooks) as pairs:
            values.append(passes.values(len(chunk), pairs))
    return torch.cat(values).double()


def _check_map(name: str, given: Any, passes: InterventionPasses) -> None:
    lens, argument = passes.checked.session.lens, f"maps[{name!r}]"
    mixing: MixingMap = check_instance(argument, given, MixingMap, "a MixingMap")
    if mixing.kind != "layer" or not mixing.keys_are_tokens:
        raise ValueError(
            f"{argument}: expected a map of single layers over the prompt's own tokens, got kind "
            f"{mixing.kind!r}{'' if mixing.keys_are_tokens else ' with other keys'}"
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


def _check_all_kept(passes: InterventionPasses, whole: float) -> None:
    """Raise an error if hooks with the clean patterns do not give the model's own target."""
    lens = passes.checked.session.lens
    bound = 10 * tolerance(lens.dtype) * max(1.0, abs(passes.clean))
    if not abs(whole - passes.clean) <= bound:
        raise UnsupportedModelError(
            f"keep_cells: expected the clean target, {passes.clean:.6g}, with all cells kept, got "
            f"{whole:.6g}: patterns and values do not give this model's attention"
        )
