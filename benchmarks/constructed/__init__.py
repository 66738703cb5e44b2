"""Score every method on the models whose routes are known, and record the tables."""
