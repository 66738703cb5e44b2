"""Convert the tokens of a model to text, one string per token."""

from __future__ import annotations

from jaxtyping import Int
from torch import Tensor

from lens_mix._classes.model_classes import TransformerLensModel
from lens_mix.maps.token_strings import strings_of


def token_strings(model: TransformerLensModel, tokens: Int[Tensor, " pos"]) -> list[str]:
    """Return one string per token, as `strings_of`; its number without a tokenizer."""
    ids = tokens.tolist()
    tokenizer = getattr(model, "tokenizer", None)
    return [str(token) for token in ids] if tokenizer is None else strings_of(tokenizer, ids)
