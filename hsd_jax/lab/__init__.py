"""Experiments, pictures and compiled programs. The commands of `hsd` use this package; decoding does not."""
