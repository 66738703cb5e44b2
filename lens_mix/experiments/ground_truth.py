"""Score maps against a known truth: the area under the ROC curve on models with known routes (`constructed`).

A layer map is scored by its cells. In all rows through which information can reach the answer, the cells that
transport it should score above the others. The diagonal is left out, because only some methods add to it what
stays in the residual stream. An input map is scored by its row at the answer.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from lens_mix import UnsupportedModelError
from lens_mix.aggregation.candidates import Aggregation, join_layers
from lens_mix.aggregation.flow import flow
from lens_mix.aggregation.gradient_rollout import gradient_rollout
from lens_mix.aggregation.layer_mean import layer_mean
from lens_mix.aggregation.rollout import rollout
from lens_mix.arguments import check_flags, check_instance, check_items
from lens_mix.evaluation.agreement import bootstrap
from lens_mix.experiments.constructed import ConstructedModel, Routes, constructed_models
from lens_mix.maps import MixingMap
from lens_mix.method import Method
from lens_mix.methods import METHODS
from lens_mix.models import TransformerLensModel
from lens_mix.runner import MethodLike, read_methods, run

if TYPE_CHECKING:
    import pandas as pd

# Scores that differ by less than this share of the map's largest score are tied: rounding decides nothing.
_TIE = 1e-5


def roc_area(scores: Float[Tensor, "*shape"], truth: Bool[Tensor, "*shape"]) -> float:
    """Return the area under the ROC curve.

        >>> lm.experiments.roc_area(torch.tensor([0.1, 0.7, 0.2]), torch.tensor([False, True, True]))
        1.0

    It is the probability that a true entry scores above a false one, where ties count half (the Mann-Whitney
    U divided by the number of pairs). It is 1 if all true entries are on top, 0.5 for constant scores, and 0
    if all are at the bottom. It is NaN if no entry is true, or none is false.

    Args:
        scores: One score per entry.
        truth: One boolean per entry.

    Raises:
        TypeError: An argument is not a tensor, or `truth` is not boolean.
        ValueError: The shapes differ, or a score is not finite.
    """
    check_instance("scores", scores, Tensor, "a tensor")
    if not isinstance(truth, Tensor) or truth.dtype != torch.bool:
        got = truth.dtype if isinstance(truth, Tensor) else type(truth).__name__
        raise TypeError(f"truth: expected a tensor of True and False, got {got}")
    if scores.shape != truth.shape:
        raise ValueError(f"truth: expected the shape {tuple(scores.shape)}, got {tuple(truth.shape)}")
    if not bool(torch.isfinite(scores).all()):
        raise ValueError("scores: expected finite numbers, got NaN or infinity")
    from scipy.stats import rankdata

    right = truth.flatten().cpu().numpy()
    positive, negative = int(right.sum()), int((~right).sum())
    if not positive or not negative:
        return float("nan")
    ranks = rankdata(scores.detach().double().flatten().cpu().numpy())
    return float((ranks[right].sum() - positive * (positive + 1) / 2) / (positive * negative))


def _compute_layer_area(mixing_map: MixingMap, routes: Routes) -> float:
    """Return `roc_area` of a layer map, over cells off the diagonal in rows that reach the answer."""
    visible = mixing_map.visible().cpu()
    others = ~torch.eye(visible.shape[-1], dtype=torch.bool, device="cpu")
    cells = visible & others & routes.rows()[:, :, None]
    return roc_area(_round_to_ties(mixing_map.merge_heads().scores.cpu())[cells], routes.layers[cells])


def _compute_input_area(mixing_map: MixingMap, routes: Routes) -> float:
    """Return `roc_area` of an input map's last layer, in the rows of answers, over visible keys."""
    rows = list(routes.queries)
    cells = mixing_map.visible()[-1].cpu()[rows]
    return roc_area(_round_to_ties(mixing_map.scores[-1].cpu()[rows])[cells], routes.inputs[rows][cells])


def _round_to_ties(scores: Tensor) -> Tensor:
    """Return absolute values, rounded to multiples of a small share of the largest one."""
    scores = scores.detach().double().abs()
    largest = scores.max()
    return (scores / (largest * _TIE)).round() if largest > 0 else scores


def _list_aggregations(method: Method) -> dict[str, Aggregation]:
    """Return the aggregations of a method's layer maps: mean, rollout, flow, and Chefer's own rollout."""
    functions: dict[str, Aggregation] = {"mean": layer_mean, "rollout": rollout}
    functions["flow"] = functools.partial(flow, layer=-1)
    return {**functions, "gradient_rollout": gradient_rollout} if method.has_gradient_weights else functions


def score_constructed(
    methods: MethodLike | Sequence[MethodLike] | None = None,
    models: Sequence[ConstructedModel] | None = None,
    aggregations: Mapping[str, Aggregation] | None = None,
    *,
    seed: int = 0,
    count: int = 8,
    progress: bool = False,
) -> pd.DataFrame:
    """Score methods on constructed models, whose routes are known.

        >>> copy = lm.experiments.constructed_models()["copy"]
        >>> lm.experiments.score_constructed(["attention", "value_zeroing"], [copy], count=2)

    Maps with signs are scored and aggregated by their absolute values. ALTI-Logit is first summed over
    layers. A method with a target explains the model's prediction at the answer. The method "position" is a
    control in which later keys have higher scores.

    Args:
        methods: Names or methods. None: all.
        models: The constructed models. None: all of `constructed_models()`.
        aggregations: Functions from layer maps to an input map, by name. None: the mean over layers, rollout
            and flow, and for Chefer's maps their own rollout.
        seed: The seed of the prompts of each model.
        count: The number of prompts of each model.
        progress: Whether a bar over models and methods is shown.

    Returns:
        A table with the columns

        - model and method;
        - aggregation: "layers" for the cells of layer maps, "input" for methods that return input maps;
        - area: the mean over prompts, 0 to 1;
        - low and high: its 95 % bootstrap interval;
        - n: the number of prompts that have an area;
        - note: the reason if there is none.

    Raises:
        TypeError: A model is not a constructed model, or a number has the wrong type.
        ValueError: A method is unknown, or a number is out of range.
    """
    check_flags(progress=progress)
    labeled, _ = read_methods(list(METHODS) if methods is None else methods)
    chosen = list(constructed_models().values()) if models is None else models
    chosen = check_items("models", chosen, "constructed models", 1, ConstructedModel)
    from lens_mix.tables import Table

    rows: list[dict[str, Any]] = []
    with tqdm(total=len(chosen) * len(labeled), disable=not progress) as bar:
        for built in chosen:
            model, prompts = built.model(), built.prompts(seed, count)
            controls = [(_make_position_map(built, len(prompt)), built.routes(prompt)) for prompt in prompts]
            rows.append(
                _summarize(
                    built, "position", "layers", list(itertools.starmap(_compute_layer_area, controls))
                )
            )
            rows.append(
                _summarize(built, "position", "input", list(itertools.starmap(_compute_input_area, controls)))
            )
            for label, method in labeled.items():
                areas, note = _compute_areas(built, model, prompts, method, aggregations)
                rows += [_summarize(built, label, name, values, note) for name, values in areas.items()]
                bar.update()
    return Table(rows)


def _compute_areas(
    built: ConstructedModel,
    model: TransformerLensModel,
    prompts: Sequence[Int[Tensor, " pos"]],
    method: Method,
    aggregations: Mapping[str, Aggregation] | None,
) -> tuple[dict[str, list[float]], str]:
    """Return one area per prompt for each aggregation, and the reason if there are none."""
    functions = _list_aggregations(method) if aggregations is None else aggregations
    by_prompt = []
    for prompt in prompts:
        routes = built.routes(prompt)
        try:
            mixing_map = run(model, prompt, _explain_answer(method, routes.queries[0]), progress=None)
        except UnsupportedModelError as problem:
            return {"input" if method.is_input_map else "layers": []}, str(problem)
        if method.is_input_map:
            whole = join_layers(mixing_map)[None]
            mixing_map = mixing_map.select_layers(mixing_map.layer_labels[-1:]).replace(scores=whole)
        mixing_map = mixing_map.replace(scores=mixing_map.scores.abs())
        if not method.is_input_map:
            areas = {"layers": _compute_layer_area(mixing_map, routes)}
            areas |= {
                name: _compute_input_area(function(mixing_map), routes)
                for name, function in functions.items()
            }
        else:
            areas = {"input": _compute_input_area(mixing_map, routes)}
        by_prompt.append(areas)
    return {name: [areas[name] for areas in by_prompt] for name in by_prompt[0]}, ""


def _explain_answer(method: Method, answer: int) -> Method:
    """Return the method with its target at the answer, if its target has a position.

    A method of the whole model has a row for every position, and reads the target at each.
    """
    if not hasattr(method.target, "position"):
        return method
    position = None if method.reads == "model" else answer
    changed: dict[str, Any] = {"target": dataclasses.replace(method.target, position=position)}
    return dataclasses.replace(method, **changed)


def _make_position_map(built: ConstructedModel, length: int) -> MixingMap:
    """Return a map in which later keys have higher scores, as a control."""
    weights = built.weights()
    scores = torch.arange(length, dtype=torch.float32, device="cpu").expand(
        len(weights.query), length, length
    )
    scores = scores.tril() if weights.causal else scores.clone()
    return MixingMap(scores=scores, tokens=["?"] * length, method="position", causal=weights.causal)


def _summarize(
    built: ConstructedModel, method: str, aggregation: str, areas: list[float], note: str = ""
) -> dict[str, Any]:
    """Return the mean and its bootstrap interval over the prompts, as a row of the table."""
    over_prompts = bootstrap(areas)
    figures = {"area": over_prompts.mean, "low": over_prompts.low, "high": over_prompts.high}
    named = {"model": built.name, "method": method, "aggregation": aggregation}
    return {**named, **figures, "n": over_prompts.count, "note": note}
