"""Experiments, pictures, compiled programs and theory. The commands of `hsd` use this package; decoding does not."""
