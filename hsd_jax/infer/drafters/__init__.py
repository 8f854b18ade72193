"""Drafters: each proposes a `DraftTree` and knows nothing about acceptance."""
