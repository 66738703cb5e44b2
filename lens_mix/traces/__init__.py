"""Find the sources of written text: which document, sentence or token a written span came from."""
