"""The head of a classifier of transformers: from the last hidden states to the logits of its classes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Logits = Callable[[Tensor], Tensor]

_TOLERANCE = 1e-3  # accepted differences of logits, and of hidden states, as a share of the largest
_FINAL_NORMS = ("ln_f", "norm", "final_norm", "final_layer_norm", "final_layernorm")


def read_head(model: PreTrainedModel) -> tuple[Logits, bool]:
    """Its head, proven on four tokens, and whether it reads the hidden states after a final norm.

    Raises:
        TypeError: no classifier of transformers. ValueError: in training mode, or a head of unknown form.
    """
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel) or model.base_model is model:
        raise TypeError(
            "hf_model: expected a classifier of transformers (AutoModelForSequenceClassification), got "
            f"{type(model).__name__}"
        )
    if model.training:
        raise ValueError("hf_model: expected evaluation mode, got training mode; call hf_model.eval() first")
    base, config = model.base_model, model.config
    # Of some models' heads the padding token says where the prompt ends.
    ids = [token for token in range(config.vocab_size) if token != config.pad_token_id][-4:]
    tokens = torch.tensor([ids], device=next(iter(model.parameters())).device, dtype=torch.long)
    hidden = last_hidden(model, tokens)
    with torch.no_grad():
        logits = model(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits
        for head in _heads(model, base):
            try:
                made = head(hidden)
            except (TypeError, RuntimeError, IndexError, AttributeError):
                continue
            if made.shape == logits.shape and close(made, logits):
                return head, any(isinstance(getattr(base, name, None), nn.Module) for name in _FINAL_NORMS)
    raise ValueError(
        f"hf_model: expected a head that reads the first token, the last one, or a pooler, and found no such "
        f"one in {type(model).__name__}; write it with lm.targets.head(function)"
    )


def last_hidden(
    model: PreTrainedModel, tokens: Tensor, **inputs: Tensor
) -> Float[Tensor, "batch pos d_model"]:
    """What the head reads, by the model's own pass."""
    with torch.no_grad():
        return model.base_model(input_ids=tokens, attention_mask=torch.ones_like(tokens), **inputs)[0]


def close(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors differ by no more than rounding of float32 makes."""
    difference = (one.double() - other.double()).abs().max()
    return bool(difference <= _TOLERANCE * other.double().abs().max())


def _heads(model: nn.Module, base: nn.Module) -> Iterator[Logits]:
    """The forms that heads have: BERT, RoBERTa, DistilBERT, ModernBERT, decoders, and a plain linear one."""
    classifier, score = getattr(model, "classifier", None), getattr(model, "score", None)
    pooler, before = getattr(base, "pooler", None), getattr(model, "pre_classifier", None)
    dense = getattr(model, "head", None)
    if classifier is not None:
        if pooler is not None:
            yield lambda hidden: classifier(pooler(hidden))
        if before is not None:
            yield lambda hidden: classifier(before(hidden[:, 0]).relu())
        if dense is not None:
            yield lambda hidden: classifier(dense(hidden[:, 0]))
            yield lambda hidden: classifier(dense(hidden.mean(1)))
        yield lambda hidden: classifier(hidden)
        yield lambda hidden: classifier(hidden[:, 0])
    if score is not None:
        yield lambda hidden: score(hidden[:, -1])
