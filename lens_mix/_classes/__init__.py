"""TransformerLens's classes: what a model is, what its releases compute wrongly, and what it is called."""
