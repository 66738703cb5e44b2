"""Maps against the truth: area under the ROC curve on models whose routes are known (`constructed`).

A layer map is scored by its cells: in all rows through which something can come to the answer, do the cells
that bring it there score above the others? The diagonal is left out: some methods count there what stays in
the residual stream, others don't. An input map is scored by its row at the answer.
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

from lens_mix.aggregation.flow import flow
from lens_mix.aggregation.gradient_rollout import gradient_rollout
from lens_mix.aggregation.layer_mean import layer_mean
from lens_mix.aggregation.rollout import rollout
from lens_mix.arguments import flags, instance, several
from lens_mix.evaluation.agreement import bootstrap
from lens_mix.evaluation.candidates import Aggregation
from lens_mix.evaluation.constructed import ConstructedModel, Routes, constructed_models
from lens_mix.lens.model_classes import TransformerLensModel, UnsupportedModelError
from lens_mix.maps import MixingMap
from lens_mix.method import Method
from lens_mix.methods import METHODS
from lens_mix.methods.alti_logit import AltiLogit
from lens_mix.methods.gradient_attention import GradientAttention
from lens_mix.runner import MethodLike, read_methods, run

if TYPE_CHECKING:
    import pandas as pd

# Scores that differ by less than this share of the map's largest one tie: rounding decides no order.
_TIE = 1e-5


def roc_area(scores: Float[Tensor, "*shape"], truth: Bool[Tensor, "*shape"]) -> float:
    """Area under the ROC curve: the chance that something true scores above something false, ties half.

    The Mann-Whitney U over the number of pairs. 1: all true ones on top; 0.5: as a constant; 0: all at the
    bottom; NaN where nothing is true, or nothing false.

    Raises:
        TypeError, ValueError: no tensors, or none of one shape; scores that are not finite.
    """
    instance("scores", scores, Tensor, "a tensor")
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


def _layer_area(mixing_map: MixingMap, routes: Routes) -> float:
    """`roc_area` of layer maps, over what the rows on the way to the answer could see but themselves."""
    visible = mixing_map.visible().cpu()
    others = ~torch.eye(visible.shape[-1], dtype=torch.bool, device="cpu")
    cells = visible & others & routes.rows()[:, :, None]
    return roc_area(_with_ties(mixing_map.merge_heads().scores.cpu())[cells], routes.layers[cells])


def _input_area(mixing_map: MixingMap, routes: Routes) -> float:
    """`roc_area` of an input map's last layer, in the answers' rows, over the keys that they could see."""
    rows = list(routes.queries)
    cells = mixing_map.visible()[-1].cpu()[rows]
    return roc_area(_with_ties(mixing_map.scores[-1].cpu()[rows])[cells], routes.inputs[rows][cells])


def _with_ties(scores: Tensor) -> Tensor:
    """Absolute values, in steps of a share of the largest one."""
    scores = scores.detach().double().abs()
    largest = scores.max()
    return (scores / (largest * _TIE)).round() if largest > 0 else scores


def _aggregations_of(method: Method) -> dict[str, Aggregation]:
    """From a method's layer maps to input maps: mean, rollout, flow; for Chefer's maps their own way too."""
    ways: dict[str, Aggregation] = {"mean": layer_mean, "rollout": rollout}
    ways["flow"] = functools.partial(flow, layer=-1)
    return {**ways, "gradient_rollout": gradient_rollout} if isinstance(method, GradientAttention) else ways


def score_constructed(
    methods: MethodLike | Sequence[MethodLike] | None = None,
    models: Sequence[ConstructedModel] | None = None,
    aggregations: Mapping[str, Aggregation] | None = None,
    *,
    seed: int = 0,
    count: int = 8,
    progress: bool = False,
) -> pd.DataFrame:
    """What methods make of constructed models.

    Maps with signs are scored, and aggregated, by their absolute values; ALTI-Logit is summed over layers
    before. A method with a target explains the model's prediction at the answer. The method "position" is a
    control: the later the key, the higher.

    Args:
        methods: names or methods; None: all.
        models: None: all (`constructed_models()`).
        aggregations: ways from layer maps to an input map, by name; None: the mean over layers, rollout and
            flow, and for Chefer's maps their own rollout.
        seed, count: of the prompts of each model.
        progress: show a bar over models and methods.

    Returns:
        Columns: model; method; aggregation ("layers" for the cells of layer maps, "input" for methods that
        give input maps themselves); area, the mean over prompts, 0 to 1; low and high, its 95 % bootstrap
        interval; n, the prompts that have an area; note, why there is none.

    Raises:
        TypeError, ValueError: unknown methods, models that are none, bad numbers.
    """
    flags(progress=progress)
    labelled, _ = read_methods(list(METHODS) if methods is None else methods)
    chosen = list(constructed_models().values()) if models is None else models
    chosen = several("models", chosen, "constructed models", 1, ConstructedModel)
    from lens_mix.tables import Table

    rows: list[dict[str, Any]] = []
    with tqdm(total=len(chosen) * len(labelled), disable=not progress) as bar:
        for built in chosen:
            model, prompts = built.model(), built.prompts(seed, count)
            controls = [(_later_is_more(built, len(prompt)), built.routes(prompt)) for prompt in prompts]
            rows.append(_row(built, "position", "layers", list(itertools.starmap(_layer_area, controls))))
            rows.append(_row(built, "position", "input", list(itertools.starmap(_input_area, controls))))
            for label, method in labelled.items():
                areas, note = _areas(built, model, prompts, method, aggregations)
                rows += [_row(built, label, name, values, note) for name, values in areas.items()]
                bar.update()
    return Table(rows)


def _areas(
    built: ConstructedModel,
    model: TransformerLensModel,
    prompts: Sequence[Int[Tensor, " pos"]],
    method: Method,
    aggregations: Mapping[str, Aggregation] | None,
) -> tuple[dict[str, list[float]], str]:
    """One area per prompt, by aggregation; and why there are none."""
    ways = _aggregations_of(method) if aggregations is None else aggregations
    by_prompt = []
    for prompt in prompts:
        routes = built.routes(prompt)
        try:
            mixing_map = run(model, prompt, _explaining(method, routes.queries[0]), progress=None)
        except UnsupportedModelError as problem:
            return {"layers" if method.scope == "layer" else "input": []}, str(problem)
        if isinstance(method, AltiLogit):  # its layers are shares of one logit
            summed = mixing_map.scores.sum(0, keepdim=True)
            mixing_map = mixing_map.select_layers(mixing_map.layer_labels[-1:]).replace(scores=summed)
        mixing_map = mixing_map.replace(scores=mixing_map.scores.abs())
        if method.scope == "layer":
            areas = {"layers": _layer_area(mixing_map, routes)}
            areas |= {name: _input_area(way(mixing_map), routes) for name, way in ways.items()}
        else:
            areas = {"input": _input_area(mixing_map, routes)}
        by_prompt.append(areas)
    return {name: [areas[name] for areas in by_prompt] for name in by_prompt[0]}, ""


def _explaining(method: Method, answer: int) -> Method:
    """The method with its target read at the answer, where its target stands at a position."""
    target: Any = getattr(method, "target", None)
    if not hasattr(target, "position"):
        return method
    changed: dict[str, Any] = {"target": dataclasses.replace(target, position=answer)}
    return dataclasses.replace(method, **changed)


def _later_is_more(built: ConstructedModel, length: int) -> MixingMap:
    """The control, as a map."""
    weights = built.weights()
    scores = torch.arange(length, dtype=torch.float32, device="cpu").expand(
        len(weights.query), length, length
    )
    scores = scores.tril() if weights.causal else scores.clone()
    return MixingMap(scores=scores, tokens=["?"] * length, method="position", causal=weights.causal)


def _row(
    built: ConstructedModel, method: str, aggregation: str, areas: list[float], note: str = ""
) -> dict[str, Any]:
    """The mean, and its bootstrap interval over the prompts."""
    over_prompts = bootstrap(areas)
    figures = {"area": over_prompts.mean, "low": over_prompts.low, "high": over_prompts.high}
    named = {"model": built.name, "method": method, "aggregation": aggregation}
    return {**named, **figures, "n": over_prompts.count, "note": note}
