"""The `hsd` program: one file a command. Start with `main.py`; nothing here imports jax before a command runs."""
