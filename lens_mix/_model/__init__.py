"""One face for every model: its stack of blocks, their anatomy and the unembedding."""
