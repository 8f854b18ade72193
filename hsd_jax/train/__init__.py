"""Training of targets, tokenizers and drafters. Only this package uses an optimizer. Start with `run.py`."""
