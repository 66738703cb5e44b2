"""Search and score an input map for causal decoders against measured replacement."""
