"""Make a tiny random model, so that the scripts of this folder run in seconds without a download.

Use your own model instead: `HookedTransformer.from_pretrained("gpt2")`, or on TransformerLens 4
`TransformerBridge.boot_transformers("gpt2")`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

N_LAYERS, N_HEADS, D_MODEL, N_CTX, D_VOCAB = 3, 4, 32, 32, 50

PROMPT = torch.tensor([[11, 42, 7, 23, 5, 36, 18, 29]])  # as from model.to_tokens("The Eiffel Tower ...")
OTHER_PROMPT = torch.tensor([[11, 3, 7, 48, 5, 12, 40, 29]])  # another prompt of the same length


def tiny_model(dtype: torch.dtype = torch.float32) -> Any:
    """Return a model of three layers with four heads: a TransformerBridge if TransformerLens has one."""
    torch.manual_seed(0)
    try:
        from transformer_lens.model_bridge.sources import build_bridge_from_module
    except ImportError:  # TransformerLens 2
        model = _hooked_transformer(dtype)
    else:
        from transformers import GPT2Config, GPT2LMHeadModel

        sizes = {"n_layer": N_LAYERS, "n_head": N_HEADS, "n_embd": D_MODEL, "n_positions": N_CTX}
        config = GPT2Config(**sizes, vocab_size=D_VOCAB, bos_token_id=1, eos_token_id=2)
        config.architectures = ["GPT2LMHeadModel"]
        wrapped = GPT2LMHeadModel(config).to(dtype)
        model = build_bridge_from_module(
            wrapped, architecture="GPT2LMHeadModel", hf_config=config, tokenizer=None
        )
    # With the small weights of an untrained model, all patterns would be nearly uniform.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.3)
    return model.eval()


def _hooked_transformer(dtype: torch.dtype) -> Any:
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    sizes = {"n_layers": N_LAYERS, "n_heads": N_HEADS, "d_model": D_MODEL, "d_head": D_MODEL // N_HEADS}
    config = {**sizes, "n_ctx": N_CTX, "d_vocab": D_VOCAB, "act_fn": "gelu_new", "dtype": dtype}
    return HookedTransformer(HookedTransformerConfig(**config, normalization_type="LN", device="cpu"))


def divergence(clean: Tensor, changed: Tensor) -> float:
    """Return the KL divergence KL(clean ‖ changed), in nats, of the last position's next-token predictions.

    Args:
        clean: the logits of the clean pass, [batch position vocabulary].
        changed: the logits of a pass with interventions, in the same shape.
    """
    p, q = clean[0, -1].log_softmax(-1), changed[0, -1].log_softmax(-1)
    return float((p.exp() * (p - q)).sum())
