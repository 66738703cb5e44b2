"""Models that run several copies of a prompt in a row. In the others, each copy has a row of its own."""

SHARED = ("gpt2", "llama", "gemma", "qwen2", "qwen3", "gpt_neox", "phi", "olmo", "granite", "mixtral")
