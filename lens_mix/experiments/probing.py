"""Measure agreement with probing: does a map show that a cue was mixed in where a probe finds it?

This is the third evaluation of Value Zeroing (Mohebbi et al., EACL 2023, section 6). In each layer, a linear
probe predicts a feature of the cue (its number) from the representation of another position. It is compared
with the cue's score at that position in a map. A probe can reach a high accuracy by itself, so each has a
control task (Hewitt & Liang, EMNLP 2019): the same probe for labels that were drawn for every type of cue.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lens_mix.arguments import (
    check_instance,
    check_items,
    check_number,
    check_real_tensor,
    check_whole_number,
)
from lens_mix.evaluation.ranks import spearman
from lens_mix.experiments.passes import iterate_prompts
from lens_mix.methods.attention import AttentionWeights
from lens_mix.models import TransformerLensModel

if TYPE_CHECKING:
    import pandas


@dataclasses.dataclass(frozen=True, eq=False)
class Probing:
    """The results of the probes of every layer on held-out prompts.

    Attributes:
        accuracy: [layer], 0 to 1.
        control: [layer], the accuracy of the control task, 0 to 1.
        evidence: [layer, held-out prompt], the log probability of the right value, in nats.
        held_out: The numbers of the held-out prompts.
        majority: The accuracy of always predicting the most common value.
    """

    accuracy: Float[Tensor, " layer"]
    control: Float[Tensor, " layer"]
    evidence: Float[Tensor, "layer example"]
    held_out: Int[Tensor, " example"]
    majority: float

    @property
    def selectivity(self) -> Float[Tensor, " layer"]:
        """Return accuracy minus that of the control task: what is not due to the probe itself."""
        return self.accuracy - self.control

    def to_dataframe(self) -> pandas.DataFrame:
        """Return a table with the columns layer (numbered from 0), accuracy, control and selectivity."""
        import pandas as pd

        columns = {"accuracy": self.accuracy, "control": self.control, "selectivity": self.selectivity}
        table = pd.DataFrame({name: values.tolist() for name, values in columns.items()})
        return table.rename_axis("layer").reset_index()


class ProbingAgreement(NamedTuple):
    """Spearman's rank correlations over layers, -1 to 1. NaN if one side is constant.

    Attributes:
        accuracy: That of the mean map with the accuracy of the probes.
        selectivity: That of the mean map with the selectivity of the probes.
        prompts: [held-out prompt], that of each prompt's map with its evidence for the right value.
    """

    accuracy: float
    selectivity: float
    prompts: Float[Tensor, " example"]


def residuals_at(
    model: TransformerLensModel,
    prompts: Sequence[Any],
    positions: int | Sequence[int] = -1,
    *,
    layers: int | slice | Iterable[int] | Tensor | None = None,
    **options: Any,
) -> Float[Tensor, "layer prompt d_model"]:
    """Return the residual stream after every block, at one position of every prompt.

        >>> prompts = ["The Eiffel Tower is in the city of", "Anna lives in Rome. Anna lives in"]
        >>> lm.experiments.residuals_at(model, prompts).shape

    Args:
        model: As in `lm.run`.
        prompts: As in `lm.run`, at least one.
        positions: One position for all prompts, or one for each. Negative ones count from the end.
        layers: As in `lm.run`. None: all.
        **options: `part`, `prepend_bos`, … as in `lm.run`.

    Raises:
        TypeError: `queries` is among the options.
        ValueError: There are no prompts, the number of positions does not fit, or a prompt lacks a position.
        UnsupportedModelError: The verification of the model fails.
    """
    if "queries" in options:
        raise TypeError("queries: expected the rows as `positions`, got queries too; leave them out")
    prompts = check_items("prompts", prompts, "several prompts", least=1)
    given = check_items("positions", positions, "a position for each prompt", alone=True)
    per_prompt = given * len(prompts) if len(given) == 1 else given
    if len(per_prompt) != len(prompts):
        raise ValueError(
            f"positions: expected one, or one for each of {len(prompts)} prompts, got {len(per_prompt)}"
        )
    states = []
    for prompt, position in zip(prompts, per_prompt, strict=True):
        for checked in iterate_prompts(
            model, [prompt], AttentionWeights(), queries=[position], layers=layers, **options
        ):
            states.append(torch.stack([block.resid_post[0, 0] for block in checked.blocks]))
    return torch.stack(states, dim=1)


def probe_layers(
    states: Float[Tensor, "layer prompt d_model"],
    values: Sequence[Hashable],
    types: Sequence[Hashable],
    *,
    held_out: float = 0.5,
    penalty: float = 1.0,
    seed: int = 0,
) -> Probing:
    """Fit a linear probe per layer for a feature, with its control task.

        >>> subjects = ["The key", "The keys", "The tower", "The towers", "The film", "The films"]
        >>> states = lm.experiments.residuals_at(model, [f"{subject} that Anna saw" for subject in subjects])
        >>> lm.experiments.probe_layers(states, values=[0, 1] * 3, types=subjects)

    A probe is a logistic regression on standardized features. It is fitted to the prompts that are not held
    out, and minimizes Σ cross-entropy + penalty/2 · ‖weights‖² (as scikit-learn does with C = 1/penalty).

    Args:
        states: The representations to probe, as `residuals_at` returns them.
        values: The value of the feature in each prompt (the number of the cue).
        types: The type of the cue in each prompt (its word). In the control task every type has a value that
            is drawn at random, with the frequencies of the values.
        held_out: The share of prompts that is used only for measuring, above 0 and below 1.
        penalty: The weight of the penalty, above 0.
        seed: The seed of the split and of the control task.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: Lengths differ, there are fewer than two values to fit to, or a number is out of range.
    """
    states = check_real_tensor("states", states).to("cpu", torch.float64)
    if states.ndim != 3 or not bool(torch.isfinite(states).all()):
        raise ValueError(f"states: expected finite [layer, prompt, d_model], got {list(states.shape)}")
    count = states.shape[1]
    labels, type_numbers = _number_values("values", values, count), _number_values("types", types, count)
    held_out, penalty = (
        check_number("held_out", held_out, 0, 1),
        check_number("penalty", penalty, 0, above=True),
    )
    draw = torch.Generator("cpu").manual_seed(check_whole_number("seed", seed))
    order = torch.randperm(count, generator=draw, device="cpu")
    measured, fitted = order.tensor_split([round(held_out * count)])
    if len(measured) == 0 or len(labels[fitted].unique()) < 2:
        raise ValueError(
            f"held_out: expected two values or more in {len(fitted)} prompts that are fitted to, and one "
            f"prompt or more beside them, got held_out={held_out:g} of {count}"
        )
    # Each type draws the value of a random prompt, so values are as frequent as in the task.
    control = labels[torch.randint(count, (count,), generator=draw, device="cpu")][type_numbers]
    classes = int(labels.max()) + 1
    hits, evidence, control_hits = [], [], []
    for layer in states:
        scores = _fit_probe(layer[fitted], labels[fitted], classes, penalty)(layer[measured])
        hits.append(scores.argmax(-1) == labels[measured])
        evidence.append(scores.gather(-1, labels[measured, None])[:, 0])
        scores = _fit_probe(layer[fitted], control[fitted], classes, penalty)(layer[measured])
        control_hits.append(scores.argmax(-1) == control[measured])
    commonest = labels[fitted].mode().values
    return Probing(
        accuracy=torch.stack(hits).double().mean(-1),
        control=torch.stack(control_hits).double().mean(-1),
        evidence=torch.stack(evidence),
        held_out=measured,
        majority=(labels[measured] == commonest).double().mean().item(),
    )


def probing_agreement(probing: Probing, mixed: Float[Tensor, "layer prompt"]) -> ProbingAgreement:
    """Measure whether a map shows that the cue is mixed in where the probes find it.

        >>> subjects = ["The key", "The keys", "The tower", "The towers", "The film", "The films"]
        >>> states = lm.experiments.residuals_at(model, [f"{subject} that Anna saw" for subject in subjects])
        >>> probing = lm.experiments.probe_layers(states, values=[0, 1] * 3, types=subjects)
        >>> lm.experiments.probing_agreement(probing, torch.rand(states.shape[:2]))

    Args:
        probing: The probes of every layer of the map.
        mixed: The map's score of the cue at the probed position, for every layer and every prompt that was
            given to `probe_layers`. Prompts that are not held out are ignored.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: The shape of `mixed` does not fit, or a number is not finite.
    """
    check_instance("probing", probing, Probing, "a Probing, as probe_layers returns it")
    mixed = check_real_tensor("mixed", mixed).to("cpu", torch.float64)
    layers = len(probing.evidence)
    if mixed.ndim != 2 or len(mixed) != layers or mixed.shape[1] <= int(probing.held_out.max()):
        raise ValueError(
            f"mixed: expected {layers} layers and a column for every prompt that was probed, got "
            f"{list(mixed.shape)}"
        )
    mixed = mixed[:, probing.held_out]
    if not bool(torch.isfinite(mixed).all()):
        raise ValueError("mixed: expected finite numbers, got NaN or infinity")
    mean = mixed.mean(-1).numpy()
    pairs = zip(mixed.T.numpy(), probing.evidence.T.numpy(), strict=True)
    return ProbingAgreement(
        spearman(mean, probing.accuracy.numpy()),
        spearman(mean, probing.selectivity.numpy()),
        torch.tensor([spearman(*pair) for pair in pairs], dtype=torch.float64, device="cpu"),
    )


# ------------------------------------------------------------------ details


def _number_values(name: str, values: Sequence[Hashable], count: int) -> Int[Tensor, " prompt"]:
    """Return the number of each value, from 0, in the order in which values first occur."""
    listed = (
        values.tolist() if isinstance(values, Tensor) else check_items(name, values, "one for each prompt")
    )
    if len(listed) != count:
        raise ValueError(f"{name}: expected one for each of {count} prompts, got {len(listed)}")
    numbers = {value: index for index, value in enumerate(dict.fromkeys(listed))}
    return torch.tensor([numbers[value] for value in listed], dtype=torch.long, device="cpu")


class _Probe(NamedTuple):
    """A classifier: log softmax(standardized features · weights + bias)."""

    mean: Float[Tensor, " d_model"]
    scale: Float[Tensor, " d_model"]
    weights: Float[Tensor, "d_model class"]
    bias: Float[Tensor, " class"]

    def __call__(self, features: Float[Tensor, "prompt d_model"]) -> Float[Tensor, "prompt class"]:
        return (((features - self.mean) / self.scale) @ self.weights + self.bias).log_softmax(-1)


def _fit_probe(
    features: Float[Tensor, "prompt d_model"], labels: Int[Tensor, " prompt"], classes: int, penalty: float
) -> _Probe:
    mean, scale = features.mean(0), features.std(0, correction=0)
    # A constant feature has no information, and its deviation is a rounding error, so its scale is infinite.
    scale = torch.where(scale > 1e-9 * features.abs().amax(0), scale, torch.inf)
    with torch.enable_grad():
        weights = features.new_zeros(features.shape[1], classes, requires_grad=True)
        bias = features.new_zeros(classes, requires_grad=True)
        probe = _Probe(mean, scale, weights, bias)
        optimizer = torch.optim.LBFGS(
            [weights, bias],
            max_iter=500,
            tolerance_grad=1e-7,
            tolerance_change=1e-12,
            line_search_fn="strong_wolfe",
        )

        def loss() -> Tensor:
            optimizer.zero_grad()
            misses = torch.nn.functional.nll_loss(probe(features), labels, reduction="sum")
            total = misses + penalty / 2 * weights.square().sum()
            total.backward()
            return total

        optimizer.step(loss)
    return probe._replace(weights=weights.detach(), bias=bias.detach())
