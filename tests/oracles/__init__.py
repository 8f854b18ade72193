"""Slow and obvious versions of what the library does fast: NumPy and plain loops, importing no jax."""
