"""Read what a model predicts from its logits: the most probable tokens or classes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix.maps.explained import Explained
from lens_mix.maps.token_strings import strings_of

_OTHERS = 3  # the number of further tokens that are kept with a prediction
Namer = Callable[[int], str]


def name_token(tokenizer: Any, token: int) -> str:
    """Return the text of a token, or its number if there is no tokenizer."""
    return str(token) if tokenizer is None else strings_of(tokenizer, [token])[0]


@torch.no_grad()
def read_predictions(logits: Float[Tensor, "row choice"], name: Namer) -> list[Explained]:
    """Return, for each row of logits, the most probable tokens or classes with their probabilities.

    Args:
        logits: The logits.
        name: Returns the text of a token or class by its number.
    """
    # A sum of exponentials over a whole vocabulary loses too many digits in half precision.
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    best = wide.topk(min(1 + _OTHERS, wide.shape[-1]), dim=-1)
    probabilities = (best.values - wide.logsumexp(-1, keepdim=True)).exp().clamp(max=1)
    # Each token is named once, because rows often have the same likely tokens.
    names: dict[int, str] = {token: name(token) for token in best.indices.unique().tolist()}
    found = []
    for tokens, numbers in zip(best.indices.tolist(), probabilities.tolist(), strict=True):
        first, *others = zip((names[token] for token in tokens), numbers, strict=True)
        found.append(Explained(*first, others=tuple(others)))
    return found


def describe_missing(problem: Exception) -> str:
    """Return the note of a map without predictions."""
    return f"the predictions are unknown: {type(problem).__name__}: {problem}"


def join_explained(predictions: Sequence[Explained], targets: Sequence[Explained]) -> tuple[Explained, ...]:
    """Return what rows explain, from the predictions of the model and what their targets add."""
    return tuple(
        prediction._replace(
            **{name: value for name, value in target._asdict().items() if value not in (None, ())}
        )
        for prediction, target in zip(predictions, targets, strict=True)
    )
