"""OPT with do_layer_norm_before=False, as in opt-350m, cannot run."""

import torch
from transformer_lens.model_bridge.sources import build_bridge_from_module
from transformers import OPTConfig, OPTForCausalLM

sizes = {"vocab_size": 50, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
config = OPTConfig(**sizes, ffn_dim=48, word_embed_proj_dim=24, do_layer_norm_before=False)
hf, tokens = OPTForCausalLM(config).eval(), torch.arange(5, 12)[None]
print(f"Hugging Face returns logits of shape {tuple(hf(tokens).logits.shape)}")
bridge = build_bridge_from_module(hf, architecture="OPTForCausalLM", hf_config=hf.config)
try:
    message = f"logits of shape {tuple(bridge(tokens).shape)}"
except RuntimeError as error:
    message = f"RuntimeError: {error}"
print(f"the bridge returns: {message}; expected logits of the same shape")
assert "final_layer_norm" in message
