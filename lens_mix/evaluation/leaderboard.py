"""Score methods and aggregations on tasks, with controls and intervals: the leaderboard."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from lens_mix._care.identity import digest_identity, identity, identity_of_model
from lens_mix._classes.model_classes import TransformerLensModel, UnsupportedModelError
from lens_mix._classes.model_names import model_name, strip_path
from lens_mix._model.model import Lens
from lens_mix.aggregation.candidates import (
    AS_IT_IS,
    Aggregation,
    aggregations_by_name,
    candidate_rows,
    layer_forms,
)
from lens_mix.arguments import check_choice, check_flags, check_instance
from lens_mix.evaluation.agreement import bootstrap
from lens_mix.evaluation.controls import control_maps, control_rows, randomised
from lens_mix.evaluation.finished import FinishedCases
from lens_mix.evaluation.tasks import Case, Task
from lens_mix.maps import MixingMap
from lens_mix.method import Method
from lens_mix.runner import MethodLike, read_methods, run

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure


# The methods of `control_rows`, and what is added to the name of a method on the model with shuffled weights.
_CONTROLS = ("random", "position")
_RANDOMISED = ", randomised model"


@dataclasses.dataclass(frozen=True, eq=False)
class Leaderboard:
    """The scores of every case, method and aggregation.

    Attributes:
        records: One dict per case, method and aggregation: `case` (its number), `method`, `aggregation`, and
            a score per metric (None if it is not defined).
        task: A description of the task in plain words and numbers.
        metrics: The metrics of the task. The first one ranks.
        model: The model's name.
        refused: The methods that are not defined on this model, and the aggregations that are not defined
            for a map, with the reason.
    """

    records: tuple[dict[str, Any], ...]
    task: dict[str, Any]
    metrics: tuple[str, ...]
    model: str
    refused: dict[str, str] = dataclasses.field(default_factory=dict)

    def to_dataframe(self) -> pandas.DataFrame:
        """Return a table with one row per case, method and aggregation."""
        from lens_mix.tables import Table

        frame = Table(self.records, columns=["case", "method", "aggregation", *self.metrics])
        return frame.astype(dict.fromkeys(self.metrics, float))

    def table(self, against: str | None = "position") -> pandas.DataFrame:
        """Return the mean of each metric with its 95 % interval, best first.

        Columns: method, aggregation and cases, then for each metric its mean, `<metric>_low` and
        `<metric>_high` (bootstrap over the cases). With `against`, also `<metric>_gain`, `<metric>_gain_low`
        and `<metric>_gain_high`: the paired difference from the row of that method.

        Args:
            against: The method of the paired differences. None: no differences.

        Raises:
            ValueError: The method does not exist.
        """
        from lens_mix.tables import Table

        frame = self.to_dataframe()
        base = None
        if against is not None:
            check_choice("against", against, sorted(set(frame["method"])))
            # If the method has several aggregations, the first one is the base of the differences.
            base = frame[frame["method"] == against].drop_duplicates("case").set_index("case")
        rows = []
        for (method, aggregation), group in frame.groupby(["method", "aggregation"], sort=False):
            row: dict[str, Any] = {"method": method, "aggregation": aggregation, "cases": len(group)}
            scores = group.set_index("case")
            for metric in self.metrics:
                row |= _summarize(metric, scores[metric], None if base is None else base[metric])
            rows.append(row)
        table = Table(rows)
        return table.sort_values(self.metrics[0], ascending=False, ignore_index=True)

    def verdict(self) -> list[str]:
        """Return a sentence for each control: how many candidates beat it, or that nothing does.

        A candidate, which is a method with an aggregation, beats a control if the 95 % interval of their
        paired difference in the first metric is above 0.
        """
        return [self._compare_with(control) for control in _CONTROLS if self._has(control)]

    def _has(self, method: str) -> bool:
        return any(record["method"] == method for record in self.records)

    def _compare_with(self, control: str) -> str:
        gain = f"{self.metrics[0]}_gain"
        table = self.table(control)
        is_candidate = ~table["method"].isin(_CONTROLS) & ~table["method"].str.endswith(_RANDOMISED)
        candidates = table[is_candidate].sort_values(gain, ascending=False)
        if candidates.empty:
            return f"No method was scored against {control!r}."
        best = candidates.iloc[0]
        aggregation = "" if best["aggregation"] == AS_IT_IS else f", {best['aggregation']}"
        described = f"the best, {best['method']}{aggregation}, is {_format_interval(best, gain)} above it"
        count = int((candidates[f"{gain}_low"] > 0).sum())
        beaten = "Nothing beats" if count == 0 else f"{count} of {len(candidates)} beat"
        return f"{beaten} {control!r} in {self.metrics[0]}: {described}."

    def to_markdown(self, against: str | None = None) -> str:
        """Return the table as Markdown, with mean [low, high] for each metric.

        Args:
            against: The method whose paired difference is added. None: no differences.
        """
        table = self.table(against)
        columns = [(metric, metric) for metric in self.metrics]
        if against is not None:
            columns += [(f"{metric}_gain", f"{metric} above {against}") for metric in self.metrics[:1]]
        titles = " | ".join(title for _, title in columns)
        lines = [f"| method | aggregation | {titles} | cases |"]
        lines.append("|---" * (len(columns) + 3) + "|")
        for _, row in table.iterrows():
            cells = [_format_interval(row, name) for name, _ in columns]
            lines.append(f"| {row['method']} | {row['aggregation']} | {' | '.join(cells)} | {row['cases']} |")
        return "\n".join(lines)

    def show(self, metric: str | None = None, **options: Any) -> Figure:
        """Draw one bar with its interval per method and aggregation, the best on top.

        Args:
            metric: One of `metrics`; None: the first.
            **options: `ax=`, matplotlib axes to draw in, or `figsize=`, the size of a new figure in inches.
        """
        from lens_mix.view.leaderboard_figure import leaderboard_figure

        chosen = self.metrics[0] if metric is None else metric
        check_choice("metric", chosen, self.metrics)
        return leaderboard_figure(
            self.table(None).sort_values(chosen),
            chosen,
            f"{strip_path(self.model)}: {self.task['task']}",
            **options,
        )


def evaluate(
    model: TransformerLensModel,
    task: Task,
    methods: MethodLike | Sequence[MethodLike],
    aggregations: Sequence[str] | Mapping[str, Aggregation] = ("rollout", "mean"),
    *,
    randomised_model: bool = False,
    resume: str | os.PathLike[str] | None = None,
    progress: bool = False,
    **options: Any,
) -> Leaderboard:
    """Score methods on a task that measures which of their maps show what the model uses.

        >>> task = lm.evaluation.Importance(["The Eiffel Tower is in the city of"])
        >>> print(lm.evaluate(model, task, ["attention", "value_zeroing"]))

    Every table has two controls: "random" (a seeded order per case) and "position" (later keys score higher).
    Methods that are not defined on this model are listed in `refused`.

    Args:
        model: Any TransformerLens model.
        task: What is scored (`lens_mix.evaluation.Importance`, `Cues`, or a `Task` of your own).
        methods: As in `lm.run`. A method with a `target` explains the target of the case, if it has one.
        aggregations: How layer maps become an input map: names ("rollout", "mean", "flow",
            "gradient_rollout", "upper half", "last"), or functions MixingMap -> MixingMap by name. Input maps
            need none and are named "-".
        randomised_model: Whether every method is also scored on the model with shuffled weights, as a
            control: the rows "<method>, randomised model".
        resume: A file of finished cases (JSON, one per line). It is read if it exists, and new cases are
            added. Its first line identifies the evaluation: the model's weights, dtype, settings, tokenizer
            and hooks, versions, the task with its prompts, methods, aggregations and options. If one of these
            differs, an error is raised. Cases whose lines are broken are computed again.
        progress: Whether a bar over the cases is shown.
        **options: As in `lm.run`.

    Raises:
        TypeError: As in `lm.run`.
        ValueError: As in `lm.run`, or `resume` is not a file of this evaluation. With `resume` also if
            weights are not in memory, or if functions and objects cannot be compared in another process.
    """
    check_flags(randomised_model=randomised_model, progress=progress)
    check_instance("task", task, Task, "a task of lens_mix.evaluation")
    if options.get("part") == "all":
        Lens(model, "all")  # It raises an error that lists the parts.
    chosen, by_name = read_methods(methods)[0], aggregations_by_name(aggregations)
    evaluation = _Evaluation(model, task, chosen, by_name, randomised_model, options)
    cases = task.cases(model)
    # Making a header reads all weights, and only a file needs one.
    header = {} if resume is None else evaluation.header(cases)
    finished = FinishedCases(resume, header, len(cases), task.metrics)
    for number, case in enumerate(tqdm(cases, disable=not progress, desc=task.name)):
        if number not in finished.records:
            finished.add(number, evaluation.scores(number, case))
    records = tuple(record for number in range(len(cases)) for record in finished.records[number])
    refused = {**finished.refused, **evaluation.refused}
    finished.note_refused(refused)
    return Leaderboard(records, task.describe(), task.metrics, model_name(model), refused)


@dataclasses.dataclass(frozen=True)
class _Evaluation:
    """One call of `evaluate`, which is computed case by case."""

    model: TransformerLensModel
    task: Task
    methods: Mapping[str, Method]
    aggregations: Mapping[str, Aggregation]
    randomised_model: bool
    options: Mapping[str, Any]
    refused: dict[str, str] = dataclasses.field(default_factory=dict)

    def header(self, cases: Sequence[Case]) -> dict[str, Any]:
        """Return what identifies the evaluation in a file of finished cases."""
        # The memory bound changes no number, so it does not identify an evaluation.
        options = {name: value for name, value in self.options.items() if name != "max_memory"}
        return {
            **identity_of_model(self.model),
            "task": identity(self.task.describe()),
            # Prompts may be long, so the header has digests of them.
            "cases": digest_identity(cases),
            "scores": digest_identity(self.task),
            "methods": {label: identity(method) for label, method in self.methods.items()},
            "aggregations": {name: identity(function) for name, function in self.aggregations.items()},
            "randomised_model": self.randomised_model,
            "options": {name: identity(value) for name, value in options.items() if value is not None},
        }

    def scores(self, number: int, case: Case) -> list[dict[str, Any]]:
        """Return the records of one case."""
        candidates = self._make_candidates(case, "")
        if self.randomised_model:
            with randomised(self.model, part=self.options.get("part")):
                candidates |= self._make_candidates(case, _RANDOMISED)
        if candidates:
            like = next(iter(candidates.values()))
            of_maps = self.task.layer_maps
            controls = control_maps(like, number) if of_maps else control_rows(len(like), number)
            candidates = {(label, AS_IT_IS): one for label, one in controls.items()} | candidates
        by_name = {f"{method} {aggregation}": one for (method, aggregation), one in candidates.items()}
        scores = self.task.scores(self.model, case, by_name, **self.options)
        records = []
        for method, aggregation in candidates:
            metrics = scores[f"{method} {aggregation}"]
            # JSON has no NaN. NaN is the only number that differs from itself.
            known = {metric: None if score != score else score for metric, score in metrics.items()}
            records.append({"case": number, "method": method, "aggregation": aggregation, **known})
        return records

    def _make_map(self, case: Case, method: Method) -> MixingMap:
        """Return a map of one case, with measured shares of the residual stream if that is possible.

        Rollouts need these shares.
        """
        # Only some rows of an input map are scored, but an aggregation needs all rows of layer maps.
        asked: dict[str, Any] = {"queries": _find_rows(case, method)} if method.is_input_map else {}
        asked["progress"] = None
        mixing_map: MixingMap
        if not self.task.layer_maps:
            with contextlib.suppress(UnsupportedModelError):
                with_shares = {"residual_shares": True, **asked}
                mixing_map = run(self.model, case.prompt, method, **with_shares, **self.options)
                return mixing_map
        mixing_map = run(self.model, case.prompt, method, **asked, **self.options)
        return mixing_map

    def _make_candidates(self, case: Case, suffix: str) -> dict[tuple[str, str], Any]:
        """Return rows of input maps, or the layer maps themselves if the task scores those."""
        candidates: dict[tuple[str, str], Any] = {}
        for label, method in self.methods.items():
            if case.target is not None and method.target is not None:
                method = dataclasses.replace(method, **{"target": case.target})
            try:
                m = self._make_map(case, method)
            except UnsupportedModelError as problem:
                self.refused[label + suffix] = str(problem)
                continue
            if not self.task.layer_maps:
                reasons: dict[str, str] = {}
                rows = candidate_rows(m, _find_rows(case, method), self.aggregations, reasons)
                self.refused.update({f"{label}{suffix}, {name}": why for name, why in reasons.items()})
                candidates |= {(label + suffix, name): row for name, row in rows.items()}
            elif m.kind == "layer":
                candidates |= {(label + suffix, name): form for name, form in layer_forms(m).items()}
            else:
                self.refused[label + suffix] = "an input map has no cells of single layers"
        return candidates


def _find_rows(case: Case, method: Method) -> list[int]:
    """Return the positions of the rows of a case that are summed."""
    explains_prompt = method.reads == "model" and case.target is not None and method.target is not None
    # An input map explains a number of the whole prompt in one row, which has to see all of it.
    return [-1] if explains_prompt and len(case.queries) > 1 else case.queries


def _summarize(metric: str, scores: pandas.Series, base: pandas.Series | None) -> dict[str, float]:
    """Return mean and interval of a metric, and of its paired difference from another method's."""
    intervals = {metric: bootstrap(scores)}
    if base is not None:
        intervals[f"{metric}_gain"] = bootstrap(scores, against=base.reindex(scores.index))
    row: dict[str, float] = {}
    for name, interval in intervals.items():
        row |= {name: interval.mean, f"{name}_low": interval.low, f"{name}_high": interval.high}
    return row


def _format_interval(row: Any, name: str) -> str:
    # Adding 0 turns -0 into 0, which prints without a sign.
    mean, low, high = (round(row[column], 2) + 0.0 for column in (name, f"{name}_low", f"{name}_high"))
    return f"{mean:.2f} [{low:.2f}, {high:.2f}]"
