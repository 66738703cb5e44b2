"""Score maps over sources (sentences, documents): the linear datamodeling score, and the top-k drop."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lens_mix._classes.model_classes import TransformerLensModel
from lens_mix.aggregation.candidates import candidate_rows
from lens_mix.arguments import check_items, check_real_tensor, check_whole_number
from lens_mix.evaluation.agreement import spearman
from lens_mix.evaluation.intervention_passes import InterventionPasses, falling, intervention_passes
from lens_mix.maps import MixingMap
from lens_mix.maps.spans import Group, Groups, check_groups, read_groups
from lens_mix.removal import Removal, as_removal
from lens_mix.targets import TargetLike

if TYPE_CHECKING:
    import pandas


@dataclasses.dataclass(frozen=True, eq=False)
class SourceAblations:
    """The target in passes that each keep a random half of the sources.

    Attributes:
        sources: The names of the sources.
        kept: For each ablation, which sources it keeps.
        values: The target in each ablation.
        clean: The target with all sources.
    """

    sources: tuple[str, ...]
    kept: Bool[Tensor, "ablation source"]
    values: Float[Tensor, " ablation"]
    clean: float

    def lds(self, scores: Float[Tensor, " source"]) -> float:
        """Return the linear datamodeling score of one score per source, as the function `lds` does.

        Args:
            scores: One score per source.

        Raises:
            TypeError, ValueError: There is not one finite number per source.
        """
        read = check_real_tensor("scores", scores).to("cpu", torch.float64)
        if tuple(read.shape) != (len(self.sources),) or not bool(torch.isfinite(read).all()):
            raise ValueError(
                f"scores: expected one finite score per source, [{len(self.sources)}], got shape "
                f"{list(read.shape)}{' with NaN or infinity' if read.isfinite().logical_not().any() else ''}"
            )
        return spearman(self.kept.double() @ read, self.values)


@dataclasses.dataclass(frozen=True)
class TopKDrop:
    """What the target loses without the k strongest sources of a row, and without k random ones.

    Attributes:
        name: The name of the row.
        ranked: The names of the sources, the strongest first.
        clean: The target with all sources.
        drops: For each k, the target with all sources minus that without the k strongest. Higher is better.
            NaN if there are fewer sources than k.
        random: For each k, the same for k random sources, the mean over the draws.
    """

    name: str
    ranked: tuple[str, ...]
    clean: float
    drops: dict[int, float]
    random: dict[int, float]

    def to_dataframe(self) -> pandas.DataFrame:
        """Return a table with the columns row, k, drop and random, one row per k."""
        from lens_mix.tables import Table

        lines = [(self.name, k, drop, self.random[k]) for k, drop in self.drops.items()]
        return Table(lines, columns=["row", "k", "drop", "random"])


def source_ablations(
    model: TransformerLensModel,
    prompt: Any,
    sources: Groups,
    *,
    target: TargetLike | None = None,
    removal: str | Removal = "drop",
    ablations: int = 64,
    seed: int = 0,
    **options: Any,
) -> SourceAblations:
    """Measure the target in random ablations, each of which keeps every source with probability 1/2.

        >>> prompt = "Anna lives in Rome. Ben lives in Oslo. Anna lives in"
        >>> sources = ["Anna lives in Rome.", " Ben lives in Oslo."]
        >>> ablations = lm.evaluation.source_ablations(model, prompt, sources)
        >>> ablations.lds(torch.tensor([0.8, 0.2]))

    The result scores any number of maps (`SourceAblations.lds`) without further passes. A linear model that
    is fitted to it is the one of ContextCite (Cohen-Wang et al., NeurIPS 2024).

    Args:
        model: As in `lm.run`. Any TransformerLens model.
        prompt: As in `lm.run`. For a statement that the model wrote, the prompt and the statement.
        sources: Groups of positions, as `spans` of `lm.methods.Occlusion`: texts of the prompt, slices or
            lists of positions, in a list or by name. Positions in no source are always kept.
        target: What is measured. None: the log probability of the prediction at the last position. For a
            statement, `lm.targets.span(start, stop)`.
        removal: "drop" (the tokens are deleted, and the others move together, as in ContextCite), or another
            one as in `removal_curves`.
        ablations: The number of ablations. Two of them may be equal, and take one pass.
        seed: The seed of the ablations.
        **options: Part, max_memory, prepend_bos, attention_mask and model inputs, as in `lm.run`.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument is unknown, out of range, or does not fit the prompt, or a source contains a
            position that has to stay.
        UnsupportedModelError: The verification of the model fails, or the removal does not work on it.
    """
    chosen, groups = as_removal(removal), check_groups("sources", sources)
    ablations, seed = check_whole_number("ablations", ablations, 2), check_whole_number("seed", seed, 0)
    with intervention_passes(model, prompt, target, **options) as passes:
        return _ablate(passes, _read_sources(passes, chosen, groups), chosen, ablations, seed)


@overload
def lds(
    model: TransformerLensModel, prompt: Any, rows: Mapping[str, Any], sources: Groups, **options: Any
) -> dict[str, float]: ...
@overload
def lds(model: TransformerLensModel, prompt: Any, rows: Any, sources: Groups, **options: Any) -> float: ...
def lds(
    model: TransformerLensModel,
    prompt: Any,
    rows: Any,
    sources: Groups,
    *,
    target: TargetLike | None = None,
    removal: str | Removal = "drop",
    ablations: int = 64,
    seed: int = 0,
    **options: Any,
) -> float | dict[str, float]:
    """Compute the linear datamodeling score (LDS): whether scores of sources add up to measured effects.

        >>> prompt = "Anna lives in Rome. Ben lives in Oslo. Anna lives in"
        >>> sources = ["Anna lives in Rome.", " Ben lives in Oslo."]
        >>> lm.evaluation.lds(model, prompt, lm.input_map(model, prompt), sources)

    It is the rank correlation (Spearman), over random ablations, between the sum of the scores of the sources
    that an ablation keeps and the target in that ablation (Park et al., "TRAK", ICML 2023). It is -1 to 1.
    Higher is better. Equal scores for all sources predict the number of kept sources, so their LDS is that of
    this number, and not 0.

    ContextCite (Cohen-Wang et al., NeurIPS 2024, arXiv:2409.00729) and AT2 (Cohen-Wang et al., 2025,
    arXiv:2504.13752) measure the logit log(p / (1 - p)) of the probability p of the whole response. It has
    the order of log p, which the default target measures, so the LDS is the same.

    Args:
        model: As in `source_ablations`.
        prompt: As in `source_ablations`.
        rows: The scores, or several by name, which share all passes: one per source, or one per position
            [key], of which those of a source are summed; or a `MixingMap` of kind "input" with such keys, of
            which the last layer's default row is read. Signs count.
        sources: As in `source_ablations`.
        target: As in `source_ablations`.
        removal: As in `source_ablations`.
        ablations: As in `source_ablations`. With few, the score is noisy: for scores without information its
            standard deviation is 1 / √(ablations − 1).
        seed: As in `source_ablations`.
        **options: As in `source_ablations`.

    Returns:
        A number, or a dict of them by name if `rows` has names. NaN if all scores are 0, there is one
        ablation only, or the target is constant.

    Raises:
        TypeError, ValueError, UnsupportedModelError: As in `source_ablations`, or the scores do not fit.
    """
    chosen, groups = as_removal(removal), check_groups("sources", sources)
    ablations, seed = check_whole_number("ablations", ablations, 2), check_whole_number("seed", seed, 0)
    with intervention_passes(model, prompt, target, **options) as passes:
        read = _read_sources(passes, chosen, groups)
        named, is_single = _read_scores(rows, read, passes.length)
        measured = _ablate(passes, read, chosen, ablations, seed)
    by_name = {name: measured.lds(scores) for name, scores in named.items()}
    return by_name["row"] if is_single else by_name


@overload
def top_k_drop(
    model: TransformerLensModel, prompt: Any, rows: Mapping[str, Any], sources: Groups, **options: Any
) -> dict[str, TopKDrop]: ...
@overload
def top_k_drop(
    model: TransformerLensModel, prompt: Any, rows: Any, sources: Groups, **options: Any
) -> TopKDrop: ...
def top_k_drop(
    model: TransformerLensModel,
    prompt: Any,
    rows: Any,
    sources: Groups,
    *,
    target: TargetLike | None = None,
    removal: str | Removal = "drop",
    k: int | Sequence[int] = (1, 3, 5),
    draws: int = 4,
    seed: int = 0,
    **options: Any,
) -> TopKDrop | dict[str, TopKDrop]:
    """Measure what the target loses without the k strongest sources (Cohen-Wang et al., NeurIPS 2024).

        >>> prompt = "Anna lives in Rome. Ben lives in Oslo. Anna lives in"
        >>> sources = ["Anna lives in Rome.", " Ben lives in Oslo."]
        >>> lm.evaluation.top_k_drop(model, prompt, lm.input_map(model, prompt), sources, k=1).drops

    For a log probability, the drop is in nats: log p with all sources minus log p without the k strongest. It
    is not bounded, and prompts whose answer depends on the sources dominate its mean. The same for random
    sources is the control.

    Args:
        model: As in `source_ablations`.
        prompt: As in `source_ablations`.
        rows: As in `lds`. The highest scores are the strongest; ties are in a random order.
        sources: As in `source_ablations`.
        target: As in `source_ablations`.
        removal: As in `source_ablations`.
        k: How many sources are removed, one number or several.
        draws: The number of random orders of the sources, whose first k are removed for the control.
        seed: The seed of the random orders and of the ties.
        **options: As in `source_ablations`.

    Returns:
        A `TopKDrop`, or a dict of them by name if `rows` has names.

    Raises:
        TypeError, ValueError, UnsupportedModelError: As in `lds`.
    """
    chosen, groups = as_removal(removal), check_groups("sources", sources)
    counts = [check_whole_number("k", one, 1) for one in check_items("k", k, "whole numbers", 1, alone=True)]
    draws, seed = check_whole_number("draws", draws, 1), check_whole_number("seed", seed, 0)
    with intervention_passes(model, prompt, target, **options) as passes:
        read = _read_sources(passes, chosen, groups)
        named, is_single = _read_scores(rows, read, passes.length)
        found = _measure_drops(passes, read, chosen, named, counts, draws, seed)
    return found["row"] if is_single else found


def _read_sources(passes: InterventionPasses, removal: Removal, groups: Any) -> list[Group]:
    """Return the sources, of which none has a position that the removal keeps or that has no effect."""
    read = read_groups(passes.checked.tokens(0), groups, "sources")
    first = passes.first_read
    if first is None or not passes.checked.verification.causal:
        return read
    last = first - 1 if removal.keeps_target else first
    late = [group for group in read if group.positions[-1] > last]
    if late:
        stays = " and has to stay" if removal.keeps_target else ""
        raise ValueError(
            f"sources: expected positions up to {last}, because the target is first read at {first}, which "
            f"sees no later ones{stays}, got {late[0].name!r} up to {late[0].positions[-1]}; leave out such "
            "sources, or these positions"
        )
    return read


def _read_scores(
    rows: Any, sources: Sequence[Group], length: int
) -> tuple[dict[str, Float[Tensor, " source"]], bool]:
    """Return name -> one score per source, and whether a single row was given."""
    is_single = not isinstance(rows, Mapping)
    given = {"row": rows} if is_single else dict(rows)
    if not given:
        raise ValueError("rows: expected at least one row by its name, got none")
    scores = {}
    for name, row in given.items():
        read = _read_row(f"rows[{name!r}]", row)
        if tuple(read.shape) not in ((len(sources),), (length,)):
            raise ValueError(
                f"rows[{name!r}]: expected one score per source, [{len(sources)}], or per position of the "
                f"prompt, [{length}], got shape {list(read.shape)}"
            )
        if not bool(torch.isfinite(read).all()):
            raise ValueError(f"rows[{name!r}]: expected finite scores, got NaN or infinity")
        if len(read) != len(sources):
            read = torch.stack([read[group.positions].sum() for group in sources])
        scores[name] = read
    return scores, is_single


def _read_row(argument: str, row: Any) -> Tensor:
    """Return a row as a float64 tensor; the default row of an input map."""
    if isinstance(row, MixingMap):
        if row.kind != "input":
            raise ValueError(
                f"{argument}: expected an input map, got a layer map of {row.method!r}; lm.rollout, lm.flow "
                "or lm.layer_mean make input maps of layer maps"
            )
        row = next(iter(candidate_rows(row, row.default_query_position, {}).values()))
    return check_real_tensor(argument, row).to("cpu", torch.float64)


def _ablate(
    passes: InterventionPasses, sources: Sequence[Group], removal: Removal, ablations: int, seed: int
) -> SourceAblations:
    generator = torch.Generator().manual_seed(seed)
    kept = torch.rand(ablations, len(sources), generator=generator, dtype=torch.float64, device="cpu") < 0.5
    names = tuple(group.name for group in sources)
    return SourceAblations(names, kept, _values_without(passes, sources, removal, ~kept), passes.clean)


def _measure_drops(
    passes: InterventionPasses,
    sources: Sequence[Group],
    removal: Removal,
    rows: Mapping[str, Float[Tensor, " source"]],
    counts: Sequence[int],
    draws: int,
    seed: int,
) -> dict[str, TopKDrop]:
    """Return the drops of several rows, whose passes are run together."""
    orders = {name: falling(row, seed) for name, row in rows.items()}
    # Ties of equal scores are in a random order, so a constant row has the order of its seed.
    drawn = [
        falling(torch.zeros(len(sources), dtype=torch.float64, device="cpu"), seed + 1 + draw)
        for draw in range(draws)
    ]
    possible = [k for k in counts if k <= len(sources)]
    removed = torch.zeros(len(orders) + draws, len(possible), len(sources), dtype=torch.bool, device="cpu")
    for index, order in enumerate([*orders.values(), *drawn]):
        for place, k in enumerate(possible):
            removed[index, place, order[:k]] = True
    values = _values_without(passes, sources, removal, removed.flatten(0, 1)).view(removed.shape[:2])
    undefined = dict.fromkeys(counts, math.nan)
    drops = [undefined | dict(zip(possible, row, strict=True)) for row in (passes.clean - values).tolist()]
    control = passes.clean - values[len(orders) :].mean(0)
    random = undefined | dict(zip(possible, control.tolist(), strict=True))
    found = {}
    for (name, order), own in zip(orders.items(), drops[: len(orders)], strict=True):
        ranked = tuple(sources[index].name for index in order.tolist())
        found[name] = TopKDrop(name, ranked, passes.clean, own, random)
    return found


def _values_without(
    passes: InterventionPasses,
    sources: Sequence[Group],
    removal: Removal,
    removed: Bool[Tensor, "ablation source"],
) -> Float[Tensor, " ablation"]:
    """Compute the target without some sources, once for each different set of them."""
    sets, index = removed.unique(dim=0, return_inverse=True)
    positions = torch.zeros(len(sources), passes.length, dtype=torch.bool, device="cpu")
    for row, group in enumerate(sources):
        positions[row, group.positions] = True
    # Groups are disjoint, so a position is in at most one removed source.
    values = passes.values_without(removal, (sets.double() @ positions.double()) > 0)
    return values.cpu().double()[index]
