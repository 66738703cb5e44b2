"""What a map is scored on: the truth about a row, tokens taken out in its order, cells that are kept."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix.arguments import several, whole_number
from lens_mix.evaluation.agreement import (
    average_precision,
    mass_accuracy,
    partial_spearman,
    reciprocal_rank,
    spearman,
    top_k_overlap,
)
from lens_mix.evaluation.cells import Operator, keep_cells
from lens_mix.evaluation.curves import removal_curves
from lens_mix.evaluation.removal import Removal
from lens_mix.lens.model_classes import TransformerLensModel
from lens_mix.methods.occlusion import Occlusion
from lens_mix.runner import run
from lens_mix.targets import TargetLike


@dataclasses.dataclass(frozen=True)
class Case:
    """One prompt and the row that is scored.

    Attributes:
        prompt: as `lm.run` takes it.
        query: position of the row; negative from the end.
        relevant: positions of the tokens that decide, where that is known.
        target: what is explained there; None: what the model predicts.
    """

    prompt: Any
    query: int = -1
    relevant: tuple[int, ...] = ()
    target: TargetLike | None = None


class Task(abc.ABC):
    """Cases, and how a map's row is scored on each.

    Class attributes:
        name: in tables.
        metrics: the names of its scores; higher is better.
        layer_maps: whether layer maps are scored as they are, and no input maps.
    """

    name: ClassVar[str]
    layer_maps: ClassVar[bool] = False
    metrics: ClassVar[tuple[str, ...]]

    @abc.abstractmethod
    def cases(self, model: TransformerLensModel) -> list[Case]:
        """The prompts, as the model reads them."""

    @abc.abstractmethod
    def scores(
        self, model: TransformerLensModel, case: Case, candidates: Mapping[str, Any], **options: Any
    ) -> dict[str, dict[str, float]]:
        """The scores of each candidate by metric; NaN where undefined.

        Args:
            model: the model.
            case: one of `cases`.
            candidates: by name, rows [key] of input maps for the case's query, or with `layer_maps` the maps.
            options: as in `lm.run`.
        """

    def describe(self) -> dict[str, Any]:
        """The task in plain words and numbers, for records."""
        return {"task": self.name}


class RowTask(Task):
    """A task that compares each row with one truth about the case."""

    @abc.abstractmethod
    def truth(self, model: TransformerLensModel, case: Case, **options: Any) -> Float[Tensor, " key"]:
        """What the row is compared with, a number per key, NaN where it is not; `options` as in `lm.run`."""

    @abc.abstractmethod
    def score(self, row: Float[Tensor, " key"], truth: Float[Tensor, " key"], query: int) -> dict[str, float]:
        """The scores of one row, by metric; NaN where undefined."""

    def scores(
        self, model: TransformerLensModel, case: Case, candidates: Mapping[str, Any], **options: Any
    ) -> dict[str, dict[str, float]]:
        truth = self.truth(model, case, **options).cpu()
        return {name: self.score(row.cpu(), truth, case.query) for name, row in candidates.items()}


@dataclasses.dataclass(frozen=True)
class Importance(RowTask):
    """Does the map order the tokens as taking them out does?

    The truth is `Occlusion` of the model's own prediction at the query, mean of the sizes; a map's row is
    taken by size too. Scored are the keys that the query may see but the left-out ones: Spearman, the same
    with the position partialled out (ranks), and whether the strongest source but the query is the same.

    Args:
        prompts: as `lm.run` takes them.
        occlusion: how tokens are taken out.
        leave_out: positions that are not scored; by default the first (a causal model's sink).
        query: position of the row.
    """

    name: ClassVar[str] = "importance"
    metrics: ClassVar[tuple[str, ...]] = ("partial_spearman", "spearman", "top_1")

    prompts: Sequence[Any]
    occlusion: Occlusion = dataclasses.field(default_factory=lambda: Occlusion(measure="absolute"))
    leave_out: tuple[int, ...] = (0,)
    query: int = -1

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompts", several("prompts", self.prompts, "several prompts", least=1))

    def cases(self, model: TransformerLensModel) -> list[Case]:
        return [Case(prompt, whole_number("query", self.query)) for prompt in self.prompts]

    def truth(self, model: TransformerLensModel, case: Case, **options: Any) -> Float[Tensor, " key"]:
        mixing_map = run(model, case.prompt, self.occlusion, queries=[case.query], progress=None, **options)
        row = mixing_map.scores[0, 0].double()
        hidden = ~mixing_map.visible()[0, 0].to(row.device)
        hidden[[position for position in self.leave_out if -len(row) <= position < len(row)]] = True
        return row.masked_fill(hidden, torch.nan)

    def score(self, row: Float[Tensor, " key"], truth: Float[Tensor, " key"], query: int) -> dict[str, float]:
        scored = ~truth.isnan()
        positions = torch.arange(len(truth), dtype=torch.float64, device="cpu")
        others = scored & (positions != query % len(truth))
        ours, theirs = row.abs(), truth.abs()
        beyond = partial_spearman(ours[scored], theirs[scored], positions[scored])
        plain = spearman(ours[scored], theirs[scored])
        if int(scored.sum()) > 2 and float(theirs[scored].max()) > float(theirs[scored].min()):
            # A map that is constant, or nothing but the position, says nothing that the position does not.
            beyond, plain = (0.0 if math.isnan(value) else value for value in (beyond, plain))
        return {
            "partial_spearman": beyond,
            "spearman": plain,
            "top_1": top_k_overlap(ours[others], theirs[others], 1),
        }

    def describe(self) -> dict[str, Any]:
        return {"task": self.name, **self.occlusion.parameters(), "leave_out": list(self.leave_out)}


@dataclasses.dataclass(frozen=True)
class Cues(RowTask):
    """Does the map put its weight on the words that are known to decide?

    Args:
        given: cases with `relevant` positions, and a contrast as target where there is one.
        leave_out: positions that are not scored.
    """

    name: ClassVar[str] = "cues"
    metrics: ClassVar[tuple[str, ...]] = ("average_precision", "reciprocal_rank", "mass_accuracy")

    given: Sequence[Case]
    leave_out: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        cases = several("given", self.given, "cases", least=1, kind=Case)
        if not all(case.relevant for case in cases):
            raise ValueError("given: expected cases that name their relevant positions, got some without")
        object.__setattr__(self, "given", cases)

    def cases(self, model: TransformerLensModel) -> list[Case]:
        return list(self.given)

    def truth(self, model: TransformerLensModel, case: Case, **options: Any) -> Float[Tensor, " key"]:
        visible = run(model, case.prompt, "attention", queries=[case.query], layers=[-1], **options).visible()
        relevant = torch.zeros(visible.shape[-1], dtype=torch.float64, device="cpu")
        relevant[list(case.relevant)] = 1
        hidden = ~visible[0, 0].cpu()
        hidden[[position for position in self.leave_out if -len(relevant) <= position < len(relevant)]] = True
        return relevant.masked_fill(hidden, torch.nan)

    def score(self, row: Float[Tensor, " key"], truth: Float[Tensor, " key"], query: int) -> dict[str, float]:
        scored = ~truth.isnan()
        row, relevant = row[scored], truth[scored] > 0
        return {
            "average_precision": average_precision(row, relevant),
            "reciprocal_rank": reciprocal_rank(row, relevant),
            "mass_accuracy": mass_accuracy(row, relevant),
        }


@dataclasses.dataclass(frozen=True)
class _OfPrompts(Task):
    """A task whose cases are the last positions of prompts."""

    prompts: Sequence[Any]

    def cases(self, model: TransformerLensModel) -> list[Case]:
        return [Case(prompt) for prompt in several("prompts", self.prompts, "several prompts", least=1)]


@dataclasses.dataclass(frozen=True)
class Removals(_OfPrompts):
    """Does the answer go when the tokens that the map ranks first go, and stay when they stay?

    Normalised AOPC of the deletion and of the insertion curve (`removal_curves`), the latter as
    1 − sufficiency, so that higher is better in both.

    Args:
        prompts: as `lm.run` takes them.
        removal: how tokens are taken out: "sample", "drop", "zero_values", or a `Removal`.
        exact, beam: as in `removal_curves`.
    """

    name: ClassVar[str] = "removals"
    metrics: ClassVar[tuple[str, ...]] = ("deletion", "insertion")

    removal: str | Removal = "sample"
    exact: int = 8
    beam: int = 3

    def scores(
        self, model: TransformerLensModel, case: Case, candidates: Mapping[str, Any], **options: Any
    ) -> dict[str, dict[str, float]]:
        how: dict[str, Any] = {"removal": self.removal, "exact": self.exact, "beam": self.beam}
        curves = removal_curves(model, case.prompt, dict(candidates), target=case.target, **how, **options)
        return {
            name: {"deletion": curve.comprehensiveness, "insertion": 1 - curve.sufficiency}
            for name, curve in curves.items()
        }

    def describe(self) -> dict[str, Any]:
        how = self.removal if isinstance(self.removal, str) else repr(self.removal)
        return {"task": self.name, "removal": how, "exact": self.exact, "beam": self.beam}


@dataclasses.dataclass(frozen=True)
class Cells(_OfPrompts):
    """Do the cells that a layer map ranks first carry the answer? Layer maps as they are, no rollout.

    `closeness` is −∫ abs(F(1) − F(k)) dk over the share k of cells that stay (`keep_cells`), `area` is
    ∫ F(k) dk, both in the target's unit, so that means over prompts divide by nothing that may be next to 0.
    Each map is scored as it is ("raw") and with rows that sum to 1 ("shares").

    Args:
        prompts: as `lm.run` takes them.
        operator: "zero" or "mean".
    """

    name: ClassVar[str] = "cells"
    metrics: ClassVar[tuple[str, ...]] = ("closeness", "area")
    layer_maps: ClassVar[bool] = True

    operator: Operator = "zero"

    def scores(
        self, model: TransformerLensModel, case: Case, candidates: Mapping[str, Any], **options: Any
    ) -> dict[str, dict[str, float]]:
        curves = keep_cells(
            model, case.prompt, dict(candidates), operator=self.operator, target=case.target, **options
        )
        return {name: {"closeness": -one.distance, "area": one.area} for name, one in curves.items()}

    def describe(self) -> dict[str, Any]:
        return {"task": self.name, "operator": self.operator}
