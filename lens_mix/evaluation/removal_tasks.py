"""Tasks that take tokens out in the order of an input map, or keep the cells of a layer map."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from lens_mix.arguments import several
from lens_mix.evaluation.cells import Operator, keep_cells
from lens_mix.evaluation.curves import removal_curves
from lens_mix.evaluation.removal import Removal
from lens_mix.evaluation.tasks import Case, Task
from lens_mix.lens.model_classes import TransformerLensModel


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
