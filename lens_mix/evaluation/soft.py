"""Soft erasure of a row of an input map, every map keeping as much of the input: π-Soft-NC and π-Soft-NS."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lens_mix import targets
from lens_mix.arguments import number, whole_number
from lens_mix.evaluation.intervention_passes import InterventionPasses, intervention_passes, read_rows
from lens_mix.lens.model_classes import TransformerLensModel
from lens_mix.lens.rows import Selection
from lens_mix.targets import TargetLike

if TYPE_CHECKING:
    import pandas


@dataclasses.dataclass(frozen=True)
class SoftFaithfulness:
    """Soft comprehensiveness and sufficiency of one row at one share of retention.

    Attributes:
        name: of the row.
        retained: π, the share of input coordinates kept on average, the same for every row.
        clean: the target, a probability.
        erased: the target with nothing of the ranked positions left.
        without: the target when important positions keep little, its mean over the samples.
        with_only: the target when important positions keep much, likewise.
        comprehensiveness: π-Soft-NC, 0 or more; higher is better. NaN where erasing all lowers nothing.
        sufficiency: π-Soft-NS, up to 1; higher is better. NaN likewise.
        samples: how many draws the means are over.
    """

    name: str
    retained: float
    clean: float
    erased: float
    without: float
    with_only: float
    comprehensiveness: float
    sufficiency: float
    samples: int

    def to_dataframe(self) -> pandas.DataFrame:
        """One line, the attributes as columns."""
        import pandas as pd

        return pd.DataFrame([dataclasses.asdict(self)])


def soft_faithfulness(
    model: TransformerLensModel,
    prompt: Any,
    rows: Any,
    *,
    retained: float = 0.5,
    samples: int = 8,
    target: TargetLike | None = None,
    positions: Selection | None = None,
    seed: int = 0,
    **options: Any,
) -> Any:
    """Soft normalised comprehensiveness and sufficiency with retention matched (π-Soft-NC, π-Soft-NS).

    Soft-NC and Soft-NS (Zhao and Aletras, EMNLP 2023): position i keeps each coordinate of its input vector
    with a probability that follows its importance, independently, the others being 0. With p the target's
    probability, x' the input where important positions keep more, x'' the one where they keep less, and 0 the
    one that keeps nothing:

        Soft-S  = 1 − max(0, p(x) − p(x'))     Soft-NS = (Soft-S − S(0)) / (1 − S(0)),  S(0) as of input 0
        Soft-C  = max(0, p(x) − p(x''))        Soft-NC = Soft-C / (1 − S(0))

    There a map with larger scores keeps more of the input, and wins by that (Huang and Chan, 2026, who call
    the measures with the expected retention held fixed π-Soft-NC and π-Soft-NS). Here retention is matched
    in our own way, as only the abstract of theirs was at hand: a row's positive scores are multiplied by the
    one factor that brings the mean of min(1, factor × score) to π. Where all positive scores are at 1 before
    that, scores of 0 or less share the rest alike. For x'' the share that is REMOVED is made in this way,
    with mean 1 − π. So every row keeps the same expected share π in both. All see the same random numbers.

    What is masked is the vector that enters the first block: the token's embedding, with the position's where
    the model adds one, after the embedding's norm where there is one. (The paper masks token embeddings.)

    Args:
        model, prompt: as in `lm.run`.
        rows: scores over all positions of the prompt [key], or several by name; what is negative counts as 0.
        retained: π, above 0 and below 1.
        samples: draws of the masks to average over.
        target: a probability (`lm.targets.predicted()`, the default, or `.probability(...)`).
        positions: which positions are masked; None: all that the target's position can see. The rest stay.
        seed: of the draws.
        options: part, max_memory, prepend_bos, attention_mask and model inputs, as in `lm.run`.

    Returns:
        `SoftFaithfulness`; a dict of them by name for rows by name.

    Raises:
        TypeError, ValueError: bad input; a target that is no probability.
        UnsupportedModelError: the model can't be trusted.
    """
    retained = number("retained", retained, 0, 1, above=True)
    if retained == 1:
        raise ValueError("retained: expected a number above 0 and below 1, got 1: everything would stay")
    samples, seed = whole_number("samples", samples, 1), whole_number("seed", seed, 0)
    target = targets.predicted() if target is None else target
    with intervention_passes(model, prompt, target, **options) as passes:
        if not passes.bound.is_probability:
            raise ValueError("target: expected a probability (lm.targets.probability), got another measure")
        named, single = read_rows(rows, passes.length)
        places = passes.positions(positions)
        shape = (samples, len(places), passes.first_block.whole_resid_pre.shape[-1])
        uniform = torch.rand(
            shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64, device="cpu"
        )
        # No draw decides: one will do.
        erased = _mean_target(passes, places, torch.zeros_like(uniform[:1], dtype=torch.bool))
        faithfulness = {}
        for name, row in named.items():
            keep, lose = _matched(row[places], retained), _matched(row[places], 1 - retained)
            with_only = _mean_target(passes, places, uniform < keep[:, None])
            without = _mean_target(passes, places, uniform < (1 - lose)[:, None])
            scores = _scores(passes.clean, erased, without, with_only)
            faithfulness[name] = SoftFaithfulness(
                name, retained, passes.clean, erased, without, with_only, *scores, samples
            )
    return faithfulness["row"] if single else faithfulness


def _matched(row: Float[Tensor, " key"], mean: float) -> Float[Tensor, " key"]:
    """Probabilities that follow a row's positive scores, with a given mean: min(1, factor × score).

    Scores of 0 or less get 0, unless all others are at 1 and the mean asks for more: then they share it
    alike. A row without a positive score is the same everywhere.
    """
    row = row.clamp_min(0)
    total, positive = mean * len(row), int((row > 0).sum())
    if positive <= total:
        rest = (total - positive) / max(1, len(row) - positive)
        return torch.where(row > 0, 1.0, rest).to(row)
    # With the k highest at 1, the factor that brings the others to what is left; the right k is the first
    # that leaves none of the others above 1.
    ordered = row.sort(descending=True).values
    behind = ordered.flip(0).cumsum(0).flip(0)
    for full in range(len(row)):
        factor = (total - full) / behind[full]
        if factor * ordered[full] <= 1:
            break
    return (row * factor).clamp(0, 1)


def _mean_target(
    passes: InterventionPasses, places: list[int], masks: Bool[Tensor, "copy key d_model"]
) -> float:
    """The target over copies of the prompt of whose input only some coordinates are kept."""
    values = []
    for chunk in masks.split(passes.at_once):
        resid = passes.first_block.whole_resid_pre.repeat(len(chunk), 1, 1)
        resid[:, places] *= chunk.to(resid)
        values.append(passes.values(len(chunk), resid_pre=resid))
    return float(torch.cat(values).mean())


def _scores(clean: float, erased: float, without: float, with_only: float) -> tuple[float, float]:
    """Soft-NC and Soft-NS; NaN where erasing everything lowers nothing."""
    nothing = max(0.0, clean - erased)
    if nothing == 0:
        return math.nan, math.nan
    return max(0.0, clean - without) / nothing, (nothing - max(0.0, clean - with_only)) / nothing
