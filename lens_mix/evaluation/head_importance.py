"""How important each attention head is, over a set of prompts (Hao et al., AAAI 2021, section 4)."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from lens_mix import targets as targets_module
from lens_mix.arguments import flags, instance, number, one_of, pairs, real_tensor, several, whole_number
from lens_mix.hooks import must_fire, prune_heads
from lens_mix.lens.model import Lens
from lens_mix.lens.model_classes import TransformerLensModel, UnsupportedModelError
from lens_mix.lens.prompts import read_prompt
from lens_mix.lens.verification.kept import verification_of
from lens_mix.lens.verification.support import any_prompt
from lens_mix.method import Method
from lens_mix.methods.attention import AttentionWeights
from lens_mix.methods.attention_attribution import AttentionAttribution
from lens_mix.methods.gradient_attention import GradientAttention
from lens_mix.runner import run
from lens_mix.targets import TargetLike

if TYPE_CHECKING:
    import pandas

By = Literal["attribution", "attention", "taylor"]
Statistic = Literal["pearson", "spearman"]
Metric = Callable[[Any], float]
Head = tuple[int, int]


@dataclasses.dataclass(frozen=True, eq=False)
class HeadImportance:
    """One number per head; the larger, the more important.

    Attributes:
        scores: [layer, head], float64.
        name: how it was measured.
        examples: over how many prompts.
        notes: what the maps behind it warned of (completeness), with the number of prompts.
    """

    scores: Float[Tensor, "layer head"]
    name: str
    examples: int
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        scores = real_tensor("scores", self.scores).to("cpu", torch.float64)
        if scores.ndim != 2 or scores.numel() == 0:
            raise ValueError(f"scores: expected shape [layer, head], got {list(scores.shape)}")
        if not bool(torch.isfinite(scores).all()):
            raise ValueError("scores: expected finite numbers, got NaN or infinity")
        object.__setattr__(self, "scores", scores)
        object.__setattr__(self, "examples", whole_number("examples", self.examples, 0))

    def ranking(self) -> list[Head]:
        """(layer, head), the least important first; ties by layer, then head."""
        order = self.scores.flatten().argsort(stable=True).tolist()
        return [divmod(place, self.scores.shape[1]) for place in order]

    def top(self, k: int = 5) -> list[tuple[int, int, float]]:
        """The `k` most important heads: (layer, head, score)."""
        best = self.ranking()[::-1][: whole_number("k", k, 1)]
        return [(*place, self.scores[place].item()) for place in best]

    def correlation(self, other: HeadImportance, how: Statistic = "pearson") -> float:
        """Correlation over all heads with another importance of the same model, -1 to 1.

        Raises:
            ValueError: other shapes; an unknown statistic; constant scores.
        """
        one_of("how", how, ("pearson", "spearman"))
        instance("other", other, HeadImportance, "a HeadImportance")
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
        """Columns layer, head, importance."""
        import pandas as pd

        scores = self.scores.tolist()
        rows = [(layer, head, one) for layer, row in enumerate(scores) for head, one in enumerate(row)]
        return pd.DataFrame(rows, columns=["layer", "head", "importance"])

    def show(self, **options: Any) -> Any:
        """A heat map, layer x head; `options` go to `lens_mix.view.attribution_figures.head_map`."""
        from lens_mix.view import attribution_figures

        return attribution_figures.head_map(self, **options)


def head_importance(
    model: TransformerLensModel,
    prompts: Sequence[Any],
    by: By = "attribution",
    *,
    targets: TargetLike | Sequence[TargetLike] | None = None,
    statistic: Literal["max", "mean"] = "max",
    method: AttentionAttribution | None = None,
    part: str | None = None,
    progress: bool = False,
    **options: Any,
) -> HeadImportance:
    """Importance of every head over some prompts.

    | `by` | importance of head h |
    |---|---|
    | "attribution" | E_x[max_ij Attr_h], the paper's; by default of the predicted probability |
    | "attention" | E_x[max_ij A_h], its baseline, over the queries that see two keys or more |
    | "taylor" | E_x abs(Σ_ij A_h ∂L/∂A_h) (Michel et al., NeurIPS 2019); L by default the next-token loss |

    The released code sums over examples where this averages, and its Taylor expansion differentiates the sum
    of the logits where this differentiates the loss. For accuracy differences see `ablation_importance`.

    Args:
        prompts: as in `lm.run`, one or more.
        targets: one for all prompts, or one per prompt.
        statistic: "max" over the entries of a head's map, or their "mean" over visible keys. (The mean of
            attention says nothing: rows sum to 1, so that every head has the same.)
        method: the attribution to use ("attribution" only); its target is replaced by `targets`, if given.
        part, options: as in `lm.run`.

    Raises:
        ValueError: no prompts; an unknown option; another number of targets than of prompts.
        UnsupportedModelError: a hybrid, some of whose blocks have no heads; else as `lm.run`.
    """
    one_of("by", by, ("attribution", "attention", "taylor"))
    flags(progress=progress)
    if method is not None and by != "attribution":
        raise ValueError(f"method: applies to by='attribution' only, got by={by!r}")
    prompts = several("prompts", prompts, "several prompts", least=1)
    by_prompt = one_target_each("prompts", prompts, targets)
    part = every_block_has_heads(model, part, "head_importance").stack.name
    if "layers" in options:
        raise ValueError("layers: expected none, as importances have a row for every layer; cut the scores")
    one_of("statistic", statistic, ("max", "mean"))
    values = []
    warned: collections.Counter[str] = collections.Counter()
    for prompt, target in zip(tqdm(prompts, disable=not progress, desc=by), by_prompt, strict=True):
        mixing = run(model, prompt, method_for(by, target, method), part=part, progress=None, **options)
        scores = mixing.scores.to("cpu", torch.float64)
        warned.update(note.split(":")[0] for note in mixing.notes if "completeness" in note)  # by layer
        if by == "attention":
            # a query that sees one key gives it 1 in every head: in causal models always the first
            alone = (mixing.visible().sum(-1) < 2).cpu()
            scores = scores.masked_fill(alone[:, None, :, None], 0)
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
def pruned(model: TransformerLensModel, heads: Iterable[Head], *, part: str | None = None) -> Iterator[Any]:
    """The model without some heads, inside a `with` block: their patterns count as zero.

    Args:
        heads: (layer, head) pairs.
        part: as in `lm.run`.

    Raises:
        ValueError: a layer or head that the model does not have.
        RuntimeError: at the end, when nothing ran the model inside.
        UnsupportedModelError: hooks on values and patterns can't be trusted on this model.
    """
    lens = Lens(model, part)
    by_layer: dict[int, list[int]] = collections.defaultdict(list)
    for layer, head in pairs("heads", heads, "(layer, head) pairs"):
        layer = whole_number("heads", layer, 0, lens.n_layers - 1, "layers")
        if layer not in lens.stack.attention_layers:
            gaps = lens.stack.gaps
            raise ValueError(f"heads: expected heads of blocks that have some, got layer {layer} ({gaps})")
        by_layer[layer].append(whole_number("heads", head, 0, lens.n_heads - 1, "heads"))
    reason = verification_of(lens, read_prompt(model, lens.model_class, any_prompt(model))).hooks_failure
    if reason is not None:
        raise UnsupportedModelError(f"pruned can't run on this model: {reason}")
    template = lens.stack.attention_template
    pruning = [prune_heads(layer, chosen, attention=template) for layer, chosen in by_layer.items()]
    # In the precision that the user runs the model in, with and without the heads.
    with lens.evaluation_mode(precise=False), must_fire(*pruning) as hooks, lens.hooked(hooks):
        yield model


def ablation_importance(
    model: TransformerLensModel,
    metric: Metric,
    *,
    part: str | None = None,
    examples: int = 0,
    progress: bool = False,
) -> HeadImportance:
    """Accuracy difference: metric(model) - metric(model without the head), head by head.

    Args:
        metric: a function of the model, larger is better, that runs it on data of its own; it is called
            1 + layers x heads times.
        part: as in `lm.run`.
        examples: how many examples the metric is over, for the record.

    Raises:
        RuntimeError: the metric does not run the model.
        UnsupportedModelError: as `head_importance`.
    """
    flags(progress=progress)
    examples = whole_number("examples", examples, 0)
    lens = every_block_has_heads(model, part, "ablation_importance")
    whole = measured(metric, model)
    scores = torch.zeros(lens.n_layers, lens.n_heads, dtype=torch.float64, device="cpu")
    places = list(itertools.product(range(lens.n_layers), range(lens.n_heads)))
    for place in tqdm(places, disable=not progress, desc="ablation"):
        with pruned(model, [place], part=lens.stack.name):
            scores[place] = whole - measured(metric, model)
    return HeadImportance(scores, "ablation", examples)


def every_block_has_heads(model: TransformerLensModel, part: str | None, what: str) -> Lens:
    """The face of a model whose heads are a table, layer x head; a hybrid is refused."""
    lens = Lens(model, part)
    if lens.stack.gaps is not None:
        raise UnsupportedModelError(
            f"{what}: expected heads in every block, got {lens.stack.gaps} (lm.run maps "
            "the heads that there are, with methods that take per_head=True)"
        )
    return lens


def measured(metric: Metric, model: TransformerLensModel) -> float:
    """What a metric says of the model; TypeError, ValueError: no function, or no finite number."""
    instance("metric", metric, Callable, "a function of the model")
    return number("metric", metric(model))


def importance_correlations(
    importances: Mapping[str, HeadImportance], how: Statistic = "pearson"
) -> pandas.DataFrame:
    """Correlation of head importance between tasks (or measures): a symmetric table, names on both axes.

    Raises:
        ValueError: fewer than two; else as `HeadImportance.correlation`.
    """
    from lens_mix.tables import Table

    expected = "two HeadImportances or more, by their names"
    instance("importances", importances, Mapping, expected)
    several("importances", importances.values(), expected, least=2, kind=HeadImportance)
    table = [[one.correlation(other, how) for other in importances.values()] for one in importances.values()]
    return Table(table, index=list(importances), columns=list(importances))


def one_target_each(
    name: str, items: Sequence[Any], targets: TargetLike | Sequence[TargetLike] | None
) -> list[TargetLike | None]:
    """A target for each of the prompts or examples (`name`, for errors), of which there must be one."""
    each: list[Any] = list(targets) if isinstance(targets, (list, tuple)) else [targets] * len(items)
    if len(each) != len(items):
        raise ValueError(f"targets: expected one, or one for each of {len(items)} {name}, got {len(each)}")
    return each


def method_for(by: str, target: TargetLike | None, method: AttentionAttribution | None) -> Method:
    """What measures by "attribution", "attention" or "taylor"; a target or method of None is the default."""
    if by == "attention":
        return AttentionWeights(per_head=True)
    if by == "taylor":
        target = targets_module.loss() if target is None else target
        return GradientAttention(target=target, per_head=True, rectify=False)
    if method is not None:
        instance("method", method, AttentionAttribution, "an AttentionAttribution")
    method = dataclasses.replace(method or AttentionAttribution(), per_head=True)
    return method if target is None else dataclasses.replace(method, target=target)
