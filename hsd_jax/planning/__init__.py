"""Predicts or measures what a round costs and yields, and chooses the fastest way to decode."""
