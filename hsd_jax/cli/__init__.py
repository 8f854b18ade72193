"""The `hsd` program."""
