"""The `hsd` program: a file a command, or a family of them. Start with `main.py`."""
