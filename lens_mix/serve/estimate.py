"""Estimate how long the maps of a prompt take, from measured forward passes and the costs of the methods."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import NamedTuple

from lens_mix import registry
from lens_mix._classes.model_classes import TransformerLensModel, UnsupportedModelError, model_class_of
from lens_mix._inputs.prompts import is_causal_model, is_encoder_decoder
from lens_mix._verification.support import any_tokens
from lens_mix.named_maps import has_all_rows
from lens_mix.runner import run

# The lengths of the two measured prompts. The time between and beyond them is a straight line.
_SHORT, _LONG = 8, 48


class Pace(NamedTuple):
    """The time of a forward pass of a model, as a straight line in the number of tokens.

    Attributes:
        base: The seconds that do not depend on the number of tokens.
        per_token: The seconds for each token.
        layers: The number of layers of the model.
        is_causal: Whether no position of the model reads later ones.
    """

    base: float
    per_token: float
    layers: int
    is_causal: bool = True


class Estimate(NamedTuple):
    """The expected time of the maps of one prompt.

    Attributes:
        tokens: The number of tokens.
        seconds: The seconds of each method, by its name. Methods of unknown cost are left out.
    """

    tokens: int
    seconds: dict[str, float]

    @property
    def total(self) -> float:
        """Return the seconds of all methods together."""
        return sum(self.seconds.values())

    def describe(self, limit: float = math.inf) -> str:
        """Return the tokens, the time, whether it is beyond a limit, and the slowest of several methods.

        Args:
            limit: The largest number of seconds.
        """
        text = f"{self.tokens} token{'s' * (self.tokens != 1)}"
        if self.seconds:
            text += f", {in_words(self.total)}"
        if self.total > limit:
            text += f", more than the limit of {limit:g} seconds"
        if len(self.seconds) > 1 and self.total >= 2:
            slowest = max(self.seconds, key=self.seconds.__getitem__)
            text += f"; the slowest method is {slowest}, {in_words(self.seconds[slowest])}"
        return text


def measure_pace(model: TransformerLensModel) -> Pace | None:
    """Return the time of a forward pass of a model; None if no pass can be timed."""
    tokens = any_tokens(model).flatten()[-1]
    long = min(_LONG, int(getattr(model.cfg, "n_ctx", _LONG)))
    short = min(_SHORT, long - 1)
    try:
        at_short, at_long = (
            min(_time_run(model, tokens.expand(1, length)) for _ in range(3)) for length in (short, long)
        )
    except (ValueError, UnsupportedModelError):
        return None
    per_token = max(0.0, at_long - at_short) / (long - short)
    model_class = model_class_of(model)
    is_causal = is_causal_model(model, model_class) or is_encoder_decoder(model, model_class)
    return Pace(max(0.0, at_short - per_token * short), per_token, int(model.cfg.n_layers), is_causal)


def _time_run(model: TransformerLensModel, tokens: object) -> float:
    """Return the seconds of the cheapest map, which costs about a forward pass."""
    started = time.perf_counter()
    run(model, tokens, "attention", queries=[-1], progress=None)
    return time.perf_counter() - started


def estimate(pace: Pace, tokens: int, names: Sequence[str], all_rows: bool) -> Estimate:
    """Return the expected time of the maps of one prompt.

    Args:
        pace: The time of a forward pass.
        tokens: The number of tokens of the prompt.
        names: The names of the methods.
        all_rows: Whether every method computes all rows. False: as `compute_maps` does by default.
    """
    forward = pace.base + pace.per_token * tokens
    seconds: dict[str, float] = {}
    for name in names:
        cost = registry.describe(name).cost
        if cost is not None:
            rows = tokens if all_rows or has_all_rows(name) else 1
            seconds[name] = forward * cost.passes(tokens, rows, pace.layers, is_causal=pace.is_causal)
    return Estimate(tokens, seconds)


def in_words(seconds: float) -> str:
    """Return an estimated time in words, such as "less than a second"."""
    if seconds < 1:
        return "less than a second"
    if seconds < 100:
        return f"about {seconds:.0f} second{'s' * (round(seconds) != 1)}"
    return f"about {seconds / 60:.0f} minutes"
