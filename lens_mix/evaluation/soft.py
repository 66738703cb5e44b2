"""Measure soft erasure of a row of an input map, with the same share of the input kept for every row."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, overload

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lens_mix import targets
from lens_mix._classes.model_classes import TransformerLensModel
from lens_mix._inputs.rows import Positions
from lens_mix.arguments import check_number, check_whole_number
from lens_mix.evaluation.intervention_passes import InterventionPasses, intervention_passes, read_rows
from lens_mix.targets import TargetLike

if TYPE_CHECKING:
    import pandas


@dataclasses.dataclass(frozen=True)
class SoftFaithfulness:
    """Soft comprehensiveness and sufficiency of one row, for one share of kept input.

    Attributes:
        name: The name of the row.
        retained: π, the share of input coordinates that is kept on average, the same for every row.
        clean: The target, a probability.
        erased: The target when nothing of the ranked positions is kept.
        without: The target when important positions keep little, the mean over the samples.
        with_only: The target when important positions keep much, the mean over the samples.
        comprehensiveness: π-Soft-NC, at least 0. Higher is better. NaN if erasing all does not lower the
            target.
        sufficiency: π-Soft-NS, at most 1. Higher is better. NaN if erasing all does not lower the target.
        samples: The number of draws of the means.
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
        """Return a table with one row, whose columns are the attributes."""
        import pandas as pd

        return pd.DataFrame([dataclasses.asdict(self)])


@overload
def soft_faithfulness(
    model: TransformerLensModel, prompt: Any, rows: Mapping[str, Any], **options: Any
) -> dict[str, SoftFaithfulness]: ...
@overload
def soft_faithfulness(
    model: TransformerLensModel, prompt: Any, rows: Any, **options: Any
) -> SoftFaithfulness: ...
def soft_faithfulness(
    model: TransformerLensModel,
    prompt: Any,
    rows: Any,
    *,
    retained: float = 0.5,
    samples: int = 8,
    target: TargetLike | None = None,
    positions: Positions | None = None,
    seed: int = 0,
    **options: Any,
) -> SoftFaithfulness | dict[str, SoftFaithfulness]:
    """Compute soft normalized comprehensiveness and sufficiency, with matched retention.

        >>> prompt = "The Eiffel Tower is in"
        >>> row = lm.rollout(lm.run(model, prompt, "attention")).scores[-1, -1]
        >>> lm.evaluation.soft_faithfulness(model, prompt, row).comprehensiveness

    In Soft-NC and Soft-NS (Zhao and Aletras, EMNLP 2023), position i keeps each coordinate of its input
    vector, independently, with a probability that depends on its importance. The other coordinates become 0.
    p is the target's probability. Important positions keep more in the input x', and less in x''. The input 0
    keeps nothing.

        Soft-S  = 1 − max(0, p(x) − p(x'))     Soft-NS = (Soft-S − S(0)) / (1 − S(0)),  S(0) for the input 0
        Soft-C  = max(0, p(x) − p(x''))        Soft-NC = Soft-C / (1 − S(0))

    In these measures a map with larger scores keeps more of the input, which is an advantage. Huang and Chan
    (2026) keep the expected retention fixed, and call the measures π-Soft-NC and π-Soft-NS. Only the abstract
    of their paper was available, so the retention is matched in a way of our own: a row's positive scores are
    multiplied by the one factor for which the mean of min(1, factor × score) is π. If all positive scores
    reach 1 and their mean is still below π, the other positions share the rest equally. For x'' the removed
    share, with mean 1 − π, is computed in the same way. So every row keeps the same expected share π in both
    inputs. All rows use the same random numbers.

    The mask is applied to the vector that enters the first block: the token's embedding, plus a position
    embedding if the model adds one, after the embedding norm if there is one. (The paper masks token
    embeddings.)

    Args:
        model: As in `lm.run`.
        prompt: As in `lm.run`.
        rows: Scores over all positions of the prompt [key], or several rows by name. Negative scores count as
            0.
        retained: π, above 0 and below 1.
        samples: The number of draws of the masks, over which the target is averaged.
        target: A probability: that of a token by its text, `lm.targets.predicted()` (the default) or
            `.probability(...)`.
        positions: The positions that are masked, or texts. None: all that the target's position can see.
        seed: The seed of the draws.
        **options: Part, max_memory, prepend_bos, attention_mask and model inputs, as in `lm.run`.

    Returns:
        A `SoftFaithfulness`, or a dict of them by name if `rows` has names.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument is out of range, or the target is not a probability.
        UnsupportedModelError: The verification of the model fails.
    """
    retained = check_number("retained", retained, 0, 1, above=True)
    if retained == 1:
        raise ValueError("retained: expected a number above 0 and below 1, got 1: everything would stay")
    samples, seed = check_whole_number("samples", samples, 1), check_whole_number("seed", seed, 0)
    target = targets.predicted() if target is None else target
    if isinstance(target, str):
        # The measure is defined for a probability, and a text alone states no unit.
        target = dataclasses.replace(targets.as_target(target), **{"of": "probability"})
    with intervention_passes(model, prompt, target, **options) as passes:
        if not passes.bound.is_probability:
            raise ValueError("target: expected a probability (lm.targets.probability), got another measure")
        named, single = read_rows(rows, passes.length)
        masked_positions = passes.positions(positions)
        shape = (samples, len(masked_positions), passes.first_block.whole_resid_pre.shape[-1])
        uniform = torch.rand(
            shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64, device="cpu"
        )
        # Erasing everything does not depend on the random numbers, so one sample is enough.
        erased = _average_target(passes, masked_positions, torch.zeros_like(uniform[:1], dtype=torch.bool))
        faithfulness = {}
        for name, row in named.items():
            keep, lose = (
                _match_mean(row[masked_positions], retained),
                _match_mean(row[masked_positions], 1 - retained),
            )
            with_only = _average_target(passes, masked_positions, uniform < keep[:, None])
            without = _average_target(passes, masked_positions, uniform < (1 - lose)[:, None])
            scores = _compute_scores(passes.clean, erased, without, with_only)
            faithfulness[name] = SoftFaithfulness(
                name, retained, passes.clean, erased, without, with_only, *scores, samples
            )
    return faithfulness["row"] if single else faithfulness


def _match_mean(row: Float[Tensor, " key"], mean: float) -> Float[Tensor, " key"]:
    """Return probabilities with a given mean that follow a row's positive scores: min(1, factor × score).

    Scores of 0 or less get 0, unless all others are 1 and the mean requires more. Then they share the rest
    equally. A row without a positive score gets equal probabilities.

    Args:
        row: One score per key.
        mean: The mean of the probabilities, 0 to 1.
    """
    row = row.clamp_min(0)
    total, positive = mean * len(row), int((row > 0).sum())
    if positive <= total:
        rest = (total - positive) / max(1, len(row) - positive)
        return torch.where(row > 0, 1.0, rest).to(row)
    # If the k highest scores become 1, the factor follows from the rest of the sum. The right k is the
    # smallest for which no other score exceeds 1.
    ordered = row.sort(descending=True).values
    sum_from = ordered.flip(0).cumsum(0).flip(0)
    for full in range(len(row)):
        factor = (total - full) / sum_from[full]
        if factor * ordered[full] <= 1:
            break
    return (row * factor).clamp(0, 1)


def _average_target(
    passes: InterventionPasses, masked_positions: list[int], masks: Bool[Tensor, "copy key d_model"]
) -> float:
    """Return the mean target over copies of the prompt, in which only some input coordinates are kept."""
    values = []
    for chunk in masks.split(passes.at_once):
        resid = passes.first_block.whole_resid_pre.repeat(len(chunk), 1, 1)
        resid[:, masked_positions] *= chunk.to(resid)
        values.append(passes.values(len(chunk), resid_pre=resid))
    return float(torch.cat(values).mean())


def _compute_scores(clean: float, erased: float, without: float, with_only: float) -> tuple[float, float]:
    """Return Soft-NC and Soft-NS. They are NaN if erasing everything does not lower the target."""
    nothing = max(0.0, clean - erased)
    if nothing == 0:
        return math.nan, math.nan
    return max(0.0, clean - without) / nothing, (nothing - max(0.0, clean - with_only)) / nothing
