"""Provide the attributions of peers in tests/reference, and the BERT that they belong to."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from tests.reference_models import REFERENCE, reference, to_bridge, to_hooked
from tests.tiny_models import Unavailable

MODEL_CLASSES = ["TransformerBridge", "HookedEncoder"]


def _weights() -> dict[str, Tensor]:
    return {
        name: value.double()
        for name, value in load_file(REFERENCE / "attattr_tiny_weights.safetensors").items()
    }


def body(model_class: str) -> Any:
    """Build the encoder in float64. Skip the test if this TransformerLens has no such class."""
    config = transformers.BertConfig(
        **json.loads((REFERENCE / "attattr_tiny_config.json").read_text()), layer_norm_eps=1e-5
    )
    kind = "BertForMaskedLM" if model_class == "TransformerBridge" else "BertForPreTraining"
    model = getattr(transformers, kind)._from_config(config)
    result = model.load_state_dict(_weights(), strict=False)
    assert not [name for name in result.missing_keys if "encoder" in name or "embeddings.w" in name]
    model.double().eval()
    try:
        if model_class == "TransformerBridge":
            return to_bridge(model)
        return to_hooked(model, model_class, "convert_bert_weights", act_fn="gelu", eps=1e-5, n_ctx=16)
    except Unavailable as reason:
        pytest.skip(str(reason))


def classifier() -> Callable[[Tensor], Tensor]:
    """Return the pooler and classifier: last residual stream [copy pos d_model] -> logits [copy class]."""
    weights = _weights()

    def logits(resid: Tensor) -> Tensor:
        first = resid[:, 0]
        pooled = torch.tanh(first @ weights["bert.pooler.dense.weight"].T + weights["bert.pooler.dense.bias"])
        return pooled @ weights["classifier.weight"].T + weights["classifier.bias"]

    return logits


def prompt(expected: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the tokens of a reference file, and the other inputs for `lm.run`."""
    inputs = {name: expected[name][0] for name in ("token_type_ids", "attention_mask")}
    return expected["input_ids"][0], inputs


def attattr() -> dict[str, Any]:
    return reference("attattr_tiny_m20_float64")


def chefer() -> dict[str, Any]:
    return reference("chefer_tiny_float64")


# ------------------------------------------------------------------ the papers' equations
