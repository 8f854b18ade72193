"""Compiles programs for devices that this machine does not have (`hsd compile`). Start with `programs.py`."""
