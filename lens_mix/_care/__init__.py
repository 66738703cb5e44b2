"""The user's model comes back as it was: changes that are undone, signals, state, user hooks, and errors."""
