"""A GPT-2 with scale_attn_weights=False gets other logits than from Hugging Face."""

import copy

import torch
from transformer_lens.model_bridge.sources import build_bridge_from_module
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
sizes = {"vocab_size": 50, "n_positions": 32, "n_embd": 24, "n_layer": 2, "n_head": 4}
hf = GPT2LMHeadModel(GPT2Config(**sizes, initializer_range=0.3, scale_attn_weights=False)).eval()
hf.set_attn_implementation("eager")
original = copy.deepcopy(hf)
bridge = build_bridge_from_module(hf, architecture="GPT2LMHeadModel", hf_config=hf.config)

tokens = torch.arange(5, 12)[None]
difference = float((bridge(tokens) - original(tokens).logits).abs().max())
print(f"largest difference of a logit: {difference:.3f}, expected less than 0.001")
assert difference > 1e-2
