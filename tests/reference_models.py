"""Build the models of the recorded outputs in tests/reference, for every class of TransformerLens."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file

from tests.tiny_models import Unavailable

REFERENCE = Path(__file__).parent / "reference"


def reference(name: str) -> dict[str, Any]:
    """Return the arrays of one reference file as tensors."""
    with np.load(REFERENCE / f"{name}.npz", allow_pickle=False) as arrays:
        return {
            key: torch.from_numpy(arrays[key]) if arrays[key].dtype.kind in "fi" else arrays[key].item()
            for key in arrays.files
        }


def official_bert(model_class: str) -> Any:
    """Return the BERT of the official Value Zeroing run: "TransformerBridge" or "HookedEncoder", float64."""
    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=160,
        layer_norm_eps=1e-12,
        hidden_act="gelu",
    )
    weights = load_file(REFERENCE / "official_vz_tiny.safetensors")
    weights = {name: value for name, value in weights.items() if not name.endswith("position_ids")}
    if model_class == "TransformerBridge":
        model = transformers.BertForMaskedLM._from_config(config)
        _load(model, weights)
        return to_bridge(model)
    model = transformers.BertForPreTraining._from_config(config)
    _load(model, weights)
    return to_hooked(model, model_class, "convert_bert_weights", act_fn="gelu", eps=1e-12, n_ctx=160)


def inseq_gpt2(model_class: str) -> Any:
    """Return the GPT-2 of the inseq run in float64: "TransformerBridge" or "HookedTransformer"."""
    config = transformers.GPT2Config(
        vocab_size=60, n_positions=64, n_embd=32, n_layer=3, n_head=4, bos_token_id=1, eos_token_id=2
    )
    weights = load_file(REFERENCE / "inseq_vz_gpt2_tiny.safetensors")
    config.n_positions = weights["transformer.wpe.weight"].shape[0]
    config.vocab_size = weights["transformer.wte.weight"].shape[0]
    model = transformers.GPT2LMHeadModel._from_config(config)
    _load(model, weights)
    if model_class == "TransformerBridge":
        return to_bridge(model)
    return to_hooked(
        model, model_class, "convert_gpt2_weights", act_fn="gelu_new", eps=1e-5, n_ctx=config.n_positions
    )


def inseq_t5(model_class: str) -> Any:
    """Return the T5 of the inseq run in float64: "TransformerBridge" or "HookedEncoderDecoder"."""
    sizes = {"vocab_size": 60, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 3, "num_heads": 4}
    model = transformers.T5ForConditionalGeneration._from_config(
        transformers.T5Config(**sizes, decoder_start_token_id=1)
    )
    _load(model, load_file(REFERENCE / "inseq_vz_t5_tiny.safetensors"))
    if model_class == "TransformerBridge":
        return to_bridge(model)
    options = {"positional_embedding_type": "relative_positional_bias", "relative_attention_num_buckets": 32}
    options |= {"relative_attention_max_distance": 128, "attention_dir": "bidirectional", "act_fn": "relu"}
    options |= {"normalization_type": "RMS", "d_mlp": 64, "use_attn_scale": False, "eps": 1e-6}
    return to_hooked(model, model_class, "convert_t5_weights", n_ctx=64, decoder_start_token_id=1, **options)


def _load(model: Any, weights: dict[str, torch.Tensor]) -> None:
    """Load the reference's weights. An unembedding that the file does not contain stays as it is."""
    result = model.load_state_dict(weights, strict=False)
    if result.unexpected_keys:
        raise ValueError(f"expected no unknown weights, got {result.unexpected_keys}")
    stray = [name for name in result.missing_keys if "encoder" in name or ".h." in name]
    if stray:
        raise ValueError(f"expected all weights of the blocks, missing {stray}")
    model.double().eval()


def to_bridge(model: Any) -> Any:
    """Return the Hugging Face model in a TransformerBridge."""
    try:
        from transformer_lens.model_bridge.sources import build_bridge_from_module
    except ImportError as problem:
        raise Unavailable("no TransformerBridge in this TransformerLens") from problem
    return build_bridge_from_module(model, architecture=type(model).__name__, hf_config=model.config).eval()


def to_hooked(model: Any, model_class: str, convert: str, *, n_ctx: int, **options: Any) -> Any:
    """Return a hooked model with the Hugging Face model's weights, unprocessed and in the same dtype."""
    try:
        import transformer_lens
        from transformer_lens.pretrained import weight_conversions

        hooked = getattr(transformer_lens, model_class)
    except (ImportError, AttributeError) as problem:
        raise Unavailable(f"no {model_class} in this TransformerLens") from problem
    config = model.config
    dtype = next(model.parameters()).dtype
    cfg = transformer_lens.HookedTransformerConfig(
        n_layers=config.num_hidden_layers,
        d_model=config.hidden_size,
        n_heads=config.num_attention_heads,
        d_head=config.hidden_size // config.num_attention_heads,
        d_vocab=config.vocab_size,
        n_ctx=n_ctx,
        dtype=dtype,
        **{
            "d_mlp": getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
            "normalization_type": "LN",
            "attention_dir": "bidirectional" if model_class == "HookedEncoder" else "causal",
            **options,
        },
    )
    with contextlib.redirect_stdout(io.StringIO()):
        lens_model = hooked(cfg)
    state = getattr(weight_conversions, convert)(model, cfg)
    if model_class in ("HookedEncoder", "HookedEncoderDecoder"):
        lens_model.load_state_dict(state, strict=False)
    else:
        lens_model.load_and_process_state_dict(
            state, fold_ln=False, center_writing_weights=False, center_unembed=False, fold_value_biases=False
        )
    return lens_model.to(dtype).eval()
