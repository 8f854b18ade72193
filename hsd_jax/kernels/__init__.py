"""The operations of models and draws, and their implementations for each platform. Start with `ops.py`."""
