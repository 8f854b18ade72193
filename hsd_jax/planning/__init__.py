"""Predicts what a round costs and yields, and chooses how a call is decoded. Nothing here decodes."""
