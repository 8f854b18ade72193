"""PEARL: a small model that drafts while its last drafts are verified (arXiv:2408.11850)."""
