"""Compute pruning curves: how a metric changes as heads are removed (Hao et al., AAAI 2021, section 4)."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from lens_mix import Lens
from lens_mix.arguments import (
    check_choice,
    check_flags,
    check_instance,
    check_items,
    check_number,
    check_real_tensor,
    check_whole_number,
)
from lens_mix.experiments.head_importance import (
    Head,
    HeadImportance,
    ImportanceMetric,
    measure_model,
    open_with_heads_in_every_block,
    remove_heads,
    require_pattern_hooks,
)
from lens_mix.models import TransformerLensModel

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

_FRACTIONS = tuple(step / 10 for step in range(11))


@dataclasses.dataclass(frozen=True)
class PruningCurves:
    """A metric as a function of the share of removed heads, one curve per ranking.

    Attributes:
        fractions: The shares of all heads, 0 to 1.
        removed: The number of heads of each share.
        values: For each ranking, one value per share. For "random" it is the mean over its draws.
        lowest: The lowest value over the draws of "random". For other rankings the value itself.
        highest: The highest value over the draws of "random". For other rankings the value itself.
        total: The number of heads of the model.
    """

    fractions: tuple[float, ...]
    removed: tuple[int, ...]
    values: Mapping[str, tuple[float, ...]]
    lowest: Mapping[str, tuple[float, ...]]
    highest: Mapping[str, tuple[float, ...]]
    total: int

    def area(self) -> dict[str, float]:
        """Return the area under each curve over the shares, which is the mean of the metric."""
        shares = torch.tensor(self.fractions, dtype=torch.float64, device="cpu")
        return {
            name: float(torch.trapezoid(shares.new_tensor(values), shares))
            for name, values in self.values.items()
        }

    def to_dataframe(self) -> pandas.DataFrame:
        """Return a table with the columns ranking, fraction, heads_removed, value, lowest and highest."""
        from lens_mix.tables import Table

        shares = (self.fractions, self.removed)
        rows = [
            (name, *numbers)
            for name in self.values
            for numbers in zip(*shares, self.values[name], self.lowest[name], self.highest[name], strict=True)
        ]
        columns = ["ranking", "fraction", "heads_removed", "value", "lowest", "highest"]
        return Table(rows, columns=columns)

    def show(self, **options: Any) -> Figure:
        """Draw all curves in one figure.

        Args:
            **options: Those of `lens_mix.experiments.head_figures.pruning_figure`.
        """
        from lens_mix.experiments import head_figures

        return head_figures.pruning_figure(self, **options)


def pruning_curves(
    model: TransformerLensModel,
    metric: ImportanceMetric,
    rankings: Mapping[str, HeadImportance | Float[Tensor, "layer head"]],
    *,
    fractions: Sequence[float] = _FRACTIONS,
    remove: Literal["least", "most"] = "least",
    random: int = 3,
    seed: int = 0,
    part: str | None = None,
    progress: bool = False,
) -> PruningCurves:
    """Remove heads in the order of each ranking, over all layers, and measure the model at each share.

        >>> def mean_logit(model):
        ...     return lm.models.prompt_logits(model, "The Eiffel Tower is in the city of")[-1].max().item()
        >>> rankings = {"ablation": lm.experiments.ablation_importance(model, mean_logit)}
        >>> lm.experiments.pruning_curves(model, mean_logit, rankings, fractions=(0, 0.5), random=1)

    Args:
        model: The model.
        metric: A function of the model that runs it on data of its own and returns a number. It is called
            once for each distinct set of removed heads.
        rankings: Importances [layer, head] by name.
        fractions: The shares of all heads to remove, 0 to 1, ascending.
        remove: Which heads are removed first: the "least" important (as in the paper), or the "most".
        random: The number of random orders, which are averaged under the name "random". 0: none.
        seed: The seed of the random orders.
        part: As in `lm.run`.
        progress: Whether a bar is shown.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: There is no ranking, scores are not [layer, head], or shares do not ascend in 0..1.
        RuntimeError: The metric does not run the model.
        UnsupportedModelError: Some blocks of the model have no heads (a hybrid).
    """
    lens = open_with_heads_in_every_block(model, part, "pruning_curves")
    total = lens.n_layers * lens.n_heads
    given = check_items("fractions", fractions, "ascending shares from 0 to 1", least=1)
    fractions = [check_number("fractions", fraction, 0, 1) for fraction in given]
    if not all(lower < upper for lower, upper in itertools.pairwise(fractions)):
        raise ValueError(f"fractions: expected ascending shares from 0 to 1, got {fractions}")
    check_choice("remove", remove, ("least", "most"))
    check_flags(progress=progress)
    random, seed = (
        check_whole_number("random", random, 0),
        check_whole_number("seed", seed, -(2**63), 2**63 - 1),
    )
    orders = _order_heads(rankings, lens, remove, random, seed)
    removed = tuple(round(fraction * total) for fraction in fractions)
    results: dict[frozenset[Head], float] = {}
    # Rankings share sets of heads, at least the first and the last one, so each set is measured once.
    every_order = [order for draws in orders.values() for order in draws]
    distinct = dict.fromkeys(frozenset(order[:count]) for count in removed for order in every_order)
    require_pattern_hooks(model, lens.stack.name)
    for heads in tqdm(distinct, disable=not progress, desc="pruning"):
        with remove_heads(model, sorted(heads), lens.stack.name):
            results[heads] = measure_model(metric, model)
    # values[ranking] has a list per share, which has a value per draw.
    values = {
        name: [[results[frozenset(order[:count])] for order in draws] for count in removed]
        for name, draws in orders.items()
    }
    return PruningCurves(
        tuple(fractions),
        removed,
        {name: tuple(sum(draws) / len(draws) for draws in shares) for name, shares in values.items()},
        {name: tuple(map(min, shares)) for name, shares in values.items()},
        {name: tuple(map(max, shares)) for name, shares in values.items()},
        total,
    )


def _order_heads(
    rankings: Mapping[str, HeadImportance | Tensor], lens: Lens, remove: str, random: int, seed: int
) -> dict[str, list[list[Head]]]:
    check_instance("rankings", rankings, Mapping, "a dict of importances by their names")
    if not rankings and random < 1:
        raise ValueError("rankings: expected at least one, got none (and random=0)")
    if "random" in rankings:
        raise ValueError("rankings: expected other names than 'random', which is made here, got it")
    orders: dict[str, list[list[Head]]] = {}
    for name, given in rankings.items():
        label = f"rankings[{name!r}]"
        scores = given.scores if isinstance(given, HeadImportance) else check_real_tensor(label, given)
        expected, shape = [lens.n_layers, lens.n_heads], list(scores.shape)
        if shape != expected:
            raise ValueError(f"{label}: expected shape {expected}, got {shape}")
        if not bool(torch.isfinite(scores).all()):
            raise ValueError(f"{label}: expected finite numbers, got NaN or infinity")
        order = HeadImportance(scores, name, 0).ranking()
        orders[name] = [order if remove == "least" else order[::-1]]
    if random > 0:
        # The device is named, because the default device may be another one than the generator's.
        generator, count = torch.Generator("cpu").manual_seed(seed), lens.n_layers * lens.n_heads
        draws = [torch.randperm(count, generator=generator, device="cpu") for _ in range(random)]
        orders["random"] = [[divmod(index, lens.n_heads) for index in draw.tolist()] for draw in draws]
    return orders
