"""With transformers 5.24, attention does not see the cached tokens on models whose attention is rebuilt."""

import torch
from transformer_lens.model_bridge.sources import build_bridge_from_module
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = {"vocab_size": 50, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=24, n_layer=2, n_head=4))
llama = LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=48))
tokens, errors = torch.arange(5, 12)[None], []
for hf in (gpt2, llama):
    name = type(hf).__name__
    for parameter in hf.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    bridge = build_bridge_from_module(hf.eval(), architecture=name, hf_config=hf.config)
    with torch.no_grad():
        cache = bridge.original_model(tokens[:, :-1], use_cache=True).past_key_values
        cached = bridge.original_model(tokens[:, -1:], past_key_values=cache, use_cache=True).logits
        errors.append(float((cached[0, -1] - bridge(tokens)[0, -1]).abs().max()))
    print(f"{name}: largest difference of a logit with the cache {errors[-1]:.4f}, expected 0.0000")
assert min(errors) > 1e-3
