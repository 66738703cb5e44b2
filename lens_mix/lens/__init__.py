"""Run a model with hooks, and read its blocks: the clean pass, the components and their verification."""
