"""Experiments and pictures. The commands of `hsd` use this package; decoding does not."""
