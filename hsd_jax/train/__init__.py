"""Training of targets, tokenizers and drafters; the only place that knows an optimizer."""
