"""to_tokens moves the end token of T5 from the end of the text to its beginning."""

from transformer_lens.model_bridge.sources import build_bridge_from_module
from transformers import T5Config, T5ForConditionalGeneration, T5Tokenizer

words = ["<pad>", "</s>", "<unk>", "▁a", "b", "c", "▁"]
tokenizer = T5Tokenizer(vocab=[(word, -1.0) for word in words], extra_ids=0, name_or_path="tiny")
config = T5Config(vocab_size=50, d_model=24, d_kv=6, num_layers=2, num_heads=4)
hf = T5ForConditionalGeneration(config).eval()
bridge = build_bridge_from_module(
    hf, architecture="T5ForConditionalGeneration", hf_config=hf.config, tokenizer=tokenizer
)

expected, seen = tokenizer("abc")["input_ids"], bridge.to_tokens("abc")[0].tolist()
print(f"to_tokens: {tokenizer.convert_ids_to_tokens(seen)}")
print(f"expected, as the tokenizer: {tokenizer.convert_ids_to_tokens(expected)}")
assert seen == expected[-1:] + expected[:-1]
