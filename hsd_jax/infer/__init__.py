"""Decoding: sampling, draft trees, acceptance rules, and the loop that combines them with a drafter."""
