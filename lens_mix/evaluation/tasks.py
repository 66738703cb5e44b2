"""Define what a map is scored on: the truth about a row, removed tokens, or kept cells."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from lens_mix._classes.model_classes import TransformerLensModel
from lens_mix.arguments import check_items, check_whole_number
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
from lens_mix.evaluation.sources import lds, top_k_drop
from lens_mix.maps import MixingMap
from lens_mix.maps.spans import Groups
from lens_mix.methods.occlusion import Occlusion
from lens_mix.removal import Removal
from lens_mix.runner import run
from lens_mix.targets import TargetLike


@dataclasses.dataclass(frozen=True)
class Case:
    """One prompt, and the row that is scored.

        >>> target = lm.targets.logit_difference(" are", " is")
        >>> case = lm.evaluation.Case("The keys that Anna had", relevant=(2,), target=target)
        >>> task = lm.evaluation.Cues([case], leave_out=(0,))
        >>> print(lm.evaluate(model, task, ["attention", "gradient_attention"], ["mean"]))

    Attributes:
        prompt: As in `lm.run`.
        query: The position of the row, or several whose rows are summed (for a target that is one number of
            the prompt, such as `lm.targets.span`). Negative positions count from the end.
        relevant: The positions of the tokens that decide, if they are known.
        target: What is explained there. None: the prediction.
        sources: Groups of positions whose removal is measured, as `spans` of `lm.methods.Occlusion`, if the
            task needs them.
    """

    prompt: Any
    query: int | Sequence[int] = -1
    relevant: tuple[int, ...] = ()
    target: TargetLike | None = None
    sources: Groups = ()

    @property
    def queries(self) -> list[int]:
        """The positions of the rows."""
        return [
            check_whole_number("query", each)
            for each in check_items("query", self.query, "positions", 1, alone=True)
        ]


class Task(abc.ABC):
    """Cases, and the rule that scores a map's row on each of them.

        >>> class OnTower(lm.evaluation.Task):
        ...     name, metrics = "on_tower", ("score",)
        ...
        ...     def cases(self, model):
        ...         return [lm.evaluation.Case("The Eiffel Tower is in the city of", relevant=(3,))]
        ...
        ...     def scores(self, model, case, candidates, **options):
        ...         return {name: {"score": float(row[case.relevant[0]])} for name, row in candidates.items()}
        >>> print(lm.evaluate(model, OnTower(), ["attention", "value_zeroing"]))

    Attributes:
        name: The name in tables. A class attribute.
        metrics: The names of its scores, of which higher ones are better. A class attribute.
        layer_maps: Whether layer maps are scored instead of rows of input maps. A class attribute.
    """

    name: ClassVar[str]
    layer_maps: ClassVar[bool] = False
    metrics: ClassVar[tuple[str, ...]]

    @abc.abstractmethod
    def cases(self, model: TransformerLensModel) -> list[Case]:
        """Return the cases, with prompts as the model reads them."""

    @abc.abstractmethod
    def scores(
        self, model: TransformerLensModel, case: Case, candidates: Mapping[str, Any], **options: Any
    ) -> dict[str, dict[str, float]]:
        """Return the scores of each candidate by metric. A score that is not defined is NaN.

        Args:
            model: The model.
            case: One of `cases`.
            candidates: By name, rows [key] of input maps for the case's query, or with `layer_maps` the maps.
            **options: As in `lm.run`.
        """

    def describe(self) -> dict[str, Any]:
        """Return a description of the task in plain words and numbers, for records."""
        return {"task": self.name}


class RowTask(Task):
    """A task that compares each row with one truth about the case."""

    @abc.abstractmethod
    def truth(self, model: TransformerLensModel, case: Case, **options: Any) -> Float[Tensor, " key"]:
        """Return the number of each key that the row is compared with, or NaN for keys that are not scored.

        Args:
            model: The model.
            case: One of `cases`.
            **options: As in `lm.run`.
        """

    @abc.abstractmethod
    def score(self, row: Float[Tensor, " key"], truth: Float[Tensor, " key"], query: int) -> dict[str, float]:
        """Return the scores of one row by metric. A score that is not defined is NaN."""

    @override
    def scores(
        self, model: TransformerLensModel, case: Case, candidates: Mapping[str, Any], **options: Any
    ) -> dict[str, dict[str, float]]:
        truth = self.truth(model, case, **options).cpu()
        return {name: self.score(row.cpu(), truth, case.queries[-1]) for name, row in candidates.items()}


@dataclasses.dataclass(frozen=True)
class Importance(RowTask):
    """Score whether a map ranks tokens as their measured removal does.

        >>> task = lm.evaluation.Importance(["The Eiffel Tower is in the city of"])
        >>> print(lm.evaluate(model, task, ["attention", "value_zeroing"], ["mean"]))

    The truth is `Occlusion` of the prediction at the query, the mean of absolute values. A map's row is
    scored by its absolute values too, over the keys that the query may see. The metrics are

    - partial_spearman: the rank correlation, controlled for position;
    - spearman: the rank correlation;
    - top_1: whether the strongest key except the query is the same.

    Args:
        prompts: As in `lm.run`.
        occlusion: The removal of each token, and its measure.
        leave_out: Positions that are not scored. The default is the first (a causal model's sink).
        query: The position of the row.
    """

    name: ClassVar[str] = "importance"
    metrics: ClassVar[tuple[str, ...]] = ("partial_spearman", "spearman", "top_1")

    prompts: Sequence[Any]
    occlusion: Occlusion = dataclasses.field(default_factory=lambda: Occlusion(measure="absolute"))
    leave_out: tuple[int, ...] = (0,)
    query: int = -1

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompts", check_items("prompts", self.prompts, "several prompts", least=1))
        if self.occlusion.spans is not None:
            raise ValueError(
                "occlusion: expected one without spans, because the rows of maps have a score per token, got "
                f"spans={self.occlusion.spans}"
            )

    @override
    def cases(self, model: TransformerLensModel) -> list[Case]:
        return [Case(prompt, check_whole_number("query", self.query)) for prompt in self.prompts]

    @override
    def truth(self, model: TransformerLensModel, case: Case, **options: Any) -> Float[Tensor, " key"]:
        mixing_map: MixingMap = run(
            model, case.prompt, self.occlusion, queries=case.queries, progress=None, **options
        )
        row = mixing_map.scores[0, 0].double()
        hidden = ~mixing_map.visible()[0, 0].to(row.device)
        hidden[[position for position in self.leave_out if -len(row) <= position < len(row)]] = True
        return row.masked_fill(hidden, torch.nan)

    @override
    def score(self, row: Float[Tensor, " key"], truth: Float[Tensor, " key"], query: int) -> dict[str, float]:
        scored = ~truth.isnan()
        positions = torch.arange(len(truth), dtype=torch.float64, device="cpu")
        others = scored & (positions != query % len(truth))
        ours, theirs = row.abs(), truth.abs()
        partial = partial_spearman(ours[scored], theirs[scored], positions[scored])
        plain = spearman(ours[scored], theirs[scored])
        if int(scored.sum()) > 2 and float(theirs[scored].max()) > float(theirs[scored].min()):
            # A constant map, or one that follows the position exactly, adds nothing to the position: 0.
            partial, plain = (0.0 if math.isnan(value) else value for value in (partial, plain))
        return {
            "partial_spearman": partial,
            "spearman": plain,
            "top_1": top_k_overlap(ours[others], theirs[others], 1),
        }

    @override
    def describe(self) -> dict[str, Any]:
        return {"task": self.name, **self.occlusion.parameters(), "leave_out": list(self.leave_out)}


@dataclasses.dataclass(frozen=True)
class Cues(RowTask):
    """Score whether a map puts its weight on the words that are known to decide.

        >>> case = lm.evaluation.Case("Anna lives in Rome. Ben lives in Oslo. Anna lives in", relevant=(4,))
        >>> task = lm.evaluation.Cues([case], leave_out=(0,))
        >>> print(lm.evaluate(model, task, ["attention", "value_zeroing"]))

    Args:
        given: Cases with `relevant` positions, and a contrast as target if they have one.
        leave_out: Positions that are not scored.
    """

    name: ClassVar[str] = "cues"
    metrics: ClassVar[tuple[str, ...]] = ("average_precision", "reciprocal_rank", "mass_accuracy")

    given: Sequence[Case]
    leave_out: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        cases = check_items("given", self.given, "cases", least=1, kind=Case)
        if not all(case.relevant for case in cases):
            raise ValueError("given: expected cases that name their relevant positions, got some without")
        object.__setattr__(self, "given", cases)

    @override
    def cases(self, model: TransformerLensModel) -> list[Case]:
        return list(self.given)

    @override
    def truth(self, model: TransformerLensModel, case: Case, **options: Any) -> Float[Tensor, " key"]:
        last = case.queries[-1:]
        visible = run(model, case.prompt, "attention", queries=last, layers=[-1], **options).visible()
        relevant = torch.zeros(visible.shape[-1], dtype=torch.float64, device="cpu")
        relevant[list(case.relevant)] = 1
        hidden = ~visible[0, 0].cpu()
        hidden[[position for position in self.leave_out if -len(relevant) <= position < len(relevant)]] = True
        return relevant.masked_fill(hidden, torch.nan)

    @override
    def score(self, row: Float[Tensor, " key"], truth: Float[Tensor, " key"], query: int) -> dict[str, float]:
        scored = ~truth.isnan()
        row, relevant = row[scored], truth[scored] > 0
        return {
            "average_precision": average_precision(row, relevant),
            "reciprocal_rank": reciprocal_rank(row, relevant),
            "mass_accuracy": mass_accuracy(row, relevant),
        }


@dataclasses.dataclass(frozen=True)
class _PromptTask(Task):
    """A task whose cases are the last positions of prompts."""

    prompts: Sequence[Any]

    def cases(self, model: TransformerLensModel) -> list[Case]:
        return [Case(prompt) for prompt in check_items("prompts", self.prompts, "several prompts", least=1)]


@dataclasses.dataclass(frozen=True)
class Removals(_PromptTask):
    """Score whether the target changes when the tokens with the highest scores are removed.

        >>> task = lm.evaluation.Removals(["The Eiffel Tower is in"], removal="zero_values")
        >>> print(lm.evaluate(model, task, ["attention", "value_zeroing"], ["mean"]))

    deletion is the normalized AOPC of the deletion curve, and insertion is 1 − that of the insertion curve
    (`removal_curves`), so that higher is better for both.

    Args:
        prompts: As in `lm.run`.
        removal: "sample", "drop", "mask", "zero_values", or a `Removal`.
        exact: As in `removal_curves`.
        beam: As in `removal_curves`.
    """

    name: ClassVar[str] = "removals"
    metrics: ClassVar[tuple[str, ...]] = ("deletion", "insertion")

    removal: str | Removal = "sample"
    exact: int = 8
    beam: int = 3

    @override
    def scores(
        self, model: TransformerLensModel, case: Case, candidates: Mapping[str, Any], **options: Any
    ) -> dict[str, dict[str, float]]:
        how: dict[str, Any] = {"removal": self.removal, "exact": self.exact, "beam": self.beam}
        curves = removal_curves(model, case.prompt, dict(candidates), target=case.target, **how, **options)
        return {
            name: {"deletion": curve.comprehensiveness, "insertion": 1 - curve.sufficiency}
            for name, curve in curves.items()
        }

    @override
    def describe(self) -> dict[str, Any]:
        how = self.removal if isinstance(self.removal, str) else repr(self.removal)
        return {"task": self.name, "removal": how, "exact": self.exact, "beam": self.beam}


@dataclasses.dataclass(frozen=True)
class Sources(Task):
    """Score whether a map ranks sources (sentences, documents) as removing them does.

        >>> text = "Anna lives in Rome. Ben lives in Oslo. Anna lives in"
        >>> case = lm.evaluation.Case(text, sources=["Anna lives in Rome.", " Ben lives in Oslo."])
        >>> print(lm.evaluate(model, lm.evaluation.Sources([case]), ["input_gradients"]))

    The score of a source is the sum of the row over its positions. lds is the linear datamodeling score
    (`lds`). top_1_drop, top_3_drop and top_5_drop are what the target loses without the 1, 3 or 5 strongest
    sources (`top_k_drop`), in its unit; they are not defined for fewer sources.

    Args:
        given: Cases that name their sources. The sources are before the position that the target reads.
        removal: As in `lds`.
        ablations: As in `lds`.
        seed: As in `lds`.
    """

    name: ClassVar[str] = "sources"
    metrics: ClassVar[tuple[str, ...]] = ("lds", "top_1_drop", "top_3_drop", "top_5_drop")

    given: Sequence[Case]
    removal: str | Removal = "drop"
    ablations: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        cases = check_items("given", self.given, "cases", least=1, kind=Case)
        if not all(case.sources for case in cases):
            raise ValueError("given: expected cases that name their sources, got some without")
        object.__setattr__(self, "given", cases)

    @override
    def cases(self, model: TransformerLensModel) -> list[Case]:
        return list(self.given)

    @override
    def scores(
        self, model: TransformerLensModel, case: Case, candidates: Mapping[str, Any], **options: Any
    ) -> dict[str, dict[str, float]]:
        how: dict[str, Any] = {"target": case.target, "removal": self.removal, "seed": self.seed, **options}
        of_case = (model, case.prompt, dict(candidates), case.sources)
        linear = lds(*of_case, ablations=self.ablations, **how)
        # The leaderboard has a random row, so one draw of the control is enough.
        drops = top_k_drop(*of_case, draws=1, **how)
        return {
            name: {"lds": linear[name], **{f"top_{k}_drop": drop for k, drop in drops[name].drops.items()}}
            for name in candidates
        }

    @override
    def describe(self) -> dict[str, Any]:
        how = self.removal if isinstance(self.removal, str) else repr(self.removal)
        return {"task": self.name, "removal": how, "ablations": self.ablations, "seed": self.seed}


@dataclasses.dataclass(frozen=True)
class Cells(_PromptTask):
    """Score whether the highest cells of a layer map are enough for the target, without a rollout.

        >>> task = lm.evaluation.Cells(["The Eiffel Tower is in the city of"], operator="mean")
        >>> print(lm.evaluate(model, task, ["attention", "value_zeroing"]))

    `closeness` is −∫ abs(F(1) − F(k)) dk over the share k of cells that are kept (`keep_cells`). `area` is
    ∫ F(k) dk. Both are in the target's unit, so that means over prompts do not divide by a number that may be
    almost 0. Each map is scored with raw scores ("raw") and with rows that sum to 1 ("shares").

    Args:
        prompts: As in `lm.run`.
        operator: "zero" or "mean".
    """

    name: ClassVar[str] = "cells"
    metrics: ClassVar[tuple[str, ...]] = ("closeness", "area")
    layer_maps: ClassVar[bool] = True

    operator: Operator = "zero"

    @override
    def scores(
        self, model: TransformerLensModel, case: Case, candidates: Mapping[str, Any], **options: Any
    ) -> dict[str, dict[str, float]]:
        curves = keep_cells(
            model, case.prompt, dict(candidates), operator=self.operator, target=case.target, **options
        )
        return {name: {"closeness": -one.distance, "area": one.area} for name, one in curves.items()}

    @override
    def describe(self) -> dict[str, Any]:
        return {"task": self.name, "operator": self.operator}
