"""Define a constructed model: a transformer, prompts for it, and the true routes of each prompt."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from lens_mix.arguments import check_whole_number
from lens_mix.models import TransformerLensModel, Weights, model_from_weights

Cell = tuple[int, int, int]
Sample = Callable[[torch.Generator], list[int]]
RouteTrace = Callable[[list[int]], tuple[Iterable[Cell], Iterable[int], int]]
Spare = Callable[[list[int], int], list[int]]


def draw(generator: torch.Generator, choices: Sequence[int], minimum: int, maximum: int) -> list[int]:
    """Draw different choices, from `minimum` to `maximum` of them."""
    count = int(torch.randint(minimum, maximum + 1, (), generator=generator, device="cpu"))
    places = torch.randperm(len(choices), generator=generator, device="cpu")[:count]
    return [choices[place] for place in places.tolist()]


@dataclasses.dataclass(frozen=True)
class Routes:
    """The true routes of one prompt, as interventions show them.

    Attributes:
        layers: Whether the answer changes if the attention of that layer moves nothing from key to query (the
            value is zeroed for this cell alone).
        inputs: Whether the answer at the query changes if the key's token changes. Only rows of answers have
            true entries.
        queries: The positions of the answers.
    """

    layers: Bool[Tensor, "layer query key"]
    inputs: Bool[Tensor, "query key"]
    queries: tuple[int, ...]

    def rows(self) -> Bool[Tensor, "layer query"]:
        """Return the rows that can reach the answer, through the residual stream or a true cell above."""
        rows = torch.zeros(self.layers.shape[:2], dtype=torch.bool, device="cpu")
        can_reach = torch.zeros(self.layers.shape[1], dtype=torch.bool, device="cpu")
        can_reach[list(self.queries)] = True
        for layer in reversed(range(len(rows))):
            rows[layer] = can_reach
            can_reach = can_reach | self.layers[layer][can_reach].any(dim=0)
        return rows


@dataclasses.dataclass(frozen=True)
class ConstructedModel:
    """A model whose routes are known by construction.

    Attributes:
        name: The name in tables.
        description: What the model does.
        weights: A function that makes its weights.
        sample: A function that draws a prompt, as token numbers.
        trace: A function of a prompt that returns its true cells (layer, query, key), its true input
            positions and the position of its answer.
        spare: A function of a prompt and a position that returns the tokens that may replace the one there
            without opening another route (a second key, say). It returns none if the model relies on the
            token.
    """

    name: str
    description: str
    weights: Callable[[], Weights]
    sample: Sample
    trace: RouteTrace
    spare: Spare

    def model(self) -> TransformerLensModel:
        """Return the model, in the installed TransformerLens's class for it, without a tokenizer."""
        return model_from_weights(self.weights())

    def prompts(self, seed: int = 0, count: int = 8) -> list[Int[Tensor, " pos"]]:
        """Draw prompts as token numbers, of several lengths.

        Args:
            seed: The seed of the draw.
            count: The number of prompts.

        Raises:
            TypeError: A number has the wrong type.
            ValueError: `count` is below 1.
        """
        generator = torch.Generator().manual_seed(check_whole_number("seed", seed))
        return [
            torch.tensor(self.sample(generator), dtype=torch.long, device="cpu")
            for _ in range(check_whole_number("count", count, 1))
        ]

    def routes(self, prompt: Int[Tensor, " pos"]) -> Routes:
        """Return the true routes of one of `prompts`."""
        cells, sources, answer = self.trace(prompt.tolist())
        layers = torch.zeros(
            len(self.weights().query), len(prompt), len(prompt), dtype=torch.bool, device="cpu"
        )
        for cell in cells:
            layers[cell] = True
        inputs = torch.zeros_like(layers[0])
        inputs[answer, list(sources)] = True
        return Routes(layers, inputs, (answer,))

    def replacements(self, prompt: Int[Tensor, " pos"], position: int) -> list[int]:
        """Return the tokens that may replace the one at a position without opening another route.

        Args:
            prompt: One of `prompts`.
            position: A position of the prompt, from 0.

        Raises:
            ValueError: The position does not exist.
        """
        return self.spare(prompt.tolist(), check_whole_number("position", position, 0, len(prompt) - 1))
