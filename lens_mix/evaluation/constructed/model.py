"""What a constructed model is: a transformer, prompts for it, and the truth about each prompt."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from lens_mix.arguments import whole_number
from lens_mix.lens.from_weights import Weights, model_from_weights
from lens_mix.lens.model_classes import TransformerLensModel

Cell = tuple[int, int, int]
Sample = Callable[[torch.Generator], list[int]]
Trace = Callable[[list[int]], tuple[Iterable[Cell], Iterable[int], int]]
Spare = Callable[[list[int], int], list[int]]


def draw(generator: torch.Generator, choices: Sequence[int], minimum: int, maximum: int) -> list[int]:
    """Different ones, from `minimum` to `maximum` of them."""
    count = int(torch.randint(minimum, maximum + 1, (), generator=generator, device="cpu"))
    places = torch.randperm(len(choices), generator=generator, device="cpu")[:count]
    return [choices[place] for place in places.tolist()]


@dataclasses.dataclass(frozen=True)
class Routes:
    """The truth about one prompt, as interventions show it.

    Attributes:
        layers: True where the answer changes if the attention of that layer brings nothing from key to query
            (the value is zeroed in this cell alone).
        inputs: True where the answer at the query changes if the key's token does; rows of answers alone.
        queries: the positions whose answer it is.
    """

    layers: Bool[Tensor, "layer query key"]
    inputs: Bool[Tensor, "query key"]
    queries: tuple[int, ...]

    def rows(self) -> Bool[Tensor, "layer query"]:
        """The rows through which something can come to the answer: by staying, or by a true cell above."""
        rows = torch.zeros(self.layers.shape[:2], dtype=torch.bool, device="cpu")
        here = torch.zeros(self.layers.shape[1], dtype=torch.bool, device="cpu")
        here[list(self.queries)] = True
        for layer in reversed(range(len(rows))):
            rows[layer] = here
            here = here | self.layers[layer][here].any(dim=0)
        return rows


@dataclasses.dataclass(frozen=True)
class ConstructedModel:
    """A model whose routes are known by construction.

    Attributes:
        name: in tables.
        description: what it does.
        weights: makes its weights.
        sample: draws a prompt, as token numbers.
        trace: a prompt's true cells (layer, query, key), its true input positions, its answer's position.
        spare: tokens that may stand at a position instead without opening another route (a second key, say);
            none where the model relies on the token that is there.
    """

    name: str
    description: str
    weights: Callable[[], Weights]
    sample: Sample
    trace: Trace
    spare: Spare

    def model(self) -> TransformerLensModel:
        """The model, of the class that the installed TransformerLens has for it; without a tokenizer."""
        return model_from_weights(self.weights())

    def prompts(self, seed: int = 0, count: int = 8) -> list[Int[Tensor, " pos"]]:
        """Prompts as token numbers, of several lengths; a seed always gives the same.

        Raises:
            TypeError, ValueError: a seed or a count that is no whole number; fewer than one prompt.
        """
        generator = torch.Generator().manual_seed(whole_number("seed", seed))
        return [
            torch.tensor(self.sample(generator), dtype=torch.long, device="cpu")
            for _ in range(whole_number("count", count, 1))
        ]

    def routes(self, prompt: Int[Tensor, " pos"]) -> Routes:
        """The truth about one of `prompts`."""
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
        """Tokens that may stand at a position instead, without opening another route."""
        return self.spare(prompt.tolist(), whole_number("position", position, 0, len(prompt) - 1))
