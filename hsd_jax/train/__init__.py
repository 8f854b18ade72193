"""Training of targets, tokenizers and drafters; the only place, with checkpoint.py, that knows an optimizer."""
