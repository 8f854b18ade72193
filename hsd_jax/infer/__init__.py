"""Decoding: sampling, trees, acceptance rules, drafters, and the loop in which they meet."""
