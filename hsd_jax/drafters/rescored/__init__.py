"""Rescored drafts: a lattice of token-free states and a transition scorer (arXiv:2404.09221)."""
