"""One reader for all that a user may give: texts, tokens, pictures and sounds, as prompts and batches."""
