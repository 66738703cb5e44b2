"""Build the small models of the norm-based references in float64, for every class of TransformerLens.

The weights are in `tests/reference/` (see the README there). A file does not contain the masked-language
unembedding, which no map depends on, so it keeps transformers' initial values.
"""

from __future__ import annotations

import contextlib
import functools
import io
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file

from tests.tiny_models import Unavailable

FOLDER = Path(__file__).parent / "reference"
BERT_CLASSES = ("TransformerBridge", "HookedEncoder")
GPT2_CLASSES = ("TransformerBridge", "HookedTransformer")


@functools.cache
def reference(name: str) -> dict[str, torch.Tensor]:
    """Return the tensors of one reference file."""
    return load_file(FOLDER / f"{name}.safetensors")


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def reference_inputs(row: int) -> dict[str, torch.Tensor]:
    """Return arguments of `lens_mix.run` for the reference BERT; example 1 ends in three padding tokens."""
    known = reference("norm_analysis_tiny_f64")
    return {
        "prompt": known["input_ids"][row],
        "attention_mask": known["attention_mask"][row],
        "token_type_ids": known["token_type_ids"][row],
    }


@functools.cache
def reference_bert(class_name: str) -> Any:
    """Return the BERT of norm-analysis, GlobEnc, DecompX, ALTI and the feed-forward oracle.

    Raises:
        Unavailable: If this TransformerLens has no such class.
    """
    config = transformers.BertConfig(
        vocab_size=101,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=64,
        layer_norm_eps=1e-12,
    )
    config._attn_implementation = "eager"
    bridged = class_name == "TransformerBridge"
    with _quietly():
        source = (transformers.BertForMaskedLM if bridged else transformers.BertForPreTraining)(
            config
        ).double()
        weights = reference("tiny_bert_weights_f32")
        missing = source.bert.load_state_dict(weights, strict=False).missing_keys
        if missing:
            raise ValueError(f"weights: expected all of BERT's, missing {missing}")
        source = source.eval()
        return _bridge(source) if bridged else _hooked_encoder(source)


@functools.cache
def reference_gpt2(class_name: str) -> Any:
    """Return the GPT-2 of ALTI-Logit.

    Raises:
        Unavailable: If this TransformerLens has no such class.
    """
    config = transformers.GPT2Config(
        vocab_size=101,
        n_positions=64,
        n_embd=32,
        n_layer=3,
        n_head=4,
        n_inner=64,
        bos_token_id=0,
        eos_token_id=0,
    )
    config._attn_implementation = "eager"
    with _quietly():
        source = transformers.GPT2LMHeadModel(config).double()
        weights = {k[2:]: v for k, v in reference("altilogit_gpt2_tiny_f64").items() if k.startswith("w.")}
        missing = source.load_state_dict(weights, strict=False).missing_keys
        if missing:
            raise ValueError(f"weights: expected all of GPT-2's, missing {missing}")
        source = source.eval()
        return _bridge(source) if class_name == "TransformerBridge" else _hooked_transformer(source)


def _bridge(source: Any) -> Any:
    try:
        from transformer_lens.model_bridge.sources import build_bridge_from_module
    except ImportError as error:
        raise Unavailable("this TransformerLens has no TransformerBridge") from error
    name = type(source).__name__
    source.config.architectures = [name]
    return build_bridge_from_module(source, architecture=name, hf_config=source.config).eval()


def _hooked_config(**more: Any) -> Any:
    import transformer_lens

    # For removed classes, TransformerLens 4 raises an ImportError and not an AttributeError.
    try:
        transformer_lens.HookedTransformerConfig  # noqa: B018
    except (ImportError, AttributeError) as error:
        raise Unavailable("this TransformerLens has no hooked classes") from error
    sizes = {
        "d_model": 32,
        "n_heads": 4,
        "d_head": 8,
        "n_layers": 3,
        "n_ctx": 64,
        "d_vocab": 101,
        "d_mlp": 64,
    }
    return transformer_lens.HookedTransformerConfig(**sizes, device="cpu", dtype=torch.float64, **more)


def _hooked_encoder(source: Any) -> Any:
    config = _hooked_config(act_fn="gelu", normalization_type="LN", eps=1e-12, attention_dir="bidirectional")
    from transformer_lens import HookedEncoder
    from transformer_lens.pretrained.weight_conversions import convert_bert_weights

    model = HookedEncoder(config)
    model.load_state_dict(convert_bert_weights(source, config), strict=False)
    return model.double().eval()


def _hooked_transformer(source: Any) -> Any:
    config = _hooked_config(act_fn="gelu_new", normalization_type="LN", eps=1e-5)
    from transformer_lens import HookedTransformer
    from transformer_lens.pretrained.weight_conversions import convert_gpt2_weights

    model = HookedTransformer(config)
    # In load_and_process_state_dict, TransformerLens 3 would round the weights to float32.
    model.double().load_state_dict(convert_gpt2_weights(source, config), strict=False)
    return model.eval()
