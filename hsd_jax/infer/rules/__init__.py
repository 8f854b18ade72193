"""Acceptance rules. `accept.py` has what they share; a new rule is a file of this folder and a row in `table.py`."""
