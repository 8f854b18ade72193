"""The operations that models and draws are made of, and what runs them on each platform. Start with `ops.py`."""
