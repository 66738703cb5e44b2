"""boot_native ignores fields of the configuration without an error."""

import torch
from transformer_lens.config import TransformerBridgeConfig
from transformer_lens.model_bridge import TransformerBridge

sizes = {"d_model": 24, "d_head": 6, "n_heads": 4, "n_layers": 2, "n_ctx": 32, "d_vocab": 50}
base = {**sizes, "d_mlp": 48, "act_fn": "gelu", "normalization_type": "LN", "seed": 0}
tokens, changes = torch.arange(5, 12)[None], []
plain = TransformerBridge.boot_native(TransformerBridgeConfig(**base))(tokens)
for fields in (
    {"parallel_attn_mlp": True},
    {"use_normalization_before_and_after": True},
    {"use_local_attn": True, "window_size": 2, "attn_types": ["local", "local"]},
):
    logits = TransformerBridge.boot_native(TransformerBridgeConfig(**base, **fields))(tokens)
    changes.append(float((logits - plain).abs().max()))
    print(f"{fields}: largest change of a logit {changes[-1]}, expected more than 0, or an error")
assert max(changes) == 0
