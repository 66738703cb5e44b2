"""Measure how important each attention head is, over a set of prompts (Hao et al., AAAI 2021, section 4)."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from lens_mix import Lens, UnsupportedModelError
from lens_mix import targets as targets_module
from lens_mix.arguments import (
    check_choice,
    check_flags,
    check_instance,
    check_items,
    check_number,
    check_pairs,
    check_real_tensor,
    check_whole_number,
)
from lens_mix.hooks import must_fire, prune_heads
from lens_mix.method import Method
from lens_mix.methods.attention import AttentionWeights
from lens_mix.methods.attention_attribution import AttentionAttribution
from lens_mix.methods.gradient_attention import GradientAttention
from lens_mix.models import TransformerLensModel, hooks_failure
from lens_mix.runner import run
from lens_mix.targets import TargetLike

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

ImportanceBy = Literal["attribution", "attention", "taylor"]
Statistic = Literal["pearson", "spearman"]
ImportanceMetric = Callable[[Any], float]
Head = tuple[int, int]
M = TypeVar("M", bound=TransformerLensModel)


@dataclasses.dataclass(frozen=True, eq=False)
class HeadImportance:
    """One number per head. Larger numbers are more important.

    Attributes:
        scores: [layer, head], float64.
        name: The name of the measure.
        examples: The number of prompts.
        notes: The notes of the underlying maps (about completeness), with the number of prompts.
    """

    scores: Float[Tensor, "layer head"]
    name: str
    examples: int
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        scores = check_real_tensor("scores", self.scores).to("cpu", torch.float64)
        if scores.ndim != 2 or scores.numel() == 0:
            raise ValueError(f"scores: expected shape [layer, head], got {list(scores.shape)}")
        if not bool(torch.isfinite(scores).all()):
            raise ValueError("scores: expected finite numbers, got NaN or infinity")
        object.__setattr__(self, "scores", scores)
        object.__setattr__(self, "examples", check_whole_number("examples", self.examples, 0))

    def ranking(self) -> list[Head]:
        """Return (layer, head) pairs, the least important first. Ties are ordered by layer, then head."""
        order = self.scores.flatten().argsort(stable=True).tolist()
        return [divmod(layer_and_head, self.scores.shape[1]) for layer_and_head in order]

    def top(self, k: int = 5) -> list[tuple[int, int, float]]:
        """Return the `k` most important heads as (layer, head, score)."""
        best = self.ranking()[::-1][: check_whole_number("k", k, 1)]
        return [(*layer_and_head, self.scores[layer_and_head].item()) for layer_and_head in best]

    def correlation(self, other: HeadImportance, how: Statistic = "pearson") -> float:
        """Return the correlation over all heads with another importance of the same model, -1 to 1.

        Args:
            other: The other importance.
            how: "pearson" or "spearman".

        Raises:
            TypeError: `other` is not a `HeadImportance`.
            ValueError: The shapes differ, the statistic is unknown, or scores are constant.
        """
        check_choice("how", how, ("pearson", "spearman"))
        check_instance("other", other, HeadImportance, "a HeadImportance")
        if self.scores.shape != other.scores.shape:
            raise ValueError(
                f"other: expected scores of shape {list(self.scores.shape)}, got {list(other.scores.shape)}"
            )
        pair = [importance.scores.flatten().numpy() for importance in (self, other)]
        if any(float(values.max()) == float(values.min()) for values in pair):
            raise ValueError("scores: expected some to differ, got constant importance (no correlation)")
        import scipy.stats

        statistic = {"pearson": scipy.stats.pearsonr, "spearman": scipy.stats.spearmanr}[how]
        return float(statistic(*pair).statistic)

    def to_dataframe(self) -> pandas.DataFrame:
        """Return a table with the columns layer, head and importance."""
        import pandas as pd

        scores = self.scores.tolist()
        rows = [(layer, head, one) for layer, row in enumerate(scores) for head, one in enumerate(row)]
        return pd.DataFrame(rows, columns=["layer", "head", "importance"])

    def show(self, **options: Any) -> Figure:
        """Draw a heat map, layer x head.

        Args:
            **options: Those of `lens_mix.experiments.head_figures.head_map`.
        """
        from lens_mix.experiments import head_figures

        return head_figures.head_map(self, **options)


def head_importance(
    model: TransformerLensModel,
    prompts: Sequence[Any],
    by: ImportanceBy = "attribution",
    *,
    targets: TargetLike | Sequence[TargetLike] | None = None,
    statistic: Literal["max", "mean"] = "max",
    method: AttentionAttribution | None = None,
    part: str | None = None,
    progress: bool = False,
    **options: Any,
) -> HeadImportance:
    """Measure the importance of every head over some prompts.

        >>> importance = lm.experiments.head_importance(model, ["The Eiffel Tower is in the city of"])
        >>> importance.scores

    | `by` | importance of head h |
    |---|---|
    | "attribution" | E_x[max_ij Attr_h] (the paper's), by default of the predicted probability |
    | "attention" | E_x[max_ij A_h] (the paper's baseline), over the queries that see at least two keys |
    | "taylor" | E_x abs(Σ_ij A_h ∂L/∂A_h) (Michel et al., 2019), by default of the next-token loss L |

    The released code sums over examples, and this function averages. The released Taylor expansion
    differentiates the sum of the logits, and this one the loss. `ablation_importance` measures accuracy
    differences.

    Args:
        model: As in `lm.run`.
        prompts: As in `lm.run`, at least one.
        by: "attribution", "attention" or "taylor".
        targets: One target for all prompts, or one per prompt.
        statistic: "max" over the entries of a head's map, or "mean" over its visible keys. The mean of
            attention has no information: rows sum to 1, so it is the same for every head.
        method: The attribution, for "attribution" only. `targets` replace its target if they are given.
        part: As in `lm.run`.
        progress: Whether a bar over the prompts is shown.
        **options: As in `lm.run`.

    Raises:
        ValueError: There are no prompts, an option is unknown, or the number of targets does not fit.
        UnsupportedModelError: Some blocks of the model have no heads (a hybrid), or as in `lm.run`.
    """
    check_choice("by", by, ("attribution", "attention", "taylor"))
    check_flags(progress=progress)
    if method is not None and by != "attribution":
        raise ValueError(f"method: applies to by='attribution' only, got by={by!r}")
    prompts = check_items("prompts", prompts, "several prompts", least=1)
    by_prompt = list_targets("prompts", prompts, targets)
    part = open_with_heads_in_every_block(model, part, "head_importance").stack.name
    if "layers" in options:
        raise ValueError(
            "layers: expected none, because importances have a row for every layer; cut the scores"
        )
    check_choice("statistic", statistic, ("max", "mean"))
    values = []
    warned: collections.Counter[str] = collections.Counter()
    for prompt, target in zip(tqdm(prompts, disable=not progress, desc=by), by_prompt, strict=True):
        mixing = run(model, prompt, choose_method(by, target, method), part=part, progress=None, **options)
        scores = mixing.scores.to("cpu", torch.float64)
        # The text of a note before the colon names the layer.
        warned.update(note.split(":")[0] for note in mixing.notes if "completeness" in note)
        if by == "attention":
            # A query that sees one key gives it weight 1 in every head, as the first query of a causal model.
            sees_one_key = (mixing.visible().sum(-1) < 2).cpu()
            scores = scores.masked_fill(sees_one_key[:, None, :, None], 0)
        if by == "taylor":
            values.append(scores.sum((-2, -1)).abs())
        elif statistic == "max":
            values.append(scores.amax((-2, -1)))
        else:
            visible = mixing.visible().sum((-2, -1)).cpu()
            values.append(scores.sum((-2, -1)) / visible[:, None])
    notes = [f"{layer}: completeness in doubt for {count} prompts" for layer, count in warned.items()]
    return HeadImportance(sum(values[1:], values[0]) / len(prompts), by, len(prompts), tuple(notes))


@contextlib.contextmanager
def pruned(model: M, heads: Iterable[Head], *, part: str | None = None) -> Iterator[M]:
    """Remove some heads from the model inside a `with` block, by setting their patterns to zero.

        >>> with lm.experiments.pruned(model, [(0, 1), (1, 2)]) as other:
        ...     logits = lm.models.prompt_logits(other, "The Eiffel Tower is in the city of")

    Args:
        model: The model.
        heads: (layer, head) pairs.
        part: As in `lm.run`.

    Yields:
        The model.

    Raises:
        ValueError: The model does not have a layer or a head.
        RuntimeError: The model did not run inside the block.
        UnsupportedModelError: Hooks on values and patterns have no reliable effect on this model.
    """
    require_pattern_hooks(model, part)
    with remove_heads(model, heads, part):
        yield model


def require_pattern_hooks(model: TransformerLensModel, part: str | None) -> None:
    """Raise an `UnsupportedModelError` if hooks on values and patterns have no reliable effect on a model."""
    reason = hooks_failure(model, part)
    if reason is not None:
        raise UnsupportedModelError(f"pruned can't run on this model: {reason}")


@contextlib.contextmanager
def remove_heads(model: TransformerLensModel, heads: Iterable[Head], part: str | None) -> Iterator[None]:
    """Remove some heads as `pruned` does, from a model that `require_pattern_hooks` accepts."""
    lens = Lens(model, part)
    by_layer: dict[int, list[int]] = collections.defaultdict(list)
    for layer, head in check_pairs("heads", heads, "(layer, head) pairs"):
        layer = check_whole_number("heads", layer, 0, lens.n_layers - 1, "layers")
        if layer not in lens.stack.attention_layers:
            gaps = lens.stack.gaps
            raise ValueError(f"heads: expected heads of blocks that have some, got layer {layer} ({gaps})")
        by_layer[layer].append(check_whole_number("heads", head, 0, lens.n_heads - 1, "heads"))
    template = lens.stack.attention_template
    pruning = [prune_heads(layer, chosen, attention=template) for layer, chosen in by_layer.items()]
    # The model runs in the user's precision, so that it is compared with itself with all heads.
    with lens.evaluation_mode(precise=False), must_fire(*pruning) as hooks, lens.hooked(hooks):
        yield


def ablation_importance(
    model: TransformerLensModel,
    metric: ImportanceMetric,
    *,
    part: str | None = None,
    examples: int = 0,
    progress: bool = False,
) -> HeadImportance:
    """Measure accuracy differences: metric(model) - metric(model without the head), for every head.

        >>> def mean_logit(model):
        ...     return lm.models.prompt_logits(model, "The Eiffel Tower is in the city of")[-1].max().item()
        >>> lm.experiments.ablation_importance(model, mean_logit)

    Args:
        model: The model.
        metric: A function of the model that runs it on data of its own and returns a number. Larger is
            better. It is called 1 + layers x heads times.
        part: As in `lm.run`.
        examples: The number of examples of the metric, for the record.
        progress: Whether a bar over the heads is shown.

    Raises:
        RuntimeError: The metric does not run the model.
        UnsupportedModelError: As in `head_importance`.
    """
    check_flags(progress=progress)
    examples = check_whole_number("examples", examples, 0)
    lens = open_with_heads_in_every_block(model, part, "ablation_importance")
    # The model is verified once, because it is the same for every head.
    require_pattern_hooks(model, lens.stack.name)
    whole = measure_model(metric, model)
    scores = torch.zeros(lens.n_layers, lens.n_heads, dtype=torch.float64, device="cpu")
    layers_and_heads = list(itertools.product(range(lens.n_layers), range(lens.n_heads)))
    for layer_and_head in tqdm(layers_and_heads, disable=not progress, desc="ablation"):
        with remove_heads(model, [layer_and_head], lens.stack.name):
            scores[layer_and_head] = whole - measure_model(metric, model)
    return HeadImportance(scores, "ablation", examples)


def open_with_heads_in_every_block(model: TransformerLensModel, part: str | None, what: str) -> Lens:
    """Return the lens of a model in which every block has heads, so that importances are a table.

    Args:
        model: The model.
        part: The part of an encoder-decoder.
        what: The caller's name, for errors.

    Raises:
        UnsupportedModelError: Some blocks have no heads (a hybrid).
    """
    lens = Lens(model, part)
    if lens.stack.gaps is not None:
        raise UnsupportedModelError(
            f"{what}: expected heads in every block, got {lens.stack.gaps} (lm.run maps "
            "the heads that there are, with methods that take per_head=True)"
        )
    return lens


def measure_model(metric: ImportanceMetric, model: TransformerLensModel) -> float:
    """Return the value of a metric of the model.

    Raises:
        TypeError: The metric is not a function, or its value is not a number.
        ValueError: Its value is not finite.
    """
    check_instance("metric", metric, Callable, "a function of the model")
    return check_number("metric", metric(model))


def importance_correlations(
    importances: Mapping[str, HeadImportance], how: Statistic = "pearson"
) -> pandas.DataFrame:
    """Return the correlations of head importance between tasks or measures, as a symmetric table.

        >>> prompts = ["The Eiffel Tower is in the city of"]
        >>> by_gradient = lm.experiments.head_importance(model, prompts, "taylor")
        >>> by_attention = lm.experiments.head_importance(model, prompts, "attention")
        >>> lm.experiments.importance_correlations({"gradient": by_gradient, "attention": by_attention})

    Args:
        importances: At least two importances of one model, by name.
        how: "pearson" or "spearman".

    Raises:
        TypeError: Something is not a `HeadImportance`.
        ValueError: There are fewer than two, or as in `HeadImportance.correlation`.
    """
    from lens_mix.tables import Table

    expected = "two HeadImportances or more, by their names"
    check_instance("importances", importances, Mapping, expected)
    check_items("importances", importances.values(), expected, least=2, kind=HeadImportance)
    table = [[one.correlation(other, how) for other in importances.values()] for one in importances.values()]
    return Table(table, index=list(importances), columns=list(importances))


def list_targets(
    name: str, items: Sequence[Any], targets: TargetLike | Sequence[TargetLike] | None
) -> list[TargetLike | None]:
    """Return a target for each of the prompts or examples. `name` is what errors call them."""
    each: list[Any] = list(targets) if isinstance(targets, (list, tuple)) else [targets] * len(items)
    if len(each) != len(items):
        raise ValueError(f"targets: expected one, or one for each of {len(items)} {name}, got {len(each)}")
    return each


def choose_method(by: str, target: TargetLike | None, method: AttentionAttribution | None) -> Method:
    """Return the method of "attribution", "attention" or "taylor". None: the default target or method."""
    if by == "attention":
        return AttentionWeights(per_head=True)
    if by == "taylor":
        target = targets_module.loss() if target is None else target
        return GradientAttention(target=target, per_head=True, rectify=False)
    if method is not None:
        check_instance("method", method, AttentionAttribution, "an AttentionAttribution")
    method = dataclasses.replace(method or AttentionAttribution(), per_head=True)
    return method if target is None else dataclasses.replace(method, target=target)
