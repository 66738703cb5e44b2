"""Agreement with probing: does a map say that a cue was mixed in where a probe finds it?

The third evaluation of Value Zeroing (Mohebbi et al., EACL 2023, section 6): per layer, a linear probe for a
feature of the cue (its number) on the representation of another position, against how much of the cue a map
says is there. A probe's accuracy alone may be the probe's own doing, so each has a control task (Hewitt &
Liang, EMNLP 2019): the same probe for labels that every type of cue was given at random.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lens_mix.arguments import instance, number, real_tensor, several, whole_number
from lens_mix.lens.model_classes import TransformerLensModel
from lens_mix.lens.rows import Selection
from lens_mix.methods.attention import AttentionWeights
from lens_mix.statistics.passes import each_prompt
from lens_mix.statistics.ranks import spearman

if TYPE_CHECKING:
    import pandas


@dataclasses.dataclass(frozen=True, eq=False)
class Probing:
    """What the probes of every layer found on prompts that they were not fitted to.

    Attributes:
        accuracy: [layer], 0 to 1.
        control: [layer], accuracy of the control task, 0 to 1.
        evidence: [layer, held-out prompt], log probability of the right value, in nats.
        held_out: which of the prompts these are.
        majority: accuracy of always saying the commonest value.
    """

    accuracy: Float[Tensor, " layer"]
    control: Float[Tensor, " layer"]
    evidence: Float[Tensor, "layer example"]
    held_out: Int[Tensor, " example"]
    majority: float

    @property
    def selectivity(self) -> Float[Tensor, " layer"]:
        """Accuracy minus that of the control task: what is the representation's and not the probe's."""
        return self.accuracy - self.control

    def to_dataframe(self) -> pandas.DataFrame:
        """Columns layer (by place, from 0), accuracy, control, selectivity."""
        import pandas as pd

        columns = {"accuracy": self.accuracy, "control": self.control, "selectivity": self.selectivity}
        table = pd.DataFrame({name: values.tolist() for name, values in columns.items()})
        return table.rename_axis("layer").reset_index()


class ProbingAgreement(NamedTuple):
    """Spearman's rank correlation over layers, -1 to 1; NaN where one side is constant.

    Attributes:
        accuracy: of the mean map with the probes' accuracy.
        selectivity: of the mean map with their selectivity.
        prompts: [held-out prompt], of the map with the evidence for the right value, prompt by prompt.
    """

    accuracy: float
    selectivity: float
    prompts: Float[Tensor, " example"]


def residuals_at(
    model: TransformerLensModel,
    prompts: Sequence[Any],
    positions: int | Sequence[int] = -1,
    *,
    layers: Selection | None = None,
    **options: Any,
) -> Float[Tensor, "layer prompt d_model"]:
    """The residual stream after every block, at one position of every prompt.

    Args:
        positions: one for all prompts, or one each; negative from the end.
        layers: as in `lm.run`; None: all.
        options: `part`, `prepend_bos`, … as in `lm.run`.

    Raises:
        TypeError: `queries` among the options.
        ValueError: no prompts; another number of positions; a position that a prompt does not have.
        UnsupportedModelError: the model can't be trusted.
    """
    if "queries" in options:
        raise TypeError("queries: expected the rows as `positions`, got queries too; leave them out")
    prompts = several("prompts", prompts, "several prompts", least=1)
    given = several("positions", positions, "a position for each prompt", alone=True)
    places = given * len(prompts) if len(given) == 1 else given
    if len(places) != len(prompts):
        raise ValueError(
            f"positions: expected one, or one for each of {len(prompts)} prompts, got {len(places)}"
        )
    states = []
    for prompt, place in zip(prompts, places, strict=True):
        for checked in each_prompt(
            model, [prompt], AttentionWeights(), queries=[place], layers=layers, **options
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
    """A linear probe per layer for a feature, with its control task.

    A probe is a logistic regression on standardised features, fitted to the prompts that are not held out:
    the smallest Σ cross-entropy + penalty/2 · ‖weights‖² (scikit-learn's with C = 1/penalty).

    Args:
        states: what to probe, as `residuals_at` gives it.
        values: the feature's value in each prompt (the cue's number).
        types: the cue's type in each prompt (its word). In the control task every type has a value drawn at
            random, as often as the values occur.
        held_out: the share of prompts, 0 to 1 without the ends, that is only measured on.
        penalty: above 0.
        seed: of the split and of the control task.

    Raises:
        ValueError: lengths that differ; fewer than two values to fit to; numbers out of range.
    """
    states = real_tensor("states", states).to("cpu", torch.float64)
    if states.ndim != 3 or not bool(torch.isfinite(states).all()):
        raise ValueError(f"states: expected finite [layer, prompt, d_model], got {list(states.shape)}")
    count = states.shape[1]
    labels, type_numbers = _numbered("values", values, count), _numbered("types", types, count)
    held_out, penalty = number("held_out", held_out, 0, 1), number("penalty", penalty, 0, above=True)
    draw = torch.Generator("cpu").manual_seed(whole_number("seed", seed))
    order = torch.randperm(count, generator=draw, device="cpu")
    measured, fitted = order.tensor_split([round(held_out * count)])
    if len(measured) == 0 or len(labels[fitted].unique()) < 2:
        raise ValueError(
            f"held_out: expected two values or more in {len(fitted)} prompts that are fitted to, and one "
            f"prompt or more beside them, got held_out={held_out:g} of {count}"
        )
    # One draw per type: values in the order of the prompts, shuffled, are as frequent as in the task.
    control = labels[torch.randint(count, (count,), generator=draw, device="cpu")][type_numbers]
    classes = int(labels.max()) + 1
    right, evidence, by_chance = [], [], []
    for layer in states:
        scores = _probe(layer[fitted], labels[fitted], classes, penalty)(layer[measured])
        right.append(scores.argmax(-1) == labels[measured])
        evidence.append(scores.gather(-1, labels[measured, None])[:, 0])
        scores = _probe(layer[fitted], control[fitted], classes, penalty)(layer[measured])
        by_chance.append(scores.argmax(-1) == control[measured])
    commonest = labels[fitted].mode().values
    return Probing(
        accuracy=torch.stack(right).double().mean(-1),
        control=torch.stack(by_chance).double().mean(-1),
        evidence=torch.stack(evidence),
        held_out=measured,
        majority=(labels[measured] == commonest).double().mean().item(),
    )


def probing_agreement(probing: Probing, mixed: Float[Tensor, "layer prompt"]) -> ProbingAgreement:
    """Whether a map says that the cue is mixed in where the probes find it.

    Args:
        probing: of every layer that the map speaks of.
        mixed: what the map says of the cue at the probed position, for every prompt that was given to the
            probes (those that they were fitted to are left out here).

    Raises:
        TypeError, ValueError: no such probing; other shapes; numbers that are not finite.
    """
    instance("probing", probing, Probing, "a Probing, as probe_layers returns it")
    mixed = real_tensor("mixed", mixed).to("cpu", torch.float64)
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


def _numbered(name: str, values: Sequence[Hashable], count: int) -> Int[Tensor, " prompt"]:
    """Each value as a number from 0, in the order in which they first occur."""
    listed = values.tolist() if isinstance(values, Tensor) else several(name, values, "one for each prompt")
    if len(listed) != count:
        raise ValueError(f"{name}: expected one for each of {count} prompts, got {len(listed)}")
    numbers = {value: place for place, value in enumerate(dict.fromkeys(listed))}
    return torch.tensor([numbers[value] for value in listed], dtype=torch.long, device="cpu")


class _Probe(NamedTuple):
    """log softmax(standardised features · weights + bias)."""

    mean: Float[Tensor, " d_model"]
    scale: Float[Tensor, " d_model"]
    weights: Float[Tensor, "d_model class"]
    bias: Float[Tensor, " class"]

    def __call__(self, features: Float[Tensor, "prompt d_model"]) -> Float[Tensor, "prompt class"]:
        return (((features - self.mean) / self.scale) @ self.weights + self.bias).log_softmax(-1)


def _probe(
    features: Float[Tensor, "prompt d_model"], labels: Int[Tensor, " prompt"], classes: int, penalty: float
) -> _Probe:
    mean, scale = features.mean(0), features.std(0, correction=0)
    # A feature that never changes says nothing; what is left of it is rounding.
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
