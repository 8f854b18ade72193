"""The `hsd` program. Each file declares and runs one command or one family of commands. Start with `main.py`."""
