"""Falcon with alibi gets other logits than from Hugging Face: its bias is added twice."""

import copy

import torch
from transformer_lens.model_bridge.sources import build_bridge_from_module
from transformers import FalconConfig, FalconForCausalLM

torch.manual_seed(0)
sizes = {"vocab_size": 50, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
config = FalconConfig(**sizes, alibi=True, initializer_range=0.3, bos_token_id=1, eos_token_id=2)
hf = FalconForCausalLM(config).eval()  # with sdpa, the default
original = copy.deepcopy(hf)
bridge = build_bridge_from_module(hf, architecture="FalconForCausalLM", hf_config=hf.config)

tokens = torch.arange(5, 12)[None]
difference = float((bridge(tokens) - original(tokens).logits).abs().max())
print(f"largest difference of a logit: {difference:.3f}, expected less than 0.001")
assert difference > 1e-2
