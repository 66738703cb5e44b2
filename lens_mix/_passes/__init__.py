"""Run a model: the clean pass, the replay of one block, and passes from a block on with interventions."""
