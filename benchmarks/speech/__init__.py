"""Whether maps of Whisper point to the sound of a word, on synthetic speech whose times are known."""
