"""enable_compatibility_mode changes what gpt-oss predicts: value biases are folded despite sinks."""

import torch
from transformer_lens.model_bridge.sources import build_bridge_from_module
from transformers import GptOssConfig, GptOssForCausalLM

torch.manual_seed(0)
sizes = {"vocab_size": 50, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
heads = {"num_key_value_heads": 4, "head_dim": 6, "num_local_experts": 4, "intermediate_size": 24}
hf = GptOssForCausalLM(GptOssConfig(**sizes, **heads, initializer_range=0.3)).eval()
for layer in hf.model.layers:
    torch.nn.init.normal_(layer.self_attn.v_proj.bias)  # the published models have such biases
bridge = build_bridge_from_module(hf, architecture="GptOssForCausalLM", hf_config=hf.config)

tokens = torch.arange(5, 12)[None]
before = bridge(tokens).log_softmax(-1)
bridge.enable_compatibility_mode(disable_warnings=True)
difference = float((bridge(tokens).log_softmax(-1) - before).abs().max())
print(f"largest change of a log probability: {difference:.3f}, expected less than 0.001")
assert difference > 1e-2
