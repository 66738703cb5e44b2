"""Faithfulness of a layer map without any rollout: keep its best cells, remove the rest, see what is left."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lens_mix.arguments import flags, instance, number, one_of, several, whole_number
from lens_mix.evaluation.edited_passes import EditedPasses, edited_passes
from lens_mix.hooks import must_fire
from lens_mix.hooks.base import AttentionHook
from lens_mix.hooks.mixing import check_mixing, mix, tolerance
from lens_mix.lens.model_classes import UnsupportedModelError
from lens_mix.maps import MixingMap
from lens_mix.targets import TargetLike

if TYPE_CHECKING:
    import pandas

Operator = Literal["zero", "mean"]

# MIB's steps from 1 % on; even ones above a tenth, where cells (unlike edges of a circuit) bring the target back.
FRACTIONS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)

# Differences of the target that are smaller, relative to its size, are rounding.
_FLAT = 1e-6


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
        if abs(whole - removed) <= _FLAT * max(abs(whole), abs(removed)):
            return (math.nan,) * len(self.values)
        return tuple((value - removed) / (whole - removed) for value in self.values)

    @property
    def cpr(self) -> float:
        """∫₀¹ f(k) dk, as MIB's circuit performance ratio: higher is better.

        Random orders give what the model loses by itself; cells that hold the target down, left out, bring it
        above 1.
        """
        return _area(self.faithfulness, self.shares)

    @property
    def cmd(self) -> float:
        """∫₀¹ abs(1 − f(k)) dk, as MIB's circuit-model distance: lower is better, 0 the best."""
        return _area([abs(1 - one) for one in self.faithfulness], self.shares)

    def to_dataframe(self) -> pandas.DataFrame:
        """Columns map, operator, share, value, faithfulness."""
        import pandas as pd

        lines = zip(self.shares, self.values, self.faithfulness, strict=True)
        return pd.DataFrame(
            [(self.name, self.operator, *line) for line in lines],
            columns=["map", "operator", "share", "value", "faithfulness"],
        )


def keep_cells(
    model: Any,
    prompt: Any,
    maps: Any,
    *,
    operator: Operator = "zero",
    fractions: Sequence[float] = FRACTIONS,
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
        options: stack, max_memory, prepend_bos, attention_mask and model inputs, as in `lm.run`.

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
    with edited_passes(model, prompt, target, **options) as passes:
        for name, mixing in named.items():
            _check_map(name, mixing, passes)
        ranked = {name: _Ranked.of(mixing, passes, keep_diagonal, seed) for name, mixing in named.items()}
        counts = {name: [round(one * cells.count) for one in asked] for name, cells in ranked.items()}
        curves = {}
        for name, cells in ranked.items():
            values = _values(passes, cells, counts[name], operator)
            _check_whole(passes, values[-1])
            shares = tuple(count / cells.count for count in counts[name]) if cells.count else tuple(asked)
            curves[name] = CellFaithfulness(name, operator, shares, tuple(values), cells.count)
    return curves["map"] if isinstance(maps, MixingMap) else curves


def pool_cells(curves: Sequence[CellFaithfulness]) -> CellFaithfulness:
    """One map's curves on several prompts as one, the targets averaged BEFORE f is made, as MIB does.

    A prompt on which removing everything changes little can't blow up its mean, as it can the mean of `cpr`.
    Shares are averaged too: prompts of different lengths round them differently.

    Raises:
        TypeError, ValueError: no curves; of different maps, operators or numbers of fractions.
    """
    listed = several("curves", curves, "curves of one map", least=1, kind=CellFaithfulness)
    kinds = {(one.name, one.operator, len(one.shares)) for one in listed}
    if len(kinds) > 1:
        raise ValueError(
            f"curves: expected those of one map with one operator and the same fractions, got {sorted(kinds)}"
        )
    shares = np.mean([one.shares for one in listed], axis=0).tolist()
    values = np.mean([one.values for one in listed], axis=0).tolist()
    first = listed[0]
    return CellFaithfulness(
        first.name, first.operator, tuple(shares), tuple(values), sum(one.cells for one in listed)
    )


def _area(values: Sequence[float], shares: Sequence[float]) -> float:
    """∫ over the shares, by trapezoids."""
    return float(torch.trapezoid(*(torch.tensor(one, dtype=torch.float64) for one in (values, shares))))


# ------------------------------------------------------------------ ranks and passes


@dataclasses.dataclass(frozen=True)
class _Ranked:
    """Which cells of a map come first.

    Attributes:
        ranks: per layer, [head or 1, query, key]: 0 for the first cell, -1 for what is always kept, `count`
            for what the mask hides.
        visible: per layer, what each query sees.
        count: how many cells are ranked.
    """

    ranks: Mapping[int, Int[Tensor, "head query key"]]
    visible: Mapping[int, Bool[Tensor, "query key"]]
    count: int

    @classmethod
    def of(cls, mixing: MixingMap, passes: EditedPasses, keep_diagonal: bool, seed: int) -> _Ranked:
        layers = mixing.layer_labels
        allowed = passes.passed.allowed_keys().by_layer
        own = slice(0, passes.length)
        visible = torch.stack([allowed[layer][0, own, own] for layer in layers]).cpu()
        scores = mixing.scores.detach().cpu()
        scores = scores if mixing.has_heads else scores[:, None]
        diagonal = torch.eye(passes.length, dtype=torch.bool)
        taken = visible & ~diagonal if keep_diagonal else visible
        places = taken[:, None].expand_as(scores).flatten().nonzero()[:, 0]
        shuffled = places[torch.randperm(len(places), generator=torch.Generator().manual_seed(seed))]
        order = scores.flatten()[shuffled].argsort(descending=True, stable=True)
        ranks = torch.full((scores.numel(),), len(places))
        ranks[shuffled[order]] = torch.arange(len(places))
        ranks = ranks.view(scores.shape)
        if keep_diagonal:
            ranks = ranks.masked_fill(diagonal, -1)
        return cls(
            dict(zip(layers, ranks, strict=True)), dict(zip(layers, visible, strict=True)), len(places)
        )


class _KeepCells(AttentionHook):
    """z of one layer from the clean pattern with some cells kept, another number of them in each copy."""

    points = ("values", "pattern", "mixed")

    def __init__(
        self,
        layer: int,
        attention: str,
        clean: Float[Tensor, "1 head query key"],
        cells: _Ranked,
        kept: Int[Tensor, " copy"],
        operator: str,
    ) -> None:
        super().__init__(layer, attention)
        self._clean, self._operator, self._kept = clean, operator, kept.to(clean.device)
        beyond = clean.shape[-1] - cells.visible[layer].shape[-1]
        pad = (0, beyond, 0, beyond)
        # Padding is never seen, and what it reads is never asked for.
        self._ranks = torch.nn.functional.pad(cells.ranks[layer], pad, value=-1).to(clean.device)
        self._visible = torch.nn.functional.pad(cells.visible[layer], pad).to(clean)

    def on_mixed(self, mixed: Tensor, values: Tensor, pattern: Tensor | None) -> Tensor:
        if pattern is not None:
            check_mixing("keep_cells", mixed, pattern, values)
        kept = self._ranks < self._kept[:, None, None, None]
        edited = self._clean * kept
        if self._operator == "mean":
            removed = (self._clean * ~kept).sum(-1, keepdim=True)
            edited = edited + removed * (self._visible / self._visible.sum(-1, keepdim=True).clamp_min(1))
        self.calls += 1
        return mix(edited, values)


def _values(passes: EditedPasses, cells: _Ranked, counts: Sequence[int], operator: str) -> list[float]:
    """The target with so many of the cells kept."""
    stack = passes.passed.session.lens.stack
    template, values = stack.attention_template, []
    for part in passes.chunks(len(counts)):
        kept = torch.tensor(counts[part])
        pairs = []
        for layer in cells.ranks:
            clean = passes.passed.clean.recorded[stack.hook_name("pattern", layer)]
            pairs.append(_KeepCells(layer, template, clean, cells, kept, operator)._pair())
        with must_fire(*pairs) as hooks:
            values += passes.with_hooks(hooks, len(kept)).double().tolist()
    return values


def _check_map(name: str, mixing: Any, passes: EditedPasses) -> None:
    instance(f"maps[{name!r}]", mixing, MixingMap, "a MixingMap")
    mixing = cast(MixingMap, mixing)
    lens, argument = passes.passed.session.lens, f"maps[{name!r}]"
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


def _check_whole(passes: EditedPasses, whole: float) -> None:
    """Patterns that are put in again must give the model's own target."""
    lens = passes.passed.session.lens
    bound = 10 * tolerance(lens.dtype) * max(1.0, abs(passes.clean))
    if not abs(whole - passes.clean) <= bound:
        raise UnsupportedModelError(
            f"keep_cells: expected the clean target, {passes.clean:.6g}, with all cells kept, got "
            f"{whole:.6g}: patterns and values don't make this model's attention"
        )
