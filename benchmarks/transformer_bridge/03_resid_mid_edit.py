"""An edit of hook_resid_mid changes the input of the MLP, but not the residual stream."""

import torch
from transformer_lens.model_bridge.sources import build_bridge_from_module
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = {"vocab_size": 50, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
hf = LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=48)).eval()
bridge = build_bridge_from_module(hf, architecture="LlamaForCausalLM", hf_config=hf.config)

tokens, direction = torch.arange(5, 12)[None], torch.randn(24)
with bridge.hooks(fwd_hooks=[("blocks.0.hook_resid_mid", lambda mid, hook: mid + direction)]):
    edited = bridge.run_with_cache(tokens)[1]
clean = bridge.run_with_cache(tokens)[1]
mid = [cache["blocks.0.hook_resid_post"] - cache["blocks.0.hook_mlp_out"] for cache in (edited, clean)]
moved = float((mid[0] - mid[1]).abs().max())
print(f"resid_post - mlp_out moved by {moved:.4f}, expected {float(direction.abs().max()):.4f}")
assert moved < 1e-4
