"""The vectors that the norm-based methods measure, and their norms, without writing a vector per pair."""
