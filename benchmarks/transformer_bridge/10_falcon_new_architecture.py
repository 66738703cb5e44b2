"""Falcon's new decoder architecture (40B, 180B) does not load, or gets other logits."""

import copy

import torch
from transformer_lens.model_bridge.sources import build_bridge_from_module
from transformers import FalconConfig, FalconForCausalLM

torch.manual_seed(0)
sizes = {"vocab_size": 50, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
new = {"new_decoder_architecture": True, "num_kv_heads": 2, "initializer_range": 0.3}
tokens, seen = torch.arange(5, 12)[None], []
for multi_query in (True, False):  # transformers ignores it in the new architecture
    hf = FalconForCausalLM(FalconConfig(**sizes, **new, multi_query=multi_query)).eval()
    original = copy.deepcopy(hf)
    try:
        bridge = build_bridge_from_module(hf, architecture="FalconForCausalLM", hf_config=hf.config)
        seen.append(float((bridge(tokens) - original(tokens).logits).abs().max()))
    except RuntimeError as error:
        seen.append(str(error))
    print(f"multi_query={multi_query}: {seen[-1]}, expected a difference of the logits below 0.001")
assert "split_with_sizes" in str(seen[0])
assert seen[1] > 1e-2
