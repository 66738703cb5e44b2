"""How far to trust a map, and what to do with it: head importance, pruning, triggers."""
