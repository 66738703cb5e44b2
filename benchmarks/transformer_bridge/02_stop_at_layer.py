"""stop_at_layer is ignored on BERT, and on every model if it equals the number of layers."""

import torch
from transformer_lens.model_bridge.sources import build_bridge_from_module
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

tokens = torch.arange(5, 12)[None]
sizes = {"vocab_size": 50, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
shapes = []
for hf, layer in (
    (BertForMaskedLM(BertConfig(**sizes, intermediate_size=48)), 1),
    (LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=48)), 2),
):
    name = type(hf).__name__
    bridge = build_bridge_from_module(hf.eval(), architecture=name, hf_config=hf.config)
    shapes.append(tuple(bridge(tokens, stop_at_layer=layer).shape))
    print(f"{name}, stop_at_layer={layer} of 2: shape {shapes[-1]}, expected (1, 7, 24)")
assert shapes == [(1, 7, 50)] * 2  # the logits, not a residual stream
