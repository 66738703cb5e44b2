"""`python -m lens_mix` is the command line."""

from lens_mix.cli import app

app()
