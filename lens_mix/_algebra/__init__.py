"""The vectors that the norm-based methods measure, and their norms, without a stored vector per pair."""
