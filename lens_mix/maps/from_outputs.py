"""Make a map of the attention weights that a model of transformers returned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from lens_mix.arguments import check_choice, check_flags, describe_value
from lens_mix.hooks.mixing import sink
from lens_mix.maps.token_strings import strings_of

if TYPE_CHECKING:
    from lens_mix.maps import MixingMap

# The part of an encoder-decoder, and the name of its weights in the outputs.
_PARTS = {"encoder": "encoder_attentions", "decoder": "decoder_attentions", "cross": "cross_attentions"}
# Sums of rounded weights are larger than 1 by less than this; those after dropout are larger by more.
_MOST_ABOVE_ONE = 0.05
_EAGER = (
    'load the model with attn_implementation="eager", because the other kernels keep no weights, and call it '
    "with output_attentions=True"
)


def from_attentions(
    cls: type[MixingMap],
    outputs: Any,
    tokens: Any,
    *,
    key_tokens: Any,
    tokenizer: Any,
    part: str | None,
    per_head: bool,
    **fields: Any,
) -> MixingMap:
    """Return the map of attention weights, as `MixingMap.from_attentions`."""
    check_flags(per_head=per_head)
    name, part = _find_name(outputs, part)
    layers, weights = _read_weights(outputs, name)
    words = _read_tokens("tokens", tokens, tokenizer)
    keys = None if key_tokens is None else _read_tokens("key_tokens", key_tokens, tokenizer)
    if part == "cross" and keys is None:
        raise TypeError(
            "key_tokens: expected the tokens of the source beside tokens= of the target, because "
            "cross-attention reads the source, got None"
        )
    is_self = part != "cross"
    if is_self and keys is not None:
        raise TypeError(
            "key_tokens: expected None beside part='cross' alone, because other attention reads its own "
            f"tokens, got key_tokens with part={part!r}"
        )
    if len(words) != weights.shape[-2]:
        raise ValueError(
            f"tokens: expected {weights.shape[-2]}, one per query of {name}, got {len(words)}"
            + "; give the tokens that the decoder read" * (part in ("decoder", "cross"))
        )
    causal = is_self and part != "encoder" and not bool(weights.triu(diagonal=1).any())
    provenance = {"part": part or "blocks", "from": f"transformers outputs, {name}"}
    made: dict[str, Any] = {
        "scores": weights if per_head else weights.mean(1),
        "tokens": words,
        "key_tokens": keys,
        "method": "attention",
        "causal": causal,
        "parameters": {"per_head": per_head},
        "residual": 0.5,
        "layers": layers,
        "provenance": provenance | ({"sink": True} if bool(sink(weights).any()) else {}),
    }
    return cls(**{**made, **fields})


def _find_name(outputs: Any, part: str | None) -> tuple[str, str | None]:
    """Return the name of the weights in the outputs, and the part that they are of; None for one stack."""
    if part is not None:
        check_choice("part", part, tuple(_PARTS))
        return _PARTS[part], part
    has_parts = any(_get(outputs, _PARTS[each]) is not None for each in ("encoder", "decoder"))
    return (_PARTS["encoder"], "encoder") if has_parts else ("attentions", None)


def _get(outputs: Any, name: str) -> Any:
    return outputs.get(name) if isinstance(outputs, Mapping) else getattr(outputs, name, None)


def _read_weights(outputs: Any, name: str) -> tuple[list[int], Float[Tensor, "layer head query key"]]:
    """Return the labels of the layers that have weights, and these weights."""
    is_bare = isinstance(outputs, (list, tuple, Tensor)) and not hasattr(outputs, name)
    found = outputs if is_bare else _get(outputs, name)
    if found is None or len(found) == 0 or all(layer is None for layer in found):
        known = [key for key in ("attentions", *_PARTS.values()) if _get(outputs, key) is not None]
        raise ValueError(
            f"outputs: expected {name}, got none in {type(outputs).__name__}"
            + (f", which has {known}" if known else "")
            + f"; {_EAGER}"
            + "; for the model inside of a TransformerBridge, which keeps none, write lm.run(bridge, tokens, "
            "'attention')" * (found is not None)
        )
    if any(isinstance(layer, (list, tuple)) for layer in found):
        raise ValueError(
            f"outputs: expected {name} of one forward pass, got those of each step of generate; call the "
            "model once on the whole text: model(tokens, output_attentions=True)"
        )
    labels = [label for label, layer in enumerate(found) if layer is not None]
    tensors = [found[label] for label in labels]
    wrong = next((each for each in tensors if not isinstance(each, Tensor) or each.ndim != 4), None)
    if wrong is not None:
        raise ValueError(
            f"outputs: expected weights [batch, head, query, key] of each layer, got {describe_value(wrong)}"
        )
    shapes = {tuple(each.shape) for each in tensors}
    if len(shapes) > 1:
        raise ValueError(f"outputs: expected weights of one shape in all layers, got {sorted(shapes)}")
    if len(tensors[0]) != 1:
        raise ValueError(
            f"outputs: expected the weights of one prompt, got those of {len(tensors[0])}; select one, and "
            f"cut its padding: [layer[[0], :, :n, :n] for layer in outputs.{name}]"
        )
    stacked = torch.stack([each[0].detach() for each in tensors])
    # A mean over heads in half precision would lose digits.
    stacked = stacked.to(torch.promote_types(stacked.dtype, torch.float32))
    _require_weights(stacked, name)
    return labels, stacked


def _require_weights(weights: Float[Tensor, "layer head query key"], name: str) -> None:
    largest, least = float(weights.sum(-1).max()), float(weights.min())
    if largest > 1 + _MOST_ABOVE_ONE or least < 0:
        raise ValueError(
            f"outputs: expected {name} whose rows are weights of 0 or more that sum to 1, got a weight of "
            f"{least:.3g} and a sum of {largest:.3g}; call model.eval(), because dropout changes the weights"
        )


def _read_tokens(argument: str, tokens: Any, tokenizer: Any) -> list[str]:
    """Return one string per token, of strings or of token ids `[pos]` or `[1, pos]`."""
    if isinstance(tokens, Mapping) and "input_ids" in tokens:
        # What a tokenizer returned.
        tokens = tokens["input_ids"]
    values = tokens.tolist() if hasattr(tokens, "tolist") else tokens
    if isinstance(values, Sequence) and len(values) == 1 and isinstance(values[0], (list, tuple)):
        values = values[0]
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise TypeError(
            f"{argument}: expected token ids or one string per token, got {describe_value(tokens)}"
        )
    if all(type(value) is int for value in values):
        return [str(value) for value in values] if tokenizer is None else strings_of(tokenizer, values)
    if not all(isinstance(value, str) for value in values):
        raise TypeError(
            f"{argument}: expected the token ids of one prompt or one string per token, got "
            f"{describe_value(tokens)}"
        )
    return list(values)
